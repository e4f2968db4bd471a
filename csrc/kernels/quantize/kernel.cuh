// The quantiser: memory-bound, one pass over q, k and v. A CTA goes through blocks of rows of a
// head; it holds one in registers, as float32, while the next is on its way to shared memory.
#pragma once

#include "quantize/rotate.cuh"
#include "quantize/transpose.cuh"

namespace flash3 {

enum class QuantizePass {
  kAll,       // scales are of blocks
  kFindAmax,  // for scales of heads or tensors: largest values only
  kWrite,     // and then the rest
};

constexpr int kMaxBlock = 128;

// 64 elements, or as many as come near it, are a thread's share of a block of 128 rows.
constexpr int rows_per_thread(int chunks) { return 8 / chunks; }
constexpr int max_threads(int chunks) {
  return kMaxBlock * kThreadsPerRow / rows_per_thread(chunks);
}

struct QuantizeArgs {
  QuantizeParams p;
  QuantizePass pass;
  int first_item[4];    // of each operand, and behind the last
  int row_blocks[3];    // of a head
  int scale_blocks[3];  // of them those that have a descale, if scales are of blocks
};

// A block of rows of one head, as a CTA's step.
struct QuantizeItem {
  int operand = -1;  // of QuantizeParams::operands; negative: there is no such item
  int64_t batch = 0;
  int head = 0, block = 0;
};

// Neighbouring items are heads of the same rows: neighbours in memory, with the same rotary tables.
__device__ inline QuantizeItem find_item(QuantizeArgs const& args, unsigned index) {
  if (index >= args.first_item[3]) return {};
  int const operand = (index >= args.first_item[1]) + (index >= args.first_item[2]);
  unsigned const heads = args.p.operands[operand].heads, blocks = args.row_blocks[operand];
  unsigned const of_operand = index - args.first_item[operand];
  unsigned const of_batch = of_operand / heads, batch = of_batch / blocks;
  return {operand, batch, int(of_operand - of_batch * heads), int(of_batch - batch * blocks)};
}

template <class Half, int kChunks>
struct Quantizer {
  static constexpr int kRows = rows_per_thread(kChunks);

  QuantizeParams const& p;
  int const (&scale_blocks)[3];
  uint4* prefetched;  // [kRows][kChunks][threads]: each thread reads what it asked for itself
  uint4 const* packed_masks;  // [32]: sign bits of 16-bit elements, eight at a time
  unsigned* warp_max;         // [2][16]
  TransposeTile tile;
  int step = 0;

  __device__ QuantizeOperand const& operand(QuantizeItem const& item) const {
    return p.operands[item.operand];
  }
  __device__ int rows_at_once() const { return blockDim.x / kThreadsPerRow; }
  __device__ int row_in_block(int r) const {
    return threadIdx.x / kThreadsPerRow + r * rows_at_once();
  }
  __device__ int column(int j) const {
    return 8 * (j * kThreadsPerRow + threadIdx.x % kThreadsPerRow);
  }
  // Chunks j < my_chunks() of this thread exist.
  __device__ int my_chunks() const {
    return (p.head_dim / 8 + kThreadsPerRow - 1 - threadIdx.x % kThreadsPerRow) / kThreadsPerRow;
  }
  __device__ uint4* slot(int r, int j) const {
    return prefetched + (r * kChunks + j) * max_threads(kChunks) + threadIdx.x;
  }
  __device__ Half const* row_address(QuantizeItem const& item, int row) const {
    TensorView const& in = operand(item).in;
    return static_cast<Half const*>(in.ptr) + item.batch * in.batch_stride +
           row * in.seqlen_stride + item.head * in.head_stride;
  }

  // Rows and columns that do not exist arrive as zeros.
  __device__ void prefetch(QuantizeItem const& item) const {
    if (item.operand >= 0) {
      int const row = item.block * p.block + row_in_block(0), chunks = my_chunks();
      Half const* from = row_address(item, row) + column(0);
      int64_t const stride = rows_at_once() * operand(item).in.seqlen_stride;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        bool const row_exists = row + r * rows_at_once() < operand(item).seqlen;
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
          copy_async(slot(r, j), from + j * kThreadsPerRow * 8, row_exists && j < chunks);
        }
        from += stride;
      }
    }
    asm volatile("cp.async.commit_group;");
  }

  // The elements, with their random signs unless they are rotated first.
  __device__ void take(Chunk (&y)[kRows][kChunks], bool change) const {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      uint4 mask{};
      if (change) mask = packed_masks[column(j) / 8];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        uint4 const x = *slot(r, j);
        y[r][j] = unpack<Half>(make_uint4(x.x ^ mask.x, x.y ^ mask.y, x.z ^ mask.z, x.w ^ mask.w));
      }
    }
  }

  // Rotary embedding, then the signs.
  __device__ void embed(QuantizeItem const& item, Chunk (&y)[kRows][kChunks]) const {
    bool const in_registers = !p.rotary.interleaved && p.rotary.width == 32 * kChunks &&
                              kChunks % 2 == 0;  // both elements of every pair
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      int const row = item.block * p.block + row_in_block(r);
      if (row >= operand(item).seqlen) continue;
      int64_t const position = operand(item).first_position + row;
      if (in_registers) {
        rotary_row<Half, kChunks>(y[r], column(0), p.rotary, position);
        continue;
      }
      Half const* const address = row_address(item, row);
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        // Opaque, or the addresses of all chunks are computed in front and there are no registers.
        int first = column(j);
        asm volatile("" : "+r"(first));
        if (first >= p.rotary.width) continue;
        rotary_chunk<Half>(y[r][j], address, first, p.rotary, position);
      }
    }
    if (p.hadamard_block == 0) return;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) change_signs(y[r][j], packed_masks[column(j) / 8]);
    }
  }

  // The CTA's largest magnitude, as bits, which for numbers >= 0 are in their order.
  __device__ unsigned block_max(Chunk const (&y)[kRows][kChunks]) {
    float largest = 0.f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = max_abs(largest, y[r][j].x[i]);
      }
    }
    // Two places in turn: who is a step ahead does not overwrite what others still read.
    unsigned* const place = warp_max + 16 * (step++ % 2);
    unsigned const of_warp = __reduce_max_sync(0xffffffff, __float_as_uint(largest));
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) place[warp] = of_warp;
    __syncthreads();
    return __reduce_max_sync(0xffffffff, lane < blockDim.x / 32 ? place[lane] : 0);
  }

  // The same of what is finite. What is not becomes NaN: e4m3 has no infinity.
  __device__ unsigned finite_max(Chunk (&y)[kRows][kChunks]) {
    unsigned const found = block_max(y);
    if (found != __float_as_uint(INFINITY)) return found;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (!is_finite(y[r][j].x[i])) y[r][j].x[i] = NAN;
        }
      }
    }
    return block_max(y);
  }

  __device__ int64_t scale_index(QuantizeItem const& item) const {
    QuantizeOperand const& x = operand(item);
    switch (p.granularity) {
      case Granularity::kTensor:
        return 0;
      case Granularity::kHead:
        return item.batch * p.num_heads_kv + item.head / (x.heads / p.num_heads_kv);
      case Granularity::kBlock:
        break;
    }
    return (item.batch * x.heads + item.head) * scale_blocks[item.operand] + item.block;
  }

  // The factor before rounding. One thread writes the descale; where blocks share one, of each.
  __device__ float scale(QuantizeItem const& item, unsigned amax_bits) const {
    constexpr float kLargest = 448.f;
    constexpr float kMinAmax = 448.f * 0x1p-122f;  // below, a descale would be subnormal
    float const amax = __uint_as_float(
        amax_bits > __float_as_uint(kMinAmax) ? amax_bits : __float_as_uint(kMinAmax));
    bool const exists = item.block * p.block < operand(item).seqlen;
    if (threadIdx.x == 0 && exists) {
      float const descale = __fdiv_rn(
          multiply(amax, p.hadamard_block && operand(item).rotated ? p.hadamard_factor : 1.f),
          kLargest);
      operand(item).descale[scale_index(item)] = amax_bits == 0 ? 1.f : descale;
    }
    return amax_bits == 0 ? 1.f : __fdiv_rn(kLargest, amax);
  }

  __device__ static uint2 round(Chunk const& chunk, float scale) {
    float z[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) z[i] = multiply(chunk.x[i], scale);
    return make_uint2(to_e4m3(z[0], z[1], z[2], z[3]), to_e4m3(z[4], z[5], z[6], z[7]));
  }

  __device__ void write(QuantizeItem const& item, Chunk const (&y)[kRows][kChunks],
                        float scale) const {
    QuantizeOperand const& x = operand(item);
    int const row = item.block * p.block + row_in_block(0), chunks = my_chunks();
    int64_t const stride = int64_t(x.heads) * p.head_dim;
    uint8_t* to = static_cast<uint8_t*>(x.out) + (item.batch * x.seqlen + row) * stride +
                  item.head * p.head_dim + column(0);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r * rows_at_once() >= x.seqlen) break;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        uint2 const eight = round(y[r][j], scale);
        if (j < chunks) *reinterpret_cast<uint2*>(to + j * kThreadsPerRow * 8) = eight;
      }
      to += rows_at_once() * stride;
    }
  }

  __device__ void write_transposed_block(QuantizeItem const& item, Chunk const (&y)[kRows][kChunks],
                                         float scale) const {
    QuantizeOperand const& x = operand(item);
    int const chunks = my_chunks();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        uint2 const eight = round(y[r][j], scale);
        if (j < chunks) tile.store(row_in_block(r), column(j), eight);
      }
    }
    __syncthreads();  // the barrier of the next block_max keeps its stores behind these reads
    int64_t const pitch =
        int64_t(x.seqlen + kQuantizeKeyTile - 1) / kQuantizeKeyTile * kQuantizeKeyTile;
    int64_t const first_row = (item.batch * x.heads + item.head) * p.head_dim;
    write_transposed(
        tile, p.block,
        static_cast<uint8_t*>(x.out) + first_row * pitch + int64_t(item.block) * p.block, pitch);
  }
};

template <class Half, int kChunks, bool kRotary>
__global__ void __launch_bounds__(max_threads(kChunks), 512 / max_threads(kChunks))
    quantize_kernel(__grid_constant__ QuantizeArgs const args) {
  extern __shared__ uint4 smem[];
  QuantizeParams const& p = args.p;
  constexpr int kRows = rows_per_thread(kChunks);
  __shared__ unsigned warp_max[32];
  __shared__ uint4 packed_masks[32];
  for (int i = threadIdx.x; i < 128; i += blockDim.x) {
    uint32_t const bits = p.signs[i / 16] >> (2 * i % 32);
    reinterpret_cast<uint32_t*>(packed_masks)[i] = (bits & 1) << 15 | (bits & 2) << 30;
  }
  Quantizer<Half, kChunks> quantizer{
      p,
      args.scale_blocks,
      smem,
      packed_masks,
      warp_max,
      {reinterpret_cast<uint32_t*>(smem + kRows * kChunks * max_threads(kChunks)), p.head_dim}};
  __syncthreads();

  unsigned index = blockIdx.x;
  QuantizeItem item = find_item(args, index);
  quantizer.prefetch(item);
  while (item.operand >= 0) {
    Chunk y[kRows][kChunks];
    bool const rotated = p.operands[item.operand].rotated;
    bool const embedded = kRotary && rotated, transformed = rotated && p.hadamard_block;
    quantizer.take(y, transformed && !embedded);
    index += gridDim.x;
    QuantizeItem const next = find_item(args, index);
    quantizer.prefetch(next);

    if constexpr (kRotary) {
      if (embedded) quantizer.embed(item, y);
    }
    if (transformed) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) hadamard<kChunks>(y[r], p.hadamard_block);
    }
    unsigned amax = quantizer.finite_max(y);
    if (args.pass == QuantizePass::kFindAmax) {
      if (threadIdx.x == 0)
        atomicMax(p.operands[item.operand].amax + quantizer.scale_index(item), amax);
    } else {
      if (args.pass == QuantizePass::kWrite) {
        amax = p.operands[item.operand].amax[quantizer.scale_index(item)];
      }
      float const scale = quantizer.scale(item, amax);
      if (p.operands[item.operand].transposed) {
        quantizer.write_transposed_block(item, y, scale);
      } else {
        quantizer.write(item, y, scale);
      }
    }
    item = next;
  }
}

}  // namespace flash3
