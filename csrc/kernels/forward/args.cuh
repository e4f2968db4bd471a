// What the forward kernel receives: descriptors and plain numbers, in constant memory.
#pragma once

#include "attention/sequences.cuh"
#include "common/tma.cuh"
#include "forward/traits.cuh"

namespace flash3 {

template <class Row>
struct FwdArgs {
  using T = FwdTraits<Row>;

  CUtensorMap q, k, v;  // boxes of tile.m, tile.n, tile.n rows
  CUtensorMap o;        // boxes of 16 rows, one per warp
  float* lse;           // (batch, heads_q, seqlen_q); packed: (heads_q, total_q)
  typename T::Sequences sequences;
  int num_heads_q, qheads_per_kvhead;
  float softmax_scale;
  int num_tiles;  // of a dense row; a packed one's list knows
  typename T::Order order;
  typename T::Schedule schedule;

  using Lengths = typename T::Sequences::Lengths;
  CUTLASS_DEVICE typename T::MaskType mask(Lengths lengths) const {
    return {sequences.q(lengths), sequences.k(lengths)};
  }
};

}  // namespace flash3
