// Which tile a CTA works on next. Tiles are (m_block, head, batch); a head of a batch entry is
// numbered batch * heads + head.
#pragma once

#include <cutlass/cutlass.h>

namespace flash3 {

struct WorkTile {
  int m_block, head, batch;
};

// Tiles in memory order: CTAs that run side by side share the keys and values of a head.
struct InOrder {
  int num_m_blocks, num_heads;

  CUTLASS_DEVICE WorkTile operator()(int index) const {
    int const head_and_batch = index / num_m_blocks;
    return {index % num_m_blocks, head_and_batch % num_heads, head_and_batch / num_heads};
  }
};

// Longest first, for causal masks: within a section of heads whose keys and values stay in L2
// together, all heads' last (heaviest) query block come first, then the blocks before. The light
// tiles at the end even out the finish.
struct LongestFirst {
  int num_m_blocks, num_heads, num_heads_total, section_heads;

  CUTLASS_DEVICE WorkTile operator()(int index) const {
    int const section = index / (section_heads * num_m_blocks);
    int const in_section = index - section * section_heads * num_m_blocks;
    int const first_head = section * section_heads;
    int const heads = min(section_heads, num_heads_total - first_head);
    int const head_and_batch = first_head + in_section % heads;
    return {num_m_blocks - 1 - in_section / heads, head_and_batch % num_heads,
            head_and_batch / num_heads};
  }
};

// Query heads whose keys and values (kv_bytes for each KV head) stay in L2 together, with room for
// the rest.
inline int heads_per_l2_section(long long kv_bytes, int qheads_per_kvhead) {
  constexpr long long kSectionBytes = 32LL << 20;  // of the 50 to 60 MB of a Hopper L2
  long long const kv_heads = kSectionBytes / (kv_bytes > 0 ? kv_bytes : 1);
  long long const section = (kv_heads > 1 ? kv_heads : 1) * qheads_per_kvhead;
  return section < (1 << 16) ? int(section) : (1 << 16);
}

// The sequence of tile indices of one CTA of a persistent grid.
struct StaticSchedule {
  CUTLASS_DEVICE int first() const { return blockIdx.x; }
  CUTLASS_DEVICE int after(int index) const { return index + gridDim.x; }
};

struct DynamicSchedule {
  int* counter;  // tiles handed out so far beyond each CTA's first

  CUTLASS_DEVICE int first() const { return blockIdx.x; }
  CUTLASS_DEVICE int after(int) const { return gridDim.x + atomicAdd(counter, 1); }
};

}  // namespace flash3
