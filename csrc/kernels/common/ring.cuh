// A ring: a few shared-memory slots handed from a producer to consumers and back, each guarded by
// two mbarriers.
//
//   producer: wait_empty -> expect_bytes -> TMA loads that complete on full()      advance
//   consumer:                               wait_full -> read -> release           advance
//
// A consumer warp releases a slot once, by its first lane, so `empty` counts consumer warps.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/util.hpp>

#include "common/barriers.cuh"

namespace flash3 {

// Where one end of a ring stands. `phase` flips at each wrap and is what mbarrier waits compare
// with.
template <int kSlots>
struct RingCursor {
  int slot = 0;
  uint32_t phase = 0;

  CUTLASS_DEVICE void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

template <int kSlots_>
struct Ring {
  static constexpr int kSlots = kSlots_;
  using Cursor = RingCursor<kSlots>;

  // The cursor after `steps` advances. Loops short of registers keep one counter for all their
  // rings.
  CUTLASS_DEVICE static Cursor after(int steps) {
    static_assert((kSlots & (kSlots - 1)) == 0,
                  "a power of two, so that this is a mask and a shift");
    return {steps % kSlots, uint32_t(steps / kSlots) % 2};
  }
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  alignas(8) FullBarrier full_barriers[kSlots];
  alignas(8) EmptyBarrier empty_barriers[kSlots];

  // One thread, before the CTA-wide fence and sync that publish the barriers. `producers` arrive
  // at each slot: one thread, or so many warps.
  CUTLASS_DEVICE void init(int consumer_warps, int producers = 1) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSlots; ++i) {
      full_barriers[i].init(producers);
      empty_barriers[i].init(consumer_warps);
    }
  }

  // A fresh ring is all empty: the wait for the phase before the first one returns at once.
  CUTLASS_DEVICE void wait_empty(Cursor const& at) {
    empty_barriers[at.slot].wait(at.phase ^ 1);
    compiler_fence();
  }
  CUTLASS_DEVICE void expect_bytes(Cursor const& at, uint32_t bytes) {
    full_barriers[at.slot].arrive_and_expect_tx(bytes);
  }
  CUTLASS_DEVICE uint64_t* full(Cursor const& at) {
    return reinterpret_cast<uint64_t*>(&full_barriers[at.slot]);
  }
  // For slots that ordinary stores fill: the stores are visible to whoever waits for this arrival.
  CUTLASS_DEVICE void commit(Cursor const& at) {
    compiler_fence();
    full_barriers[at.slot].arrive();
  }
  // The same for a slot that several converged warps fill.
  CUTLASS_DEVICE void commit_warp(Cursor const& at,
                                  bool one_lane = threadIdx.x % kThreadsPerWarp == 0) {
    if (one_lane) commit(at);
  }

  CUTLASS_DEVICE void wait_full(Cursor const& at) {
    full_barriers[at.slot].wait(at.phase);
    compiler_fence();
  }
  // Called by converged warps that have finished reading the slot.
  CUTLASS_DEVICE void release(Cursor const& at,
                              bool one_lane = threadIdx.x % kThreadsPerWarp == 0) {
    compiler_fence();
    if (one_lane) empty_barriers[at.slot].arrive();
  }
  // The same, but not before `value`, which is never negative (it may be NaN), is known. ptxas
  // moves a wait for wgmma up past arithmetic, but neither past this arrival, nor this arrival past
  // the comparison, which only looks as if it could fail.
  CUTLASS_DEVICE void release_after(float value, Cursor const& at) {
    if (threadIdx.x % kThreadsPerWarp == 0) {
      asm volatile(
          "{\n"
          "  .reg .pred known;\n"
          "  setp.geu.f32 known, %1, 0fBF800000;\n"  // value >= -1, or NaN
          "  @known mbarrier.arrive.shared::cta.b64 _, [%0];\n"
          "}" ::"r"(cute::cast_smem_ptr_to_uint(&empty_barriers[at.slot])),
          "f"(value)
          : "memory");
    }
  }

 private:
  // CUTLASS's barrier calls order memory for the hardware but do not keep the compiler from moving
  // ordinary loads and stores of the slot across them.
  CUTLASS_DEVICE static void compiler_fence() { asm volatile("" ::: "memory"); }
};

}  // namespace flash3
