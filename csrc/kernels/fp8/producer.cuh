// The producer warpgroup: one thread hands out tiles and loads Q, K, V and their scales; the three
// other warps turn V around, unless it comes transposed.
#pragma once

#include "fp8/args.cuh"
#include "fp8/smem.cuh"

namespace flash3 {

template <class Row>
struct Fp8Producer {
  using T = Fp8Traits<Row>;

  Fp8Args<Row> const& args;
  Fp8Smem<Row>& smem;
  typename Ring<T::kQSlots>::Cursor q_at;
  int num_tiles, num_blocks;  // published, loaded of K: cursors of their own would be spilled
  float k_scales[T::kScaleGroups], v_scales[T::kScaleGroups];  // of the next block: read ahead

  CUTLASS_DEVICE void run() {
    int index = args.schedule.first();
    while (index < args.num_tiles) {
      // Asked for now, used after this tile's loads.
      int const next = args.schedule.after(index);
      load(args.order(index));
      args.schedule.answered(next, args.num_tiles);
      index = next;
    }
    Ring<2>::Cursor const at = Ring<2>::after(num_tiles);
    smem.tile_ring.wait_empty(at);
    smem.tiles[at.slot].block = kNoMoreFp8Tiles;
    smem.tile_ring.commit(at);
  }

 private:
  struct KeyScaleReader {
    HeadScales k, v;
  };

  CUTLASS_DEVICE void load(WorkTile tile) {
    BlockRange const blocks = args.mask().template key_blocks<T::kM, T::kN>(tile.block * T::kM);
    WorkTile kv = tile;
    kv.head = tile.head / args.qheads_per_kvhead;
    float q_scales[T::kMmaWarpgroups];
    read_query_scales(tile, q_scales);
    KeyScaleReader const scales{{args.k_scales, kv.batch, kv.head},
                                {args.v_scales, kv.batch, kv.head}};
    read_key_scales(scales, blocks.begin);
    bool const any = blocks.begin < blocks.end;
    if (any) {
      load_q(tile);
      load_k(kv, scales, blocks.begin);
    }
    publish(tile, q_scales);  // late: the scales have to come
    if (!any) return;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int n = blocks.begin + 1; n < blocks.end; ++n) {
      load_k(kv, scales, n);
      load_v(kv, n - 1, num_blocks - 2);
    }
    load_v(kv, blocks.end - 1, num_blocks - 1);
  }

  CUTLASS_DEVICE void publish(WorkTile tile, float const (&q_scales)[T::kMmaWarpgroups]) {
    Ring<2>::Cursor const at = Ring<2>::after(num_tiles++);
    smem.tile_ring.wait_empty(at);
    auto& slot = smem.tiles[at.slot];
    static_cast<WorkTile&>(slot) = tile;
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < T::kMmaWarpgroups; ++w) slot.q_scales[w] = q_scales[w];
    smem.tile_ring.commit(at);
  }

  CUTLASS_DEVICE void read_query_scales(WorkTile tile, float (&scales)[T::kMmaWarpgroups]) const {
    HeadScales const of_head(args.q_scales, tile.batch, tile.head);
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < T::kMmaWarpgroups; ++w) {
      int const row = min(tile.block * T::kM + w * 64, args.seqlen_q - 1);
      scales[w] = of_head.of_row(row);
    }
  }

  CUTLASS_DEVICE void read_key_scales(KeyScaleReader const& from, int n_block) {
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < T::kScaleGroups; ++g) {
      int const row = min(n_block * T::kN + g * kScaleGroup, args.seqlen_k - 1);
      k_scales[g] = from.k.of_row(row);
      v_scales[g] = from.v.of_row(row);
    }
  }

  CUTLASS_DEVICE void load_q(WorkTile tile) {
    smem.q_ring.wait_empty(q_at);
    smem.q_ring.expect_bytes(q_at, T::TileQ::kBytes);
    T::TileQ::load(args.q, smem.q_ring.full(q_at), smem.q[q_at.slot],
                   TileCoord<int>{tile.block * T::kM, tile.head, tile.batch},
                   CacheHint::kEvictFirst);
    q_at.advance();
  }

  // `kv` is the tile with the head of K and V.
  CUTLASS_DEVICE void load_k(WorkTile kv, KeyScaleReader const& from, int n_block) {
    auto const at = Ring<T::kKvSlots>::after(num_blocks++);
    smem.k_ring.wait_empty(at);
    auto& scales = smem.scales[at.slot];
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < T::kScaleGroups; ++g) {
      scales.k[g] = k_scales[g];
      scales.v_log2[g] = v_scales[g] < 0x1p-100f ? -100.f : log2f(v_scales[g]);
    }
    smem.k_ring.expect_bytes(at, T::TileKV::kBytes);
    T::TileKV::load(args.k, smem.k_ring.full(at), smem.k[at.slot],
                    TileCoord<int>{n_block * T::kN, kv.head, kv.batch}, CacheHint::kEvictLast);
    read_key_scales(from, n_block + 1);
  }

  CUTLASS_DEVICE void load_v(WorkTile kv, int n_block, int index) {
    auto const at = Ring<T::kKvSlots>::after(index);
    if (args.v_transposed) {
      smem.vt_ring.wait_empty(at);
      smem.vt_ring.expect_bytes(at, T::TileVt::kBytes);
      T::TileVt::load(args.v, smem.vt_ring.full(at), smem.vt[at.slot],
                      TileCoord<int>{0, kv.head, kv.batch}, CacheHint::kEvictLast, n_block * T::kN);
    } else {
      smem.v_ring.wait_empty(at);
      smem.v_ring.expect_bytes(at, T::TileKV::kBytes);
      T::TileKV::load(args.v, smem.v_ring.full(at), smem.v[at.slot],
                      TileCoord<int>{n_block * T::kN, kv.head, kv.batch}, CacheHint::kEvictLast);
    }
  }
};

// Warps 1 to 3 of the producer warpgroup, for a V that comes with head_dim along its rows. They
// follow the same tiles, and walk the same key blocks, as the consumers.
template <class Row>
struct Fp8Transposer {
  using T = Fp8Traits<Row>;
  static constexpr int kPieces = T::kN / 32 * (T::kHeadDim / 16);  // of a block

  Fp8Args<Row> const& args;
  Fp8Smem<Row>& smem;
  int const warp;  // 0 .. kTransposerWarps - 1
  int num_blocks;  // turned around so far; a cursor of its own for each ring would be spilled

  CUTLASS_DEVICE void run() {
    for (int num_tiles = 0;; ++num_tiles) {
      Ring<2>::Cursor const tile_at = Ring<2>::after(num_tiles);
      smem.tile_ring.wait_full(tile_at);
      int const block = smem.tiles[tile_at.slot].block;
      __syncwarp();  // nothing else keeps the lanes of these warps together
      smem.tile_ring.release(tile_at);
      if (block == kNoMoreFp8Tiles) break;
      if (args.v_transposed) continue;
      BlockRange const blocks = args.mask().template key_blocks<T::kM, T::kN>(block * T::kM);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int n = blocks.begin; n < blocks.end; ++n) transpose_block();
    }
  }

 private:
  CUTLASS_DEVICE void transpose_block() {
    auto const at = Ring<T::kKvSlots>::after(num_blocks++);
    smem.v_ring.wait_full(at);
    smem.vt_ring.wait_empty(at);
    __syncwarp();
    auto const* const v = smem.v[at.slot];
    auto* const vt = smem.vt[at.slot];
    // Two pieces at a time, so that the second's reading runs beside the first's.
    CUTLASS_PRAGMA_NO_UNROLL
    for (int pair = warp; pair < kPieces / 2; pair += T::kTransposerWarps) {
      constexpr int kPairsAlongKeys = T::kN / 64;
      transpose_64x16<typename T::TileKV, typename T::TileVt>(v, vt, pair % kPairsAlongKeys,
                                                              pair / kPairsAlongKeys);
    }
    // stmatrix writes through the generic proxy, wgmma reads through the async one.
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    smem.v_ring.release(at);
    smem.vt_ring.commit_warp(at);
  }
};

}  // namespace flash3
