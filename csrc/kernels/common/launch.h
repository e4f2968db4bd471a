// Launching kernels: more shared memory than the default limit, clusters.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "cuda_check.h"

namespace flash3 {

inline constexpr int kMaxSmemBytes = 227 * 1024;  // per CTA, compute capability 9.0

inline int current_device() {
  int device = 0;
  FLASH3_CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

// Raises `kernel`'s shared-memory limit once per device.
template <auto kernel>
void allow_smem(int bytes) {
  static std::atomic<uint64_t> done{0};  // one bit per device
  uint64_t const bit = uint64_t{1} << (current_device() % 64);
  if (done.load(std::memory_order_relaxed) & bit) return;
  FLASH3_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  done.fetch_or(bit, std::memory_order_relaxed);
}

struct LaunchShape {
  int ctas, cluster_size;  // clusters are of neighbouring CTAs
  int threads, smem_bytes;
};

template <class Args>
void launch_clusters(void (*kernel)(Args), LaunchShape const& shape, cudaStream_t stream,
                     Args const& args) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {unsigned(shape.cluster_size), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(shape.ctas);
  config.blockDim = unsigned(shape.threads);
  config.dynamicSmemBytes = std::size_t(shape.smem_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = shape.cluster_size > 1 ? 1 : 0;
  FLASH3_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace flash3
