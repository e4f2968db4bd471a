// After the main kernel: dQ = softmax_scale * (fp32 sum), rounded to 16 bits and put back into row
// order.
#pragma once

#include "backward/dq_accumulate.cuh"
#include "backward/query_block.cuh"
#include "common/tma.cuh"

namespace flash3 {

template <class Row>
struct BwdPostprocessArgs : QueryBlocks<Row> {
  TensorView dq;
  float const* dq_accum;
  int seqlen_q, seqlen_q_rounded, num_heads_q, head_dim;
  float softmax_scale;
};

// One CTA takes a query block, its threads the fragments of the main kernel's consumers.
// Rows from `used` on are written as zeros.
template <class Row>
CUTLASS_DEVICE void postprocess_block(BwdPostprocessArgs<Row> const& args, int m_block,
                                      int64_t head_and_batch, int used) {
  using T = BwdTraits<Row>;
  using Element = typename T::Element;
  using Vector = cutlass::AlignedArray<Element, 8>;
  __shared__ alignas(128) Element tile[T::kM * T::kHeadDim];

  int const rows = min(T::kM, args.seqlen_q - m_block * T::kM);
  if (rows <= 0) return;  // rounding may add a block that holds no row

  typename T::MmaDq mma_dq;
  Tensor dq = partition_fragment_C(mma_dq, Shape<Int<T::kM>, Int<T::kHeadDim>>{});
  float const* const block_sum =
      args.dq_accum +
      (head_and_batch * args.seqlen_q_rounded + int64_t(m_block) * T::kM) * T::kHeadDim;
  bool holds_queries = true;
  if constexpr (T::kPacked) {
    holds_queries = dq_warp_row<T::kM>(threadIdx.x) < used - m_block * T::kM;
  }
  CUTLASS_PRAGMA_UNROLL
  for (int g = 0; g < T::kDqPerThread / 4; ++g) {
    float4 const sum = holds_queries
                           ? *reinterpret_cast<float4 const*>(
                                 block_sum + dq_accum_offset<T::kDqPerThread>(threadIdx.x, g))
                           : float4{};
    dq(4 * g) = sum.x * args.softmax_scale;
    dq(4 * g + 1) = sum.y * args.softmax_scale;
    dq(4 * g + 2) = sum.z * args.softmax_scale;
    dq(4 * g + 3) = sum.w * args.softmax_scale;
  }
  Tensor rounded = make_tensor<Element>(dq.layout());
  convert(dq, rounded);
  // The swizzle spreads the fragment's scattered writes over the banks.
  Tensor sDq =
      make_tensor(make_smem_ptr(tile), SwizzledTile<Element, T::kM, T::kHeadDim, T::kBoxOfK>{});
  auto const words = recast<uint32_t>(rounded);
  auto target = recast<uint32_t>(mma_dq.get_thread_slice(threadIdx.x).partition_C(sDq));
  copy(words, target);
  __syncthreads();

  auto* const dq_rows = static_cast<Element*>(args.dq.ptr) +
                        head_and_batch / args.num_heads_q * args.dq.batch_stride +
                        head_and_batch % args.num_heads_q * args.dq.head_stride +
                        int64_t(m_block) * T::kM * args.dq.seqlen_stride;
  for (int i = threadIdx.x * 8; i < rows * T::kHeadDim; i += T::kConsumerThreads * 8) {
    int const row = i / T::kHeadDim, column = i % T::kHeadDim;
    if (column < args.head_dim) {
      Vector value = *reinterpret_cast<Vector const*>(&sDq(row, column));
      if constexpr (T::kPacked) {
        if (m_block * T::kM + row >= used) value.clear();
      }
      *reinterpret_cast<Vector*>(dq_rows + row * args.dq.seqlen_stride + column) = value;
    }
  }
}

template <class Row>
__global__ void __launch_bounds__(BwdTraits<Row>::kConsumerThreads)
    bwd_postprocess_kernel(BwdPostprocessArgs<Row> const args) {
  using T = BwdTraits<Row>;
  if constexpr (T::kPacked) {
    PackedQueryBlock const at = packed_query_block(args, args.num_heads_q);
    if (!at.exists) return;
    // To a block its sequence's head is a dense tensor with one head.
    BwdPostprocessArgs<Row> own = args;
    int64_t const padded_row = int64_t(at.head) * args.seqlen_q_rounded + at.q_first * T::kM;
    own.dq = first_row(args.dq, at, sizeof(typename T::Element));
    own.dq_accum += padded_row * T::kHeadDim;
    own.seqlen_q = at.slot;
    own.num_heads_q = 1;
    postprocess_block<Row>(own, at.m_block, 0, at.used);
  } else {
    int const num_m_blocks = args.seqlen_q_rounded / T::kM;
    postprocess_block<Row>(args, blockIdx.x % num_m_blocks, blockIdx.x / num_m_blocks,
                           args.seqlen_q);
  }
}

}  // namespace flash3
