// From BwdParams to the three launches of the backward.
#pragma once

#include "attention/list_blocks.cuh"
#include "backward/kernel.cuh"
#include "backward/postprocess.cuh"
#include "backward/preprocess.cuh"
#include "common/launch.h"
#include "common/tensor_map.h"

namespace flash3 {

// Q, dO and the fp32 dQ sum of a query row: what the CTAs of a head share.
template <class T>
inline constexpr long long kQueryRowBytes =
    (T::kHeadDim + T::kHeadDimV) * sizeof(typename T::Element) + T::kHeadDim * sizeof(float);

template <class T>
typename T::Order make_bwd_order(BwdParams const& params) {
  Problem const& p = params.problem;
  if constexpr (T::kPacked) {
    return {params.k_blocks, p.num_heads_kv, 1};
  } else {
    int const group = p.num_heads_q / p.num_heads_kv;
    int const kv_heads_total = p.num_heads_kv * p.batch;
    return {ceil_div_int(p.seqlen_k, T::kN), p.num_heads_kv, kv_heads_total,
            heads_per_section(kQueryRowBytes<T> * group * p.seqlen_q, 1, kv_heads_total)};
  }
}

// The lists of the query blocks and of the key blocks of a packed call.
template <class Row>
void list_query_and_key_blocks(BwdParams const& params, cudaStream_t stream) {
  using T = BwdTraits<Row>;
  Problem const& p = params.problem;
  int const group = p.num_heads_q / p.num_heads_kv;
  list_blocks<Row>({.rows = params.rows,
                    .batch = p.batch,
                    .total_q = p.seqlen_q,
                    .total_k = p.seqlen_k,
                    .q = {.list = params.q_blocks, .tile = T::kM},
                    .k = {.list = params.k_blocks,
                          .tile = T::kN,
                          .row_bytes = kQueryRowBytes<T> * group,
                          .least_heads = 1,
                          .heads = p.num_heads_kv,
                          .unit = 1},
                    .tile_counter = nullptr},
                   ListedSides::kQueriesAndKeys, stream);
}

template <class Row>
BwdArgs<Row> make_bwd_args(BwdParams const& params) {
  using T = BwdTraits<Row>;
  Problem const& p = params.problem;
  TensorExtent const q_extent{p.head_dim, p.seqlen_q, p.num_heads_q, p.batch};
  TensorExtent const do_extent{p.head_dim_v, p.seqlen_q, p.num_heads_q, p.batch};
  TensorExtent const k_extent{p.head_dim, p.seqlen_k, p.num_heads_kv, p.batch};
  TensorExtent const v_extent{p.head_dim_v, p.seqlen_k, p.num_heads_kv, p.batch};
  int const group = p.num_heads_q / p.num_heads_kv;
  constexpr auto make_map = T::kPacked ? make_ragged_tensor_map : make_tensor_map;
  return {
      .q = make_map(params.q, p.dtype, q_extent, {T::kM, T::kBox}),
      .d_o = make_map(params.d_o, p.dtype, do_extent, {T::kM, T::kBox}),
      .k = make_map(params.k, p.dtype, k_extent, {T::kN, T::kBoxOfK}),
      .v = make_map(params.v, p.dtype, v_extent, {T::kN, T::kBox}),
      .dk = make_map(params.dk, p.dtype, k_extent, {kRowsPerWarp, T::kBox}),
      .dv = make_map(params.dv, p.dtype, v_extent, {kRowsPerWarp, T::kBox}),
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
      .order = make_bwd_order<T>(params),
      .softmax_scale = p.softmax_scale,
      .limits = make_limits<Row::key.mask>(p),
  };
}

template <class Row>
void launch_bwd(BwdParams const& params, cudaStream_t stream) {
  using T = BwdTraits<Row>;
  constexpr int kSmemBytes = sizeof(BwdSmem<Row>);
  static_assert(kSmemBytes <= kMaxSmemBytes, "the row's tile does not fit into shared memory");
  Problem const& p = params.problem;
  BwdArgs<Row> const args = make_bwd_args<Row>(params);
  unsigned query_blocks = unsigned(params.seqlen_q_rounded / T::kM) * p.num_heads_q;
  QueryBlocks<Row> list{};
  if constexpr (T::kPacked) {
    list_query_and_key_blocks<Row>(params, stream);
    list = params.q_blocks;
  } else {
    query_blocks *= p.batch;
  }

  bwd_preprocess_kernel<Row><<<query_blocks, 256, 0, stream>>>(
      {list, params.o, params.d_o, params.lse, params.dlse, params.lse_log2, params.dpsum,
       params.dq_accum, params.dq_turn, p.seqlen_q, params.seqlen_q_rounded, p.num_heads_q,
       p.head_dim_v});
  FLASH3_CUDA_CHECK(cudaGetLastError());
  allow_smem<bwd_kernel<Row>>(kSmemBytes);
  launch_clusters(bwd_kernel<Row>, {params.grid, params.cluster_size, T::kThreads, kSmemBytes},
                  stream, args);
  bwd_postprocess_kernel<Row><<<query_blocks, T::kConsumerThreads, 0, stream>>>(
      {list, params.dq, params.dq_accum, p.seqlen_q, params.seqlen_q_rounded, p.num_heads_q,
       p.head_dim, p.softmax_scale});
  FLASH3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash3
