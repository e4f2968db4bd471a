// Warpgroup roles and their share of the register file.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include "common/barriers.cuh"

namespace flash3 {

enum class Role { kProducer, kConsumer };

// Registers per thread after setmaxnreg. The sum over warpgroups of 128 * registers must fit the
// SM's 65,536.
struct RegisterBudget {
  int producer, consumer;
};

// Warpgroup 0 loads, the others compute. The shuffle, which whole warps must reach, tells the
// compiler that the answer is the same across the warp.
CUTLASS_DEVICE int warpgroup_index() {
  return __shfl_sync(0xffffffff, threadIdx.x / kThreadsPerWarpgroup, 0);
}
CUTLASS_DEVICE int warp_index_in_warpgroup() {
  return threadIdx.x / kThreadsPerWarp % kWarpsPerWarpgroup;
}
CUTLASS_DEVICE Role warpgroup_role() {
  return warpgroup_index() == 0 ? Role::kProducer : Role::kConsumer;
}

}  // namespace flash3
