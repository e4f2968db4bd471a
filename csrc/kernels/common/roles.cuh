// Warpgroup roles and their share of the register file.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include "common/barriers.cuh"

namespace flash3 {

enum class Role { kProducer, kConsumer };

// Registers per thread after setmaxnreg.
struct RegisterBudget {
  int producer, consumer;
};

// Warpgroups can only take what the CTA was launched with: the SM's registers divided among its
// threads and rounded down to a multiple of 8. A budget above that is a wait without end.
constexpr bool fits_launch(RegisterBudget budget, int consumers) {
  int const warpgroups = consumers + 1;
  int const at_launch = 65536 / (warpgroups * kThreadsPerWarpgroup) / 8 * 8;
  return budget.producer + consumers * budget.consumer <= warpgroups * at_launch;
}

// Warpgroup 0 loads, the others compute. The shuffle, which whole warps must reach, tells the
// compiler that the answer is the same across the warp.
CUTLASS_DEVICE int warpgroup_index() {
  return __shfl_sync(0xffffffff, threadIdx.x / kThreadsPerWarpgroup, 0);
}
CUTLASS_DEVICE int warp_index_in_warpgroup() {
  return threadIdx.x / kThreadsPerWarp % kWarpsPerWarpgroup;
}

// The thread's index, in a register of its own. The compiler reads %tid again wherever it needs it,
// and such a read waits behind all reductions and stores to memory that the warp has under way.
CUTLASS_DEVICE int thread_index_in_register() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}

CUTLASS_DEVICE Role warpgroup_role() {
  return warpgroup_index() == 0 ? Role::kProducer : Role::kConsumer;
}

}  // namespace flash3
