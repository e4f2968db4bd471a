// Adding a step's dQ to its fp32 sum in global memory.
//
// The sum is private to the backward, so it is stored in fragment order: for each query block,
// warpgroup and group of four accumulator registers, the 128 threads' four floats lie side by side.
// A warp's vector reduction is then 512 contiguous bytes straight from registers, with no staging
// in shared memory; postprocess.cuh undoes the order.
#pragma once

#include "common/barriers.cuh"
#include "common/wgmma.cuh"

namespace flash3 {

// Float offset, within a query block's sum, of the first of the four floats of `group` of a
// consumer thread.
template <int kFloatsPerThread>
CUTLASS_DEVICE int dq_accum_offset(int consumer_thread, int group) {
  int const warpgroup = consumer_thread / kThreadsPerWarpgroup;
  int const lane = consumer_thread % kThreadsPerWarpgroup;
  return (warpgroup * kFloatsPerThread / 4 + group) * kThreadsPerWarpgroup * 4 + lane * 4;
}

// The first of the 16 rows of a query block whose parts a consumer thread's warp holds: kM is 64,
// and all warpgroups hold all rows, or 128. Packed rows leave out warps that no query lies in: of
// short sequences most blocks are short.
template <int kM>
CUTLASS_DEVICE int dq_warp_row(int consumer_thread) {
  return consumer_thread / kThreadsPerWarp * 16 % kM;
}

template <int kFloatsPerThread, class Fragment>
CUTLASS_DEVICE void add_to_dq_accum(float* block_sum, Fragment const& dq, int consumer_thread) {
  static_assert(decltype(size(dq.layout()))::value == kFloatsPerThread);
  // One address and constants from it: addresses of their own would take registers until the
  // reductions have left the SM, which is hundreds of cycles later.
  float* const first = block_sum + dq_accum_offset<kFloatsPerThread>(consumer_thread, 0);
  for_each(make_int_sequence<kFloatsPerThread / 4>{}, [&](auto group) {
    constexpr int g = decltype(group)::value;
    constexpr int kOffset = g * kThreadsPerWarpgroup * 4 * int(sizeof(float));
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0 + %5], {%1, %2, %3, %4};" ::"l"(first),
                 "f"(dq(4 * g)), "f"(dq(4 * g + 1)), "f"(dq(4 * g + 2)), "f"(dq(4 * g + 3)),
                 "n"(kOffset)
                 : "memory");
  });
}

}  // namespace flash3
