// A consumer warpgroup: 64 query rows of the tile through S = Q K^T, softmax, O += P V, all
// operands e4m3, all sums fp32. The same schedule as forward/consumer.cuh.
#pragma once

#include "common/stage_rows.cuh"
#include "common/warp_gemm.cuh"
#include "fp8/args.cuh"
#include "fp8/smem.cuh"
#include "fp8/softmax.cuh"
#include "fp8/write_output.cuh"

namespace flash3 {

template <class Row>
struct Fp8Consumer {
  using T = Fp8Traits<Row>;
  using Element = typename T::Element;
  using Softmax = ScaledSoftmax<T::kScaleGroups, T::kJudgesSums>;
  using Units = ValueUnits<T::kScaleGroups>;

  Fp8Args<Row> const& args;
  Fp8Smem<Row>& smem;
  int const warpgroup;  // 0 .. mma_warpgroups - 1
  typename Ring<T::kQSlots>::Cursor q_at;
  typename Ring<T::kKvSlots>::Cursor k_at, v_at;
  Ring<2>::Cursor tile_at;

  CUTLASS_DEVICE void run() {
    if (warpgroup == T::kMmaWarpgroups - 1) pass_turn();  // the first turn is warpgroup 0's
    while (true) {
      smem.tile_ring.wait_full(tile_at);
      WorkTile const tile = smem.tiles[tile_at.slot];
      if (tile.block == kNoMoreFp8Tiles) break;
      float const q_scale = smem.tiles[tile_at.slot].q_scales[warpgroup];
      compute(tile, q_scale * (args.softmax_scale * kLog2e));
      smem.tile_ring.release(tile_at);
      tile_at.advance();
    }
  }

 private:
  CUTLASS_DEVICE void await_turn() {
    if constexpr (Row::tile.pingpong) {
      named_barrier_sync(barrier_at(Fp8Barrier::kTurn, warpgroup), 2 * kThreadsPerWarpgroup);
    }
  }
  CUTLASS_DEVICE void pass_turn() {
    if constexpr (Row::tile.pingpong) {
      int const next = warpgroup + 1 == T::kMmaWarpgroups ? 0 : warpgroup + 1;
      named_barrier_arrive(barrier_at(Fp8Barrier::kTurn, next), 2 * kThreadsPerWarpgroup);
    }
  }

  CUTLASS_DEVICE int first_query(WorkTile tile) const {
    return tile.block * T::kM + warpgroup * 64;
  }
  CUTLASS_DEVICE int lane_first_query(WorkTile tile) const {
    return first_query(tile) + warp_index_in_warpgroup() * 16 + lane_first_row();
  }

  template <class Scores>
  CUTLASS_DEVICE void mask_scores(Scores& scores, int n_block) const {
    // From shared memory: registers are short in the loop.
    int const first_row = lane_first_query(smem.tiles[tile_at.slot]);
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const last_column =
          args.mask().last_key(first_row + 8 * r) - n_block * T::kN - lane_first_column();
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        if (accumulator_column(j) > last_column) scores(r, j) = -INFINITY;
      }
    }
  }

  CUTLASS_DEVICE void compute(WorkTile tile, float scale_log2) {
    BlockRange const blocks = args.mask().template key_blocks<T::kM, T::kN>(tile.block * T::kM);
    typename T::MmaPV mma_pv;
    // ((2, 2, head_dim / 8), 1, 1) fp32
    Tensor o = partition_fragment_C(mma_pv, Shape<Int<T::kM>, Int<T::kHeadDim>>{});
    clear(o);
    Softmax softmax;
    Units units;
    if (blocks.begin < blocks.end) {
      smem.q_ring.wait_full(q_at);
      BlockRange const own = own_blocks(tile, blocks);
      if (own.begin < own.end) {
        attend(tile, own, scale_log2, mma_pv, o, softmax, units);
      } else {
        smem.q_ring.release(q_at);
        q_at.advance();
      }
      if constexpr (T::kOwnRange) pass_over({own.end, blocks.end}, blocks.begin);
    }
    float factor[2], lse[2];
    softmax.finish(factor, lse);
    tile = smem.tiles[tile_at.slot];  // again, as in mask_scores
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) factor[r] *= exp2f(units.unit_log2) * args.v_scale;
    scale_rows(o, factor);
    Fp8Output<Row>{args, tile, lane_first_query(tile)}.write(o, lse);
  }

  // The key blocks that the warpgroup's own rows see, of those that the tile visits.
  CUTLASS_DEVICE BlockRange own_blocks(WorkTile tile, BlockRange blocks) const {
    if constexpr (T::kOwnRange) {
      int const first = first_query(tile);
      if (first >= args.seqlen_q) return {blocks.begin, blocks.begin};
      return args.mask().template key_blocks<64, T::kN>(first);
    }
    return blocks;
  }

  // Hands back the blocks that only other warpgroups of the tile see, and hands on their turns.
  CUTLASS_DEVICE void pass_over(BlockRange unseen, int first_of_tile) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int n = unseen.begin; n < unseen.end; ++n) {
      // Without a GEMM nothing else brings the lanes together again that a release has parted, and
      // a warp in parts arrives at a named barrier once for each part.
      __syncwarp();
      smem.k_ring.wait_full(k_at);
      smem.k_ring.release(k_at);
      k_at.advance();
      if (n > first_of_tile) {
        await_turn();
        pass_turn();
      }
      smem.vt_ring.wait_full(v_at);
      smem.vt_ring.release(v_at);
      v_at.advance();
    }
  }

  // The scales of the key block in the slot k_at, those of its scores in the log2 domain.
  CUTLASS_DEVICE KeyScales<T::kScaleGroups> read_scales(float scale_log2) const {
    KeyScales<T::kScaleGroups> scales = smem.scales[k_at.slot];
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < T::kScaleGroups; ++g) {
      // A scale of 0 must not meet the -inf of a masked score.
      float const scale = scales.k[g] * scale_log2;
      scales.k[g] = scale < 0x1p-100f ? 0x1p-100f : scale;
    }
    return scales;
  }

  template <class Output>
  CUTLASS_DEVICE void attend(WorkTile tile, BlockRange blocks, float scale_log2,
                             typename T::MmaPV& mma_pv, Output& o, Softmax& softmax, Units& units) {
    int const first_thread = warpgroup * kThreadsPerWarpgroup;  // forward/consumer.cuh says why
    typename T::MmaQK mma_qk;
    auto const thread_qk = mma_qk.get_thread_slice(first_thread);
    auto const thread_pv = mma_pv.get_thread_slice(first_thread);
    Tensor sQ = make_tensor(make_smem_ptr(smem.q[q_at.slot]),
                            typename T::TileQ::template Layout<Element>{});
    Tensor sK = make_tensor(make_smem_ptr(smem.k[0]),
                            typename T::TileKV::template Layouts<Element, T::kKvSlots>{});
    Tensor sVt = make_tensor(make_smem_ptr(smem.vt[0]),
                             typename T::TileVt::template Layouts<Element, T::kKvSlots>{});
    Tensor tSrQ = thread_qk.partition_fragment_A(sQ);   // (MMA, 1, head_dim / 32)
    Tensor tSrK = thread_qk.partition_fragment_B(sK);   // (MMA, 1, head_dim / 32, slots)
    Tensor tOrV = thread_pv.partition_fragment_B(sVt);  // (MMA, 1, n / 32, slots)

    int const first_masked = args.mask().template first_masked_key_block<T::kN>(
        T::kOwnRange ? first_query(tile) : tile.block * T::kM);
    float correction[2], shift[T::kScaleGroups];
    int n = blocks.begin;

    // The first block, which alone has no P V to hide behind.
    Tensor s = partition_fragment_C(mma_qk, Shape<Int<T::kM>, Int<T::kN>>{});
    smem.k_ring.wait_full(k_at);
    issue_gemm<Accumulate::kReplace>(mma_qk, tSrQ, tSrK(_, _, _, k_at.slot), s);
    auto const first_scales = read_scales(scale_log2);
    warpgroup_wait<0>();
    smem.k_ring.release(k_at);
    k_at.advance();
    auto scores = rows_and_columns(s);
    if (n >= first_masked) mask_scores(scores, n);
    units.advance(first_scales.v_log2, shift);
    softmax.step(scores, first_scales.k, shift, correction);
    auto p = make_e4m3_operand<Element>(s);
    round_to_e4m3(s, p);

    // What O must be multiplied by before the next P V is added: now, or with that sum.
    float o_factor[2] = {1.f, 1.f};
    // P V of one block goes straight into O, or by way of accumulators of its own.
    Tensor o_block = partition_fragment_C(mma_pv, Shape<Int<T::kM>, Int<T::kHeadDim>>{});
    auto issue_pv = [&] {
      smem.vt_ring.wait_full(v_at);
      if constexpr (T::kTwoLevel) {
        issue_gemm<Accumulate::kReplace>(mma_pv, p, tOrV(_, _, _, v_at.slot), o_block);
      } else {
        issue_gemm<Accumulate::kAdd>(mma_pv, p, tOrV(_, _, _, v_at.slot), o);
      }
    };
    auto finish_pv = [&] {  // once it has been waited for
      smem.vt_ring.release(v_at);
      v_at.advance();
      if constexpr (T::kTwoLevel) {
        auto rows = rows_and_columns(o), block = rows_and_columns(o_block);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < size<1>(rows); ++j) {
            rows(r, j) = rows(r, j) * o_factor[r] + block(r, j);
          }
        }
      }
    };

    // One step: S of block n beside P V of block n - 1.
    auto step = [&](auto masked) {
      Tensor s_next = partition_fragment_C(mma_qk, Shape<Int<T::kM>, Int<T::kN>>{});
      smem.k_ring.wait_full(k_at);
      auto const scales = read_scales(scale_log2);
      await_turn();
      if constexpr (T::kOverlap) {
        issue_gemm<Accumulate::kReplace>(mma_qk, tSrQ, tSrK(_, _, _, k_at.slot), s_next);
        issue_pv();
        pass_turn();
        warpgroup_wait<1>();  // S of block n
      } else {                // P must have left its registers before S comes
        issue_pv();
        warpgroup_wait<0>();
        issue_gemm<Accumulate::kReplace>(mma_qk, tSrQ, tSrK(_, _, _, k_at.slot), s_next);
        pass_turn();
        finish_pv();
        warpgroup_wait<0>();
      }
      auto scores_next = rows_and_columns(s_next);
      if constexpr (decltype(masked)::value) mask_scores(scores_next, n);
      float const unit_factor = units.advance(scales.v_log2, shift);
      auto await_pv = [&] {
        if constexpr (T::kOverlap) {
          warpgroup_wait<0>();  // O with block n - 1
          finish_pv();
        }
      };
      if constexpr (T::kGuesses) {
        float known_early;
        auto const sums = softmax.guess(scores_next, scales.k, shift, known_early);
        if constexpr (T::kOverlap) hold_wait_until_known(known_early);
        await_pv();
        round_to_e4m3(s_next, p);
        correction[0] = correction[1] = 1.f;
        bool const fits = T::kJudgesSums ? sums.judged_small() : !any_above_384(p);
        if (__builtin_expect(!__all_sync(0xffffffff, fits), false)) {
          if (!softmax.raise_references(scores_next, sums, correction)) {
            warp_gemm(sQ, warp_row_in_tile(warpgroup), sK(_, _, k_at.slot), scores_next);
            if constexpr (decltype(masked)::value) mask_scores(scores_next, n);
            softmax.step(scores_next, scales.k, shift, correction);
          }
          round_to_e4m3(s_next, p);
        } else {
          softmax.accept(sums);
        }
        smem.k_ring.release(k_at);
      } else {
        softmax.step(scores_next, scales.k, shift, correction);
        // Holds the wait for P V back, as in the forward (E015).
        smem.k_ring.release_after(correction[1], k_at);
        await_pv();
        round_to_e4m3(s_next, p);
      }
      k_at.advance();
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) o_factor[r] = correction[r] * unit_factor;
      if constexpr (!T::kTwoLevel) {
        bool const moved = o_factor[0] != 1.f || o_factor[1] != 1.f;
        if (__any_sync(0xffffffff, moved)) scale_rows(o, o_factor);
      }
    };
    CUTLASS_PRAGMA_NO_UNROLL
    for (++n; n < min(first_masked, blocks.end); ++n) step(false_type{});
    CUTLASS_PRAGMA_NO_UNROLL
    for (; n < blocks.end; ++n) step(true_type{});
    smem.q_ring.release(q_at);
    q_at.advance();
    issue_pv();
    warpgroup_wait<0>();
    finish_pv();
  }
};

}  // namespace flash3
