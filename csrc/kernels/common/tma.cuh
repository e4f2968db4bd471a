// Tiles of (batch, seqlen, heads, head_dim) tensors, and of packed (rows, heads, head_dim) tensors,
// through the tensor memory accelerator (TMA).
//
// A tile of `rows` x head_dim 16-bit elements travels as boxes of rows x 64: 64 elements are the
// 128 bytes of the widest swizzle. Where 64 does not divide what has to be taken apart, boxes have
// 32 or 16 columns and the swizzle of 64 or 32 bytes. In shared memory box c follows box c - 1,
// which is the layout SwizzledTile of wgmma.cuh. Rows past the sequence and columns past the true
// head_dim are zeros on load and dropped on store.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "params.h"

namespace flash3 {

inline constexpr int kWidestBox = 64;  // columns

// Columns of the boxes of a tile that is taken apart into pieces of `first` and `second` columns.
CUTE_HOST_DEVICE constexpr int box_columns(int first, int second) {
  int columns = kWidestBox;
  while (first % columns != 0 || second % columns != 0) columns /= 2;
  return columns;
}

// L2 eviction priorities as cp.async.bulk takes them (createpolicy encodings, PTX ISA "cache
// eviction priority").
enum class CacheHint : uint64_t {
  kEvictFirst = 0x12F0000000000000,
  kEvictLast = 0x14F0000000000000,
};

// Row `row` of a head of a sequence: that of batch entry `sequence` (an int), or the one that lies
// in the rows `sequence` (a RowRange) of a packed tensor.
template <class Sequence>
struct TileCoord {
  int row, head;
  Sequence sequence;
};

// Packed sequences of any lengths go through one descriptor, whose second dimension ends where the
// sequence does, so that the hardware itself keeps to its rows: those behind it are zeros on load
// and dropped on store. Dimension 1 has kRaggedRows rows and every sequence is addressed at its
// end: row r is row kRaggedRows - length + r there. Dimension 3 has the same stride and moves by
// start + length, and dimension 4, by one fixed step, moves back by the kRaggedRows rows:
// its stride is 2^34 elements less a row, and kRaggedRows times 2^34 elements of 2 bytes are 2^65
// bytes, which is 0 in 64 bits. tensor_map.h makes the descriptor.
inline constexpr int kRaggedRows = 1 << 30;

template <class Element>
CUTLASS_DEVICE void tma_load_box(CUtensorMap const& map, uint64_t* full_barrier, CacheHint hint,
                                 Element* smem, int column, TileCoord<int> at) {
  cute::SM90_TMA_LOAD_4D::copy(&map, full_barrier, static_cast<uint64_t>(hint), smem, column,
                               at.row, at.head, at.sequence);
}
template <class Element>
CUTLASS_DEVICE void tma_load_box(CUtensorMap const& map, uint64_t* full_barrier, CacheHint hint,
                                 Element* smem, int column, TileCoord<RowRange> at) {
  cute::SM90_TMA_LOAD_5D::copy(&map, full_barrier, static_cast<uint64_t>(hint), smem, column,
                               kRaggedRows - at.sequence.length + at.row, at.head,
                               at.sequence.start + at.sequence.length, int(kRaggedRows));
}

template <int kRows, int kColumns, int kBox, class Element, class Sequence>
CUTLASS_DEVICE void tma_load_tile(CUtensorMap const& map, uint64_t* full_barrier, Element* smem,
                                  TileCoord<Sequence> at, CacheHint hint) {
  CUTLASS_PRAGMA_UNROLL
  for (int c = 0; c < kColumns / kBox; ++c) {
    tma_load_box(map, full_barrier, hint, smem + c * kRows * kBox, c * kBox, at);
  }
}

// A contiguous copy of `bytes` (a multiple of 16, 16-byte aligned on both sides).
template <class Element>
CUTLASS_DEVICE void bulk_load(Element* smem, Element const* global, uint32_t bytes,
                              uint64_t* full_barrier) {
  cute::SM90_BULK_COPY_G2S::copy(global, full_barrier, smem, bytes);
}

// Stores one box of `map` to row `at.row` and the columns from `column` on.
template <class Element>
CUTLASS_DEVICE void tma_store_box(CUtensorMap const& map, Element const* smem, int column,
                                  TileCoord<int> at) {
  cute::SM90_TMA_STORE_4D::copy(&map, smem, column, at.row, at.head, at.sequence);
}
template <class Element>
CUTLASS_DEVICE void tma_store_box(CUtensorMap const& map, Element const* smem, int column,
                                  TileCoord<RowRange> at) {
  cute::SM90_TMA_STORE_5D::copy(&map, smem, column, kRaggedRows - at.sequence.length + at.row,
                                at.head, at.sequence.start + at.sequence.length, int(kRaggedRows));
}

// Stores `map`'s box rows starting at `row_in_tile` of a tile of kRows rows to row `at.row` of the
// tensor: kColumns of them, from box `first_box` on.
template <int kRows, int kColumns, int kBox, class Element, class Sequence>
CUTLASS_DEVICE void tma_store_rows(CUtensorMap const& map, Element const* smem, int row_in_tile,
                                   TileCoord<Sequence> at, int first_box) {
  CUTLASS_PRAGMA_UNROLL
  for (int c = 0; c < kColumns / kBox; ++c) {
    int const box = first_box + c;
    tma_store_box(map, smem + (box * kRows + row_in_tile) * kBox, box * kBox, at);
  }
}

}  // namespace flash3
