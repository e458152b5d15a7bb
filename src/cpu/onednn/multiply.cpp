// Products by oneDNN (2.6 and 3.x), each on the calling thread alone: the parallel loop is ours.
// A primitive costs 0.1 ms to create, so each thread keeps those it has used; only shapes are kept, never weights. The memory
// that a primitive works in is oneDNN's own, one growing buffer per thread.
#include <array>
#include <cstring>
#include <functional>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <unordered_map>

#include "cpu/onednn/interface.h"

#if DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_OMP
// Declared here instead of linking an OpenMP runtime: they must be those of the runtime that oneDNN itself was linked to.
extern "C" int omp_get_max_threads(void);
extern "C" void omp_set_num_threads(int);
#endif

namespace {

/// Keeps oneDNN from starting OpenMP's pool inside a worker of ours, and leaves the caller's setting as it was.
class OneThread {
#if DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_OMP
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }

 private:
  int before_;
#endif
};

struct Hash {
  std::size_t operator()(const intarsia_product& p) const {
    std::size_t hash = 0;
    const std::int64_t flags = p.a_transposed + 2 * p.b_transposed + 4 * p.bfloat16 + 8 * p.accumulate;
    for (std::int64_t value : {p.m, p.n, p.k, p.a_step, p.b_step, p.c_step, flags})
      hash = (hash ^ static_cast<std::size_t>(value)) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 32);
  }
};

struct Equal {
  bool operator()(const intarsia_product& x, const intarsia_product& y) const {
    return x.m == y.m && x.n == y.n && x.k == y.k && x.a_step == y.a_step && x.b_step == y.b_step && x.c_step == y.c_step &&
           x.a_transposed == y.a_transposed && x.b_transposed == y.b_transposed && x.bfloat16 == y.bfloat16 &&
           x.accumulate == y.accumulate;
  }
};

dnnl::engine& engine() {
  static dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

dnnl::memory::desc matrix(std::int64_t rows, std::int64_t columns, std::int64_t step, bool transposed,
                          dnnl::memory::data_type type) {
  const auto strides = transposed ? dnnl::memory::dims{1, step} : dnnl::memory::dims{step, 1};
  return {{rows, columns}, type, strides};
}

dnnl::matmul::primitive_desc describe(const intarsia_product& p) {
  using Type = dnnl::memory::data_type;
  const Type type = p.bfloat16 ? Type::bf16 : Type::f32;
  const auto a = matrix(p.m, p.k, p.a_step, p.a_transposed, type);
  const auto b = matrix(p.k, p.n, p.b_step, p.b_transposed, type);
  const auto c = matrix(p.m, p.n, p.c_step, false, Type::f32);
  dnnl::primitive_attr attributes;
  attributes.set_fpmath_mode(dnnl::fpmath_mode::strict);  // whatever the environment says
  if (p.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
#if DNNL_VERSION_MAJOR >= 3
  return {engine(), a, b, c, attributes};
#else
  return {dnnl::matmul::desc(a, b, c), attributes, engine()};
#endif
}

/// A primitive with the three memory objects that its arguments are put in.
struct Product {
  dnnl::matmul primitive;
  dnnl::memory a, b, c;
  std::unordered_map<int, dnnl::memory> arguments;
  bool fast;

  explicit Product(const dnnl::matmul::primitive_desc& description)
      : primitive(description),
        a(description.src_desc(), engine(), DNNL_MEMORY_NONE),
        b(description.weights_desc(), engine(), DNNL_MEMORY_NONE),
        c(description.dst_desc(), engine(), DNNL_MEMORY_NONE),
        arguments{{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}},
        fast(std::strncmp(description.impl_info_str(), "ref", 3) != 0) {}
};

Product& product(const intarsia_product& p) {
  constexpr std::size_t kMost = 512;  // about ten layers' shapes; a program with more pays for creating them again
  static thread_local std::unordered_map<intarsia_product, Product, Hash, Equal> cache;
  const auto found = cache.find(p);
  if (found != cache.end()) return found->second;
  if (cache.size() >= kMost) cache.clear();
  return cache.emplace(p, Product(describe(p))).first->second;
}

bool has(dnnl::cpu_isa isa) {
  const auto bits = [](dnnl::cpu_isa value) { return static_cast<unsigned>(value); };
  return (bits(dnnl::get_effective_cpu_isa()) & bits(isa)) == bits(isa);
}

std::string version_and(const char* instructions) {
  const dnnl_version_t* v = dnnl_version();
  return "oneDNN " + std::to_string(v->major) + "." + std::to_string(v->minor) + ", " + instructions;
}

}  // namespace

#define INTARSIA_ONEDNN_EXPORT extern "C" __attribute__((visibility("default")))

INTARSIA_ONEDNN_EXPORT int intarsia_onednn_interface(void) { return INTARSIA_ONEDNN_INTERFACE; }

INTARSIA_ONEDNN_EXPORT const char* intarsia_onednn_describe(int bfloat16) {
  using Isa = dnnl::cpu_isa;
  // Without these instructions oneDNN 2.6 computes bfloat16 products many times slower than float32 ones.
  static const std::string text16 = has(Isa::avx512_core_amx)    ? version_and("bfloat16 by avx512_core_amx")
                                    : has(Isa::avx512_core_bf16) ? version_and("bfloat16 by avx512_core_bf16")
                                                                 : "";
  static const std::string text32 = has(Isa::avx512_core) ? version_and("float32 by avx512_core")
                                    : has(Isa::avx2)      ? version_and("float32 by avx2")
                                                          : version_and("float32");
  const std::string& text = bfloat16 ? text16 : text32;
  return text.empty() ? nullptr : text.c_str();
}

INTARSIA_ONEDNN_EXPORT int intarsia_onednn_multiply(const intarsia_product* p, const void* a, const void* b, float* c) {
  try {
    const OneThread one_thread;
    static thread_local dnnl::stream stream(engine());
    Product& found = product(*p);
    if (!found.fast) return 1;
    found.a.set_data_handle(const_cast<void*>(a));
    found.b.set_data_handle(const_cast<void*>(b));
    found.c.set_data_handle(c);
    found.primitive.execute(stream, found.arguments);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}
