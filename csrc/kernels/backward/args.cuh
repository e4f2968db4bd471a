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
struct KeyTile {
  int n_block, kv_head, batch;
  int first_q_head, num_q_heads;
};

template <class Row>
struct BwdArgs {
  using T = BwdTraits<Row>;

  CUtensorMap q, d_o;     // boxes of tile.m rows
  CUtensorMap k, v;       // boxes of tile.n rows
  CUtensorMap dk, dv;     // boxes of 16 rows, one per warp
  float const* lse_log2;  // (batch, heads_q, seqlen_q_rounded); +inf where a row sees no key or
                          // does not exist
  float const* dpsum;     // likewise; 0 where a row does not exist
  float* dq_accum;        // (batch, heads_q, m_blocks) blocks of m * head_dim in fragment order
  int* dq_turn;           // (batch, heads_q, m_blocks) or null
  int seqlen_q, seqlen_k, seqlen_q_rounded;
  int num_heads_q, qheads_per_kvhead;
  int cluster_size;
  BlockByBlock order;
  float softmax_scale;

  CUTLASS_DEVICE typename T::MaskType mask() const { return {seqlen_q, seqlen_k}; }

  CUTLASS_DEVICE int cluster_rank() const { return blockIdx.x % cluster_size; }
  CUTLASS_DEVICE KeyTile tile() const {
    WorkTile const at = order(blockIdx.x / cluster_size);
    int const share = qheads_per_kvhead / cluster_size;
    return {at.block, at.head, at.batch, at.head * qheads_per_kvhead + cluster_rank() * share,
            share};
  }
  CUTLASS_DEVICE int64_t head_row(int batch, int head) const {
    return (int64_t(batch) * num_heads_q + head) * seqlen_q_rounded;
  }
};

}  // namespace flash3
