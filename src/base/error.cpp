#include "intarsia/error.h"

namespace intarsia {

// Out of line, so that the type information has one home and exceptions cross library borders.
Error::~Error() = default;
InvalidArgument::~InvalidArgument() = default;
Unsupported::~Unsupported() = default;

}  // namespace intarsia
