// The e4m3 forward kernel. Start reading here: loads and the transposition of V in producer.cuh,
// the mainloop in consumer.cuh, scales and the softmax in softmax.cuh, why nothing is shuffled in
// operands.cuh.
#pragma once

#include "fp8/consumer.cuh"
#include "fp8/producer.cuh"

namespace flash3 {

template <class Row>
__global__ void __launch_bounds__(Fp8Traits<Row>::kThreads, 1)
    fp8_kernel(__grid_constant__ Fp8Args<Row> const args) {
  extern __shared__ __align__(1024) unsigned char storage[];
  Fp8Smem<Row>& smem = *reinterpret_cast<Fp8Smem<Row>*>(storage);
  if (threadIdx.x == 0) {
    smem.init_barriers(args.v_transposed);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  constexpr RegisterBudget kRegisters = Fp8Traits<Row>::kRegisters;
  if (warpgroup_role() == Role::kProducer) {
    cutlass::arch::warpgroup_reg_dealloc<kRegisters.producer>();
    int const warp = __shfl_sync(0xffffffff, warp_index_in_warpgroup(), 0);
    if (warp > 0) {
      Fp8Transposer<Row>{args, smem, warp - 1, 0}.run();
    } else if (threadIdx.x == 0) {
      Fp8Producer<Row>{args, smem, {}, 0, 0}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kRegisters.consumer>();
    Fp8Consumer<Row>{args, smem, warpgroup_index() - 1}.run();
  }
}

}  // namespace flash3
