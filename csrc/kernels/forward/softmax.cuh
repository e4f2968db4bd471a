// Online softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1) over the two rows
// that a thread owns of a 64-row accumulator. Works in the log2 domain: exp2(s * scale_log2 - max *
// scale_log2) is one FFMA and one ex2.
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

struct OnlineSoftmax {
  static constexpr int kRows = 2;

  float scale_log2;      // softmax_scale * log2(e)
  float row_max[kRows];  // of the raw scores
  float row_sum[kRows];  // this lane's share; the quad's total is formed once, at the end

  CUTLASS_DEVICE explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
    }
  }

  // Turns scores into probabilities relative to the running maximum, in place, and reports in
  // `correction` what everything summed before must be multiplied by.
  //
  // Maxima, exponentials, sums, each over both rows and each one plain chain: of this order ptxas
  // makes a loop in which the rescaling of O and the rounding of P fill the gaps between the
  // exponentials. Two chains per row, or a sum of the block's own, end in a slower one (E015).
  template <class Scores>
  CUTLASS_DEVICE void step(Scores& scores, float (&correction)[kRows]) {
    float max_log2[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const previous = row_max[r];
      float current = previous;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) current = fmaxf(current, scores(r, j));
      current = quad_reduce(current, [](float a, float b) { return fmaxf(a, b); });
      row_max[r] = current;
      // A row that has seen no key yet: -inf minus -inf would be NaN; any finite maximum gives
      // exp2(-inf) = 0.
      float const maximum = current == -INFINITY ? 0.f : current;
      max_log2[r] = maximum * scale_log2;
      // The difference first: it is exactly 0 while the maximum stands, and the correction
      // exactly 1. Products rounded apart would differ by an ulp, which a long row multiplies up.
      correction[r] = exp2f((previous - maximum) * scale_log2);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(r, j) = exp2f(scores(r, j) * scale_log2 - max_log2[r]);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] *= correction[r];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) row_sum[r] += scores(r, j);
    }
  }

  // Ends the rows: `inverse_sum` normalises O (0 for a row without keys), `lse` is the natural
  // log-sum-exp.
  CUTLASS_DEVICE void finish(float (&inverse_sum)[kRows], float (&lse)[kRows]) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const sum = quad_reduce(row_sum[r], [](float a, float b) { return a + b; });
      bool const empty = sum == 0.f;  // any key adds exp2(0) at the maximum; NaN is not empty
      inverse_sum[r] = empty ? 0.f : 1.f / sum;
      lse[r] = empty ? -INFINITY : (row_max[r] * scale_log2 + log2f(sum)) * kLn2;
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
