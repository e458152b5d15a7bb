/* The C interface as a C program sees it: lists by build_index, the layer by layer_forward, and errors as text.
 * Every figure is compared with plain loops below. Exits with the number of failed checks. */
#include <intarsia/c_api.h>
#include <intarsia/version.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { T = 5, H = 6, I = 3, E = 4, K = 2, R = T * K };

static int failures = 0;
#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, intarsia_last_error()); \
      ++failures;                                                                       \
    }                                                                                   \
  } while (0)

static DLTensor tensor(void* data, uint8_t code, int32_t rank, int64_t* shape) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = rank;
  t.dtype.code = code;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

static void fill(float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) values[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

/* Chosen experts of the worked example in MoEBlaze, section 4; the lists they give are known. */
static int32_t ids[T][K] = {{2, 3}, {0, 1}, {0, 3}, {1, 2}, {0, 3}};
static const int32_t kOffsets[E + 1] = {0, 3, 5, 7, 10}, kRowToken[R] = {1, 2, 4, 1, 3, 0, 3, 0, 2, 4};
static const int32_t kSlotRow[T * K] = {5, 7, 0, 3, 1, 8, 4, 6, 2, 9};

static int32_t expert_offsets[E + 1], row_token[R], row_slot[R], slot_row[T][K];
static float x[T][H], scores[T][K], w_up[E][2 * I][H], w_down[E][H][I], y[T][H];

static int64_t shape_tk[] = {T, K}, shape_th[] = {T, H}, shape_r[] = {R}, shape_offsets[] = {E + 1};
static int64_t shape_up[] = {E, 2 * I, H}, shape_down[] = {E, H, I};

static void check_lists(void) {
  DLTensor t_ids = tensor(ids, kDLInt, 2, shape_tk), t_offsets = tensor(expert_offsets, kDLInt, 1, shape_offsets);
  DLTensor t_token = tensor(row_token, kDLInt, 1, shape_r), t_slot = tensor(row_slot, kDLInt, 1, shape_r);
  DLTensor t_slot_row = tensor(slot_row, kDLInt, 2, shape_tk);
  const intarsia_argument arguments[] = {INTARSIA_TENSOR("ids", &t_ids), INTARSIA_TENSOR("expert_offsets", &t_offsets),
                                         INTARSIA_TENSOR("row_token", &t_token), INTARSIA_TENSOR("row_slot", &t_slot),
                                         INTARSIA_TENSOR("slot_row", &t_slot_row)};
  CHECK(intarsia_run("build_index", arguments, 5, NULL, NULL) == INTARSIA_OK);
  CHECK(memcmp(expert_offsets, kOffsets, sizeof kOffsets) == 0);
  CHECK(memcmp(row_token, kRowToken, sizeof kRowToken) == 0);
  CHECK(memcmp(slot_row, kSlotRow, sizeof kSlotRow) == 0);
}

static double expected_y(int t, int h) {
  double sum = 0.0;
  for (int k = 0; k < K; ++k) {
    const int e = ids[t][k];
    for (int i = 0; i < I; ++i) {
      double gate = 0.0, up = 0.0;
      for (int j = 0; j < H; ++j) {
        gate += (double)x[t][j] * w_up[e][i][j];
        up += (double)x[t][j] * w_up[e][I + i][j];
      }
      sum += scores[t][k] * w_down[e][h][i] * (gate / (1.0 + exp(-gate)) * up);
    }
  }
  return sum;
}

/* Runs the layer with the first `count` arguments and K scores a token as `shape_scores` says. */
static intarsia_status run_layer(size_t count, int64_t* shape_scores, const char* backend) {
  DLTensor t_x = tensor(x, kDLFloat, 2, shape_th), t_y = tensor(y, kDLFloat, 2, shape_th);
  DLTensor t_offsets = tensor(expert_offsets, kDLInt, 1, shape_offsets), t_token = tensor(row_token, kDLInt, 1, shape_r);
  DLTensor t_slot = tensor(row_slot, kDLInt, 1, shape_r), t_slot_row = tensor(slot_row, kDLInt, 2, shape_tk);
  DLTensor t_scores = tensor(scores, kDLFloat, 2, shape_scores), t_up = tensor(w_up, kDLFloat, 3, shape_up);
  DLTensor t_down = tensor(w_down, kDLFloat, 3, shape_down);
  const intarsia_argument arguments[] = {INTARSIA_TENSOR("x", &t_x),
                                         INTARSIA_TENSOR("expert_offsets", &t_offsets),
                                         INTARSIA_TENSOR("row_token", &t_token),
                                         INTARSIA_TENSOR("row_slot", &t_slot),
                                         INTARSIA_TENSOR("slot_row", &t_slot_row),
                                         INTARSIA_TENSOR("scores", &t_scores),
                                         INTARSIA_TENSOR("w_up", &t_up),
                                         INTARSIA_TENSOR("w_down", &t_down),
                                         INTARSIA_TEXT("activation", "swiglu"),
                                         INTARSIA_TENSOR("y", &t_y),
                                         INTARSIA_INTEGER("no_such_field", 1)};
  return intarsia_run("layer_forward", arguments, count, backend, NULL);
}

static void check_layer(const char* backend) {
  for (int t = 0; t < T; ++t) {
    for (int h = 0; h < H; ++h) y[t][h] = NAN;
  }
  CHECK(run_layer(10, shape_tk, backend) == INTARSIA_OK);
  for (int t = 0; t < T; ++t) {
    for (int h = 0; h < H; ++h) CHECK(fabs(y[t][h] - expected_y(t, h)) < 1e-6);
  }
}

static void check_errors(void) {
  int64_t wrong_scores[] = {T, K + 1};
  y[0][0] = 7.0f;
  CHECK(run_layer(10, wrong_scores, NULL) == INTARSIA_INVALID_ARGUMENT);
  CHECK(strstr(intarsia_last_error(), "scores") != NULL);
  CHECK(run_layer(11, shape_tk, NULL) == INTARSIA_INVALID_ARGUMENT); /* a name that no field has */
  CHECK(strstr(intarsia_last_error(), "no_such_field") != NULL);
  CHECK(run_layer(9, shape_tk, NULL) == INTARSIA_INVALID_ARGUMENT); /* y is missing */
  CHECK(run_layer(10, shape_tk, "abacus") == INTARSIA_INVALID_ARGUMENT);
  CHECK(intarsia_run("no_such_operation", NULL, 0, NULL, NULL) == INTARSIA_INVALID_ARGUMENT);
  CHECK(strstr(intarsia_last_error(), "no_such_operation") != NULL);
  CHECK(y[0][0] == 7.0f); /* a refused call writes nothing */
}

int main(void) {
  const char* json = NULL;
  size_t count = 0;
  srand(3);
  fill(&x[0][0], T * H);
  fill(&scores[0][0], T * K);
  fill(&w_up[0][0][0], E * 2 * I * H);
  fill(&w_down[0][0][0], E * H * I);

  CHECK(intarsia_abi_version() == INTARSIA_ABI_VERSION);
  CHECK(strcmp(intarsia_version(), INTARSIA_VERSION) == 0);
  while (intarsia_operation(count) != NULL) CHECK(intarsia_schema(intarsia_operation(count++)) != NULL);
  CHECK(count == 23);
  check_lists();
  check_layer("reference");
  check_layer("cpu");
  check_layer(NULL);
  check_errors();
  CHECK(intarsia_doctor(&json) == INTARSIA_OK && json != NULL && json[0] == '{');
  printf("%d failed\n", failures);
  return failures != 0;
}
