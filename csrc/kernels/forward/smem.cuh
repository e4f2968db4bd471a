// The forward kernel's shared memory.
#pragma once

#include "common/ring.cuh"
#include "forward/traits.cuh"

namespace flash3 {

template <class Row>
struct FwdSmem {
  using T = FwdTraits<Row>;
  using Element = typename T::Element;

  // A Q slot also stages the O tile that it led to: each warpgroup writes only the rows of Q that
  // it alone has read, and the slot goes back to the producer after the TMA store has read it.
  alignas(1024) Element q[T::kQSlots][T::kM * T::kHeadDim];
  alignas(1024) Element k[T::kKvSlots][T::kN * T::kHeadDim];
  alignas(1024) Element v[T::kKvSlots][T::kN * T::kHeadDimV];
  typename T::Tile tiles[2];
  Ring<T::kQSlots> q_ring;
  Ring<T::kKvSlots> k_ring;
  Ring<T::kKvSlots> v_ring;
  Ring<2> tile_ring;

  CUTLASS_DEVICE void init_barriers() {
    q_ring.init(T::kConsumerWarps);
    k_ring.init(T::kConsumerWarps);
    v_ring.init(T::kConsumerWarps);
    tile_ring.init(T::kConsumerWarps);
  }
};

inline constexpr int kNoMoreTiles = -1;  // the block of a tile that is none

}  // namespace flash3
