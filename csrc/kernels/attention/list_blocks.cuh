// Before the kernels of a packed call: the lengths, which only the device knows, become lists of
// blocks.
//
// Slots are made to follow one another whatever cu_seqlens holds: slot b starts at the largest of
// its first b + 1 numbers, each brought into [0, total]. Numbers that are wrong give wrong results,
// but no access outside the tensors and no list that is longer than total / tile + batch + 1.
#pragma once

#include "attention/mask.cuh"
#include "attention/scheduler.cuh"
#include "common/barriers.cuh"
#include "cuda_check.h"
#include "params.h"

namespace flash3 {

// One side of the call and the list of its blocks.
struct ListSide {
  BlockList list = {};
  int tile = 1;  // rows of a block
  // How many heads make a section (scheduler.cuh): what a row of the other side brings to L2 for a
  // head, and the least and largest number of heads, in units of `unit` heads.
  long long row_bytes = 0;
  int least_heads = 0, heads = 0, unit = 0;
};

struct ListBlocksArgs {
  PackedRows rows;
  int batch, total_q, total_k;
  ListSide q, k;      // k.list is not wanted by a forward
  int* tile_counter;  // to be set to 0, or null
};

inline constexpr int kListThreads = 1024;

struct IntPair {
  int q, k;
};
struct Largest {
  CUTLASS_DEVICE IntPair operator()(IntPair a, IntPair b) const {
    return {max(a.q, b.q), max(a.k, b.k)};
  }
};
struct Sum {
  CUTLASS_DEVICE IntPair operator()(IntPair a, IntPair b) const { return {a.q + b.q, a.k + b.k}; }
};

template <class Op>
CUTLASS_DEVICE IntPair warp_scan(IntPair x, Op op) {
  int const lane = threadIdx.x % kThreadsPerWarp;
  CUTLASS_PRAGMA_UNROLL
  for (int step = 1; step < kThreadsPerWarp; step *= 2) {
    IntPair const before{__shfl_up_sync(0xffffffff, x.q, step),
                         __shfl_up_sync(0xffffffff, x.k, step)};
    if (lane >= step) x = op(before, x);
  }
  return x;
}

// The value of `op` over `carry` and the x of all threads up to this one; `carry` goes on to the
// next call. No x is below 0, and 0 changes nothing.
template <class Op>
CUTLASS_DEVICE IntPair block_scan(IntPair x, IntPair& carry, Op op) {
  constexpr int kWarps = kListThreads / kThreadsPerWarp;
  static_assert(kWarps == kThreadsPerWarp);
  __shared__ IntPair of_warps[kWarps];
  int const warp = threadIdx.x / kThreadsPerWarp, lane = threadIdx.x % kThreadsPerWarp;
  x = warp_scan(x, op);
  if (lane == kThreadsPerWarp - 1) of_warps[warp] = x;
  __syncthreads();
  IntPair const warps = warp_scan(of_warps[lane], op);
  __syncthreads();
  IntPair before{__shfl_sync(0xffffffff, warps.q, max(warp - 1, 0)),
                 __shfl_sync(0xffffffff, warps.k, max(warp - 1, 0))};
  if (warp == 0) before = {0, 0};
  x = op(carry, op(before, x));
  carry = op(carry, {__shfl_sync(0xffffffff, warps.q, kWarps - 1),
                     __shfl_sync(0xffffffff, warps.k, kWarps - 1)});
  return x;
}

// Boundary b of the slots, and total behind all sequences.
CUTLASS_DEVICE int boundary(int const* cu_seqlens, int b, int batch, int total) {
  return b <= batch ? min(max(cu_seqlens[b], 0), total) : total;
}
CUTLASS_DEVICE int used_rows(int const* seqused, int b, int batch, int slot) {
  if (b >= batch) return 0;
  return seqused == nullptr ? slot : min(max(seqused[b], 0), slot);
}

// Writes the blocks of a warp's 32 sequences, all lanes on each sequence that has any, in turn.
CUTLASS_DEVICE void write_blocks(BlockList const& list, ListedBlock const& own, int own_blocks) {
  int const lane = threadIdx.x % kThreadsPerWarp;
  auto const from = [](int value, int source) { return __shfl_sync(0xffffffff, value, source); };
  unsigned left = __ballot_sync(0xffffffff, own_blocks > 0);
  for (; left != 0; left &= left - 1) {
    int const source = __ffs(int(left)) - 1;
    int const blocks = from(own_blocks, source);
    int4 const rows{from(own.q.start, source), from(own.q.length, source),
                    from(own.k.start, source), from(own.k.length, source)};
    int4 const place{from(own.slot, source), from(own.first, source), from(own.q_first, source),
                     from(own.section_heads, source)};
    auto* const target = reinterpret_cast<int4*>(list.blocks + place.y);
    for (int i = lane; i < blocks; i += kThreadsPerWarp) {
      target[2 * i] = rows;
      target[2 * i + 1] = place;
    }
  }
}

// CTA (c, side) lists the blocks of the c-th kListThreads sequences on one side, 0 for queries. The
// sequences before them it scans again: that is cheaper than to wait for another CTA.
template <class Row>  // so that the objects of rows share no symbol
__global__ void __launch_bounds__(kListThreads) list_blocks_kernel(ListBlocksArgs const args) {
  bool const keys = blockIdx.y == 1;
  ListSide const& side = keys ? args.k : args.q;
  IntPair ends{0, 0}, counts{0, 0};  // of all sequences so far
  for (int chunk = 0; chunk <= int(blockIdx.x); ++chunk) {
    int const b = chunk * kListThreads + int(threadIdx.x);
    bool const exists = b <= args.batch;  // the last one is the rows behind all
    IntPair start{0, 0}, slot{0, 0}, blocks{0, 0};
    if (exists) {
      start = {boundary(args.rows.cu_seqlens_q, b, args.batch, args.total_q),
               boundary(args.rows.cu_seqlens_k, b, args.batch, args.total_k)};
    }
    start = block_scan(start, ends, Largest{});
    if (exists) {
      int const end_q = boundary(args.rows.cu_seqlens_q, b + 1, args.batch, args.total_q);
      int const end_k = boundary(args.rows.cu_seqlens_k, b + 1, args.batch, args.total_k);
      slot = {max(end_q - start.q, 0), max(end_k - start.k, 0)};
      blocks = {ceil_div_int(slot.q, args.q.tile), ceil_div_int(slot.k, args.k.tile)};
    }
    IntPair const all = block_scan(blocks, counts, Sum{});
    if (chunk < int(blockIdx.x)) continue;

    int const used_q = used_rows(args.rows.seqused_q, b, args.batch, slot.q);
    int const used_k = used_rows(args.rows.seqused_k, b, args.batch, slot.k);
    int const other_rows = keys ? used_q : used_k;
    int const first = keys ? all.k - blocks.k : all.q - blocks.q;
    write_blocks(side.list,
                 {.q = {start.q, used_q},
                  .k = {start.k, used_k},
                  .slot = keys ? slot.k : slot.q,
                  .first = first,
                  .q_first = all.q - blocks.q,
                  .section_heads = side.unit * heads_per_section(side.row_bytes * other_rows,
                                                                 side.least_heads, side.heads)},
                 exists ? (keys ? blocks.k : blocks.q) : 0);
    if (b == args.batch) *side.list.count = keys ? all.k : all.q;
  }
  if (args.tile_counter != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *args.tile_counter = 0;
}

enum class ListedSides : int { kQueries = 1, kQueriesAndKeys = 2 };

template <class Row>
void list_blocks(ListBlocksArgs const& args, ListedSides sides, cudaStream_t stream) {
  dim3 const grid(unsigned(ceil_div_int(args.batch + 1, kListThreads)), unsigned(sides));
  list_blocks_kernel<Row><<<grid, kListThreads, 0, stream>>>(args);
  FLASH3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash3
