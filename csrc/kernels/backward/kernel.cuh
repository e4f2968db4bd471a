// The backward's main kernel: a producer warp loads (producer.cuh), consumer warpgroups run the
// five GEMMs (consumer.cuh). Around it, preprocess.cuh makes the row statistics and zeroes the dQ
// sums, postprocess.cuh rounds them.
#pragma once

#include "backward/consumer.cuh"
#include "backward/dq_turns.cuh"
#include "backward/producer.cuh"

namespace flash3 {

template <class Row>
__global__ void __launch_bounds__(BwdTraits<Row>::kThreads, 1)
    bwd_kernel(__grid_constant__ BwdArgs<Row> const args) {
  extern __shared__ __align__(1024) unsigned char storage[];
  BwdSmem<Row>& smem = *reinterpret_cast<BwdSmem<Row>*>(storage);
  if (args.no_tile()) return;  // all CTAs of a cluster
  if (threadIdx.x == 0) {
    smem.init_barriers();
    if constexpr (BwdTraits<Row>::kPacked) smem.tile = args.tile();
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  constexpr RegisterBudget kRegisters = BwdTraits<Row>::kRegisters;
  if (warpgroup_role() == Role::kProducer) {
    cutlass::arch::warpgroup_reg_dealloc<kRegisters.producer>();
    int const warp = threadIdx.x / kThreadsPerWarp;
    if (threadIdx.x == 0) BwdProducer<Row>{args, smem}.run();
    if (args.dq_turn != nullptr) {
      if (warp == 1) BwdDqTurns<Row>{args, smem}.await_turns();
      if (warp == 2) BwdDqTurns<Row>{args, smem}.pass_turns_on();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kRegisters.consumer>();
    BwdConsumer<Row>{args, smem, warpgroup_index() - 1}.run();
  }
}

}  // namespace flash3
