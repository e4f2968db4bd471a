// The backward kernel's shared memory.
#pragma once

#include "backward/args.cuh"
#include "common/ring.cuh"

namespace flash3 {

template <class Row>
struct BwdSmem {
  using T = BwdTraits<Row>;
  using Element = typename T::Element;

  alignas(1024) Element k[T::kN * T::kHeadDim];   // stages dK after the main loop
  alignas(1024) Element v[T::kN * T::kHeadDimV];  // stages dV after the main loop
  alignas(1024) Element q[T::kQSlots][T::kM * T::kHeadDim];
  alignas(1024) Element d_o[T::kDoSlots][T::kM * T::kHeadDimV];
  alignas(1024) Element ds[T::kDsSlots + T::kPSlots][T::kN * T::kM];  // dS^T, then P^T
  alignas(128) float lse_log2[T::kQSlots][T::kM];
  alignas(128) float dpsum[T::kDoSlots][T::kM];
  Ring<1> kv_ring;
  Ring<T::kQSlots> q_ring;    // Q and lse_log2
  Ring<T::kDoSlots> do_ring;  // dO and dpsum
  // dS^T of each warpgroup's keys, where they have keys of their own: the warps of one warpgroup
  // fill a slot, all consumer warps release it.
  Ring<T::kDsSlots> ds_rings[T::kMmaWarpgroups];
  // The CTA's tile, if the row is packed: read where it is needed, it takes no registers.
  using KeyTile = typename BwdArgs<Row>::KeyTile;
  using TileArg = std::conditional_t<T::kPacked, KeyTile const&, KeyTile>;
  struct Nothing {};
  [[no_unique_address]] std::conditional_t<T::kPacked, KeyTile, Nothing> tile;

  CUTLASS_DEVICE TileArg own_tile(BwdArgs<Row> const& args) const {
    if constexpr (T::kPacked) {
      return tile;
    } else {
      return args.tile();
    }
  }

  CUTLASS_DEVICE void init_barriers() {
    kv_ring.init(T::kConsumerWarps);
    q_ring.init(T::kConsumerWarps);
    do_ring.init(T::kConsumerWarps);
    for (auto& ring : ds_rings) ring.init(T::kConsumerWarps, kWarpsPerWarpgroup);
  }
};

}  // namespace flash3
