// Online softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1) over the two rows
// that a thread owns of a 64-row accumulator. Works in the log2 domain: exp2(s * scale_log2 -
// reference * scale_log2) is one FFMA and one ex2.
//
// A row's reference need not be its maximum: whatever it is, the final division by the row's sum
// takes it out again. It only has to be near enough for P to be neither lost nor infinite, and each
// time that it stays O need not be rescaled.
#pragma once

#include "common/math.cuh"
#include "common/wgmma.cuh"

namespace flash3 {

// Combines a value over the four lanes that share a row.
template <class Op>
CUTLASS_DEVICE float quad_reduce(float x, Op op) {
  x = op(x, __shfl_xor_sync(0xffffffff, x, 1));
  return op(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// A step that knows the maxima moves a row's reference when P would exceed 2^2 (E027), one that
// does not when a lane's P of the step add up to more than this (E028). Both dtypes would hold far
// more. But a key with most of the weight should have the P 1, which rounding leaves alone: else O
// is off by as much, in one direction, and the backward's rowsum(dO * O) with it.
inline constexpr float kLog2RowSlack = 2.f;
inline constexpr float kLargestGuess = 64.f;

struct OnlineSoftmax {
  static constexpr int kRows = 2;

  float scale_log2;        // softmax_scale * log2(e)
  float reference[kRows];  // a raw score; -inf before the first key
  float row_sum[kRows];    // this lane's share; the quad's total is formed once, at the end

  CUTLASS_DEVICE explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      reference[r] = -INFINITY;
      row_sum[r] = 0.f;
    }
  }

  // Turns scores into probabilities relative to the references, in place, and reports in
  // `correction` what everything summed before must be multiplied by.
  //
  // Maxima, exponentials, sums, each over both rows and each one plain chain: of this order ptxas
  // makes a loop in which the rescaling of O and the rounding of P fill the gaps between the
  // exponentials. Two chains per row, or a sum of the block's own, end in a slower one (E015).
  template <class Scores>
  CUTLASS_DEVICE void step(Scores& scores, float (&correction)[kRows]) {
    float reference_log2[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const previous = reference[r];
      float largest = previous;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) largest = fmaxf(largest, scores(r, j));
      largest = quad_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
      float const current = (largest - previous) * scale_log2 > kLog2RowSlack ? largest : previous;
      reference[r] = current;
      // A row that has seen no key yet: -inf minus -inf would be NaN; any finite reference gives
      // exp2(-inf) = 0.
      float const finite = current == -INFINITY ? 0.f : current;
      reference_log2[r] = finite * scale_log2;
      // The difference first: it is exactly 0 while the reference stands, and the correction
      // exactly 1. Products rounded apart would differ by an ulp, which a long row multiplies up.
      correction[r] = exp2f((previous - finite) * scale_log2);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(r, j) = exp2f(scores(r, j) * scale_log2 - reference_log2[r]);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] *= correction[r];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) row_sum[r] += scores(r, j);
    }
  }

  // The same without a look at the maxima, so that exponentials begin as soon as scores are there.
  // False, for the whole warp, where a row has no reference yet or its scores have outgrown it: the
  // state is then as it was, and `scores` holds P, finite or not. `early_sum` is known when the
  // first row's exponentials are in part (5/8) done, whose order among themselves ptxas leaves
  // alone.
  template <class Scores>
  CUTLASS_DEVICE bool try_step(Scores& scores, float& early_sum) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const reference_log2 = reference[r] * scale_log2;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(r, j) = exp2f(scores(r, j) * scale_log2 - reference_log2);
      }
    }
    float sum[kRows];
    bool fits = true;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sum[r] = row_sum[r];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        sum[r] += scores(r, j);
        if (r == 0 && j + 1 == size<1>(scores) * 5 / 8) early_sum = sum[r];
      }
      fits &= sum[r] - row_sum[r] <= kLargestGuess;  // relative to -inf: +inf, or NaN
    }
    if (!__all_sync(0xffffffff, fits)) return false;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) row_sum[r] = sum[r];
    return true;
  }

  // What becomes of a step that try_step has refused: the references move to the largest P, where
  // that is above 1. False, for the whole warp, if not all are finite: nothing has changed then.
  template <class Scores>
  CUTLASS_DEVICE bool raise_references(Scores& p, float (&correction)[kRows]) {
    constexpr float kFinite = 0x1p120f;
    float sum[kRows], largest[kRows];
    bool finite = true;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sum[r] = 0.f;
      largest[r] = 1.f;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(p); ++j) {
        sum[r] += p(r, j);
        largest[r] = fmaxf(largest[r], p(r, j));
      }
      largest[r] = quad_reduce(largest[r], [](float a, float b) { return fmaxf(a, b); });
      finite &= sum[r] <= kFinite;
    }
    if (!__all_sync(0xffffffff, finite)) return false;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      correction[r] = 1.f / largest[r];
      reference[r] += log2f(largest[r]) / scale_log2;
      row_sum[r] = (row_sum[r] + sum[r]) * correction[r];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(p); ++j) p(r, j) *= correction[r];
    }
    return true;
  }

  // Ends the rows: `inverse_sum` normalises O (0 for a row without keys), `lse` is the natural
  // log-sum-exp.
  CUTLASS_DEVICE void finish(float (&inverse_sum)[kRows], float (&lse)[kRows]) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const sum = quad_reduce(row_sum[r], [](float a, float b) { return a + b; });
      bool const empty = sum == 0.f;  // the key of the reference adds exp2(0); NaN is not empty
      inverse_sum[r] = empty ? 0.f : 1.f / sum;
      lse[r] = empty ? -INFINITY : (reference[r] * scale_log2 + log2f(sum)) * kLn2;
    }
  }
};

// Adds a sink to finished rows: a logit in the natural-log domain that has no value, that is, one
// more partial result with output 0. A row without keys then has lse = sink.
CUTLASS_DEVICE void add_sink(float sink, float (&inverse_sum)[2], float (&lse)[2]) {
  CUTLASS_PRAGMA_UNROLL
  for (int r = 0; r < 2; ++r) {
    float const largest = fmaxf(lse[r], sink);
    float const shift = largest == -INFINITY ? 0.f : largest;
    float const keys = exp2f((lse[r] - shift) * kLog2e);
    float const sum = keys + exp2f((sink - shift) * kLog2e);
    if (lse[r] != -INFINITY) inverse_sum[r] *= keys / sum;
    lse[r] = shift + log2f(sum) * kLn2;
  }
}

template <class Accumulator>
CUTLASS_DEVICE void scale_rows(Accumulator& accumulator, float const (&factor)[2]) {
  auto rows = rows_and_columns(accumulator);
  CUTLASS_PRAGMA_UNROLL
  for (int r = 0; r < 2; ++r) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < size<1>(rows); ++j) rows(r, j) *= factor[r];
  }
}

}  // namespace flash3
