// The int in which a dynamic schedule counts its tiles. A launch finds it 0 and leaves it 0: the
// kernel sets it back once the last tile is handed out.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/tensor.h>

#include <map>
#include <mutex>
#include <utility>

#include "cuda_check.h"
#include "memory.h"

namespace flash3 {

inline Tensor zeroed_counter(cudaStream_t stream, Placement const& placement) {
  Tensor counter = empty<1>({1}, aoti_torch_dtype_int32(), placement);
  FLASH3_CUDA_CHECK(cudaMemsetAsync(counter.mutable_data_ptr(), 0, sizeof(int), stream));
  return counter;
}

// The counter of a call on `stream`. Launches on one stream run one after the other, so they share
// one, made at the stream's first call; that saves each call an allocation and a memset. A call
// that is captured into a CUDA graph gets its own: two graphs may be captured on one stream and run
// side by side.
inline Tensor tile_counter(cudaStream_t stream, Placement const& placement) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  FLASH3_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) return zeroed_counter(stream, placement);

  unsigned long long stream_id = 0;  // never used again in the process, unlike a handle
  FLASH3_CUDA_CHECK(cudaStreamGetId(stream, &stream_id));
  // Never destroyed: at exit torch's allocator may be gone first.
  static auto& counters = *new std::map<std::pair<int32_t, unsigned long long>, Tensor>;
  static std::mutex mutex;
  std::lock_guard const lock(mutex);
  std::pair const key{placement.device_index, stream_id};
  auto found = counters.find(key);
  if (found == counters.end()) {
    found = counters.emplace(key, zeroed_counter(stream, placement)).first;
  }
  return found->second;
}

}  // namespace flash3
