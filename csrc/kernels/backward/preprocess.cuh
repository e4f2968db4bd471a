// Before the main kernel: dPsum = rowsum(dO * O) - dLSE, LSE in the log2 domain, and zeros for the
// dQ sums.
#pragma once

#include "backward/traits.cuh"
#include "common/math.cuh"

namespace flash3 {

template <class Row>
struct BwdPreprocessArgs {
  TensorView o, d_o;
  float const* lse;   // (batch, heads_q, seqlen_q)
  float const* dlse;  // likewise, or null
  float *lse_log2, *dpsum, *dq_accum;
  int* dq_turn;  // or null
  int seqlen_q, seqlen_q_rounded, num_heads_q, head_dim;
};

// One CTA takes kM rows of one head. Eight-element vectors: kHeadDim / 8 lanes share a row.
template <class Row>
__global__ void __launch_bounds__(256) bwd_preprocess_kernel(BwdPreprocessArgs<Row> const args) {
  using T = BwdTraits<Row>;
  using Element = typename T::Element;
  using Vector = cutlass::AlignedArray<Element, 8>;
  constexpr int kThreads = 256;
  constexpr int kLanesPerRow = T::kHeadDim / 8;
  constexpr int kRowsAtOnce = kThreads / kLanesPerRow;

  int const num_m_blocks = args.seqlen_q_rounded / T::kM;
  int const m_block = blockIdx.x % num_m_blocks;
  int64_t const head_and_batch = blockIdx.x / num_m_blocks;
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
    if (exists && column < args.head_dim) {
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
    block_sum[i + threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (args.dq_turn != nullptr && threadIdx.x == 0) args.dq_turn[padded_row / T::kM] = 0;
}

}  // namespace flash3
