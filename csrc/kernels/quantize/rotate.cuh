// What happens to the elements of a row before they are quantised: rotary embedding, random signs,
// Hadamard transform.
//
// kThreadsPerRow neighbouring threads share a row. Thread t of them holds chunk j of its kChunks at
// columns 8 * (j * kThreadsPerRow + t) ..., so of a column's index the lowest three bits count
// within a chunk, the next two the threads, the rest the chunks of a thread.
#pragma once

#include "quantize.h"
#include "quantize/arithmetic.cuh"

namespace flash3 {

inline constexpr int kThreadsPerRow = 4;

// The sums and differences of elements at a distance of 1, 2 and 4.
__device__ inline void hadamard_within(Chunk& chunk) {
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & distance) continue;
      float const low = chunk.x[i], high = chunk.x[i + distance];
      chunk.x[i] = add(low, high);
      chunk.x[i + distance] = subtract(low, high);
    }
  }
}

// At a distance of 8 * lanes: the partner is in another thread.
__device__ inline void hadamard_across(Chunk& chunk, int lanes) {
  float const sign = threadIdx.x & lanes ? -1.f : 1.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float const partner = __shfl_xor_sync(0xffffffff, chunk.x[i], lanes);
    chunk.x[i] = multiply_add(chunk.x[i], sign, partner);
  }
}

// In place, elements at a distance of 1, 2, 4 and so on up to block / 2; the order of these sums is
// part of the specification. `block` is at least 16.
template <int kChunks>
__device__ void hadamard(Chunk (&row)[kChunks], int block) {
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    hadamard_within(row[j]);
    hadamard_across(row[j], 1);
  }
  if (block < 32) return;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) hadamard_across(row[j], 2);
#pragma unroll
  for (int distance = 1; distance < kChunks; distance *= 2) {
    // A block that long divides head_dim, so that both chunks of each pair are there.
    if (kChunks % (2 * distance) != 0 || block < 64 * distance) continue;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (j & distance) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float const low = row[j].x[i], high = row[(j + distance) % kChunks].x[i];
        row[j].x[i] = add(low, high);
        row[(j + distance) % kChunks].x[i] = subtract(low, high);
      }
    }
  }
}

// `mask` holds the sign bits of eight elements of 16 bits.
__device__ inline void change_signs(Chunk& chunk, uint4 const& mask) {
  uint32_t const words[4] = {mask.x, mask.y, mask.z, mask.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t const sign = i % 2 ? words[i / 2] & 0x80000000u : words[i / 2] << 16;
    chunk.x[i] = __uint_as_float(__float_as_uint(chunk.x[i]) ^ sign);
  }
}

// Elements [4 * part, 4 * part + 4) of a chunk, whose partners are four other columns of the row:
// pairs (i, i + width / 2).
__device__ inline void rotate_half(Chunk& chunk, int part, Four const& partner, Four const& cos,
                                   Four const& sin, bool first_half) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& x = chunk.x[4 * part + i];
    float const own = multiply(x, cos.x[i]), other = multiply(partner.x[i], sin.x[i]);
    x = first_half ? subtract(own, other) : add(other, own);
  }
}

// Pairs (2i, 2i + 1), with four entries of the tables for the eight elements.
__device__ inline void rotate_neighbours(Chunk& chunk, Four const& cos, Four const& sin) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float const first = chunk.x[2 * i], second = chunk.x[2 * i + 1];
    chunk.x[2 * i] = subtract(multiply(first, cos.x[i]), multiply(second, sin.x[i]));
    chunk.x[2 * i + 1] = add(multiply(first, sin.x[i]), multiply(second, cos.x[i]));
  }
}

// Four entries of a table of float32 or of Half.
template <class Half>
__device__ Four load_entries(void const* table, unsigned entry, bool fp32) {
  return fp32 ? load_four(static_cast<float const*>(table) + entry)
              : load_four(static_cast<Half const*>(table) + entry);
}

// Where a position's entries begin.
template <class Half>
__device__ void const* table_row(void const* table, RotaryTables const& tables, int64_t position) {
  int64_t const bytes = tables.fp32 ? sizeof(float) : sizeof(Half);
  return static_cast<char const*>(table) + position * (tables.width / 2) * bytes;
}

// `row` is where the row begins in memory, `column` the chunk's first column.
template <class Half>
__device__ void rotary_chunk(Chunk& chunk, Half const* row, int column, RotaryTables const& tables,
                             int64_t position) {
  int const half = tables.width / 2;
  void const* const cos = table_row<Half>(tables.cos, tables, position);
  void const* const sin = table_row<Half>(tables.sin, tables, position);
  if (tables.interleaved) {
    unsigned const entry = column / 2;
    rotate_neighbours(chunk, load_entries<Half>(cos, entry, tables.fp32),
                      load_entries<Half>(sin, entry, tables.fp32));
    return;
  }
  bool const first_half = column < half;
  int const partner = first_half ? column + half : column - half;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    unsigned const entry = (first_half ? column : partner) + 4 * part;
    rotate_half(chunk, part, load_four(row + partner + 4 * part),
                load_entries<Half>(cos, entry, tables.fp32),
                load_entries<Half>(sin, entry, tables.fp32), first_half);
    asm volatile("" ::: "memory");  // one part's loads at a time: there are no more registers
  }
}

// The whole row by halves, where each thread holds both elements of its pairs: chunks j and
// j + kChunks / 2. `column` is that of the first chunk.
template <class Half, int kChunks>
__device__ void rotary_row(Chunk (&row)[kChunks], int column, RotaryTables const& tables,
                           int64_t position) {
  void const* const cos_row = table_row<Half>(tables.cos, tables, position);
  void const* const sin_row = table_row<Half>(tables.sin, tables, position);
#pragma unroll
  for (int part = 0; part < kChunks / 2 * 2; ++part) {
    int const j = part / 2, base = 4 * (part % 2);
    unsigned entry = column + 8 * kThreadsPerRow * j + base;
    asm volatile("" : "+r"(entry));  // as in Quantizer::embed
    Four const cos = load_entries<Half>(cos_row, entry, tables.fp32);
    Four const sin = load_entries<Half>(sin_row, entry, tables.fp32);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float &low = row[j].x[base + i], &high = row[j + kChunks / 2].x[base + i];
      float const first = low, second = high;
      low = subtract(multiply(first, cos.x[i]), multiply(second, sin.x[i]));
      high = add(multiply(first, sin.x[i]), multiply(second, cos.x[i]));
    }
  }
}

}  // namespace flash3
