/* DLTensor of DLPack, the array interchange standard (Apache-2.0). If a dlpack.h was included before, that one is used. */
#ifndef INTARSIA_DLPACK_H_
#define INTARSIA_DLPACK_H_

#ifndef DLPACK_VERSION
#ifndef DLPACK_MAJOR_VERSION

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { kDLCPU = 1, kDLCUDA = 2 } DLDeviceType;

typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;

typedef enum { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6 } DLDataTypeCode;

typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides; /* in elements; null: contiguous */
  uint64_t byte_offset;
} DLTensor;

#ifdef __cplusplus
}
#endif

#endif
#endif
#endif
