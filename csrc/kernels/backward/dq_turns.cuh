// Deterministic dQ sums: key block n adds to a query block after key blocks 0 ... n - 1 have. CTAs
// start in the order of their key blocks, so that each waits only for CTAs that run or are done.
//
// Waiting for a turn is a read of L2, and passing it on waits until the sums have arrived there.
// Neither holds up the tensor cores: each consumer warpgroup has a warp for them, beside the
// producer, and meets it at two named barriers.
//
//   this warp:  wait until the turn has come -> kDqTurn      kDqAdded -> fence, pass the turn on
//   warpgroup:                        next dQ    kDqTurn -> add -> kDqAdded      next step
#pragma once

#include "backward/args.cuh"
#include "backward/dq_accumulate.cuh"

namespace flash3 {

inline constexpr int kDqTurnThreads = kThreadsPerWarpgroup + kThreadsPerWarp;

template <class Row>
struct BwdDqTurns {
  using T = BwdTraits<Row>;

  BwdArgs<Row> const& args;
  int const warpgroup;  // the consumer whose turns the warp looks after

  CUTLASS_DEVICE void run() {
    auto const tile = args.tile();
    BlockRange const blocks = args.mask(T::Sequences::lengths(tile.batch))
                                  .template query_blocks<T::kM, T::kN>(tile.n_block * T::kN);
    if (blocks.begin >= blocks.end) return;
    bool const first_lane = threadIdx.x % kThreadsPerWarp == 0;
    int const heads_end = tile.first_q_head + tile.num_q_heads;
    auto at = QueryBlockOf<Row::key.mask>::first(tile.first_q_head, blocks);
    CUTLASS_PRAGMA_NO_UNROLL
    for (; at.head < heads_end; at.advance(blocks)) {
      int* const turn = args.dq_turn + args.head_row(tile.batch, at.head) / T::kM + at.m_block;
      // `turn` counts the warpgroups that have added.
      int const key_blocks_before =
          tile.n_block - args.first_n_block(T::Sequences::lengths(tile.batch), at.m_block);
      if (first_lane) await(turn, key_blocks_before * T::kMmaWarpgroups);
      __syncwarp();
      named_barrier_arrive(barrier_at(BwdBarrier::kDqTurn, warpgroup), kDqTurnThreads);
      named_barrier_sync(barrier_at(BwdBarrier::kDqAdded, warpgroup), kDqTurnThreads);
      if (first_lane) pass_on(turn);
    }
  }

 private:
  CUTLASS_DEVICE static void await(int const* turn, int expected) {
    int seen;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory");
    } while (seen < expected);
  }
  // The barrier before it orders the whole warpgroup's sums before this thread's release.
  CUTLASS_DEVICE static void pass_on(int* turn) {
    __threadfence();
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
  }
};

}  // namespace flash3
