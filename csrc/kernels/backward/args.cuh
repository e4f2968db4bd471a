// What the backward's main kernel receives, and which keys and heads a CTA owns.
#pragma once

#include "backward/traits.cuh"
#include "common/tma.cuh"

namespace flash3 {

// A CTA owns one block of keys of one KV head and walks over the query heads of that head's group,
// so dK and dV need no sum across CTAs. Within a head, CTAs with fewer keys before them come first:
// deterministic dQ sums wait for those only.
struct KeyTile {
  int n_block, kv_head, batch;
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
  int num_heads_q, num_heads_kv, qheads_per_kvhead;
  int num_n_blocks, section_heads;
  float softmax_scale;

  CUTLASS_DEVICE typename T::MaskType mask() const { return {seqlen_q, seqlen_k}; }

  // Longest first within sections of KV heads whose queries and gradients share L2.
  CUTLASS_DEVICE KeyTile tile() const {
    int const heads_total = gridDim.x / num_n_blocks;
    int const section = blockIdx.x / (section_heads * num_n_blocks);
    int const in_section = blockIdx.x - section * section_heads * num_n_blocks;
    int const first_head = section * section_heads;
    int const heads = min(section_heads, heads_total - first_head);
    int const head_and_batch = first_head + in_section % heads;
    return {in_section / heads, head_and_batch % num_heads_kv, head_and_batch / num_heads_kv};
  }
  CUTLASS_DEVICE int64_t head_row(int batch, int head) const {
    return (int64_t(batch) * num_heads_q + head) * seqlen_q_rounded;
  }
};

}  // namespace flash3
