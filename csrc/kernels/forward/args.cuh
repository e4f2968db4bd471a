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
  [[no_unique_address]] typename T::Limits limits;
  void const* sink;  // (heads_q) or null
  bool sink_is_fp32;

  using Lengths = typename T::Sequences::Lengths;
  CUTLASS_DEVICE int length_q(Lengths lengths) const { return T::Sequences::q(lengths, seqlen_q); }
  CUTLASS_DEVICE int length_k(Lengths lengths) const { return T::Sequences::k(lengths, seqlen_k); }
  CUTLASS_DEVICE typename T::MaskType mask(Lengths lengths) const {
    if constexpr (T::kLocal) {
      return {length_q(lengths), length_k(lengths), limits.window};
    } else {
      return {length_q(lengths), length_k(lengths)};
    }
  }

  // What the scores that the softmax sees are multiplied by: capped ones are tanh(...) alone.
  CUTLASS_DEVICE float score_scale() const {
    if constexpr (T::kLocal) {
      if (limits.softcap > 0.f) return limits.softcap;
    }
    return softmax_scale;
  }

  CUTLASS_DEVICE float sink_of(int head) const {
    if (sink_is_fp32) return static_cast<float const*>(sink)[head];
    return float(static_cast<typename T::Element const*>(sink)[head]);
  }
};

}  // namespace flash3
