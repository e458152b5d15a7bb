// Functions that the GPU runs too: the same source for both, so that both compute the same.
#pragma once

#if defined(__CUDACC__)
#define INTARSIA_HOST_DEVICE __host__ __device__
#else
#define INTARSIA_HOST_DEVICE
#endif
