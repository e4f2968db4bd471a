// Allocation through torch (so that its caching allocator and CUDA graphs know of it) and the
// current stream.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <stdexcept>

#include "checks.h"

// A CPU build of torch lacks this function. Weak, so that the module (its plans, its list of rows)
// loads there as well; no call gets this far without a CUDA tensor.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace flash3 {

[[noreturn]] inline void throw_allocation_failed(torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                                 int32_t dtype) {
  int64_t bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  for (int64_t const size : sizes) bytes *= size;
  throw std::runtime_error("flash3: torch could not allocate a tensor of shape " + text(sizes) +
                           ", " + std::to_string(bytes) +
                           " bytes (out of memory? torch wrote its own message to stderr)");
}

// An uninitialised contiguous tensor. Calls the allocation shim itself: torch::stable::empty goes
// through the boxed dispatcher, which costs about a microsecond more per tensor.
template <std::size_t kDims>
Tensor empty(std::array<int64_t, kDims> const& sizes, int32_t dtype, Placement const& placement) {
  std::array<int64_t, kDims> strides;
  int64_t stride = 1;
  for (std::size_t dim = kDims; dim-- > 0;) {
    strides[dim] = stride;
    stride *= sizes[dim] > 1 ? sizes[dim] : 1;
  }
  AtenTensorHandle handle = nullptr;
  AOTITorchError const status =
      aoti_torch_empty_strided(static_cast<int64_t>(kDims), sizes.data(), strides.data(), dtype,
                               placement.device_type, placement.device_index, &handle);
  if (status != AOTI_TORCH_SUCCESS) throw_allocation_failed({sizes.data(), sizes.size()}, dtype);
  return Tensor(handle);
}

inline cudaStream_t current_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace flash3
