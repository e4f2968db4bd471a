// What the e4m3 forward kernel receives: descriptors and plain numbers, in constant memory.
#pragma once

#include "fp8/traits.cuh"

namespace flash3 {

template <class Row>
struct Fp8Args {
  using T = Fp8Traits<Row>;

  CUtensorMap q, k, v;  // boxes of tile.m, tile.n, tile.n rows; v transposed: of head_dim rows
  Fp8Scales q_scales, k_scales, v_scales;
  bool v_transposed;
  void* o;  // (batch, seqlen_q, heads_q, head_dim_v), contiguous, 16-bit
  bool o_is_f16;
  float* lse;  // (batch, heads_q, seqlen_q)
  int seqlen_q, seqlen_k, num_heads_q, qheads_per_kvhead, head_dim;
  float softmax_scale, v_scale;
  int num_tiles;
  typename T::Order order;
  typename T::Schedule schedule;

  CUTLASS_DEVICE typename T::MaskType mask() const { return {seqlen_q, seqlen_k}; }
};

__device__ float const kNoScale = 1.f;

// The scales of one head; a 1 for all rows if there are none (then the strides are 0).
struct HeadScales {
  float const* first;
  int64_t block_stride;
  int log2_block;

  CUTLASS_DEVICE HeadScales(Fp8Scales const& scales, int batch, int head)
      : first(scales.ptr != nullptr
                  ? scales.ptr + batch * scales.batch_stride + head * scales.head_stride
                  : &kNoScale),
        block_stride(scales.block_stride),
        log2_block(scales.log2_block) {}

  CUTLASS_DEVICE float of_row(int row) const {
    return __ldg(first + (row >> log2_block) * block_stride);
  }
};

}  // namespace flash3
