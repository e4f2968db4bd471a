// e4m3 operands in shared memory, and the order of P and V that lets registers feed the tensor
// cores as they are.
//
// A thread of an fp32 accumulator holds, of 16 neighbouring columns, 2c, 2c + 1, 8 + 2c and 9 + 2c
// (c = lane % 4). As the left operand of an 8-bit wgmma it must hold the four columns 4c to 4c + 3.
// A sum over keys does not mind in which order they come, so P stays where it is and the keys of V
// are put in the same order: place 4c + 2a + b of a group of 16 holds key 8a + 2c + b.
//
// The head dimensions of V are permuted too, which only names the columns of O: row i of a group of
// 16 holds dimension 2i, row 8 + i holds 2i + 1. The transposition then writes without bank
// conflicts, and a thread's four columns of O are four neighbours.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_conversion.h>
#include <cute/tensor.hpp>

#include "common/tma.cuh"
#include "common/wgmma.cuh"

namespace flash3 {

// A tile of `rows` x `columns` bytes: blocks of 128 (or 64) columns, swizzled as wide, one after
// the other; what TMA writes and wgmma reads.
template <int kRows_, int kColumns_>
struct ByteTile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kBoxColumns = kColumns % 128 == 0 ? 128 : 64;
  static constexpr int kBytes = kRows * kColumns;
  static_assert(kColumns % kBoxColumns == 0);

  template <class Element>
  using Atom = std::conditional_t<kBoxColumns == 128, GMMA::Layout_K_SW128_Atom<Element>,
                                  GMMA::Layout_K_SW64_Atom<Element>>;
  template <class Element>
  using Layout = decltype(tile_to_shape(Atom<Element>{}, Shape<Int<kRows>, Int<kColumns>>{}));
  template <class Element, int kSlots>
  using Layouts =
      decltype(tile_to_shape(Atom<Element>{}, Shape<Int<kRows>, Int<kColumns>, Int<kSlots>>{}));

  // Where the 16 bytes of `row` from column 16 * chunk on lie.
  CUTLASS_DEVICE static int offset(int row, int chunk) {
    constexpr int kChunks = kBoxColumns / 16;
    int const swizzled = chunk % kChunks ^ (kBoxColumns == 128 ? row % 8 : row / 2 % 4);
    return chunk / kChunks * (kRows * kBoxColumns) + row * kBoxColumns + swizzled * 16;
  }

  template <class Element>
  CUTLASS_DEVICE static void load(CUtensorMap const& map, uint64_t* full_barrier, Element* smem,
                                  TileCoord<int> at, CacheHint hint, int first_column = 0) {
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kColumns / kBoxColumns; ++c) {
      tma_load_box(map, full_barrier, hint, smem + c * kRows * kBoxColumns,
                   first_column + c * kBoxColumns, at);
    }
  }
};

// Rounds an fp32 accumulator to e4m3, as the left operand ((4, 2, 2), 1, N / 32) of a GEMM over its
// columns in the order above. Beyond 448 it saturates; NaN stays NaN.
template <class Element, class Scores>
CUTLASS_DEVICE auto make_e4m3_operand(Scores const& scores) {
  constexpr int kSize = decltype(size(scores.layout()))::value;
  return make_tensor<Element>(Shape<Shape<_4, _2, _2>, _1, Int<kSize / 16>>{});
}
template <class Scores, class Operand>
CUTLASS_DEVICE void round_to_e4m3(Scores const& scores, Operand& operand) {
  using Element = typename Operand::value_type;
  constexpr int kSize = decltype(size(scores.layout()))::value;
  cutlass::NumericArrayConverter<Element, float, 4> const round;
  auto words = recast<cutlass::Array<Element, 4>>(operand);
  CUTLASS_PRAGMA_UNROLL
  for (int half = 0; half < kSize / 8; ++half) {  // 16 columns
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      // scores: column in the pair, row, group of 8 columns
      int const low = 2 * r + 8 * half, high = low + 4;
      words(2 * half + r) = round(
          cutlass::Array<float, 4>{scores(low), scores(low + 1), scores(high), scores(high + 1)});
    }
  }
}

// Whether a number in the operand, none of them negative, has been rounded to more than 384 (or is
// NaN): for a few integer instructions, as four numbers share a register.
template <class Operand>
CUTLASS_DEVICE bool any_above_384(Operand const& operand) {
  constexpr uint32_t kToSignBit = 0x80 - 0x7d;  // 0x7d is 416, the next one
  auto const words = recast<uint32_t const>(operand);
  uint32_t signs = 0;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(words); ++i) signs |= words(i) + kToSignBit * 0x01010101u;
  return (signs & 0x80808080u) != 0;
}

// Transposes 64 keys x 16 dimensions of V, from chunk `d_chunk` of keys 64 * key_block on, into
// the order above. One warp.
template <class From, class To, class Element>
CUTLASS_DEVICE void transpose_64x16(Element const* v, Element* vt, int key_block, int d_chunk) {
  constexpr int kHalves = 2;  // of 32 keys
  int const lane = threadIdx.x % 32;
  // As 16-bit units, a column is two dimensions. Matrix i is keys 8i to 8i + 7 x 8 such columns; a
  // lane receives, of column lane / 4, keys 8i + 2c and 8i + 2c + 1: bytes (key, d), (key, d + 1),
  // (key + 1, d), (key + 1, d + 1).
  uint32_t keys[kHalves][4];
  CUTLASS_PRAGMA_UNROLL
  for (int h = 0; h < kHalves; ++h) {
    Element const* const from = v + From::offset(key_block * 64 + h * 32 + lane, d_chunk);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(keys[h][0]), "=r"(keys[h][1]), "=r"(keys[h][2]), "=r"(keys[h][3])
                 : "r"(cast_smem_ptr_to_uint(from)));
  }
  CUTLASS_PRAGMA_UNROLL
  for (int h = 0; h < kHalves; ++h) {
    // Places 4c to 4c + 3 of a group of 16 keys, for an even dimension and for the odd one after.
    uint32_t const even_0 = __byte_perm(keys[h][0], keys[h][1], 0x6420);
    uint32_t const odd_0 = __byte_perm(keys[h][0], keys[h][1], 0x7531);
    uint32_t const even_1 = __byte_perm(keys[h][2], keys[h][3], 0x6420);
    uint32_t const odd_1 = __byte_perm(keys[h][2], keys[h][3], 0x7531);
    int const row = d_chunk * 16 + lane % 16;
    Element* const to = vt + To::offset(row, key_block * 4 + h * 2 + lane / 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     cast_smem_ptr_to_uint(to)),
                 "r"(even_0), "r"(odd_0), "r"(even_1), "r"(odd_1)
                 : "memory");
  }
}

}  // namespace flash3
