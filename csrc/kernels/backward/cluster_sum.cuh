// dK and dV of a cluster, whose CTAs own a block of keys together and have visited different query
// heads.
//
// A piece is a box of columns of dK or dV. Each CTA leaves its fp32 pieces in its own shared
// memory, in fragment order, over the operands that it no longer needs. The CTA of rank r then
// reads pieces r, r + cluster size, ... of all CTAs through distributed shared memory, adds them up
// in the order of the ranks, so that every run has the same result, and stores the sums.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "backward/args.cuh"
#include "backward/smem.cuh"
#include "common/stage_rows.cuh"

namespace flash3 {

// Reads `local`, an address in this CTA's shared memory, in the CTA of `rank` in the cluster.
CUTLASS_DEVICE float4 load_from_cta(float4 const* local, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(cast_smem_ptr_to_uint(local)), "r"(rank));
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(remote));
  return value;
}

template <class Row>
struct BwdClusterSum {
  using T = BwdTraits<Row>;
  using Element = typename T::Element;
  using KeyTile = typename BwdArgs<Row>::KeyTile;
  static constexpr int kDkPieces = T::kDkColumns / T::kBox;  // of a warpgroup
  static constexpr int kDvPieces = T::kDvColumns / T::kBox;
  static constexpr int kPieces = kDkPieces + kDvPieces;
  static constexpr int kVectors =
      T::kBox * kRowsPerWarpgroup / kThreadsPerWarpgroup / 4;  // of a thread
  static constexpr int kConsumerRows = T::kMmaWarpgroups * kRowsPerWarpgroup;
  using Piece = float4[kVectors][T::kConsumerThreads];
  // Behind the pieces, the slots of dS stage the sums.
  static_assert(kPieces * sizeof(Piece) <= offsetof(BwdSmem<Row>, ds));
  static_assert(kConsumerRows * T::kBox <= T::kN * T::kM * T::kDsSlots);

  BwdArgs<Row> const& args;
  BwdSmem<Row>& smem;
  int const warpgroup;

  // Called by all consumers once all have left the main loop; the stores may still be under way.
  template <class Dk, class Dv>
  CUTLASS_DEVICE void run(KeyTile tile, Dk const& dk, Dv const& dv) {
    leave<kDkPieces>(dk, 0);
    leave<kDvPieces>(dv, kDkPieces);
    // Release and acquire, of the threads that have not ended: the producer has.
    cute::cluster_arrive();
    cute::cluster_wait();
    for (int piece = args.cluster_rank(); piece < kPieces; piece += args.cluster_size) {
      store_sum(tile, piece);
    }
    // No CTA may end, and lose its shared memory, before the others have read it.
    cute::cluster_arrive();
    cute::cluster_wait();
  }

 private:
  CUTLASS_DEVICE Piece* pieces() { return reinterpret_cast<Piece*>(&smem); }
  CUTLASS_DEVICE static int consumer_thread() { return threadIdx.x - kThreadsPerWarpgroup; }

  template <int kCount, class Gradient>
  CUTLASS_DEVICE void leave(Gradient const& gradient, int first_piece) {
    auto const vectors = recast<float4 const>(gradient);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount * kVectors; ++i) {
      pieces()[first_piece + i / kVectors][i % kVectors][consumer_thread()] = vectors(i);
    }
  }

  CUTLASS_DEVICE void store_sum(KeyTile tile, int piece) {
    // ((2, 2, kBox / 8), 1, 1) fp32, the fragment's part for a box
    Tensor sum = make_tensor<float>(Shape<Shape<_2, _2, Int<T::kBox / 8>>, _1, _1>{});
    clear(sum);
    auto vectors = recast<float4>(sum);
    for (int rank = 0; rank < args.cluster_size; ++rank) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        float4 const value = load_from_cta(&pieces()[piece][i][consumer_thread()], rank);
        vectors(i).x += value.x;
        vectors(i).y += value.y;
        vectors(i).z += value.z;
        vectors(i).w += value.w;
      }
    }
    Tensor rounded = make_tensor<Element>(sum.layout());
    convert(sum, rounded);
    int const row = warp_row_in_tile(T::kKeysShared ? 0 : warpgroup);
    bool const first_lane = threadIdx.x % kThreadsPerWarp == 0;
    if (first_lane) tma_store_wait<0>();  // the piece before it, from the same rows
    __syncwarp();
    Element* const staging = smem.ds[0] + (T::kKeysShared ? warpgroup * T::kN * T::kBox : 0);
    bool const of_dk = piece < kDkPieces;
    int const first_box = T::kKeysShared ? warpgroup * (of_dk ? kDkPieces : kDvPieces) : 0;
    stage_warp_rows<T::kN, T::kBox, T::kBox>(rounded, staging, row);
    if (first_lane) {
      static_assert(kDvPieces <= kDkPieces, "the remainder below is the place among dV's");
      tma_store_box(
          of_dk ? args.dk : args.dv, staging + row * T::kBox,
          (first_box + piece % kDkPieces) * T::kBox,
          TileCoord{tile.n_block * T::kN + row, tile.kv_head, T::Sequences::slot_k(tile.batch)});
      tma_store_arrive();
    }
  }
};

}  // namespace flash3
