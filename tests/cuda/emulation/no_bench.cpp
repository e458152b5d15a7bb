// The emulation times nothing, and large shapes would take hours.
#include "gemm_bench.h"

namespace intarsia::check {

void check_large(const std::function<void(const std::string&, double)>&, const Want&) {}
int bench_products(const Want&) { return 1; }

}  // namespace intarsia::check
