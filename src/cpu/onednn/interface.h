/* All that passes between libintarsia.so and libintarsia_cpu.so, the one library that links oneDNN. Three C functions, found by
 * name. */
#ifndef INTARSIA_CPU_ONEDNN_INTERFACE_H_
#define INTARSIA_CPU_ONEDNN_INTERFACE_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define INTARSIA_ONEDNN_INTERFACE 1

/* c (m, n) = a (m, k) b (k, n), or += when accumulate; c is float with rows c_step apart. Element (i, p) of a is at
 * a[i * a_step + p], or at a[p * a_step + i] when a_transposed; b likewise. a and b are float, or bfloat16. */
typedef struct intarsia_product {
  int64_t m, n, k;
  int64_t a_step, b_step, c_step;
  uint8_t a_transposed, b_transposed, bfloat16, accumulate;
} intarsia_product;

typedef int (*intarsia_onednn_interface_function)(void);
typedef const char* (*intarsia_onednn_describe_function)(int bfloat16);
typedef int (*intarsia_onednn_multiply_function)(const intarsia_product*, const void* a, const void* b, float* c);

/* intarsia_onednn_interface: INTARSIA_ONEDNN_INTERFACE of the library.
 * intarsia_onednn_describe: version and instruction set; null when products of that dtype would not be fast on this processor.
 * intarsia_onednn_multiply: computes on the calling thread alone; not 0 when oneDNN has no fast product of this kind. */

#ifdef __cplusplus
}
#endif

#endif
