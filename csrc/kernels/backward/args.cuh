// What the backward's main kernel receives, and which keys and heads a CTA owns.
#pragma once

#include "attention/scheduler.cuh"
#include "backward/traits.cuh"
#include "common/tma.cuh"

namespace flash3 {

// A CTA owns one block of keys of one KV head and walks over query heads of that head's group. If
// there would be too few CTAs, those of a cluster own a block together: each takes an equal share
// of the query heads, and they sum dK and dV (cluster_sum.cuh). Within a head, CTAs with fewer keys
// before them come first: under a causal mask they have the most queries, and deterministic dQ sums
// wait for those only.
template <class Sequence>
struct KeyTileOf {
  int n_block, kv_head;
  Sequence batch;
  int first_q_head, num_q_heads;

  CUTLASS_DEVICE int num_steps(BlockRange query_blocks) const {
    return (query_blocks.end - query_blocks.begin) * num_q_heads;
  }
};

// Where the walk of a CTA over its query blocks, and in each over its query heads, stands. Under a
// causal mask the last block comes first: every key block of a head sees it, so that CTAs that
// start together meet the same blocks at about the same time, which deterministic sums need (E020).
template <MaskKind kMask>
struct QueryBlockOf {
  static constexpr bool kLastFirst = kMask == MaskKind::kCausal;
  int head, m_block;

  template <class KeyTile>
  CUTLASS_DEVICE static QueryBlockOf first(KeyTile const& tile, BlockRange blocks) {
    return {tile.first_q_head, kLastFirst ? blocks.end - 1 : blocks.begin};
  }
  template <class KeyTile>
  CUTLASS_DEVICE void advance(KeyTile const& tile) {
    if (++head == tile.first_q_head + tile.num_q_heads) {
      head = tile.first_q_head;
      m_block += kLastFirst ? -1 : 1;
    }
  }
};

template <class Row>
struct BwdArgs {
  using T = BwdTraits<Row>;
  using KeyTile = KeyTileOf<typename T::Sequence>;

  CUtensorMap q, d_o;     // boxes of tile.m rows
  CUtensorMap k, v;       // boxes of tile.n rows
  CUtensorMap dk, dv;     // boxes of 16 rows, one per warp
  float const* lse_log2;  // (batch, heads_q, seqlen_q_rounded); +inf where a row sees no key or
                          // does not exist
  float const* dpsum;     // likewise; 0 where a row does not exist
  float* dq_accum;        // (batch, heads_q, m_blocks) blocks of m * head_dim in fragment order
  int* dq_turn;           // (batch, heads_q, m_blocks) or null
  int seqlen_q, seqlen_k, seqlen_q_rounded;  // packed: rows of all sequences together
  int num_heads_q, qheads_per_kvhead;
  int cluster_size;
  typename T::Order order;
  float softmax_scale;
  [[no_unique_address]] typename T::Limits limits;

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
  // What scores are multiplied by before the exponential: capped ones are tanh(...) alone.
  CUTLASS_DEVICE float score_scale() const {
    if constexpr (T::kLocal) {
      if (limits.softcap > 0.f) return limits.softcap;
    }
    return softmax_scale;
  }
  // The key block that is the first to visit a query block.
  CUTLASS_DEVICE int first_n_block(Lengths lengths, int m_block) const {
    if constexpr (T::kLocal) {
      return mask(lengths).template key_blocks<T::kM, T::kN>(m_block * T::kM).begin;
    } else {
      return 0;
    }
  }

  // The grid of a packed row is for the largest number of key blocks that there can be.
  CUTLASS_DEVICE bool no_tile() const {
    if constexpr (T::kPacked) {
      return int(blockIdx.x / cluster_size) >= order.num_tiles();
    } else {
      return false;
    }
  }
  CUTLASS_DEVICE int cluster_rank() const { return blockIdx.x % cluster_size; }
  CUTLASS_DEVICE KeyTile tile() const {
    auto const at = order(blockIdx.x / cluster_size);
    int const share = qheads_per_kvhead / cluster_size;
    return {at.block, at.head, at.batch, at.head * qheads_per_kvhead + cluster_rank() * share,
            share};
  }
  CUTLASS_DEVICE int64_t head_row(typename T::Sequence const& batch, int head) const {
    if constexpr (T::kPacked) {
      return int64_t(head) * seqlen_q_rounded + batch.q_first * T::kM;
    } else {
      return (int64_t(batch) * num_heads_q + head) * seqlen_q_rounded;
    }
  }
};

}  // namespace flash3
