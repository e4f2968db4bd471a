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
  int seqlen_q, seqlen_k, num_heads_q, qheads_per_kvhead;  // packed: rows of all sequences together
  float softmax_scale;
  int num_tiles;  // of a dense row; a packed one's list knows
  typename T::Order order;
  typename T::Schedule schedule;

  using Lengths = typename T::Sequences::Lengths;
  CUTLASS_DEVICE int length_q(Lengths lengths) const { return T::Sequences::q(lengths, seqlen_q); }
  CUTLASS_DEVICE int length_k(Lengths lengths) const { return T::Sequences::k(lengths, seqlen_k); }
  CUTLASS_DEVICE typename T::MaskType mask(Lengths lengths) const {
    return {length_q(lengths), length_k(lengths)};
  }
};

}  // namespace flash3
