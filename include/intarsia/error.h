// Errors. Every failure the library reports is an intarsia::Error (or one of the two below); nothing prints, exits or aborts.
#pragma once

#include <stdexcept>
#include <string>

#include "intarsia/export.h"

namespace intarsia {

/// Base of all errors. The text names the argument, what was expected, what came and what to do.
class INTARSIA_EXPORT Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  ~Error() override;
};

/// An argument is wrong: shape, dtype, device, stride or value. Nothing was launched or written, but by earlier steps of an
/// operation of moe.h. (Python: ValueError)
class INTARSIA_EXPORT InvalidArgument : public Error {
 public:
  using Error::Error;
  ~InvalidArgument() override;
};

/// The request is well formed but no backend here can run it; the text says why and what can. (Python: NotImplementedError)
class INTARSIA_EXPORT Unsupported : public Error {
 public:
  using Error::Error;
  ~Unsupported() override;
};

}  // namespace intarsia
