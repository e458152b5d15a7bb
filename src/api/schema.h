// Torch schemas, made from the field lists: "up_forward.out(Tensor x, ..., str activation, Tensor(a!)? z, Tensor(b!) a, str
// backend) -> ()".
#pragma once

#include <string>
#include <string_view>

namespace intarsia {

/// Throws InvalidArgument for an unknown operation.
std::string schema(std::string_view operation);

}  // namespace intarsia
