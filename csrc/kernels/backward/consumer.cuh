// A consumer warpgroup of the backward: 64 keys of the CTA's block against every query block, five
// GEMMs a step (FlashAttention-2, algorithm 2; FlashAttention-3, algorithm 3):
//
//   S^T = K Q^T      P^T = exp2(S^T * scale - LSE)      dV += P^T dO
//   dP^T = V dO^T    dS^T = P^T * (dP^T - dPsum)        dK += dS^T Q       dQ += dS K
//
// The first four stay within the warpgroup's own keys. dQ sums over all keys of the CTA, so dS is
// exchanged through shared memory.
#pragma once

#include "attention/softcap.cuh"
#include "backward/args.cuh"
#include "backward/cluster_sum.cuh"
#include "backward/dq_turns.cuh"
#include "backward/smem.cuh"
#include "common/math.cuh"
#include "common/stage_rows.cuh"

namespace flash3 {

template <class Row>
struct BwdConsumer {
  using T = BwdTraits<Row>;
  using Element = typename T::Element;
  using KeyTile = typename BwdArgs<Row>::KeyTile;
  using TileArg = typename BwdSmem<Row>::TileArg;
  using Lengths = typename T::Sequences::Lengths;

  BwdArgs<Row> const& args;
  BwdSmem<Row>& smem;
  int const warpgroup;  // 0 .. mma_warpgroups - 1

  using QRing = Ring<T::kQSlots>;
  using DoRing = Ring<T::kDoSlots>;

  CUTLASS_DEVICE void run() {
    TileArg tile = smem.own_tile(args);
    BlockRange const blocks = args.mask(T::Sequences::lengths(tile.batch))
                                  .template query_blocks<T::kM, T::kN>(tile.n_block * T::kN);
    // ((2, 2, columns / 8), 1, 1) fp32 each
    typename T::MmaDk mma_dk;
    typename T::MmaDv mma_dv;
    Tensor dk = partition_fragment_C(mma_dk, Shape<Int<T::kN>, Int<T::kHeadDim>>{});
    Tensor dv = partition_fragment_C(mma_dv, Shape<Int<T::kN>, Int<T::kHeadDimV>>{});
    clear(dk);
    clear(dv);
    if (blocks.begin < blocks.end) {
      smem.kv_ring.wait_full({});
      accumulate(tile, blocks, mma_dk, dk, mma_dv, dv);
    }
    write_output(tile, dk, dv);
  }

 private:
  using QueryBlock = QueryBlockOf<Row::key.mask>;

  CUTLASS_DEVICE int consumer_thread() const { return threadIdx.x - kThreadsPerWarpgroup; }

  // Of the warp's part of the scores, within the tile.
  CUTLASS_DEVICE int first_key() const { return warp_row_in_tile(T::kKeysShared ? 0 : warpgroup); }
  CUTLASS_DEVICE int first_query() const {
    return T::kKeysShared ? warpgroup * T::kScoreColumns : 0;
  }

  // The schedule of a step, with what runs under the tensor cores:
  //
  //   dV(j)                 dS(j) = P(j) * (dP(j) - dPsum), staged for the other warpgroup
  //   dQ(j)  S(j + 1)       -- dV(j), dQ(j) done --
  //   dK(j)  dP(j + 1)      dQ(j) to global memory, then P(j + 1) from S(j + 1)
  template <class Dk, class Dv>
  CUTLASS_DEVICE void accumulate(TileArg tile, BlockRange blocks, typename T::MmaDk& mma_dk, Dk& dk,
                                 typename T::MmaDv& mma_dv, Dv& dv) {
    typename T::MmaScores mma_scores;
    typename T::MmaDq mma_dq;
    auto const thread_scores = mma_scores.get_thread_slice(consumer_thread());
    auto const thread_dk = mma_dk.get_thread_slice(consumer_thread());
    auto const thread_dv = mma_dv.get_thread_slice(consumer_thread());
    auto const thread_dq = mma_dq.get_thread_slice(consumer_thread());
    auto const k = make_smem_ptr(smem.k), v = make_smem_ptr(smem.v);
    auto const q = make_smem_ptr(smem.q[0]), d_o = make_smem_ptr(smem.d_o[0]);
    auto const ds = make_smem_ptr(smem.ds[0]);
    typename T::LayoutK const layout_k{};
    typename T::LayoutV const layout_v{};
    typename T::LayoutQ const layout_q{};
    typename T::LayoutDo const layout_do{};
    typename T::LayoutDs const layout_ds{};
    // Operands (MMA, MMA_MN, MMA_K[, slots]) of S^T = K Q^T, dP^T = V dO^T, dV = P^T dO, dK = dS^T
    // Q, dQ = dS K.
    Tensor tSrK = thread_scores.partition_fragment_A(make_tensor(k, layout_k));
    Tensor tSrQ = thread_scores.partition_fragment_B(make_tensor(q, layout_q));
    Tensor tPrV = thread_scores.partition_fragment_A(make_tensor(v, layout_v));
    Tensor tPrDo = thread_scores.partition_fragment_B(make_tensor(d_o, layout_do));
    Tensor tVrDo = thread_dv.partition_fragment_B(make_tensor(d_o, transposed(layout_do)));
    Tensor tKrDs = thread_dk.partition_fragment_A(make_tensor(ds, layout_ds));
    Tensor tKrQ = thread_dk.partition_fragment_B(make_tensor(q, transposed(layout_q)));
    Tensor tQrDs = thread_dq.partition_fragment_A(make_tensor(ds, transposed(layout_ds)));
    Tensor tQrK = thread_dq.partition_fragment_B(make_tensor(k, transposed(layout_k)));

    QueryBlock at = QueryBlock::first(tile, blocks);
    Tensor s = partition_fragment_C(mma_scores, Shape<Int<T::kN>, Int<T::kM>>{});
    Tensor dp = partition_fragment_C(mma_scores, Shape<Int<T::kN>, Int<T::kM>>{});
    smem.q_ring.wait_full(QRing::after(0));
    issue_gemm<Accumulate::kReplace>(mma_scores, tSrK, tSrQ(_, _, _, 0), s);
    smem.do_ring.wait_full(DoRing::after(0));
    issue_gemm<Accumulate::kReplace>(mma_scores, tPrV, tPrDo(_, _, _, 0), dp);
    warpgroup_wait<1>();  // S
    to_probabilities(s, tile, at, 0);
    warpgroup_wait<0>();  // dP

    auto step = [&](int j, auto last) {
      constexpr bool kLast = decltype(last)::value;
      auto const q_at = QRing::after(j);
      auto const do_at = DoRing::after(j);
      int const ds_slot = j % T::kDsSlots, p_slot = T::kDsSlots + ds_slot;
      to_score_gradients(dp, s, smem.dpsum[do_at.slot], smem.lse_log2[q_at.slot]);
      Tensor rounded_ds = make_operand_a_like<Element>(dp);
      convert(dp, rounded_ds);
      stage_scores(rounded_ds, smem.ds[ds_slot]);
      // Only now, when dP's registers are free: rounding P takes half as many as it frees, and dV
      // keeps them until it is done.
      Tensor p = make_operand_a_like<Element>(s);
      convert(s, p);
      if constexpr (T::kKeysShared) {
        stage_scores(p, smem.ds[p_slot]);
      } else {
        issue_gemm<Accumulate::kAdd>(mma_dv, p, tVrDo(_, _, _, do_at.slot), dv);
      }
      // Orders this step's writes of dS (and P) before its reads, and the last step's reads before
      // the next step's writes to the same slot.
      named_barrier_sync(BwdBarrier::kDsReady, T::kConsumerThreads);
      if constexpr (T::kKeysShared) {
        issue_gemm<Accumulate::kAdd>(mma_dv, tKrDs(_, _, _, p_slot), tVrDo(_, _, _, do_at.slot),
                                     dv);
      }
      Tensor dq = partition_fragment_C(mma_dq, Shape<Int<T::kM>, Int<T::kHeadDim>>{});
      issue_gemm<Accumulate::kReplace>(mma_dq, tQrDs(_, _, _, ds_slot), formed_in_place(tQrK), dq);
      auto const q_next = QRing::after(j + 1);
      auto const do_next = DoRing::after(j + 1);
      if constexpr (!kLast) {
        smem.q_ring.wait_full(q_next);
        issue_gemm<Accumulate::kReplace>(mma_scores, formed_in_place(tSrK),
                                         tSrQ(_, _, _, q_next.slot), s);
        warpgroup_wait<1>();  // dV and dQ
      } else {
        warpgroup_wait<0>();
      }
      smem.do_ring.release(do_at);
      issue_gemm<Accumulate::kAdd>(mma_dk, tKrDs(_, _, _, ds_slot), tKrQ(_, _, _, q_at.slot), dk);
      add_dq(tile, at, dq);
      at.advance(tile);
      if constexpr (!kLast) {
        smem.do_ring.wait_full(do_next);
        issue_gemm<Accumulate::kReplace>(mma_scores, formed_in_place(tPrV),
                                         tPrDo(_, _, _, do_next.slot), dp);
        warpgroup_wait<2>();  // S
        to_probabilities(s, tile, at, q_next.slot);
      }
      warpgroup_wait<0>();  // dK, and dP of the next step
      smem.q_ring.release(q_at);
    };
    int const last = tile.num_steps(blocks) - 1;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int j = 0; j < last; ++j) step(j, false_type{});
    step(last, true_type{});
  }

  // Of P or dS, for the GEMMs that need the other warpgroup's too.
  template <class Rounded>
  CUTLASS_DEVICE void stage_scores(Rounded const& rounded, Element* slot) const {
    stage_warp_rows<T::kN, T::kScoreColumns, kWidestBox>(rounded, slot, first_key(), first_query());
  }

  // Keys past the end were loaded as zeros; their scores of 0 must not turn into probabilities
  // either.
  template <class Scores>
  CUTLASS_DEVICE void mask_scores(Scores& scores, Lengths lengths, int m_block, int n_block) const {
    auto const mask = args.mask(lengths);
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const key = n_block * T::kN + first_key() + lane_first_row() + 8 * r;
      int const first_query =
          key < args.length_k(lengths) ? mask.first_query(key) : args.seqlen_q_rounded;
      int const first_column =
          first_query - m_block * T::kM - this->first_query() - lane_first_column();
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        if (accumulator_column(j) < first_column) scores(r, j) = -INFINITY;
      }
      if constexpr (T::kLocal) {
        int const last_column =
            mask.last_query(key) - m_block * T::kM - this->first_query() - lane_first_column();
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < size<1>(scores); ++j) {
          if (accumulator_column(j) > last_column) scores(r, j) = -INFINITY;
        }
      }
    }
  }

  // The tanh of capped scores, in place; the cap is then what they are scaled by.
  template <class Scores>
  CUTLASS_DEVICE void cap_scores(Scores& scores) const {
    if constexpr (T::kLocal) {
      float const softcap = args.limits.softcap;
      if (softcap == 0.f) return;
      float const scale = softcap_argument_scale(args.softmax_scale, softcap);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) = tanh_from_log2(scores(i) * scale);
    }
  }

  // P^T from S^T, in place. Columns are queries, whose statistics all rows share.
  template <class Fragment>
  CUTLASS_DEVICE void to_probabilities(Fragment& s, TileArg tile, QueryBlock at, int slot) const {
    auto scores = rows_and_columns(s);
    Lengths const lengths = T::Sequences::lengths(tile.batch);
    cap_scores(scores);
    if (args.mask(lengths).template cuts<T::kM, T::kN>(at.m_block * T::kM, tile.n_block * T::kN)) {
      mask_scores(scores, lengths, at.m_block, tile.n_block);
    }
    float const* const lse_log2 = smem.lse_log2[slot] + first_query();
    float const scale_log2 = args.score_scale() * kLog2e;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < size<1>(scores); j += 2) {
      float2 const lse = row_stats(lse_log2, j);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        scores(r, j) = exp2f(scores(r, j) * scale_log2 - lse.x);
        scores(r, j + 1) = exp2f(scores(r, j + 1) * scale_log2 - lse.y);
      }
    }
  }

  // dS^T from dP^T, in place; P^T stays.
  template <class Fragment>
  CUTLASS_DEVICE void to_score_gradients(Fragment& dp_fragment, Fragment& p_fragment,
                                         float const* dpsum, float const* lse_log2) const {
    auto dp = rows_and_columns(dp_fragment);
    auto const p = rows_and_columns(p_fragment);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < size<1>(dp); j += 2) {
      float2 const sum = row_stats(dpsum + first_query(), j);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        dp(r, j) = p(r, j) * (dp(r, j) - sum.x);
        dp(r, j + 1) = p(r, j + 1) * (dp(r, j + 1) - sum.y);
      }
    }
    if constexpr (T::kLocal) {
      if (args.limits.softcap > 0.f) through_tanh(dp, p, lse_log2 + first_query());
    }
  }

  // dS^T *= 1 - tanh^2. There are no registers in which to keep the tanh, but P has it: log2(P) =
  // tanh * cap - LSE. Where P is 0, or LSE +inf, so is dS, and any finite factor will do.
  template <class Scores>
  CUTLASS_DEVICE void through_tanh(Scores& ds, Scores const& p, float const* lse_log2) const {
    float const inverse_cap = 1.f / (args.limits.softcap * kLog2e);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < size<1>(ds); j += 2) {
      float2 const lse = row_stats(lse_log2, j);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        float const x = (log2f(p(r, j)) + lse.x) * inverse_cap;
        float const y = (log2f(p(r, j + 1)) + lse.y) * inverse_cap;
        ds(r, j) *= fmaxf(1.f - x * x, 0.f);
        ds(r, j + 1) *= fmaxf(1.f - y * y, 0.f);
      }
    }
  }

  CUTLASS_DEVICE static float2 row_stats(float const* stats, int j) {
    return *reinterpret_cast<float2 const*>(stats + accumulator_column(j) + lane_first_column());
  }

  template <class Fragment>
  CUTLASS_DEVICE void add_dq(TileArg tile, QueryBlock at, Fragment const& dq) {
    int64_t const row = args.head_row(tile.batch, at.head) + int64_t(at.m_block) * T::kM;
    float* const block_sum = args.dq_accum + row * T::kHeadDim;
    bool holds_queries = true;
    if constexpr (T::kPacked) {
      int const rows = tile.batch.q.length - at.m_block * T::kM;
      holds_queries = dq_warp_row<T::kM>(consumer_thread()) < rows;
    }
    if (args.dq_turn == nullptr) {
      if (holds_queries) add_to_dq_accum<T::kDqPerThread>(block_sum, dq, consumer_thread());
      return;
    }
    named_barrier_sync(BwdBarrier::kDqTurn, BwdDqTurns<Row>::kTurnThreads);
    if (holds_queries) add_to_dq_accum<T::kDqPerThread>(block_sum, dq, consumer_thread());
    named_barrier_arrive(BwdBarrier::kDqAdded, BwdDqTurns<Row>::kAddedThreads);
  }

  template <class Dk, class Dv>
  CUTLASS_DEVICE void write_output(KeyTile tile, Dk& dk, Dv& dv) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(dk); ++i) dk(i) *= args.softmax_scale;
    // K is the B operand of every warpgroup's dQ, so all must be done before dK overwrites it.
    named_barrier_sync(BwdBarrier::kConsumersDone, T::kConsumerThreads);
    if (args.cluster_size > 1) {
      BwdClusterSum<Row>{args, smem, warpgroup}.run(tile, dk, dv);
    } else {
      write_gradient<T::kDvColumns>(args.dv, dv, smem.v, tile);
      write_gradient<T::kDkColumns>(args.dk, dk, smem.k, tile);
    }
    if (threadIdx.x % kThreadsPerWarp == 0) tma_store_wait<0>();
  }

  template <int kColumns, class Gradient>
  CUTLASS_DEVICE void write_gradient(CUtensorMap const& map, Gradient const& gradient,
                                     Element* staging, KeyTile tile) {
    Tensor rounded = make_tensor<Element>(gradient.layout());
    convert(gradient, rounded);
    int const first_column = T::kKeysShared ? warpgroup * kColumns : 0;
    stage_warp_rows<T::kN, kColumns, T::kBox>(rounded, staging, first_key(), first_column);
    store_warp_rows<T::kN, kColumns, T::kBox>(
        map, staging, first_key(),
        TileCoord{tile.n_block * T::kN, tile.kv_head, T::Sequences::slot_k(tile.batch)},
        first_column / T::kBox);
  }
};

}  // namespace flash3
