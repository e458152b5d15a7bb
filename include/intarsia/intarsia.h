// Everything public, for C++ programs.
#pragma once

#include "intarsia/config.h"
#include "intarsia/error.h"
#include "intarsia/layer.h"
#include "intarsia/moe.h"
#include "intarsia/ops.h"
#include "intarsia/plan.h"
#include "intarsia/types.h"
#include "intarsia/version.h"
