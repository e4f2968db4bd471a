// A consumer warpgroup: 64 query rows of the tile through S = Q K^T, softmax, O += P V.
//
// Two overlaps hide the softmax behind the tensor cores (FlashAttention-3, sections 3.1 and 3.2):
//   pingpong   a warpgroup issues its GEMMs in its turn, so another's softmax runs under them (rows
//              that ask for it: elsewhere they fall into step by themselves, E016);
//   overlap    within a warpgroup, S of the next key block is computed while P V of this one is in
//   flight.
#pragma once

#include "attention/softcap.cuh"
#include "common/stage_rows.cuh"
#include "common/warp_gemm.cuh"
#include "forward/args.cuh"
#include "forward/smem.cuh"
#include "forward/softmax.cuh"

namespace flash3 {

template <class Row>
struct FwdConsumer {
  using T = FwdTraits<Row>;
  using Element = typename T::Element;
  using Tile = typename T::TileArg;
  using Lengths = typename T::Sequences::Lengths;

  FwdArgs<Row> const& args;
  FwdSmem<Row>& smem;
  int const warpgroup;  // 0 .. mma_warpgroups - 1
  typename Ring<T::kQSlots>::Cursor q_at;
  typename Ring<T::kKvSlots>::Cursor k_at, v_at;
  Ring<2>::Cursor tile_at;

  CUTLASS_DEVICE void run() {
    if (warpgroup == T::kMmaWarpgroups - 1) pass_turn();  // the first turn is warpgroup 0's
    while (true) {
      smem.tile_ring.wait_full(tile_at);
      Tile tile = smem.tiles[tile_at.slot];
      if constexpr (!T::kPacked) release_tile();
      if (tile.block == kNoMoreTiles) break;
      compute(tile);
      if constexpr (T::kPacked) release_tile();
    }
  }

 private:
  CUTLASS_DEVICE void release_tile() {
    smem.tile_ring.release(tile_at);
    tile_at.advance();
  }

  CUTLASS_DEVICE void await_turn() {
    if constexpr (Row::tile.pingpong) {
      named_barrier_sync(barrier_at(FwdBarrier::kTurn, warpgroup), 2 * kThreadsPerWarpgroup);
    }
  }
  CUTLASS_DEVICE void pass_turn() {
    if constexpr (Row::tile.pingpong) {
      int const next = warpgroup + 1 == T::kMmaWarpgroups ? 0 : warpgroup + 1;
      named_barrier_arrive(barrier_at(FwdBarrier::kTurn, next), 2 * kThreadsPerWarpgroup);
    }
  }

  template <class Scores>
  CUTLASS_DEVICE void mask_scores(Scores& scores, Lengths lengths, int first_row,
                                  int n_block) const {
    auto const mask = args.mask(lengths);
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const last_column =
          mask.last_key(first_row + 8 * r) - n_block * T::kN - lane_first_column();
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        if (accumulator_column(j) > last_column) scores(r, j) = -INFINITY;
      }
      if constexpr (T::kLocal) {
        int const first_column =
            mask.first_key(first_row + 8 * r) - n_block * T::kN - lane_first_column();
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < size<1>(scores); ++j) {
          if (accumulator_column(j) < first_column) scores(r, j) = -INFINITY;
        }
      }
    }
  }

  // The tanh of capped scores; the softmax's scale is then the cap.
  template <class Scores>
  CUTLASS_DEVICE void cap_scores(Scores& scores) const {
    if constexpr (T::kLocal) {
      float const softcap = args.limits.softcap;
      if (softcap == 0.f) return;
      float const scale = softcap_argument_scale(args.softmax_scale, softcap);
      // With wide heads ptxas serialises the GEMMs around the multiply-adds (C7520), and the GEMMs
      // take longer than the exponentials anyway.
      constexpr bool kReciprocalByFma = T::kHeadDim <= 128;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(scores); ++i) {
        scores(i) = tanh_from_log2<kReciprocalByFma>(scores(i) * scale);
      }
    }
  }

  CUTLASS_DEVICE void compute(Tile tile) {
    Lengths const lengths = T::Sequences::lengths(tile.batch);
    BlockRange const blocks =
        args.mask(lengths).template key_blocks<T::kM, T::kN>(tile.block * T::kM);
    typename T::MmaPV mma_pv;
    // ((2, 2, head_dim_v / 8), 1, 1) fp32
    Tensor o = partition_fragment_C(mma_pv, Shape<Int<T::kM>, Int<T::kHeadDimV>>{});
    clear(o);
    OnlineSoftmax softmax(args.score_scale() * kLog2e);
    smem.q_ring.wait_full(q_at);
    // Without a key in sight the fresh softmax state gives O = 0 and LSE = -inf.
    BlockRange const own = own_blocks(tile, lengths, blocks);
    if (own.begin < own.end) attend(tile, lengths, own, mma_pv, o, softmax);
    if constexpr (T::kOwnRange) pass_over({own.end, blocks.end}, blocks.begin);
    write_output(tile, o, softmax);
  }

  CUTLASS_DEVICE int first_query(Tile tile) const {
    return tile.block * T::kM + warpgroup * kRowsPerWarpgroup;
  }

  // The key blocks that the warpgroup's own rows see, of those that the tile visits.
  CUTLASS_DEVICE BlockRange own_blocks(Tile tile, Lengths lengths, BlockRange blocks) const {
    if constexpr (T::kOwnRange) {
      int const first = first_query(tile);
      if (first >= args.length_q(lengths)) return {blocks.begin, blocks.begin};
      return args.mask(lengths).template key_blocks<kRowsPerWarpgroup, T::kN>(first);
    }
    return blocks;
  }

  // Hands back the blocks that only other warpgroups of the tile see, and hands on the turns that
  // go with them: each block after the tile's first has one.
  CUTLASS_DEVICE void pass_over(BlockRange unseen, int first_of_tile) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int n = unseen.begin; n < unseen.end; ++n) {
      smem.k_ring.wait_full(k_at);
      smem.k_ring.release(k_at);
      k_at.advance();
      if (n > first_of_tile) {
        __syncwarp();  // lanes may leave a wait apart, and turns count whole warps
        await_turn();
        pass_turn();
      }
      smem.v_ring.wait_full(v_at);
      smem.v_ring.release(v_at);
      v_at.advance();
    }
  }

  template <class Output>
  CUTLASS_DEVICE void attend(Tile tile, Lengths lengths, BlockRange blocks,
                             typename T::MmaPV& mma_pv, Output& o, OnlineSoftmax& softmax) {
    // Descriptors are the same for a whole warpgroup. Of an index that ptxas knows to be so they
    // stay in uniform registers, of threadIdx.x each step would move them there again.
    int const first_thread = warpgroup * kThreadsPerWarpgroup;
    typename T::MmaQK mma_qk;
    auto const thread_qk = mma_qk.get_thread_slice(first_thread);
    auto const thread_pv = mma_pv.get_thread_slice(first_thread);
    Tensor sQ = make_tensor(make_smem_ptr(smem.q[q_at.slot]), typename T::LayoutQ{});
    Tensor sK = make_tensor(make_smem_ptr(smem.k[0]), typename T::LayoutK{});
    Tensor sVt = make_tensor(make_smem_ptr(smem.v[0]), transposed(typename T::LayoutV{}));
    Tensor tSrQ = thread_qk.partition_fragment_A(sQ);   // (MMA, 1, head_dim / 16)
    Tensor tSrK = thread_qk.partition_fragment_B(sK);   // (MMA, 1, head_dim / 16, slots)
    Tensor tOrV = thread_pv.partition_fragment_B(sVt);  // (MMA, 1, n / 16, slots)

    int const first_row = tile.block * T::kM + warp_row_in_tile(warpgroup) + lane_first_row();
    int const first_masked = args.mask(lengths).template first_masked_key_block<T::kN>(
        T::kOwnRange || T::kLocal ? first_query(tile) : tile.block * T::kM);
    int first_whole = 0;  // blocks before it need a mask too
    if constexpr (T::kLocal) {
      first_whole = args.mask(lengths).template first_whole_key_block<kRowsPerWarpgroup, T::kN>(
          first_query(tile));
    }
    float correction[2];
    int n = blocks.begin;

    // The first block, which alone has no P V to hide behind.
    Tensor s = partition_fragment_C(mma_qk, Shape<Int<T::kM>, Int<T::kN>>{});
    smem.k_ring.wait_full(k_at);
    issue_gemm<Accumulate::kReplace>(mma_qk, tSrQ, tSrK(_, _, _, k_at.slot), s);
    warpgroup_wait<0>();
    smem.k_ring.release(k_at);
    k_at.advance();
    auto scores = rows_and_columns(s);
    cap_scores(scores);
    if (n >= first_masked || n < first_whole) mask_scores(scores, lengths, first_row, n);
    softmax.step(scores, correction);
    Tensor p = make_operand_a_like<Element>(s);
    convert(s, p);

    // One step: S of block n, or of its first keys, beside P V of block n - 1; ends with P in
    // `p_next`.
    auto step = [&](auto masked, auto num_keys, auto& mma, auto const& keys, auto& p_next) {
      Tensor s_next = partition_fragment_C(mma, Shape<Int<T::kM>, decltype(num_keys)>{});
      smem.k_ring.wait_full(k_at);
      await_turn();
      issue_gemm<Accumulate::kReplace>(mma, tSrQ, keys(_, _, _, k_at.slot), s_next);
      smem.v_ring.wait_full(v_at);
      issue_gemm<Accumulate::kAdd>(mma_pv, p, tOrV(_, _, _, v_at.slot), o);
      pass_turn();
      warpgroup_wait<1>();  // S of block n
      auto scores_next = rows_and_columns(s_next);
      cap_scores(scores_next);
      if constexpr (decltype(masked)::value) mask_scores(scores_next, lengths, first_row, n);
      if constexpr (T::kGuesses) {
        float early_sum;
        bool const fits = softmax.try_step(scores_next, early_sum);
        hold_wait_until_known(early_sum);  // a third of the exponentials run under P V
        warpgroup_wait<0>();               // O with block n - 1
        smem.v_ring.release(v_at);
        if (__builtin_expect(!fits, false)) {
          if (!softmax.raise_references(scores_next, correction)) {
            warp_gemm(sQ, warp_row_in_tile(warpgroup), sK(_, _, k_at.slot), scores_next);
            if constexpr (decltype(masked)::value) mask_scores(scores_next, lengths, first_row, n);
            softmax.step(scores_next, correction);
          }
          scale_rows(o, correction);
        }
        smem.k_ring.release(k_at);
        convert(s_next, p_next);
      } else {
        softmax.step(scores_next, correction);
        // K could go earlier. Here it holds the wait for P V back until the maxima and a third of
        // the exponentials are done, all of which run under P V then (E015).
        smem.k_ring.release_after(correction[1], k_at);
        warpgroup_wait<0>();  // O with block n - 1
        smem.v_ring.release(v_at);
        convert(s_next, p_next);
        bool const moved = correction[0] != 1.f || correction[1] != 1.f;
        if (__any_sync(0xffffffff, moved)) scale_rows(o, correction);
      }
      k_at.advance();
      v_at.advance();
    };
    auto finish = [&](auto const& p_last) {
      smem.v_ring.wait_full(v_at);
      issue_gemm<Accumulate::kAdd>(mma_pv, p_last, tOrV(_, _, _, v_at.slot), o);
      warpgroup_wait<0>();
      smem.v_ring.release(v_at);
      v_at.advance();
    };
    bool const half_last = T::kHalfSteps && ends_in_half(tile, lengths, blocks);
    int const whole_end = half_last ? blocks.end - 1 : blocks.end;
    ++n;
    if constexpr (T::kLocal) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (; n < min(first_whole, whole_end); ++n) {
        step(true_type{}, Int<T::kN>{}, mma_qk, tSrK, p);
      }
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (; n < min(first_masked, whole_end); ++n) {
      step(false_type{}, Int<T::kN>{}, mma_qk, tSrK, p);
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (; n < whole_end; ++n) step(true_type{}, Int<T::kN>{}, mma_qk, tSrK, p);
    if constexpr (T::kHalfSteps) {
      if (half_last) {
        constexpr int kHalf = T::kN / 2;
        typename T::MmaQKHalf mma_half;
        Tensor sK_half = local_tile(sK, Shape<Int<kHalf>, Int<T::kHeadDim>, Int<T::kKvSlots>>{},
                                    make_coord(0, 0, 0));
        Tensor tSrK_half = mma_half.get_thread_slice(first_thread).partition_fragment_B(sK_half);
        Tensor p_half = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<kHalf / 16>>{});
        step(true_type{}, Int<kHalf>{}, mma_half, tSrK_half, p_half);
        finish(p_half);
        return;
      }
    }
    finish(p);
  }

  // Whether the warpgroup's rows see at most the first half of their last block (of several).
  CUTLASS_DEVICE bool ends_in_half(Tile tile, Lengths lengths, BlockRange blocks) const {
    int const last_query = min(first_query(tile) + kRowsPerWarpgroup, args.length_q(lengths)) - 1;
    int const last = blocks.end - 1;
    return last > blocks.begin &&
           args.mask(lengths).last_key(last_query) < last * T::kN + T::kN / 2;
  }

  template <class Output>
  CUTLASS_DEVICE void write_output(Tile tile, Output& o, OnlineSoftmax& softmax) {
    float inverse_sum[2], lse[2];
    softmax.finish(inverse_sum, lse);
    if (args.sink != nullptr) add_sink(args.sink_of(tile.head), inverse_sum, lse);
    scale_rows(o, inverse_sum);
    if constexpr (T::kPacked) {
      if (tile.batch.q.length < tile.batch.slot) clear_unused_rows(tile, o, lse);
    }
    write_lse(tile, lse);
    // All four warps have retired their reads of the warpgroup's rows of Q before O overwrites
    // them.
    named_barrier_sync(barrier_at(FwdBarrier::kWarpgroup, warpgroup), kThreadsPerWarpgroup);
    int const row = warp_row_in_tile(warpgroup);
    Tensor rounded = make_tensor<Element>(o.layout());
    convert(o, rounded);
    stage_warp_rows<T::kM, T::kHeadDimV, T::kBox>(rounded, smem.q[q_at.slot], row);
    store_warp_rows<T::kM, T::kHeadDimV, T::kBox>(args.o, smem.q[q_at.slot], row,
                                                  output_coord(tile));
    // The slot is the producer's again once the store has read it.
    if (threadIdx.x % kThreadsPerWarp == 0) tma_store_wait<0>();
    smem.q_ring.release(q_at);
    q_at.advance();
  }

  CUTLASS_DEVICE auto output_coord(Tile tile) const {
    return TileCoord{tile.block * T::kM, tile.head, T::Sequences::slot_q(tile.batch)};
  }

  // Rows of the slot that its sequence does not use: they were loaded as zeros, which are queries
  // like any other.
  template <class Output>
  CUTLASS_DEVICE void clear_unused_rows(Tile tile, Output& o, float (&lse)[2]) const {
    auto rows = rows_and_columns(o);
    int const first_row = tile.block * T::kM + warp_row_in_tile(warpgroup) + lane_first_row();
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (first_row + 8 * r < tile.batch.q.length) continue;
      lse[r] = -INFINITY;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(rows); ++j) rows(r, j) = 0.f;
    }
  }

  // The first row of the tile's sequence in lse, in rows, and the end of those to write.
  CUTLASS_DEVICE int64_t lse_row_0(Tile tile) const {
    if constexpr (T::kPacked) {
      return int64_t(tile.head) * args.seqlen_q + tile.batch.q.start;
    } else {
      int64_t const head = int64_t(tile.batch) * args.num_heads_q + tile.head;
      return head * args.seqlen_q;
    }
  }
  CUTLASS_DEVICE int lse_rows_end(Tile tile) const {
    if constexpr (T::kPacked) {
      return tile.batch.slot;
    } else {
      return args.seqlen_q;
    }
  }

  CUTLASS_DEVICE void write_lse(Tile tile, float const (&lse)[2]) const {
    int64_t const row_0 = lse_row_0(tile);
    float* const rows = args.lse + row_0;
    int const first_row = tile.block * T::kM + warp_row_in_tile(warpgroup) + lane_first_row();
    if (threadIdx.x % 4 != 0) return;  // the quad's four lanes hold the same rows
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (first_row + 8 * r < lse_rows_end(tile)) rows[first_row + 8 * r] = lse[r];
    }
  }
};

}  // namespace flash3
