// What the forward kernel receives: descriptors and plain numbers, in constant memory.
#pragma once

#include "common/tma.cuh"
#include "forward/traits.cuh"

namespace flash3 {

template <class Row>
struct FwdArgs {
  using T = FwdTraits<Row>;

  CUtensorMap q, k, v;  // boxes of tile.m, tile.n, tile.n rows
  CUtensorMap o;        // boxes of 16 rows, one per warp
  float* lse;           // (batch, heads_q, seqlen_q)
  int seqlen_q, seqlen_k, num_heads_q, qheads_per_kvhead;
  float softmax_scale;
  int num_tiles;
  typename T::Order order;
  typename T::Schedule schedule;

  CUTLASS_DEVICE typename T::MaskType mask() const { return {seqlen_q, seqlen_k}; }
};

}  // namespace flash3
