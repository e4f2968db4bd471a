// Named barriers (bar.sync / bar.arrive): 16 per CTA. Id 0 belongs to __syncthreads, so each kernel
// numbers its own from 1 in one enum and asserts that they fit.
#pragma once

#include <cutlass/cutlass.h>

namespace flash3 {

inline constexpr int kNumNamedBarriers = 16;
inline constexpr int kThreadsPerWarp = 32;
inline constexpr int kThreadsPerWarpgroup = 128;
inline constexpr int kWarpsPerWarpgroup = 4;

// Waits until `num_threads` threads (a multiple of 32, the same number at every call) have synced
// or arrived.
template <class Id>
CUTLASS_DEVICE void named_barrier_sync(Id id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(id)), "r"(num_threads) : "memory");
}

// Counts the calling threads in without waiting.
template <class Id>
CUTLASS_DEVICE void named_barrier_arrive(Id id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(id)), "r"(num_threads) : "memory");
}

// The barrier `offset` places after `first`, for enums that hold one barrier per warpgroup.
template <class Id>
CUTLASS_DEVICE Id barrier_at(Id first, int offset) {
  return static_cast<Id>(static_cast<int>(first) + offset);
}

}  // namespace flash3
