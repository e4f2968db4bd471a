// The producer: one thread that hands out tiles and keeps the Q, K and V rings full.
#pragma once

#include "forward/args.cuh"
#include "forward/smem.cuh"

namespace flash3 {

template <class Row>
struct FwdProducer {
  using T = FwdTraits<Row>;

  FwdArgs<Row> const& args;
  FwdSmem<Row>& smem;
  typename Ring<T::kQSlots>::Cursor q_at;
  typename Ring<T::kKvSlots>::Cursor k_at, v_at;
  Ring<2>::Cursor tile_at;

  CUTLASS_DEVICE void run() {
    if constexpr (T::kPublishesAhead) {
      run_ahead();
    } else {
      run_in_turn();
    }
  }

 private:
  using Tile = typename T::TileArg;

  CUTLASS_DEVICE void run_in_turn() {
    int index = args.schedule.first();
    while (index < num_tiles()) {
      // Asked for now, used after this tile's loads: the counter's latency is hidden behind them.
      int const next = args.schedule.after(index);
      typename T::Tile const tile = args.order(index);
      int const slot = tile_at.slot;
      publish(tile);
      if constexpr (T::kPacked) {
        load(smem.tiles[slot], [] {});
      } else {
        load(tile, [] {});
      }
      args.schedule.answered(next, args.num_tiles);
      index = next;
    }
    publish({.block = kNoMoreTiles});
  }

  // Where a packed tile lies is read from global memory. The next one is published in the middle of
  // this one, where the producer would wait for slots anyway (E021).
  CUTLASS_DEVICE void run_ahead() {
    bool more = publish_listed(args.schedule.first());
    while (more) {
      int const next = args.schedule.after(0);
      load(smem.tiles[tile_at.slot ^ 1], [&] { more = publish_listed(next); });
    }
  }

  CUTLASS_DEVICE int num_tiles() const {
    if constexpr (T::kPacked) {
      return args.order.num_tiles();  // read each time: it would take a register
    } else {
      return args.num_tiles;
    }
  }

  CUTLASS_DEVICE bool publish_listed(int index) {
    bool const exists = index < num_tiles();
    if (exists) {
      publish(args.order(index));
    } else {
      publish({.block = kNoMoreTiles});
    }
    return exists;
  }

  CUTLASS_DEVICE void publish(typename T::Tile const& tile) {
    smem.tile_ring.wait_empty(tile_at);
    smem.tiles[tile_at.slot] = tile;
    smem.tile_ring.commit(tile_at);
    tile_at.advance();
  }

  // Consumers need K one block ahead of V, and Q first. Every tile starts at key 0: tiles of a head
  // that run side by side then read the same blocks at about the same time, which L2 serves better
  // than a staggered start (E006).
  //
  // `when_full` is called once, as soon as there is no slot left to fill at once.
  template <class WhenFull>
  CUTLASS_DEVICE void load(Tile tile, WhenFull when_full) {
    BlockRange const blocks = args.mask(T::Sequences::lengths(tile.batch))
                                  .template key_blocks<T::kM, T::kN>(tile.block * T::kM);
    load_q(tile);  // even if no row of the tile sees a key: the slot also carries O out
    if (blocks.begin == blocks.end) {
      when_full();
      return;
    }
    load_k(tile, blocks.begin);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int n = blocks.begin + 1; n < blocks.end; ++n) {
      load_k(tile, n);
      load_v(tile, n - 1);
      if (n == blocks.begin + 1) when_full();
    }
    load_v(tile, blocks.end - 1);
    if (blocks.end - blocks.begin == 1) when_full();
  }

  CUTLASS_DEVICE void load_q(Tile tile) {
    smem.q_ring.wait_empty(q_at);
    smem.q_ring.expect_bytes(q_at, T::kQBytes);
    tma_load_tile<T::kM, T::kHeadDim, T::kBox>(
        args.q, smem.q_ring.full(q_at), smem.q[q_at.slot],
        TileCoord{tile.block * T::kM, tile.head, T::Sequences::rows_q(tile.batch)},
        CacheHint::kEvictFirst);
    q_at.advance();
  }

  CUTLASS_DEVICE void load_k(Tile tile, int n_block) {
    smem.k_ring.wait_empty(k_at);
    smem.k_ring.expect_bytes(k_at, T::kKBytes);
    tma_load_tile<T::kN, T::kHeadDim, T::kBox>(args.k, smem.k_ring.full(k_at), smem.k[k_at.slot],
                                               kv_coord(tile, n_block), CacheHint::kEvictLast);
    k_at.advance();
  }

  CUTLASS_DEVICE void load_v(Tile tile, int n_block) {
    smem.v_ring.wait_empty(v_at);
    smem.v_ring.expect_bytes(v_at, T::kVBytes);
    tma_load_tile<T::kN, T::kHeadDimV, T::kBox>(args.v, smem.v_ring.full(v_at), smem.v[v_at.slot],
                                                kv_coord(tile, n_block), CacheHint::kEvictLast);
    v_at.advance();
  }

  CUTLASS_DEVICE auto kv_coord(Tile tile, int n_block) const {
    return TileCoord{n_block * T::kN, kv_head(tile), T::Sequences::rows_k(tile.batch)};
  }

  CUTLASS_DEVICE int kv_head(Tile tile) const {
    if constexpr (T::kPacked) {
      return tile.kv_head;
    } else {
      return tile.head / args.qheads_per_kvhead;
    }
  }
};

}  // namespace flash3
