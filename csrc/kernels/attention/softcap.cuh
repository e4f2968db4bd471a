// Soft-capped scores: s * scale counts as cap * tanh(s * scale / cap).
#pragma once

#include <cutlass/cutlass.h>

#include "common/math.cuh"

namespace flash3 {

// 1 / x for x in [1, 2^61], right to 1e-7, without the unit that has the exponentials: capping
// needs one more of those for each score, and a reciprocal there would make three. The bits of x,
// subtracted from a constant, give a first guess that is off by 5 %; two steps, of third and of
// second order, do the rest.
CUTLASS_DEVICE float reciprocal_by_fma(float x) {
  float guess = __int_as_float(0x7ef31000 - __float_as_int(x));
  float const error = 1.f - x * guess;
  guess += guess * (error + error * error);
  return guess + guess * (1.f - x * guess);
}

// tanh(x) = 1 - 2 / (exp(2 x) + 1), from x * 2 log2(e). Right to about 2e-7, at both ends too. The
// tanh instruction alone is wrong by up to 5e-4 (docs/numerics.md).
template <bool kReciprocalByFma = true>
CUTLASS_DEVICE float tanh_from_log2(float two_x_log2) {
  if constexpr (!kReciprocalByFma) return 1.f - 2.f / (exp2f(two_x_log2) + 1.f);
  float exponent;  // where the tanh has long been 1; NaN stays NaN
  asm("min.ftz.NaN.f32 %0, %1, %2;" : "=f"(exponent) : "f"(two_x_log2), "f"(60.f));
  return 1.f - 2.f * reciprocal_by_fma(exp2f(exponent) + 1.f);
}

// What turns a raw score into the argument of tanh_from_log2.
CUTLASS_DEVICE float softcap_argument_scale(float softmax_scale, float softcap) {
  return 2.f * kLog2e * softmax_scale / softcap;
}

}  // namespace flash3
