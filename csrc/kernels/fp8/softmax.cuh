// Online softmax over scores that one scale per 64 keys turns into numbers, with probabilities
// scaled for e4m3.
#pragma once

#include "forward/softmax.cuh"

namespace flash3 {

// Probabilities are at most 1. Times 2^8 they end below e4m3's largest number, 448, and vanish only
// below 2^-18 instead of 2^-10 (half its smallest subnormal). The factor cancels in O / sum.
inline constexpr float kLog2ProbabilityScale = 8.f;

// A row's reference follows the largest exponent only when that has grown by more than this, so
// that most steps leave O as it is. 2^(8 + kLog2Slack) is still below 448. When it does follow, the
// largest P becomes 2^8, which e4m3 holds exactly: a key with most of the weight loses nothing.
inline constexpr float kLog2Slack = 0.75f;

template <int kGroups>
struct ScaledSoftmax {
  static constexpr int kRows = 2;

  float reference[kRows];  // of the exponents: near the largest of them, log2 domain
  float row_sum[kRows];    // this lane's share, times 2^8

  CUTLASS_DEVICE ScaledSoftmax() {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      reference[r] = -INFINITY;
      row_sum[r] = 0.f;
    }
  }

  // Turns raw scores into 2^(8 + exponent - reference), in place; a raw score's exponent is itself
  // times the `scale_log2`, positive or NaN, plus the `shift`, at most 0 or NaN, of its group of
  // keys.
  template <class Scores>
  CUTLASS_DEVICE void step(Scores& scores, float const (&scale_log2)[kGroups],
                           float const (&shift)[kGroups], float (&correction)[kRows]) {
    constexpr int kColumns = decltype(size<1>(scores))::value / kGroups;
    float bias[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float current = -INFINITY;
      CUTLASS_PRAGMA_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        float raw = -INFINITY;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kColumns; ++j) raw = fmaxf(raw, scores(r, g * kColumns + j));
        current = fmaxf(current, raw * scale_log2[g] + shift[g]);
      }
      current = quad_reduce(current, [](float a, float b) { return fmaxf(a, b); });
      float const previous = reference[r];
      reference[r] = current > previous + kLog2Slack ? current : previous;
      float const finite = reference[r] == -INFINITY ? 0.f : reference[r];  // no key seen yet
      bias[r] = kLog2ProbabilityScale - finite;
      correction[r] = exp2f(previous - finite);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float const group_bias = bias[r] + shift[g];
        CUTLASS_PRAGMA_UNROLL
        for (int j = g * kColumns; j < (g + 1) * kColumns; ++j) {
          scores(r, j) = exp2f(scores(r, j) * scale_log2[g] + group_bias);
        }
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) row_sum[r] *= correction[r];
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      float const shift_back = exp2f(-shift[g]);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float sum = scores(r, g * kColumns);
        CUTLASS_PRAGMA_UNROLL
        for (int j = g * kColumns + 1; j < (g + 1) * kColumns; ++j) sum += scores(r, j);
        row_sum[r] += sum * shift_back;
      }
    }
  }

  // As OnlineSoftmax::finish.
  CUTLASS_DEVICE void finish(float (&inverse_sum)[kRows], float (&lse)[kRows]) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const sum = quad_reduce(row_sum[r], [](float a, float b) { return a + b; });
      bool const empty = sum == 0.f;
      inverse_sum[r] = empty ? 0.f : 1.f / sum;
      lse[r] = empty ? -INFINITY : (reference[r] + (log2f(sum) - kLog2ProbabilityScale)) * kLn2;
    }
  }
};

// Scales of V cost next to nothing: O is kept in units of the largest so far, and a smaller one
// shifts the exponents of its keys' probabilities.
template <int kGroups>
struct ValueUnits {
  float unit_log2 = -INFINITY;

  // Moves on to a block with the scales 2^v_log2, and returns the factor for O.
  CUTLASS_DEVICE float advance(float const (&v_log2)[kGroups], float (&shift)[kGroups]) {
    constexpr float kSmallest = -64.f;  // then P rounds to 0, and the sum of P still holds it
    float next = unit_log2;
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kGroups; ++g) next = fmaxf(next, v_log2[g]);
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      float const below = v_log2[g] - next;
      shift[g] = below < kSmallest ? kSmallest : below;  // NaN stays
    }
    float const factor = exp2f(unit_log2 - next);
    unit_log2 = next;
    return factor;
  }
};

}  // namespace flash3
