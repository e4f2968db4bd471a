// A matrix product by one warp alone (mma.sync), for what it cannot ask its warpgroup for.
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "common/wgmma.cuh"

namespace flash3 {

template <class Element>
using WarpMma = std::conditional_t<std::is_same_v<Element, cutlass::half_t>,
                                   SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>;

// C = A B^T for the warp's 16 rows of A, from first_row on, and as many rows of B as C has columns.
// A and B are (rows, k) in shared memory, C a rows_and_columns view as wgmma would have filled it.
//
// Meant for paths that are hardly ever taken, so it is short of registers rather than fast: the k
// loop runs anew for every eight columns.
template <class TensorA, class TensorB, class TensorC>
CUTLASS_DEVICE void warp_gemm(TensorA const& a, int first_row, TensorB const& b, TensorC& c) {
  using Element = typename TensorA::value_type;
  // Two neighbours along k, of which the first is even: a swizzle keeps 16 bytes together.
  auto const pair = [](auto const& tensor, int row, int k) {
    return *reinterpret_cast<uint32_t const*>(&tensor(row, k));
  };
  // Asked here, so that no address that follows from it is formed, and kept, before.
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  int const row = lane / 4;
  clear(c);
  CUTLASS_PRAGMA_UNROLL
  for (int j = 0; j < size<1>(c); j += 2) {
    // Bounds that differ from lane to lane would keep ptxas from uniform registers in the code
    // around.
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first_k = 0; first_k < size<1>(a); first_k += 16) {
      int const k = first_k + lane % 4 * 2;
      int const column = accumulator_column(j) + row;
      WarpMma<Element>::fma(c(0, j), c(0, j + 1), c(1, j), c(1, j + 1), pair(a, first_row + row, k),
                            pair(a, first_row + row + 8, k), pair(a, first_row + row, k + 8),
                            pair(a, first_row + row + 8, k + 8), pair(b, column, k),
                            pair(b, column, k + 8), c(0, j), c(0, j + 1), c(1, j), c(1, j + 1));
    }
  }
}

}  // namespace flash3
