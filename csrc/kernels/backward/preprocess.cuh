// Before the main kernel: dPsum = rowsum(dO * O) - dLSE, LSE in the log2 domain, and zeros for the
// dQ sums.
#pragma once

#include <bit>

#include "backward/dq_accumulate.cuh"
#include "backward/query_block.cuh"
#include "common/math.cuh"

namespace flash3 {

template <class Row>
struct BwdPreprocessArgs : QueryBlocks<Row> {
  TensorView o, d_o;
  float const* lse;   // (batch, heads_q, seqlen_q); packed: (heads_q, total_q)
  float const* dlse;  // likewise, or null
  float *lse_log2, *dpsum, *dq_accum;
  int* dq_turn;  // or null
  int seqlen_q, seqlen_q_rounded, num_heads_q, head_dim_v;
};

// One CTA takes kM rows of one head. Eight-element vectors: kHeadDimV / 8 lanes share a row, and as
// many more as make a power of two.
template <class Row>
CUTLASS_DEVICE void preprocess_block(BwdPreprocessArgs<Row> const& args, int m_block,
                                     int64_t head_and_batch) {
  using T = BwdTraits<Row>;
  using Element = typename T::Element;
  using Vector = cutlass::AlignedArray<Element, 8>;
  constexpr int kThreads = 256;
  constexpr int kLanesPerRow = std::bit_ceil(unsigned{T::kHeadDimV / 8});
  constexpr int kRowsAtOnce = kThreads / kLanesPerRow;

  int const head = head_and_batch % args.num_heads_q;
  int64_t const batch = head_and_batch / args.num_heads_q;
  int const column = threadIdx.x % kLanesPerRow * 8;
  int64_t const padded_row = head_and_batch * args.seqlen_q_rounded + m_block * T::kM;

  auto const* o = static_cast<Element const*>(args.o.ptr) + batch * args.o.batch_stride +
                  head * args.o.head_stride + column;
  auto const* d_o = static_cast<Element const*>(args.d_o.ptr) + batch * args.d_o.batch_stride +
                    head * args.d_o.head_stride + column;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < T::kM; i += kRowsAtOnce) {
    int const row_in_block = i + threadIdx.x / kLanesPerRow;
    int const row = m_block * T::kM + row_in_block;
    bool const exists = row < args.seqlen_q;
    float sum = 0.f;
    if (exists && column < args.head_dim_v) {
      Vector const a = *reinterpret_cast<Vector const*>(o + row * args.o.seqlen_stride);
      Vector const b = *reinterpret_cast<Vector const*>(d_o + row * args.d_o.seqlen_stride);
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 8; ++e) sum += float(a[e]) * float(b[e]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int lane = kLanesPerRow / 2; lane > 0; lane /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, lane);
    }
    if (threadIdx.x % kLanesPerRow == 0) {
      int64_t const at = head_and_batch * args.seqlen_q + row;
      float const lse = exists ? args.lse[at] : -INFINITY;
      // exp2(score - inf) = 0: rows without keys, and rows that do not exist, contribute nothing.
      // Merging partial results by their LSE sends NaN to rows without keys, so dLSE is not looked
      // at there.
      bool const empty = lse == -INFINITY;
      args.lse_log2[padded_row + row_in_block] = empty ? INFINITY : lse * kLog2e;
      float const dlse = args.dlse != nullptr && !empty ? args.dlse[at] : 0.f;
      args.dpsum[padded_row + row_in_block] = empty ? 0.f : sum - dlse;
    }
  }

  auto* const block_sum = reinterpret_cast<float4*>(args.dq_accum + padded_row * T::kHeadDim);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < T::kM * T::kHeadDim / 4; i += kThreads) {
    if constexpr (T::kPacked) {
      // The consumer thread that these four floats belong to: dq_accum_offset, backwards.
      int const warpgroup = i / (T::kDqPerThread / 4 * kThreadsPerWarpgroup);
      int const thread = warpgroup * kThreadsPerWarpgroup + threadIdx.x % kThreadsPerWarpgroup;
      if (dq_warp_row<T::kM>(thread) >= args.seqlen_q - m_block * T::kM) continue;
    }
    block_sum[i + threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (args.dq_turn != nullptr && threadIdx.x == 0) args.dq_turn[padded_row / T::kM] = 0;
}

template <class Row>
__global__ void __launch_bounds__(256) bwd_preprocess_kernel(BwdPreprocessArgs<Row> const args) {
  using T = BwdTraits<Row>;
  if constexpr (T::kPacked) {
    PackedQueryBlock const at = packed_query_block(args, args.num_heads_q);
    // Blocks of a slot behind the rows that its sequence uses have no part in the main kernel.
    if (!at.exists || at.m_block * T::kM >= at.used) return;
    // To a block its sequence's head is a dense tensor with one head.
    BwdPreprocessArgs<Row> own = args;
    int64_t const lse_row = int64_t(at.head) * args.seqlen_q + at.start;
    int64_t const padded_row = int64_t(at.head) * args.seqlen_q_rounded + at.q_first * T::kM;
    own.o = first_row(args.o, at, sizeof(typename T::Element));
    own.d_o = first_row(args.d_o, at, sizeof(typename T::Element));
    own.lse += lse_row;
    if (args.dlse != nullptr) own.dlse += lse_row;
    own.lse_log2 += padded_row;
    own.dpsum += padded_row;
    own.dq_accum += padded_row * T::kHeadDim;
    if (args.dq_turn != nullptr) own.dq_turn += padded_row / T::kM;
    own.seqlen_q = at.used;
    own.num_heads_q = 1;
    preprocess_block<Row>(own, at.m_block, 0);
  } else {
    int const num_m_blocks = args.seqlen_q_rounded / T::kM;
    preprocess_block<Row>(args, blockIdx.x % num_m_blocks, blockIdx.x / num_m_blocks);
  }
}

}  // namespace flash3
