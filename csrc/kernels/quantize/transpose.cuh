// V in the transposed layout: (b, h, d, keys), and in groups of 16 both keys and dimensions in the
// order in which the attention kernel's registers hold them (flash3/reference_fp8.py).
#pragma once

#include <cstdint>

namespace flash3 {

// e4m3 of a block of rows in shared memory, four dimensions a word. The pitch of a row and the step
// between groups of 16 rows make read_group free of bank conflicts.
struct TransposeTile {
  uint32_t* words;
  int head_dim;

  __host__ __device__ static int pitch(int head_dim) { return head_dim / 4 + 8; }
  __host__ __device__ static int bytes(int head_dim, int rows) {
    return 4 * (rows * pitch(head_dim) + 4 * (rows / 16));
  }
  __device__ uint32_t* word(int row, int index) const {
    return words + row * pitch(head_dim) + 4 * (row / 16) + index;
  }
  __device__ void store(int row, int column, uint2 const& eight) const {
    *reinterpret_cast<uint2*>(word(row, column / 4)) = eight;
  }
};

// Rows of a 4 x 4 matrix of bytes become columns.
__device__ inline void transpose_bytes(uint32_t const (&in)[4], uint32_t (&out)[4]) {
  uint32_t const low_01 = __byte_perm(in[0], in[1], 0x5140);
  uint32_t const high_01 = __byte_perm(in[0], in[1], 0x7362);
  uint32_t const low_23 = __byte_perm(in[2], in[3], 0x5140);
  uint32_t const high_23 = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(low_01, low_23, 0x5410);
  out[1] = __byte_perm(low_01, low_23, 0x7632);
  out[2] = __byte_perm(high_01, high_23, 0x5410);
  out[3] = __byte_perm(high_01, high_23, 0x7632);
}

// Writes a tile of `rows` keys to `out`, the head's first dimension at the tile's first key.
// `pitch` is the number of keys from one dimension to the next. All threads of the CTA call it,
// after a barrier behind the tile's stores.
__device__ inline void write_transposed(TransposeTile const& tile, int rows, uint8_t* out,
                                        int64_t pitch) {
  int const shift = rows == 128 ? 3 : 2;  // 8 or 4 groups of 16 keys
  for (int unit = threadIdx.x; unit < tile.head_dim / 4 << shift; unit += blockDim.x) {
    int const group = unit & (1 << shift) - 1, index = unit >> shift;  // 16 keys, 4 dimensions
    uint32_t by_dim[4][4];  // [dimension][four places of keys]
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      int const key = 16 * group + 2 * c;
      uint32_t const by_key[4] = {*tile.word(key, index), *tile.word(key + 1, index),
                                  *tile.word(key + 8, index), *tile.word(key + 9, index)};
      uint32_t places[4];
      transpose_bytes(by_key, places);
#pragma unroll
      for (int x = 0; x < 4; ++x) by_dim[x][c] = places[x];
    }
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      int const dim = 4 * index + x;
      int const row = dim / 16 * 16 + dim % 16 / 2 + 8 * (dim % 2);
      *reinterpret_cast<uint4*>(out + row * pitch + 16 * group) =
          make_uint4(by_dim[x][0], by_dim[x][1], by_dim[x][2], by_dim[x][3]);
    }
  }
}

}  // namespace flash3
