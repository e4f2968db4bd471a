// The forward kernel. Start reading here: a producer warp loads (producer.cuh), consumer warpgroups
// compute (consumer.cuh), shared memory is in smem.cuh, the online softmax in softmax.cuh, the
// order of tiles in attention/scheduler.cuh.
#pragma once

#include "forward/consumer.cuh"
#include "forward/producer.cuh"

namespace flash3 {

template <class Row>
__global__ void __launch_bounds__(FwdTraits<Row>::kThreads, 1)
    fwd_kernel(__grid_constant__ FwdArgs<Row> const args) {
  extern __shared__ __align__(1024) unsigned char storage[];
  FwdSmem<Row>& smem = *reinterpret_cast<FwdSmem<Row>*>(storage);
  if (threadIdx.x == 0) {
    smem.init_barriers();
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  constexpr RegisterBudget kRegisters = FwdTraits<Row>::kRegisters;
  if (warpgroup_role() == Role::kProducer) {
    cutlass::arch::warpgroup_reg_dealloc<kRegisters.producer>();
    if (threadIdx.x == 0) FwdProducer<Row>{args, smem}.run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<kRegisters.consumer>();
    FwdConsumer<Row>{args, smem, warpgroup_index() - 1}.run();
  }
}

}  // namespace flash3
