// Host side of tma.cuh: builds the descriptor (CUtensorMap) of a tensor. The driver's encoder is
// looked up at run time, so that nothing links against libcuda and the module loads on machines
// without a driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "common/launch.h"
#include "cuda_check.h"
#include "params.h"

namespace flash3 {

inline auto tensor_map_encoder() {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static Encode const encode = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found;
    FLASH3_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000,
                                                       cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || symbol == nullptr) {
      throw std::runtime_error(
          "flash3: this driver has no cuTensorMapEncodeTiled (CUDA 12.0 or newer is needed)");
    }
    return reinterpret_cast<Encode>(symbol);
  }();
  return encode;
}

inline CUtensorMapDataType element_type(DType dtype) {
  return dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

struct TensorExtent {
  int head_dim, seqlen, heads, batch;
};

// The map of a 16-bit tensor whose boxes are box_rows (along seqlen) x 64 (along head_dim),
// 128-byte swizzled.
inline CUtensorMap make_tensor_map(TensorView const& view, DType dtype, TensorExtent extent,
                                   int box_rows) {
  constexpr int kElementBytes = 2;
  constexpr cuuint32_t kBoxColumns = 64;
  cuuint64_t const dims[4] = {cuuint64_t(extent.head_dim), cuuint64_t(extent.seqlen),
                              cuuint64_t(extent.heads), cuuint64_t(extent.batch)};
  cuuint64_t const byte_strides[3] = {cuuint64_t(view.seqlen_stride) * kElementBytes,
                                      cuuint64_t(view.head_stride) * kElementBytes,
                                      cuuint64_t(view.batch_stride) * kElementBytes};
  cuuint32_t const box[4] = {kBoxColumns, cuuint32_t(box_rows), 1, 1};
  cuuint32_t const element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  auto const encode = [&] {
    return tensor_map_encoder()(&map, element_type(dtype), 4, view.ptr, dims, byte_strides, box,
                                element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread that has not used CUDA yet, such as autograd's: the runtime makes the device's
    // context current.
    FLASH3_CUDA_CHECK(cudaSetDevice(current_device()));
    result = encode();
  }
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("flash3: cuTensorMapEncodeTiled refused a tensor (CUresult " +
                             std::to_string(int(result)) + ")");
  }
  return map;
}

}  // namespace flash3
