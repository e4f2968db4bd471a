// The e4m3 forward kernel's shared memory.
#pragma once

#include "common/ring.cuh"
#include "fp8/traits.cuh"

namespace flash3 {

// Scales of a key block, beside its K: those of V are needed with the scores, before V is.
template <int kGroups>
struct KeyScales {
  float k[kGroups], v_log2[kGroups];
};

template <class Row>
struct Fp8Smem {
  using T = Fp8Traits<Row>;
  using Element = typename T::Element;

  struct Tile : WorkTile {
    float q_scales[T::kMmaWarpgroups];
  };

  alignas(1024) Element q[T::kQSlots][T::TileQ::kBytes];
  alignas(1024) Element k[T::kKvSlots][T::TileKV::kBytes];
  alignas(1024) Element v[T::kKvSlots][T::TileKV::kBytes];   // as it comes
  alignas(1024) Element vt[T::kKvSlots][T::TileVt::kBytes];  // as P V reads it
  alignas(16) KeyScales<T::kScaleGroups> scales[T::kKvSlots];
  Tile tiles[2];
  Ring<T::kQSlots> q_ring;
  Ring<T::kKvSlots> k_ring;
  Ring<T::kKvSlots> v_ring;   // from TMA to the transposers
  Ring<T::kKvSlots> vt_ring;  // from the transposers, or from TMA, to the consumers
  Ring<2> tile_ring;

  CUTLASS_DEVICE void init_barriers(bool v_transposed) {
    q_ring.init(T::kConsumerWarps);
    k_ring.init(T::kConsumerWarps);
    v_ring.init(T::kTransposerWarps);
    vt_ring.init(T::kConsumerWarps, v_transposed ? 1 : T::kTransposerWarps);
    tile_ring.init(T::kConsumerWarps + T::kTransposerWarps);
  }
};

inline constexpr int kNoMoreFp8Tiles = -1;  // the block of a tile that is none

}  // namespace flash3
