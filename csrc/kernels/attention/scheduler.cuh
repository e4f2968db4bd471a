// Which tile a CTA works on next. Tiles are (block, head, batch), the block one of queries in the
// forward and of keys in the backward; a head of a batch entry is numbered batch * heads + head.
#pragma once

#include <cutlass/cutlass.h>

namespace flash3 {

struct WorkTile {
  int block, head, batch;
};

// Tiles in memory order: CTAs that run side by side share the keys and values of a head.
struct InOrder {
  int num_blocks, num_heads;

  CUTLASS_DEVICE WorkTile operator()(int index) const {
    int const head_and_batch = index / num_blocks;
    return {index % num_blocks, head_and_batch % num_heads, head_and_batch / num_heads};
  }
};

// Block by block over a section of heads, whose operands stay in L2 together: all heads' first
// block, then all heads' second.
struct BlockByBlock {
  int num_blocks, num_heads, num_heads_total, section_heads;

  CUTLASS_DEVICE WorkTile operator()(int index) const {
    int const section = index / (section_heads * num_blocks);
    int const in_section = index - section * section_heads * num_blocks;
    int const first_head = section * section_heads;
    int const heads = min(section_heads, num_heads_total - first_head);
    int const head_and_batch = first_head + in_section % heads;
    return {in_section / heads, head_and_batch % num_heads, head_and_batch / num_heads};
  }
};

// Block by block from the last, which under a causal mask has the most keys to visit: longest
// first, so that light tiles at the end even out the finish.
struct LongestFirst : BlockByBlock {
  CUTLASS_DEVICE WorkTile operator()(int index) const {
    WorkTile tile = BlockByBlock::operator()(index);
    tile.block = num_blocks - 1 - tile.block;
    return tile;
  }
};

// Heads of a section if each brings `head_bytes` to L2 and there are `heads_total`: as many as L2
// holds, but enough of them that tiles of one length come in numbers.
CUTLASS_HOST_DEVICE int heads_per_section(long long head_bytes, int least, int heads_total) {
  constexpr long long kSectionBytes = 32LL << 20;  // of the 50 MB of a Hopper L2
  long long const fitting = kSectionBytes / (head_bytes > 0 ? head_bytes : 1);
  long long const heads = fitting > least ? fitting : least;
  return static_cast<int>(heads < heads_total ? heads : heads_total);
}

// The sequence of tile indices of one CTA of a persistent grid. The CTA asks once after each tile
// that it has, and says what it was answered when it no longer minds waiting for the answer.
struct StaticSchedule {
  CUTLASS_DEVICE int first() const { return blockIdx.x; }
  CUTLASS_DEVICE int after(int index) const { return index + gridDim.x; }
  CUTLASS_DEVICE void answered(int, int) const {}
};

struct DynamicSchedule {
  int* counter;  // tiles asked for so far beyond each CTA's first; 0 before and after the launch

  CUTLASS_DEVICE int first() const { return blockIdx.x; }
  CUTLASS_DEVICE int after(int) const { return gridDim.x + atomicAdd(counter, 1); }
  // Each tile is asked a successor for, so the answer of the last asker is known: nobody uses the
  // counter after it.
  CUTLASS_DEVICE void answered(int next, int num_tiles) const {
    if (next - int(gridDim.x) == num_tiles - 1) *counter = 0;
  }
};

// The same with a counter that an earlier kernel has set to 0.
struct CountedSchedule {
  int* counter;

  CUTLASS_DEVICE int first() const { return blockIdx.x; }
  CUTLASS_DEVICE int after(int) const { return gridDim.x + atomicAdd(counter, 1); }
  CUTLASS_DEVICE void answered(int, int) const {}
};

}  // namespace flash3
