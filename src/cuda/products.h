// The six products, once: X(Struct).
#pragma once

#include "intarsia/ops.h"

#define INTARSIA_FOR_EACH_PRODUCT(X) \
  X(UpForward) X(DownForward) X(DownBackward) X(DownWeightBackward) X(UpBackward) X(UpWeightBackward)
