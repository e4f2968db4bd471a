// What happens to a warp's scores between the GEMMs of a step: S^T becomes P^T, dP^T becomes dS^T,
// and either is staged in shared memory for the GEMMs that need the other warpgroup's too. Rows are
// keys, columns queries.
#pragma once

#include "attention/softcap.cuh"
#include "backward/smem.cuh"
#include "common/math.cuh"
#include "common/stage_rows.cuh"

namespace flash3 {

template <class Row>
struct BwdScores {
  using T = BwdTraits<Row>;
  using Element = typename T::Element;
  using TileArg = typename BwdSmem<Row>::TileArg;
  using Lengths = typename T::Sequences::Lengths;
  using QueryBlock = QueryBlockOf<Row::key.mask>;

  BwdArgs<Row> const& args;
  BwdSmem<Row>& smem;
  int const warpgroup;
  int const thread;  // in the CTA

  // LSE or dPsum of a slot's queries, which all rows share: those of the lane's columns, in pairs.
  struct InSharedMemory {
    float const* first;
    CUTLASS_DEVICE float2 operator[](int pair) const {
      return *reinterpret_cast<float2 const*>(first + 8 * pair);
    }
  };
  // Read when they are asked for, which is before the reductions of dQ: a read of shared memory
  // waits behind those (E031).
  struct InRegisters {
    float2 values[T::kScoreColumns / 8];
    CUTLASS_DEVICE explicit InRegisters(InSharedMemory const& stats) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < T::kScoreColumns / 8; ++i) values[i] = stats[i];
    }
    CUTLASS_DEVICE float2 operator[](int pair) const { return values[pair]; }
  };
  using Stats = std::conditional_t<T::kStatsInRegisters, InRegisters, InSharedMemory>;

  CUTLASS_DEVICE Stats lse(int q_slot) const { return Stats(stats_of(smem.lse_log2[q_slot])); }
  CUTLASS_DEVICE Stats dpsum(int do_slot) const { return Stats(stats_of(smem.dpsum[do_slot])); }

  // P^T from S^T, in place.
  template <class Fragment>
  CUTLASS_DEVICE void to_probabilities(Fragment& s, TileArg tile, QueryBlock at,
                                       Stats const& lse) const {
    auto scores = rows_and_columns(s);
    Lengths const lengths = T::Sequences::lengths(tile.batch);
    cap(scores);
    if (args.mask(lengths).template cuts<T::kM, T::kN>(at.m_block * T::kM, tile.n_block * T::kN)) {
      mask(scores, lengths, at.m_block, tile.n_block);
    }
    float const scale_log2 = args.score_scale() * kLog2e;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < size<1>(scores); j += 2) {
      float2 const of_queries = lse[j / 2];
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        scores(r, j) = exp2f(scores(r, j) * scale_log2 - of_queries.x);
        scores(r, j + 1) = exp2f(scores(r, j + 1) * scale_log2 - of_queries.y);
      }
    }
  }

  // dS^T from dP^T, in place; P^T stays.
  template <class Fragment>
  CUTLASS_DEVICE void to_gradients(Fragment& dp_fragment, Fragment& p_fragment, Stats const& dpsum,
                                   int q_slot) const {
    auto dp = rows_and_columns(dp_fragment);
    auto const p = rows_and_columns(p_fragment);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < size<1>(dp); j += 2) {
      float2 const of_queries = dpsum[j / 2];
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        dp(r, j) = p(r, j) * (dp(r, j) - of_queries.x);
        dp(r, j + 1) = p(r, j + 1) * (dp(r, j + 1) - of_queries.y);
      }
    }
    if constexpr (T::kLocal) {
      if (args.limits.softcap > 0.f) through_tanh(dp, p, stats_of(smem.lse_log2[q_slot]));
    }
  }

  // The warp's 16 keys of P^T or dS^T to a slot of `ds`, whose boxes are 64 queries wide and
  // swizzled over 128 bytes. Blocks of 16 queries differ in bits that the swizzle leaves alone or
  // flips alike, so one address serves them all.
  template <class Rounded>
  CUTLASS_DEVICE void stage(Rounded const& rounded, Element* slot) const {
    auto const words = recast<uint32_t const>(rounded);
    int const lane = thread % kThreadsPerWarp;
    int const row = first_key() + lane % 16;
    uint32_t const first =
        cast_smem_ptr_to_uint(slot + row * kWidestBox + (lane / 16 ^ row % 8) * 8);
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < T::kScoreColumns / 16; ++block) {
      int const column = first_query() + block * 16;
      int const box_bytes = column / kWidestBox * T::kN * kWidestBox * int(sizeof(Element));
      store_matrices((first ^ column % kWidestBox * int(sizeof(Element))) + box_bytes,
                     words(block * 4), words(block * 4 + 1), words(block * 4 + 2),
                     words(block * 4 + 3));
    }
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
  }

 private:
  // Of the warp's part of the scores, within the tile.
  CUTLASS_DEVICE int first_key() const {
    int const warp = thread / kThreadsPerWarp % kWarpsPerWarpgroup;
    return (T::kKeysShared ? 0 : warpgroup) * kRowsPerWarpgroup + warp * kRowsPerWarp;
  }
  CUTLASS_DEVICE int first_query() const {
    return T::kKeysShared ? warpgroup * T::kScoreColumns : 0;
  }

  CUTLASS_DEVICE InSharedMemory stats_of(float const* slot) const {
    return {slot + first_query() + thread % 4 * 2};
  }

  // Keys past the end were loaded as zeros; their scores of 0 must not turn into probabilities
  // either.
  template <class Scores>
  CUTLASS_DEVICE void mask(Scores& scores, Lengths lengths, int m_block, int n_block) const {
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
  CUTLASS_DEVICE void cap(Scores& scores) const {
    if constexpr (T::kLocal) {
      float const softcap = args.limits.softcap;
      if (softcap == 0.f) return;
      float const scale = softcap_argument_scale(args.softmax_scale, softcap);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) = tanh_from_log2(scores(i) * scale);
    }
  }

  // dS^T *= 1 - tanh^2. There are no registers in which to keep the tanh, but P has it: log2(P) =
  // tanh * cap - LSE. Where P is 0, or LSE +inf, so is dS, and any finite factor will do.
  template <class Scores>
  CUTLASS_DEVICE void through_tanh(Scores& ds, Scores const& p, InSharedMemory lse) const {
    float const inverse_cap = 1.f / (args.limits.softcap * kLog2e);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < size<1>(ds); j += 2) {
      float2 const of_queries = lse[j / 2];
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        float const x = (log2f(p(r, j)) + of_queries.x) * inverse_cap;
        float const y = (log2f(p(r, j + 1)) + of_queries.y) * inverse_cap;
        ds(r, j) *= fmaxf(1.f - x * x, 0.f);
        ds(r, j + 1) *= fmaxf(1.f - y * y, 0.f);
      }
    }
  }
};

}  // namespace flash3
