// From a warpgroup's fp32 accumulator to global memory: 16-bit, through shared memory, each warp on
// its own 16 rows.
#pragma once

#include <cutlass/arch/barrier.h>

#include "common/roles.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

namespace flash3 {

inline constexpr int kRowsPerWarp = 16;
inline constexpr int kRowsPerWarpgroup = kWarpsPerWarpgroup * kRowsPerWarp;

// Stores four 8x8 matrices of 16-bit elements; lane l names the address of row l % 8 of matrix l
// / 8.
CUTLASS_DEVICE void store_matrices(uint32_t address, uint32_t first, uint32_t second,
                                   uint32_t third, uint32_t fourth) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(first), "r"(second), "r"(third), "r"(fourth)
               : "memory");
}

// Writes this warp's 16 rows of `rounded`, an accumulator (kColumns wide) converted to 16 bits,
// into rows row_in_tile and columns first_column on of a SwizzledTile of kRows rows and boxes of
// kBox columns at `smem`, then makes them visible to TMA and wgmma.
template <int kRows, int kColumns, int kBox, class Element, class Rounded>
CUTLASS_DEVICE void stage_warp_rows(Rounded const& rounded, Element* smem, int row_in_tile,
                                    int first_column = 0) {
  auto const words = recast<uint32_t const>(rounded);  // one word: two columns of one row
  int const lane = threadIdx.x % kThreadsPerWarp;
  // The matrices are, in fragment order, (rows 0-7, 8-15) x (columns 0-7, 8-15) of a 16 x 16 block.
  int const row = row_in_tile + lane % 16;
  CUTLASS_PRAGMA_UNROLL
  for (int block = 0; block < kColumns / 16; ++block) {
    int const column = first_column + block * 16 + lane / 16 * 8;
    int const chunk = column % kBox / 8;
    // The swizzle of 128, 64 or 32 bytes: rows that share 128 bytes have the same.
    int const swizzled = chunk ^ (row / (kWidestBox / kBox) % (kBox / 8));
    Element* const address = smem + (column / kBox * kRows + row) * kBox + swizzled * 8;
    store_matrices(cast_smem_ptr_to_uint(address), words(block * 4), words(block * 4 + 1),
                   words(block * 4 + 2), words(block * 4 + 3));
  }
  // stmatrix writes through the generic proxy; TMA and wgmma read through the async one.
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
}

// The first of this warp's 16 rows in a tile whose warpgroups stack along the rows.
CUTLASS_DEVICE int warp_row_in_tile(int warpgroup) {
  return warpgroup * kRowsPerWarpgroup + warp_index_in_warpgroup() * kRowsPerWarp;
}

// Stores the warp's staged rows, kColumns from box `first_box` on, and returns at once;
// tma_store_wait<0> in lane 0 says when the rows may be overwritten.
template <int kRows, int kColumns, int kBox, class Element, class Sequence>
CUTLASS_DEVICE void store_warp_rows(CUtensorMap const& map, Element const* smem, int row_in_tile,
                                    TileCoord<Sequence> tile, int first_box = 0) {
  if (threadIdx.x % kThreadsPerWarp == 0) {
    tma_store_rows<kRows, kColumns, kBox>(
        map, smem, row_in_tile,
        TileCoord<Sequence>{tile.row + row_in_tile, tile.head, tile.sequence}, first_box);
    tma_store_arrive();
  }
}

}  // namespace flash3
