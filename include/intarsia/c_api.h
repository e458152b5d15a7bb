/* The C interface: every operation by name, on DLPack tensors. Plain C, no exceptions cross it, no memory changes owner.
 *
 *   intarsia_argument arguments[] = {
 *       INTARSIA_TENSOR("x", &x), INTARSIA_TENSOR("expert_offsets", &offsets), INTARSIA_TEXT("activation", "swiglu"), ...};
 *   if (intarsia_run("up_forward", arguments, 9, NULL, NULL) != INTARSIA_OK) puts(intarsia_last_error());
 *
 * Names and meanings of the arguments are the fields of include/intarsia/ops.h and moe.h; w_up is w_up, w_up_second,
 * w_up_gate_block, w_up_transposed, and so on. A left-out tensor is absent, a left-out value has the default of ops.h, an
 * unknown name is an error. */
#ifndef INTARSIA_C_API_H_
#define INTARSIA_C_API_H_

#include <stddef.h>
#include <stdint.h>

#include "intarsia/dlpack.h"
#include "intarsia/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a struct or function of this header changes incompatibly; compare with intarsia_abi_version(). */
#define INTARSIA_ABI_VERSION 1

typedef enum intarsia_status {
  INTARSIA_OK = 0,
  INTARSIA_INVALID_ARGUMENT = 1, /* nothing was written */
  INTARSIA_UNSUPPORTED = 2,      /* nothing was written */
  INTARSIA_OUT_OF_MEMORY = 3,
  INTARSIA_INTERNAL_ERROR = 4
} intarsia_status;

typedef enum intarsia_kind {
  INTARSIA_KIND_TENSOR = 0,
  INTARSIA_KIND_INTEGER = 1, /* integers and booleans */
  INTARSIA_KIND_REAL = 2,
  INTARSIA_KIND_TEXT = 3 /* an enumerator, spelled as in config.h */
} intarsia_kind;

typedef struct intarsia_argument {
  const char* name;
  intarsia_kind kind;
  const DLTensor* tensor; /* null: absent */
  int64_t integer;
  double real;
  const char* text;
} intarsia_argument;

#define INTARSIA_TENSOR(name, pointer) {(name), INTARSIA_KIND_TENSOR, (pointer), 0, 0.0, NULL}
#define INTARSIA_INTEGER(name, value) {(name), INTARSIA_KIND_INTEGER, NULL, (value), 0.0, NULL}
#define INTARSIA_REAL(name, value) {(name), INTARSIA_KIND_REAL, NULL, 0, (value), NULL}
#define INTARSIA_TEXT(name, value) {(name), INTARSIA_KIND_TEXT, NULL, 0, 0.0, (value)}

INTARSIA_EXPORT int intarsia_abi_version(void);
INTARSIA_EXPORT const char* intarsia_version(void);

/* Text of the last failure on this thread; valid until the next call on it. */
INTARSIA_EXPORT const char* intarsia_last_error(void);

/* Checks and computes. `backend`: NULL or "automatic", "reference", "cpu", "cuda". `stream`: a cudaStream_t, or NULL. */
INTARSIA_EXPORT intarsia_status intarsia_run(const char* operation, const intarsia_argument* arguments, size_t count,
                                             const char* backend, void* stream);
/* Sets *text to what would run and why (valid until the next call on this thread). */
INTARSIA_EXPORT intarsia_status intarsia_explain(const char* operation, const intarsia_argument* arguments, size_t count,
                                                 const char* backend, const char** text);

/* Operation names: index 0, 1, ... until NULL. */
INTARSIA_EXPORT const char* intarsia_operation(size_t index);
/* The operation as a torch schema, "up_forward.out(Tensor x, ..., Tensor(a!)? z, ..., str backend) -> ()"; NULL if unknown. */
INTARSIA_EXPORT const char* intarsia_schema(const char* operation);

/* The memory plan as JSON. Arguments: the fields of LayerShape and PlanOptions in plan.h. */
INTARSIA_EXPORT intarsia_status intarsia_plan(const intarsia_argument* arguments, size_t count, const char** json);
/* Versions, processor features, loaded libraries, a numeric self-test: JSON. */
INTARSIA_EXPORT intarsia_status intarsia_doctor(const char** json);

INTARSIA_EXPORT int intarsia_num_threads(void);
INTARSIA_EXPORT intarsia_status intarsia_set_num_threads(int threads);
/* Bytes of the host allocator plus workspaces on GPUs: now, and at most since the reset (the sum of both peaks). */
INTARSIA_EXPORT void intarsia_memory(size_t* live, size_t* peak);
INTARSIA_EXPORT void intarsia_memory_reset(void);

#ifdef __cplusplus
}
#endif

#endif
