// Deterministic dQ sums: key block n adds to a query block after key blocks 0 ... n - 1 have. CTAs
// start in the order of their key blocks, so that each waits only for CTAs that run or are done.
//
// Waiting for a turn is a read of L2, and passing it on waits until the sums have arrived there.
// Neither holds up the tensor cores: two warps beside the producer do it, and meet each consumer
// warpgroup at named barriers of its own, so that one may add before the other comes (E020, E031).
//
//   warp 1      read the turn until it has come -> kDqTurn -> read the next ...
//   warpgroup               dQ(j) -> kDqTurn -> add -> kDqAdded           dQ(j + 1) -> kDqTurn ...
//   warp 2                  kDqTurn                 -> kDqAdded -> fence, pass the turn on ...
#pragma once

#include "backward/args.cuh"
#include "backward/dq_accumulate.cuh"
#include "backward/smem.cuh"

namespace flash3 {

template <class Row>
struct BwdDqTurns {
  using T = BwdTraits<Row>;

  BwdArgs<Row> const& args;
  BwdSmem<Row> const& smem;

  CUTLASS_DEVICE void await_turns() {
    typename BwdSmem<Row>::TileArg tile = smem.own_tile(args);
    for_each_step([&](int const* turn, int m_block) {
      int const key_blocks_before =
          tile.n_block - args.first_n_block(T::Sequences::lengths(tile.batch), m_block);
      if (first_lane()) {
        int added;
        do {
          asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(added) : "l"(turn) : "memory");
        } while (added < key_blocks_before);
      }
      __syncwarp();
      for (int w = 0; w < T::kMmaWarpgroups; ++w) {
        named_barrier_sync(barrier_at(BwdBarrier::kDqTurn, w), kTurnThreads);
      }
    });
  }

  CUTLASS_DEVICE void pass_turns_on() {
    for_each_step([&](int* turn, int) {
      // No turn comes before the last one has been passed on: kDqAdded is free again.
      for (int w = 0; w < T::kMmaWarpgroups; ++w) {
        named_barrier_arrive(barrier_at(BwdBarrier::kDqTurn, w), kTurnThreads);
      }
      for (int w = 0; w < T::kMmaWarpgroups; ++w) {
        named_barrier_sync(barrier_at(BwdBarrier::kDqAdded, w), kAddedThreads);
      }
      if (first_lane()) {
        // The barrier has ordered all consumers' sums before this fence and release.
        __threadfence();
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
      }
      __syncwarp();
    });
  }

  static constexpr int kTurnThreads = kThreadsPerWarpgroup + 2 * kThreadsPerWarp;
  static constexpr int kAddedThreads = kThreadsPerWarpgroup + kThreadsPerWarp;

 private:
  CUTLASS_DEVICE static bool first_lane() { return threadIdx.x % kThreadsPerWarp == 0; }

  // Calls `work` with the counter of each query block that the CTA adds to (how many key blocks
  // have) and the query block.
  template <class Work>
  CUTLASS_DEVICE void for_each_step(Work work) {
    typename BwdSmem<Row>::TileArg tile = smem.own_tile(args);
    BlockRange const blocks = args.mask(T::Sequences::lengths(tile.batch))
                                  .template query_blocks<T::kM, T::kN>(tile.n_block * T::kN);
    if (blocks.begin >= blocks.end) return;
    auto at = QueryBlockOf<Row::key.mask>::first(tile, blocks);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int steps = tile.num_steps(blocks); steps > 0; --steps, at.advance(tile)) {
      work(args.dq_turn + args.head_row(tile.batch, at.head) / T::kM + at.m_block, at.m_block);
    }
  }
};

// Where the sum of a query block lies.
template <class Row>
struct DqBlock {
  int64_t first_row;  // of all query rows, padded to whole blocks
  int m_block;        // in its sequence

  CUTLASS_DEVICE DqBlock(BwdArgs<Row> const& args, typename BwdSmem<Row>::TileArg tile,
                         QueryBlockOf<Row::key.mask> at)
      : first_row(args.head_row(tile.batch, at.head) + int64_t(at.m_block) * BwdTraits<Row>::kM),
        m_block(at.m_block) {}
};

// The consumers' side: adds a query block's dQ, in its turn if sums are ordered.
template <class Row, class Fragment>
CUTLASS_DEVICE void add_dq(BwdArgs<Row> const& args, typename BwdSmem<Row>::TileArg tile,
                           DqBlock<Row> const& block, Fragment const& dq, int warpgroup,
                           int consumer_thread) {
  using T = BwdTraits<Row>;
  float* const block_sum = args.dq_accum + block.first_row * T::kHeadDim;
  bool holds_queries = true;
  if constexpr (T::kPacked) {
    int const rows = tile.batch.q.length - block.m_block * T::kM;
    holds_queries = dq_warp_row<T::kM>(consumer_thread) < rows;
  }
  if (args.dq_turn == nullptr) {
    if (holds_queries) add_to_dq_accum<T::kDqPerThread>(block_sum, dq, consumer_thread);
    return;
  }
  named_barrier_sync(barrier_at(BwdBarrier::kDqTurn, warpgroup), BwdDqTurns<Row>::kTurnThreads);
  if (holds_queries) add_to_dq_accum<T::kDqPerThread>(block_sum, dq, consumer_thread);
  named_barrier_arrive(barrier_at(BwdBarrier::kDqAdded, warpgroup), BwdDqTurns<Row>::kAddedThreads);
}

}  // namespace flash3
