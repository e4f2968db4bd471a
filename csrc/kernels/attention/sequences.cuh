// Where the sequence of a tile lies: a batch entry of tensors whose sequences are equally long, or
// a range of rows of packed tensors.
#pragma once

#include <cstddef>
#include <type_traits>

#include "attention/scheduler.cuh"
#include "common/tma.cuh"
#include "params.h"

namespace flash3 {

// Dense: a sequence is the number of its batch entry.
struct DenseSequences {
  struct Lengths {};  // those of the call
  CUTLASS_DEVICE static Lengths lengths(int) { return {}; }
  CUTLASS_DEVICE static int q(Lengths, int seqlen_q) { return seqlen_q; }
  CUTLASS_DEVICE static int k(Lengths, int seqlen_k) { return seqlen_k; }
  // What TileCoord takes: to load rows of Q or K, and to store to a block of queries or keys.
  CUTLASS_DEVICE static int rows_q(int batch) { return batch; }
  CUTLASS_DEVICE static int rows_k(int batch) { return batch; }
  CUTLASS_DEVICE static int slot_q(int batch) { return batch; }
  CUTLASS_DEVICE static int slot_k(int batch) { return batch; }
};

// Packed: the rows that a sequence uses, and its slot on the side whose blocks are the tiles.
struct PackedSequence {
  RowRange q, k;
  int slot;
  int q_first;  // place of its first block in the list of query blocks
};

struct PackedSequences {
  // Refers to the sequence: in the forward's consumers that lies in shared memory, and a length is
  // read where it is needed instead of held in a register.
  struct Lengths {
    PackedSequence const* of;
  };
  CUTLASS_DEVICE static Lengths lengths(PackedSequence const& at) { return {&at}; }
  CUTLASS_DEVICE static int q(Lengths lengths, int) { return lengths.of->q.length; }
  CUTLASS_DEVICE static int k(Lengths lengths, int) { return lengths.of->k.length; }
  CUTLASS_DEVICE static RowRange rows_q(PackedSequence at) { return at.q; }
  CUTLASS_DEVICE static RowRange rows_k(PackedSequence at) { return at.k; }
  // Rows of the slot behind the used ones are stored too: as zeros.
  CUTLASS_DEVICE static RowRange slot_q(PackedSequence at) { return {at.q.start, at.slot}; }
  CUTLASS_DEVICE static RowRange slot_k(PackedSequence at) { return {at.k.start, at.slot}; }
};

struct PackedTile {
  int block, head;
  int kv_head;  // that `head` reads
  PackedSequence batch;
};

enum class Side { kQueries, kKeys };

// Tiles of packed sequences: one sequence after the other, each in the order that a batch of one
// has. Blocks of a slot behind the rows that its sequence uses see nothing of the other side: they
// only have zeros to write.
template <class OrderInSequence, Side kSide, int kBlockRows>
struct PackedOrder {
  BlockList list;
  int num_heads;  // of the side whose blocks are the tiles
  int heads_per_kvhead;

  CUTLASS_DEVICE int num_tiles() const { return *list.count * num_heads; }
  CUTLASS_DEVICE PackedTile operator()(int index) const {
    static_assert(sizeof(ListedBlock) == 2 * sizeof(int4) && offsetof(ListedBlock, slot) == 16);
    auto const* const halves = reinterpret_cast<int4 const*>(list.blocks + index / num_heads);
    int4 const rows = halves[0];   // q, k
    int4 const place = halves[1];  // slot, first, q_first, section_heads
    int const num_blocks = (place.x + kBlockRows - 1) / kBlockRows;
    WorkTile const tile = in_sequence(num_blocks, place.w)(index - place.y * num_heads);
    PackedSequence at{{rows.x, rows.y}, {rows.z, rows.w}, place.x, place.z};
    int const first_row = tile.block * kBlockRows;
    if (kSide == Side::kQueries && first_row >= at.q.length) at.k.length = 0;
    if (kSide == Side::kKeys && first_row >= at.k.length) at.q.length = 0;
    return {tile.block, tile.head, tile.head / heads_per_kvhead, at};
  }

 private:
  CUTLASS_DEVICE OrderInSequence in_sequence(int num_blocks, int section_heads) const {
    if constexpr (std::is_same_v<OrderInSequence, InOrder>) {
      return {num_blocks, num_heads};
    } else {
      return {num_blocks, num_heads, num_heads, section_heads};
    }
  }
};

}  // namespace flash3
