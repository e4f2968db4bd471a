// The main loop of wide heads: the warpgroups share 64 keys, each computes the scores of one half
// of the queries and one half of the columns of dV, dK and dQ. P and dS are both exchanged.
#pragma once

#include "backward/dq_turns.cuh"
#include "backward/gemms.cuh"
#include "backward/scores.cuh"

namespace flash3 {

template <class Row>
struct BwdSharedKeys {
  using T = BwdTraits<Row>;
  using TileArg = typename BwdSmem<Row>::TileArg;
  using QueryBlock = QueryBlockOf<Row::key.mask>;
  using QRing = Ring<T::kQSlots>;
  using DoRing = Ring<T::kDoSlots>;

  BwdArgs<Row> const& args;
  BwdSmem<Row>& smem;
  int const warpgroup;
  int const thread = threadIdx.x;  // in the CTA

  // The schedule of a step, with what runs under the tensor cores:
  //
  //                             dS(j) = P(j) * (dP(j) - dPsum); dS and P staged
  //   dV(j)  dQ(j)  S(j + 1)    -- dV(j), dQ(j) done --
  //   dK(j)  dP(j + 1)          dQ(j) to global memory, then P(j + 1) from S(j + 1)
  template <class Dk, class Dv>
  CUTLASS_DEVICE void run(TileArg tile, BlockRange blocks, Dk& dk, Dv& dv) const {
    int const consumer_thread = thread - kThreadsPerWarpgroup;
    BwdScores<Row> const scores{args, smem, warpgroup, thread};
    BwdGemms<Row> const gemms{smem, warpgroup * kThreadsPerWarpgroup};
    QueryBlock at = QueryBlock::first(tile, blocks);
    Tensor s = gemms.scores();
    Tensor dp = gemms.scores();
    smem.q_ring.wait_full(QRing::after(0));
    gemms.issue_s(0, s);
    smem.do_ring.wait_full(DoRing::after(0));
    gemms.issue_dp(0, dp);
    warpgroup_wait<1>();  // S
    scores.to_probabilities(s, tile, at, scores.lse(0));
    warpgroup_wait<0>();  // dP

    auto step = [&](int j, auto last) {
      constexpr bool kLast = decltype(last)::value;
      auto const q_at = QRing::after(j), q_next = QRing::after(j + 1);
      auto const do_at = DoRing::after(j), do_next = DoRing::after(j + 1);
      int const ds_slot = j % T::kDsSlots, p_slot = T::kDsSlots + ds_slot;
      scores.to_gradients(dp, s, scores.dpsum(do_at.slot), q_at.slot);
      Tensor rounded = make_operand_a_like<typename T::Element>(dp);
      convert(dp, rounded);
      scores.stage(rounded, smem.ds[ds_slot]);
      Tensor p = make_operand_a_like<typename T::Element>(s);
      convert(s, p);
      scores.stage(p, smem.ds[p_slot]);
      // Orders this step's writes of dS and P before its reads, and the last step's reads before
      // the next step's writes to the same slot.
      named_barrier_sync(BwdBarrier::kDsReady, T::kConsumerThreads);
      gemms.issue_dv_of_slot(p_slot, do_at.slot, dv);
      Tensor dq = gemms.dq();
      gemms.issue_dq(ds_slot, dq);
      if constexpr (!kLast) {
        smem.q_ring.wait_full(q_next);
        gemms.issue_s(q_next.slot, s);
      }
      warpgroup_wait<kLast ? 0 : 1>();  // dV and dQ
      smem.do_ring.release(do_at);
      gemms.issue_dk(ds_slot, q_at.slot, dk);
      add_dq<Row>(args, tile, DqBlock<Row>(args, tile, at), dq, warpgroup, consumer_thread);
      at.advance(tile);
      if constexpr (!kLast) {
        smem.do_ring.wait_full(do_next);
        gemms.issue_dp(do_next.slot, dp);
        warpgroup_wait<2>();  // S
        scores.to_probabilities(s, tile, at, scores.lse(q_next.slot));
      }
      warpgroup_wait<0>();  // dK, and dP of the next step
      smem.q_ring.release(q_at);
    };
    int const last = tile.num_steps(blocks) - 1;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int j = 0; j < last; ++j) step(j, false_type{});
    step(last, true_type{});
  }
};

}  // namespace flash3
