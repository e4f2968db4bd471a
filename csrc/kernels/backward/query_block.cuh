// Which query block a CTA of the kernels before and after the main one takes.
#pragma once

#include "backward/traits.cuh"

namespace flash3 {

// What the arguments of both kernels begin with: nothing, or the list of a packed row.
struct NoList {};
template <class Row>
using QueryBlocks = std::conditional_t<BwdTraits<Row>::kPacked, BlockList, NoList>;

// A packed query block of one head; all heads of a block lie side by side, as their rows do in
// memory.
struct PackedQueryBlock {
  bool exists;  // the grid is for the largest number of blocks that there can be
  int m_block, head;
  int used, slot;   // rows of the sequence, from `start` on
  int64_t start;    // in packed tensors
  int64_t q_first;  // place of the sequence's first block in the list
};

CUTLASS_DEVICE PackedQueryBlock packed_query_block(BlockList const& list, int num_heads_q) {
  int const place = blockIdx.x / num_heads_q;
  if (place >= *list.count) return {.exists = false};
  ListedBlock const at = list.blocks[place];
  return {.exists = true,
          .m_block = place - at.first,
          .head = int(blockIdx.x % num_heads_q),
          .used = at.q.length,
          .slot = at.slot,
          .start = at.q.start,
          .q_first = at.first};
}

// The first row of a block's sequence and head.
CUTLASS_DEVICE TensorView first_row(TensorView view, PackedQueryBlock const& at,
                                    int element_bytes) {
  int64_t const elements = at.head * view.head_stride + at.start * view.seqlen_stride;
  view.ptr = static_cast<char*>(view.ptr) + elements * element_bytes;
  return view;
}

}  // namespace flash3
