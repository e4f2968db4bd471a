// Online softmax over scores that one scale per 64 keys turns into numbers, with probabilities
// scaled for e4m3.
#pragma once

#include "forward/softmax.cuh"

namespace flash3 {

// P is relative to a row's reference, which is near its largest exponent, times a power of 2, which
// cancels in O / sum. The reference stays until a P may be above this, half way between 384 and
// e4m3's next number: most steps leave O as it is. When it moves, the largest P becomes the power
// of 2, which e4m3 holds exactly: a key with most of the weight loses nothing.
inline constexpr float kLargestProbability = 400.f;
inline constexpr float kLog2LargestProbability = 8.6438562f;

// Whether a P is above that shows in the rounded ones, or with `kJudgesSums` in their sum, which is
// known anyway: then the power is one with which a lane's keys of a step, all with the largest P,
// add up to less. P vanishes below 2^-10, half of e4m3's smallest number.
template <int kGroups, bool kJudgesSums>
struct ScaledSoftmax {
  static constexpr float kLog2ProbabilityScale = kJudgesSums ? 3.f : 5.f;
  static constexpr int kRows = 2;

  struct Sums {
    float of_row[kRows];   // what row_sum becomes
    float of_step[kRows];  // this step's P alone, before their shifts are taken back

    CUTLASS_DEVICE bool judged_small() const {
      return of_step[0] <= kLargestProbability && of_step[1] <= kLargestProbability;
    }
  };

  float reference[kRows];  // of the exponents: near the largest of them, log2 domain
  float row_sum[kRows];    // this lane's share of P

  CUTLASS_DEVICE ScaledSoftmax() {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      reference[r] = -INFINITY;
      row_sum[r] = 0.f;
    }
  }

  // Turns raw scores into P, in place, after the references have followed their maxima; a raw
  // score's exponent is itself times the `scale_log2`, positive or NaN, plus the `shift`, at most 0
  // or NaN, of its group of keys.
  template <class Scores>
  CUTLASS_DEVICE void step(Scores& scores, float const (&scale_log2)[kGroups],
                           float const (&shift)[kGroups], float (&correction)[kRows]) {
    constexpr int kColumns = decltype(size<1>(scores))::value / kGroups;
    constexpr float kSlack = kLog2LargestProbability - kLog2ProbabilityScale;
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
      reference[r] = current > previous + kSlack ? current : previous;
      correction[r] = exp2f(previous - finite_reference(r));
    }
    exponentiate(scores, scale_log2, shift);
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) row_sum[r] *= correction[r];
    float known_early;
    accept(sums(scores, shift, known_early));
  }

  // P relative to the references as they are, so that exponentials begin as soon as scores are
  // there. Returns what the sums would become, to be accepted, or else raise_references is due.
  // `known_early` is known when some of the exponentials are done.
  template <class Scores>
  CUTLASS_DEVICE Sums guess(Scores& scores, float const (&scale_log2)[kGroups],
                            float const (&shift)[kGroups], float& known_early) const {
    exponentiate(scores, scale_log2, shift);
    return sums(scores, shift, known_early);
  }

  CUTLASS_DEVICE void accept(Sums const& sums) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) row_sum[r] = sums.of_row[r];
  }

  // What becomes of a guess that is too large for e4m3: the references of such rows move to their
  // largest P. False, for the whole warp, if not all are finite: nothing has changed then.
  template <class Scores>
  CUTLASS_DEVICE bool raise_references(Scores& p, Sums const& sums, float (&correction)[kRows]) {
    constexpr float kFinite = 0x1p120f;
    bool const finite = sums.of_row[0] <= kFinite && sums.of_row[1] <= kFinite;
    if (!__all_sync(0xffffffff, finite)) return false;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float largest = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(p); ++j) largest = fmaxf(largest, p(r, j));
      largest = quad_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
      float judged = largest;
      if constexpr (kJudgesSums) {
        judged = quad_reduce(sums.of_step[r], [](float a, float b) { return fmaxf(a, b); });
      }
      bool const moves = judged > kLargestProbability;
      correction[r] = moves ? exp2f(kLog2ProbabilityScale) / largest : 1.f;
      if (moves) reference[r] += log2f(largest) - kLog2ProbabilityScale;
      row_sum[r] = sums.of_row[r] * correction[r];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < size<1>(p); ++j) p(r, j) *= correction[r];
    }
    return true;
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

 private:
  // A row that has seen no key: a score of -inf becomes 0, any other infinite.
  CUTLASS_DEVICE float finite_reference(int r) const { return fmaxf(reference[r], -0x1p100f); }

  // Both rows side by side: their sums are chains, and two at once take less time.
  template <class Scores>
  CUTLASS_DEVICE void exponentiate(Scores& scores, float const (&scale_log2)[kGroups],
                                   float const (&shift)[kGroups]) const {
    constexpr int kColumns = decltype(size<1>(scores))::value / kGroups;
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      float bias[kRows];
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        bias[r] = (kLog2ProbabilityScale - finite_reference(r)) + shift[g];
      }
      CUTLASS_PRAGMA_UNROLL
      for (int j = g * kColumns; j < (g + 1) * kColumns; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRows; ++r) {
          scores(r, j) = exp2f(scores(r, j) * scale_log2[g] + bias[r]);
        }
      }
    }
  }

  template <class Scores>
  CUTLASS_DEVICE Sums sums(Scores const& p, float const (&shift)[kGroups],
                           float& known_early) const {
    constexpr int kColumns = decltype(size<1>(p))::value / kGroups;
    // The place that made the fastest loops (E032).
    constexpr int kEarlyGroup = kJudgesSums ? 0 : kGroups - 1;
    constexpr int kEarlyColumns = kJudgesSums ? kColumns * 3 / 4 : kColumns;
    Sums result{{row_sum[0], row_sum[1]}, {0.f, 0.f}};
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      float of_group[kRows] = {p(0, g * kColumns), p(1, g * kColumns)};
      CUTLASS_PRAGMA_UNROLL
      for (int j = 1; j < kColumns; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRows; ++r) of_group[r] += p(r, g * kColumns + j);
        // With row_sum, or ptxas would see that it cannot be negative and drop what waits for it.
        if (g == kEarlyGroup && j + 1 == kEarlyColumns) known_early = row_sum[0] + of_group[0];
      }
      float const shift_back = exp2f(-shift[g]);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        result.of_row[r] += of_group[r] * shift_back;
        result.of_step[r] = g == 0 ? of_group[r] : result.of_step[r] + of_group[r];
      }
    }
    return result;
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
