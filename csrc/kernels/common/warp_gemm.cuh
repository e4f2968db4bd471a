// A matrix product by one warp alone (mma.sync), for what it cannot ask its warpgroup for.
#pragma once

#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/mma_sm89.hpp>

#include "common/wgmma.cuh"

namespace flash3 {

template <class Element>
using WarpMma = std::conditional_t<
    sizeof(Element) == 1, SM89_16x8x32_F32E4M3E4M3F32_TN,
    std::conditional_t<std::is_same_v<Element, cutlass::half_t>, SM80_16x8x16_F32F16F16F32_TN,
                       SM80_16x8x16_F32BF16BF16F32_TN>>;

// C = A B^T for the warp's 16 rows of A, from first_row on, and as many rows of B as C has columns.
// A and B are (rows, k) in shared memory, C a rows_and_columns view as wgmma would have filled it.
//
// Meant for paths that are hardly ever taken, so it is short of registers rather than fast: the k
// loop runs anew for every eight columns.
template <class TensorA, class TensorB, class TensorC>
CUTLASS_DEVICE void warp_gemm(TensorA const& a, int first_row, TensorB const& b, TensorC& c) {
  using Element = typename TensorA::value_type;
  // Neighbours along k that fill a register: a swizzle keeps 16 bytes together.
  constexpr int kInWord = sizeof(uint32_t) / sizeof(Element);
  auto const word = [](auto const& tensor, int row, int k) {
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
    for (int first_k = 0; first_k < size<1>(a); first_k += 8 * kInWord) {
      int const k = first_k + lane % 4 * kInWord, later_k = k + 4 * kInWord;
      int const column = accumulator_column(j) + row;
      WarpMma<Element>::fma(c(0, j), c(0, j + 1), c(1, j), c(1, j + 1), word(a, first_row + row, k),
                            word(a, first_row + row + 8, k), word(a, first_row + row, later_k),
                            word(a, first_row + row + 8, later_k), word(b, column, k),
                            word(b, column, later_k), c(0, j), c(0, j + 1), c(1, j), c(1, j + 1));
    }
  }
}

}  // namespace flash3
