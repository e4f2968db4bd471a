// The producer: one thread that loads K and V once, then streams Q, dO and their row statistics.
#pragma once

#include "backward/args.cuh"
#include "backward/smem.cuh"

namespace flash3 {

template <class Row>
struct BwdProducer {
  using T = BwdTraits<Row>;
  using TileArg = typename BwdSmem<Row>::TileArg;
  using Coord = decltype(TileCoord{0, 0, T::Sequences::rows_q({})});

  BwdArgs<Row> const& args;
  BwdSmem<Row>& smem;
  typename Ring<T::kQSlots>::Cursor q_at;
  typename Ring<T::kDoSlots>::Cursor do_at;

  CUTLASS_DEVICE void run() {
    TileArg tile = smem.own_tile(args);
    BlockRange const blocks = args.mask(T::Sequences::lengths(tile.batch))
                                  .template query_blocks<T::kM, T::kN>(tile.n_block * T::kN);
    if (blocks.begin >= blocks.end) return;  // no query sees these keys
    load_kv(tile);
    auto at = QueryBlockOf<Row::key.mask>::first(tile, blocks);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int steps = tile.num_steps(blocks); steps > 0; --steps, at.advance(tile)) {
      Coord const coord{at.m_block * T::kM, at.head, T::Sequences::rows_q(tile.batch)};
      load_q(tile, coord);
      load_do(tile, coord);
    }
  }

 private:
  CUTLASS_DEVICE void load_kv(TileArg tile) {
    Ring<1>::Cursor const at;
    TileCoord const coord{tile.n_block * T::kN, tile.kv_head, T::Sequences::rows_k(tile.batch)};
    smem.kv_ring.expect_bytes(at, T::kKBytes + T::kVBytes);
    tma_load_tile<T::kN, T::kHeadDim, T::kBoxOfK>(args.k, smem.kv_ring.full(at), smem.k, coord,
                                                  CacheHint::kEvictFirst);
    tma_load_tile<T::kN, T::kHeadDimV, T::kBox>(args.v, smem.kv_ring.full(at), smem.v, coord,
                                                CacheHint::kEvictFirst);
  }

  CUTLASS_DEVICE void load_q(TileArg tile, Coord coord) {
    smem.q_ring.wait_empty(q_at);
    smem.q_ring.expect_bytes(q_at, T::kQBytes + T::kRowStatBytes);
    tma_load_tile<T::kM, T::kHeadDim, T::kBox>(args.q, smem.q_ring.full(q_at), smem.q[q_at.slot],
                                               coord, CacheHint::kEvictLast);
    bulk_load(smem.lse_log2[q_at.slot],
              args.lse_log2 + args.head_row(tile.batch, coord.head) + coord.row, T::kRowStatBytes,
              smem.q_ring.full(q_at));
    q_at.advance();
  }

  CUTLASS_DEVICE void load_do(TileArg tile, Coord coord) {
    smem.do_ring.wait_empty(do_at);
    smem.do_ring.expect_bytes(do_at, T::kDoBytes + T::kRowStatBytes);
    tma_load_tile<T::kM, T::kHeadDimV, T::kBox>(args.d_o, smem.do_ring.full(do_at),
                                                smem.d_o[do_at.slot], coord, CacheHint::kEvictLast);
    bulk_load(smem.dpsum[do_at.slot],
              args.dpsum + args.head_row(tile.batch, coord.head) + coord.row, T::kRowStatBytes,
              smem.do_ring.full(do_at));
    do_at.advance();
  }
};

}  // namespace flash3
