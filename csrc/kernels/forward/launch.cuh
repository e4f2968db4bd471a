// From FwdParams to a launch of the forward kernel.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "common/tensor_map.h"
#include "forward/kernel.cuh"

namespace flash3 {

inline constexpr int kLeastSectionHeads = 8;  // query heads (E011)

template <class T>
typename T::Order make_order(Problem const& p) {
  int const num_m_blocks = ceil_div_int(p.seqlen_q, T::kM);
  if constexpr (std::is_same_v<typename T::Order, LongestFirst>) {
    long long const kv_bytes = 2LL * p.seqlen_k * T::kHeadDim * sizeof(typename T::Element);
    int const group = p.num_heads_q / p.num_heads_kv;
    int const kv_heads = heads_per_section(kv_bytes, ceil_div_int(kLeastSectionHeads, group),
                                           p.num_heads_kv * p.batch);
    return {num_m_blocks, p.num_heads_q, p.num_heads_q * p.batch, kv_heads * group};
  } else {
    return {num_m_blocks, p.num_heads_q};
  }
}

template <class T>
typename T::Schedule make_schedule(FwdParams const& params) {
  if constexpr (std::is_same_v<typename T::Schedule, DynamicSchedule>) {
    return {params.tile_counter};
  } else {
    return {};
  }
}

template <class Row>
FwdArgs<Row> make_fwd_args(FwdParams const& params) {
  using T = FwdTraits<Row>;
  Problem const& p = params.problem;
  TensorExtent const q_extent{p.head_dim, p.seqlen_q, p.num_heads_q, p.batch};
  TensorExtent const kv_extent{p.head_dim, p.seqlen_k, p.num_heads_kv, p.batch};
  return {
      .q = make_tensor_map(params.q, p.dtype, q_extent, T::kM),
      .k = make_tensor_map(params.k, p.dtype, kv_extent, T::kN),
      .v = make_tensor_map(params.v, p.dtype, kv_extent, T::kN),
      .o = make_tensor_map(params.o, p.dtype, q_extent, kRowsPerWarp),
      .lse = params.lse,
      .seqlen_q = p.seqlen_q,
      .seqlen_k = p.seqlen_k,
      .num_heads_q = p.num_heads_q,
      .qheads_per_kvhead = p.num_heads_q / p.num_heads_kv,
      .softmax_scale = p.softmax_scale,
      .num_tiles = ceil_div_int(p.seqlen_q, T::kM) * p.num_heads_q * p.batch,
      .order = make_order<T>(p),
      .schedule = make_schedule<T>(params),
  };
}

template <class Row>
void launch_fwd(FwdParams const& params, cudaStream_t stream) {
  constexpr int kSmemBytes = sizeof(FwdSmem<Row>);
  static_assert(kSmemBytes <= kMaxSmemBytes, "the row's tile does not fit into shared memory");
  FwdArgs<Row> const args = make_fwd_args<Row>(params);
  allow_smem<fwd_kernel<Row>>(kSmemBytes);
  fwd_kernel<Row><<<params.grid, FwdTraits<Row>::kThreads, kSmemBytes, stream>>>(args);
  FLASH3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash3
