// Checks around CUDA calls: a failure is a C++ exception (RuntimeError in Python), never an exit.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace flash3 {

// "cudaMemsetAsync(...) failed at launch.cuh:41: cudaErrorInvalidValue: invalid argument"
[[noreturn]] inline void throw_cuda_error(cudaError_t error, char const* call, char const* file,
                                          int line) {
  // The runtime keeps the error for the next caller of cudaGetLastError, who has nothing to do with
  // it.
  cudaGetLastError();
  throw std::runtime_error(std::string(call) + " failed at " + file + ":" + std::to_string(line) +
                           ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

}  // namespace flash3

#define FLASH3_CUDA_CHECK(call)                                            \
  do {                                                                     \
    cudaError_t const flash3_error = (call);                               \
    if (flash3_error != cudaSuccess) {                                     \
      ::flash3::throw_cuda_error(flash3_error, #call, __FILE__, __LINE__); \
    }                                                                      \
  } while (false)
