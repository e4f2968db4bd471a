// From BwdParams to the three launches of the backward.
#pragma once

#include <algorithm>

#include "backward/kernel.cuh"
#include "backward/postprocess.cuh"
#include "backward/preprocess.cuh"
#include "common/launch.h"
#include "common/tensor_map.h"

namespace flash3 {

template <class Row>
BwdArgs<Row> make_bwd_args(BwdParams const& params) {
  using T = BwdTraits<Row>;
  Problem const& p = params.problem;
  TensorExtent const q_extent{p.head_dim, p.seqlen_q, p.num_heads_q, p.batch};
  TensorExtent const kv_extent{p.head_dim, p.seqlen_k, p.num_heads_kv, p.batch};
  int const group = p.num_heads_q / p.num_heads_kv;
  int const kv_heads_total = p.num_heads_kv * p.batch;
  // Q, dO and the fp32 dQ sum of a query row: what the CTAs of a head share.
  long long const row_bytes = T::kHeadDim * (2 * sizeof(typename T::Element) + sizeof(float));
  return {
      .q = make_tensor_map(params.q, p.dtype, q_extent, T::kM),
      .d_o = make_tensor_map(params.d_o, p.dtype, q_extent, T::kM),
      .k = make_tensor_map(params.k, p.dtype, kv_extent, T::kN),
      .v = make_tensor_map(params.v, p.dtype, kv_extent, T::kN),
      .dk = make_tensor_map(params.dk, p.dtype, kv_extent, kRowsPerWarp),
      .dv = make_tensor_map(params.dv, p.dtype, kv_extent, kRowsPerWarp),
      .lse_log2 = params.lse_log2,
      .dpsum = params.dpsum,
      .dq_accum = params.dq_accum,
      .dq_turn = params.dq_turn,
      .seqlen_q = p.seqlen_q,
      .seqlen_k = p.seqlen_k,
      .seqlen_q_rounded = params.seqlen_q_rounded,
      .num_heads_q = p.num_heads_q,
      .qheads_per_kvhead = group,
      .cluster_size = params.cluster_size,
      .order = {ceil_div_int(p.seqlen_k, T::kN), p.num_heads_kv, kv_heads_total,
                heads_per_section(row_bytes * group * p.seqlen_q, 1, kv_heads_total)},
      .softmax_scale = p.softmax_scale,
  };
}

template <class Row>
void launch_bwd(BwdParams const& params, cudaStream_t stream) {
  using T = BwdTraits<Row>;
  constexpr int kSmemBytes = sizeof(BwdSmem<Row>);
  static_assert(kSmemBytes <= kMaxSmemBytes, "the row's tile does not fit into shared memory");
  Problem const& p = params.problem;
  BwdArgs<Row> const args = make_bwd_args<Row>(params);
  unsigned const query_blocks = unsigned(params.seqlen_q_rounded / T::kM) * p.num_heads_q * p.batch;

  bwd_preprocess_kernel<Row><<<query_blocks, 256, 0, stream>>>(
      {params.o, params.d_o, params.lse, params.dlse, params.lse_log2, params.dpsum,
       params.dq_accum, params.dq_turn, p.seqlen_q, params.seqlen_q_rounded, p.num_heads_q,
       p.head_dim});
  FLASH3_CUDA_CHECK(cudaGetLastError());
  allow_smem<bwd_kernel<Row>>(kSmemBytes);
  launch_clusters(bwd_kernel<Row>, {params.grid, params.cluster_size, T::kThreads, kSmemBytes},
                  stream, args);
  bwd_postprocess_kernel<Row><<<query_blocks, T::kConsumerThreads, 0, stream>>>(
      {params.dq, params.dq_accum, p.seqlen_q, params.seqlen_q_rounded, p.num_heads_q, p.head_dim,
       p.softmax_scale});
  FLASH3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash3
