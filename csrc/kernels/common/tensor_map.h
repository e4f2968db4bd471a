// Host side of tma.cuh: builds the descriptor (CUtensorMap) of a tensor. The driver's encoder is
// looked up at run time, so that nothing links against libcuda and the module loads on machines
// without a driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "common/launch.h"
#include "common/tma.cuh"
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
  switch (dtype) {
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

struct TensorExtent {
  int head_dim, seqlen, heads, batch;
};

// Of a tensor map: rows are along dimension 1, columns along head_dim.
struct Box {
  int rows, columns;
};

inline int element_bytes(DType dtype) { return dtype == DType::kE4M3 ? 1 : 2; }

// Rows of a box are as long as the swizzle's.
inline CUtensorMapSwizzle swizzle_of(int row_bytes) {
  return row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                           : CU_TENSOR_MAP_SWIZZLE_32B;
}

// `strides` count elements and leave out head_dim's, which is 1.
template <int kDims>
CUtensorMap encode_tensor_map(void* address, DType dtype, cuuint64_t const (&dims)[kDims],
                              int64_t const (&strides)[kDims - 1], Box of) {
  int const bytes = element_bytes(dtype);
  cuuint64_t byte_strides[kDims - 1];
  for (int i = 0; i < kDims - 1; ++i) byte_strides[i] = cuuint64_t(strides[i]) * bytes;
  cuuint32_t box[kDims] = {cuuint32_t(of.columns), cuuint32_t(of.rows)}, element_strides[kDims];
  for (int i = 0; i < kDims; ++i) {
    if (i >= 2) box[i] = 1;
    element_strides[i] = 1;
  }
  CUtensorMap map;
  auto const encode = [&] {
    return tensor_map_encoder()(&map, element_type(dtype), kDims, address, dims, byte_strides, box,
                                element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                swizzle_of(of.columns * bytes), CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
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

// The map of a (batch, seqlen, heads, head_dim) tensor.
inline CUtensorMap make_tensor_map(TensorView const& view, DType dtype, TensorExtent extent,
                                   Box box) {
  cuuint64_t const dims[4] = {cuuint64_t(extent.head_dim), cuuint64_t(extent.seqlen),
                              cuuint64_t(extent.heads), cuuint64_t(extent.batch)};
  return encode_tensor_map<4>(view.ptr, dtype, dims,
                              {view.seqlen_stride, view.head_stride, view.batch_stride}, box);
}

// The map of a packed (rows, heads, head_dim) tensor, in which each sequence ends by itself:
// kRaggedRows of tma.cuh.
inline CUtensorMap make_ragged_tensor_map(TensorView const& view, DType dtype, TensorExtent extent,
                                          Box box) {
  constexpr cuuint64_t kUnbounded = 0x7fff0000;  // above every start and every row
  constexpr int64_t kWrap = int64_t{1} << 34;
  cuuint64_t const dims[5] = {cuuint64_t(extent.head_dim), cuuint64_t(kRaggedRows),
                              cuuint64_t(extent.heads), kUnbounded, kUnbounded};
  int64_t const row = view.seqlen_stride;
  return encode_tensor_map<5>(view.ptr, dtype, dims, {row, view.head_stride, row, kWrap - row},
                              box);
}

}  // namespace flash3
