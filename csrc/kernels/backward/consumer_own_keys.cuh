// The main loop where a warpgroup has 64 keys of its own. dQ alone needs the other warpgroup's dS,
// and is a step late: the warpgroups never wait for each other at the same place, so that one's
// exponentials run beside the other's GEMMs (E031).
#pragma once

#include "backward/dq_turns.cuh"
#include "backward/gemms.cuh"
#include "backward/scores.cuh"

namespace flash3 {

template <class Row>
struct BwdOwnKeys {
  using T = BwdTraits<Row>;
  using TileArg = typename BwdSmem<Row>::TileArg;
  using QueryBlock = QueryBlockOf<Row::key.mask>;
  using QRing = Ring<T::kQSlots>;
  using DoRing = Ring<T::kDoSlots>;
  using DsRing = Ring<T::kDsSlots>;

  BwdArgs<Row> const& args;
  BwdSmem<Row>& smem;
  int const warpgroup;
  int const thread = thread_index_in_register();  // in the CTA

  // The schedule of a step, with what runs beside the warpgroup's own GEMMs:
  //
  //   dV(j)                     dS(j) = P(j) * (dP(j) - dPsum), staged
  //   dQ(j - 1)  S(j + 1)       -- dV(j), dQ(j - 1) done --
  //   dK(j)                     dQ(j - 1) to global memory
  //   dP(j + 1)  dV(j + 1)      P(j + 1) from S(j + 1), between the parts of dP(j + 1)
  //
  // dV(j + 1) is issued as soon as P(j + 1) is there, which takes registers that blocks of 128
  // queries do not leave: those issue it after dS(j + 1).
  template <class Dk, class Dv>
  CUTLASS_DEVICE void run(TileArg tile, BlockRange blocks, Dk& dk, Dv& dv) const {
    BwdScores<Row> const scores{args, smem, warpgroup, thread};
    BwdGemms<Row> const gemms{smem, warpgroup * kThreadsPerWarpgroup};
    DsRing& own_ds = smem.ds_rings[warpgroup];
    DsRing& other_ds = smem.ds_rings[1 - warpgroup];
    QueryBlock at = QueryBlock::first(tile, blocks);
    // Formed a step ahead, off the way from dQ to its sum.
    DqBlock<Row> before(args, tile, at);
    Tensor s = gemms.scores();
    Tensor dp = gemms.scores();
    Tensor p = make_operand_a_like<typename T::Element>(s);
    auto issue_dv = [&](DoRing::Cursor do_at) {
      convert(s, p);
      gemms.issue_dv(p, do_at.slot, dv);
    };

    smem.q_ring.wait_full(QRing::after(0));
    gemms.issue_s(0, s);
    smem.do_ring.wait_full(DoRing::after(0));
    gemms.issue_dp(0, dp);
    auto const first_lse = scores.lse(0);
    warpgroup_wait<1>();  // S
    scores.to_probabilities(s, tile, at, first_lse);
    auto dpsum = scores.dpsum(0);
    if constexpr (T::kDvEarly) issue_dv(DoRing::after(0));
    warpgroup_wait<T::kDvEarly>();  // dP

    auto step = [&](int j, auto first, auto last) __attribute__((always_inline)) {
      constexpr bool kFirst = decltype(first)::value, kLast = decltype(last)::value;
      auto const q_at = QRing::after(j), q_next = QRing::after(j + 1);
      auto const do_at = DoRing::after(j), do_next = DoRing::after(j + 1);
      auto const ds_at = DsRing::after(j), ds_before = DsRing::after(j - 1);
      scores.to_gradients(dp, s, dpsum, q_at.slot);
      Tensor rounded_ds = make_operand_a_like<typename T::Element>(dp);
      convert(dp, rounded_ds);
      own_ds.wait_empty(ds_at);
      scores.stage(rounded_ds, smem.ds[ds_at.slot]);
      own_ds.commit_warp(ds_at, cute::elect_one_sync());
      if constexpr (!T::kDvEarly) issue_dv(do_at);
      Tensor dq = gemms.dq();
      if constexpr (!kFirst) {
        other_ds.wait_full(ds_before);
        gemms.issue_dq(ds_before.slot, dq);
      }
      if constexpr (kLast) {
        // There is no next S to wait for: dK and the last dQ are issued at once.
        own_ds.wait_full(ds_at);
        gemms.issue_dk(ds_at.slot, q_at.slot, dk);
        Tensor last_dq = gemms.dq();
        other_ds.wait_full(ds_at);
        gemms.issue_dq(ds_at.slot, last_dq);
        if constexpr (!kFirst) {
          warpgroup_wait<2>();  // dV and dQ of the step before
          add_dq<Row>(args, tile, before, dq, warpgroup, consumer_thread());
        }
        warpgroup_wait<0>();
        add_dq<Row>(args, tile, DqBlock<Row>(args, tile, at), last_dq, warpgroup,
                    consumer_thread());
        return;
      }
      smem.q_ring.wait_full(q_next);
      gemms.issue_s(q_next.slot, s);
      auto const lse = scores.lse(q_next.slot);
      warpgroup_wait<1>();  // dV and dQ
      smem.do_ring.release(do_at, cute::elect_one_sync());
      if constexpr (!kFirst) {
        for (auto& ring : smem.ds_rings) ring.release(ds_before, cute::elect_one_sync());
      }
      own_ds.wait_full(ds_at);
      gemms.issue_dk(ds_at.slot, q_at.slot, dk);
      if constexpr (!kFirst) add_dq<Row>(args, tile, before, dq, warpgroup, consumer_thread());
      before = DqBlock<Row>(args, tile, at);
      at.advance(tile);
      smem.do_ring.wait_full(do_next);
      if constexpr (T::kDvEarly) {
        warpgroup_wait<1>();  // S
        scores.to_probabilities(s, tile, at, lse);
        gemms.issue_dp(do_next.slot, dp);
        issue_dv(do_next);
      } else {
        gemms.issue_dp(do_next.slot, dp);
        warpgroup_wait<2>();  // S
        scores.to_probabilities(s, tile, at, lse);
      }
      dpsum = scores.dpsum(do_next.slot);
      warpgroup_wait<T::kDvEarly>();  // dK, and dP of the next step
      smem.q_ring.release(q_at, cute::elect_one_sync());
    };
    int const last = tile.num_steps(blocks) - 1;
    if (last == 0) {
      step(0, true_type{}, true_type{});
      return;
    }
    step(0, true_type{}, false_type{});
    CUTLASS_PRAGMA_NO_UNROLL
    for (int j = 1; j < last; ++j) step(j, false_type{}, false_type{});
    step(last, false_type{}, true_type{});
  }

 private:
  CUTLASS_DEVICE int consumer_thread() const { return thread - kThreadsPerWarpgroup; }
};

}  // namespace flash3
