// Online softmax over scores that one scale per 64 keys turns into numbers, with probabilities
// scaled for e4m3. As forward/softmax.cuh, but the running maximum is that of the scaled scores.
#pragma once

#include "forward/softmax.cuh"

namespace flash3 {

// Probabilities are at most 1. Times 2^8 they end below e4m3's largest number, 448, and vanish only
// below 2^-18 instead of 2^-10 (half its smallest subnormal). The factor cancels in O / sum.
inline constexpr float kLog2ProbabilityScale = 8.f;

template <int kGroups>
struct ScaledSoftmax {
  static constexpr int kRows = 2;

  float row_max[kRows];  // of the scaled scores, log2 domain
  float row_sum[kRows];  // this lane's share, times 2^8

  CUTLASS_DEVICE ScaledSoftmax() {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
    }
  }

  // Turns raw scores into 2^8 times the probabilities relative to the running maximum, in place;
  // `scale_log2` (of each group of keys) is positive or NaN.
  template <class Scores>
  CUTLASS_DEVICE void step(Scores& scores, float const (&scale_log2)[kGroups],
                           float (&correction)[kRows]) {
    constexpr int kColumns = decltype(size<1>(scores))::value / kGroups;
    float bias[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const previous = row_max[r];
      float current = previous;
      CUTLASS_PRAGMA_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        float raw = -INFINITY;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kColumns; ++j) raw = fmaxf(raw, scores(r, g * kColumns + j));
        current = fmaxf(current, raw * scale_log2[g]);
      }
      current = quad_reduce(current, [](float a, float b) { return fmaxf(a, b); });
      row_max[r] = current;
      float const maximum = current == -INFINITY ? 0.f : current;  // no key seen yet
      bias[r] = kLog2ProbabilityScale - maximum;
      correction[r] = exp2f(previous - maximum);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(r, j) = exp2f(scores(r, j) * scale_log2[j / kColumns] + bias[r]);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] *= correction[r];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) row_sum[r] += scores(r, j);
    }
  }

  // As OnlineSoftmax::finish.
  CUTLASS_DEVICE void finish(float (&inverse_sum)[kRows], float (&lse)[kRows]) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const sum = quad_reduce(row_sum[r], [](float a, float b) { return a + b; });
      bool const empty = sum == 0.f;
      inverse_sum[r] = empty ? 0.f : 1.f / sum;
      lse[r] = empty ? -INFINITY : (row_max[r] + (log2f(sum) - kLog2ProbabilityScale)) * kLn2;
    }
  }
};

// The scales of V cost nothing in the loop: O is kept in units of the scale of the block that was
// added last, and the factor by which a step rescales O anyway moves it on to the next unit.
template <int kGroups>
struct ValueUnits {
  float unit = 0.f;     // of O at this point
  float largest = 0.f;  // scale so far

  // Moves on to a block with the scales `v`. Returns the factor for O; `ratio` is what each group's
  // probabilities must be multiplied by, 1 where all groups share their scale.
  CUTLASS_DEVICE float advance(float const (&v)[kGroups], float (&ratio)[kGroups]) {
    constexpr float kSmallest = 0x1p-100f;  // a unit must not be 0
    constexpr float kRange = 0x1p-40f;      // nor so small that O in such units overflows
    float next = v[0];
    CUTLASS_PRAGMA_UNROLL
    for (int g = 1; g < kGroups; ++g) next = fmaxf(next, v[g]);
    largest = fmaxf(largest, next);
    next = fmaxf(next, fmaxf(largest * kRange, kSmallest));
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kGroups; ++g) ratio[g] = v[g] == next ? 1.f : v[g] / next;
    float const factor = unit == next ? 1.f : unit / next;
    unit = next;
    return factor;
  }
};

}  // namespace flash3
