// From FwdParams to a launch of the e4m3 forward kernel.
#pragma once

#include "common/launch.h"
#include "common/tensor_map.h"
#include "forward/order.cuh"
#include "fp8/kernel.cuh"

namespace flash3 {

template <class Row>
Fp8Args<Row> make_fp8_args(FwdParams const& params) {
  using T = Fp8Traits<Row>;
  Problem const& p = params.problem;
  Fp8Params const& fp8 = params.fp8;
  constexpr int kTileM = T::kM;
  int const keys_padded = ceil_div_int(p.seqlen_k, kTransposedKeys) * kTransposedKeys;
  TensorExtent const q_extent{p.head_dim, p.seqlen_q, p.num_heads_q, p.batch};
  TensorExtent const k_extent{p.head_dim, p.seqlen_k, p.num_heads_kv, p.batch};
  TensorExtent const vt_extent{keys_padded, p.head_dim, p.num_heads_kv, p.batch};
  auto const make_map = [](auto tile, TensorView const& view, TensorExtent extent) {
    using Tile = decltype(tile);
    return make_tensor_map(view, DType::kE4M3, extent, {Tile::kRows, Tile::kBoxColumns});
  };
  int const num_m_blocks = ceil_div_int(p.seqlen_q, kTileM);
  return {
      .q = make_map(typename T::TileQ{}, params.q, q_extent),
      .k = make_map(typename T::TileKV{}, params.k, k_extent),
      .v = fp8.v_transposed ? make_map(typename T::TileVt{}, params.v, vt_extent)
                            : make_map(typename T::TileKV{}, params.v, k_extent),
      .q_scales = fp8.q_scales,
      .k_scales = fp8.k_scales,
      .v_scales = fp8.v_scales,
      .v_transposed = fp8.v_transposed,
      .o = params.o.ptr,
      .o_is_f16 = fp8.out_dtype == DType::kF16,
      .lse = params.lse,
      .seqlen_q = p.seqlen_q,
      .seqlen_k = p.seqlen_k,
      .num_heads_q = p.num_heads_q,
      .qheads_per_kvhead = p.num_heads_q / p.num_heads_kv,
      .head_dim = p.head_dim,
      .softmax_scale = p.softmax_scale,
      .v_scale = fp8.v_scale,
      .num_tiles = num_m_blocks * p.num_heads_q * p.batch,
      .order = make_batch_order<typename T::Order>(p, num_m_blocks, 2LL * T::kHeadDim),
      .schedule = make_batch_schedule<typename T::Schedule>(params),
  };
}

template <class Row>
void launch_fp8(FwdParams const& params, cudaStream_t stream) {
  constexpr int kSmemBytes = sizeof(Fp8Smem<Row>);
  static_assert(kSmemBytes <= kMaxSmemBytes, "the row's tile does not fit into shared memory");
  Fp8Args<Row> const args = make_fp8_args<Row>(params);
  allow_smem<fp8_kernel<Row>>(kSmemBytes);
  fp8_kernel<Row><<<params.grid, Fp8Traits<Row>::kThreads, kSmemBytes, stream>>>(args);
  FLASH3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash3
