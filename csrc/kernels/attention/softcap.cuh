// Soft-capped scores: s * scale counts as cap * tanh(s * scale / cap).
#pragma once

#include <cutlass/cutlass.h>

#include "common/math.cuh"

namespace flash3 {

// tanh(x) = 1 - 2 / (exp(2 x) + 1), from x * 2 log2(e). Right to about 2e-7, at both ends too: exp2
// becomes 0 or inf. The tanh instruction alone is wrong by up to 5e-4 (docs/numerics.md).
CUTLASS_DEVICE float tanh_from_log2(float two_x_log2) {
  float const inverse = 1.f / (exp2f(two_x_log2) + 1.f);
  return 1.f - 2.f * inverse;
}

// What turns a raw score into the argument of tanh_from_log2.
CUTLASS_DEVICE float softcap_argument_scale(float softmax_scale, float softcap) {
  return 2.f * kLog2e * softmax_scale / softcap;
}

}  // namespace flash3
