// From FwdParams to a launch of the forward kernel.
#pragma once

#include "attention/list_blocks.cuh"
#include "common/launch.h"
#include "common/tensor_map.h"
#include "forward/kernel.cuh"
#include "forward/order.cuh"

namespace flash3 {

// What a key and its value bring to L2 for a head.
template <class T>
inline constexpr long long kKvRowBytes =
    (T::kHeadDim + T::kHeadDimV) * (long long)sizeof(typename T::Element);

template <class T>
typename T::Order make_order(FwdParams const& params) {
  Problem const& p = params.problem;
  if constexpr (T::kPacked) {
    return {params.q_blocks, p.num_heads_q, p.num_heads_q / p.num_heads_kv};
  } else {
    return make_batch_order<typename T::Order>(p, ceil_div_int(p.seqlen_q, T::kM), kKvRowBytes<T>);
  }
}

// The list of the query blocks of a packed call.
template <class Row>
void list_query_blocks(FwdParams const& params, cudaStream_t stream) {
  using T = FwdTraits<Row>;
  Problem const& p = params.problem;
  int const group = p.num_heads_q / p.num_heads_kv;
  list_blocks<Row>({.rows = params.rows,
                    .batch = p.batch,
                    .total_q = p.seqlen_q,
                    .total_k = p.seqlen_k,
                    .q = {.list = params.q_blocks,
                          .tile = T::kM,
                          .row_bytes = kKvRowBytes<T>,
                          .least_heads = ceil_div_int(kLeastSectionHeads, group),
                          .heads = p.num_heads_kv,
                          .unit = group},
                    .k = {.tile = T::kN},
                    .tile_counter = params.tile_counter},
                   ListedSides::kQueries, stream);
}

template <class Row>
FwdArgs<Row> make_fwd_args(FwdParams const& params) {
  using T = FwdTraits<Row>;
  Problem const& p = params.problem;
  TensorExtent const q_extent{p.head_dim, p.seqlen_q, p.num_heads_q, p.batch};
  TensorExtent const k_extent{p.head_dim, p.seqlen_k, p.num_heads_kv, p.batch};
  TensorExtent const v_extent{p.head_dim_v, p.seqlen_k, p.num_heads_kv, p.batch};
  TensorExtent const o_extent{p.head_dim_v, p.seqlen_q, p.num_heads_q, p.batch};
  constexpr auto make_map = T::kPacked ? make_ragged_tensor_map : make_tensor_map;
  return {
      .q = make_map(params.q, p.dtype, q_extent, {T::kM, T::kBox}),
      .k = make_map(params.k, p.dtype, k_extent, {T::kN, T::kBox}),
      .v = make_map(params.v, p.dtype, v_extent, {T::kN, T::kBox}),
      .o = make_map(params.o, p.dtype, o_extent, {kRowsPerWarp, T::kBox}),
      .lse = params.lse,
      .seqlen_q = p.seqlen_q,
      .seqlen_k = p.seqlen_k,
      .num_heads_q = p.num_heads_q,
      .qheads_per_kvhead = p.num_heads_q / p.num_heads_kv,
      .softmax_scale = p.softmax_scale,
      .num_tiles = T::kPacked ? 0 : ceil_div_int(p.seqlen_q, T::kM) * p.num_heads_q * p.batch,
      .order = make_order<T>(params),
      .schedule = make_batch_schedule<typename T::Schedule>(params),
      .limits = make_limits<Row::key.mask>(p),
      .sink = params.sink,
      .sink_is_fp32 = params.sink_is_fp32,
  };
}

template <class Row>
void launch_fwd(FwdParams const& params, cudaStream_t stream) {
  constexpr int kSmemBytes = sizeof(FwdSmem<Row>);
  static_assert(kSmemBytes <= kMaxSmemBytes, "the row's tile does not fit into shared memory");
  FwdArgs<Row> const args = make_fwd_args<Row>(params);
  if constexpr (FwdTraits<Row>::kPacked) list_query_blocks<Row>(params, stream);
  allow_smem<fwd_kernel<Row>>(kSmemBytes);
  fwd_kernel<Row><<<params.grid, FwdTraits<Row>::kThreads, kSmemBytes, stream>>>(args);
  FLASH3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash3
