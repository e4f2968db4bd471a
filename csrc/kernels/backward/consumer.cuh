// A consumer warpgroup of the backward: 64 keys of the CTA's block against every query block, five
// GEMMs a step (FlashAttention-2, algorithm 2; FlashAttention-3, algorithm 3):
//
//   S^T = K Q^T      P^T = exp2(S^T * scale - LSE)      dV += P^T dO
//   dP^T = V dO^T    dS^T = P^T * (dP^T - dPsum)        dK += dS^T Q       dQ += dS K
//
// dQ sums over all keys of the CTA, so dS is exchanged through shared memory. There are two main
// loops: consumer_own_keys.cuh and, for wide heads, consumer_shared_keys.cuh.
#pragma once

#include "backward/args.cuh"
#include "backward/cluster_sum.cuh"
#include "backward/consumer_own_keys.cuh"
#include "backward/consumer_shared_keys.cuh"
#include "backward/smem.cuh"
#include "common/stage_rows.cuh"

namespace flash3 {

template <class Row>
struct BwdConsumer {
  using T = BwdTraits<Row>;
  using Element = typename T::Element;
  using KeyTile = typename BwdArgs<Row>::KeyTile;
  using TileArg = typename BwdSmem<Row>::TileArg;
  using MainLoop = std::conditional_t<T::kKeysShared, BwdSharedKeys<Row>, BwdOwnKeys<Row>>;

  BwdArgs<Row> const& args;
  BwdSmem<Row>& smem;
  int const warpgroup;  // 0 .. mma_warpgroups - 1

  CUTLASS_DEVICE void run() {
    TileArg tile = smem.own_tile(args);
    BlockRange const blocks = args.mask(T::Sequences::lengths(tile.batch))
                                  .template query_blocks<T::kM, T::kN>(tile.n_block * T::kN);
    Tensor dk = BwdGemms<Row>::dk();
    Tensor dv = BwdGemms<Row>::dv();
    clear(dk);
    clear(dv);
    if (blocks.begin < blocks.end) {
      smem.kv_ring.wait_full({});
      MainLoop{args, smem, warpgroup}.run(tile, blocks, dk, dv);
    }
    write_output(tile, dk, dv);
  }

 private:
  CUTLASS_DEVICE int first_key() const { return warp_row_in_tile(T::kKeysShared ? 0 : warpgroup); }

  template <class Dk, class Dv>
  CUTLASS_DEVICE void write_output(KeyTile tile, Dk& dk, Dv& dv) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(dk); ++i) dk(i) *= args.softmax_scale;
    // K is the B operand of every warpgroup's dQ, so all must be done before dK overwrites it.
    named_barrier_sync(BwdBarrier::kConsumersDone, T::kConsumerThreads);
    if (args.cluster_size > 1) {
      BwdClusterSum<Row>{args, smem, warpgroup}.run(tile, dk, dv);
    } else {
      write_gradient<T::kDvColumns>(args.dv, dv, smem.v, tile);
      write_gradient<T::kDkColumns>(args.dk, dk, smem.k, tile);
    }
    if (threadIdx.x % kThreadsPerWarp == 0) tma_store_wait<0>();
  }

  template <int kColumns, class Gradient>
  CUTLASS_DEVICE void write_gradient(CUtensorMap const& map, Gradient const& gradient,
                                     Element* staging, KeyTile tile) {
    Tensor rounded = make_tensor<Element>(gradient.layout());
    convert(gradient, rounded);
    int const first_column = T::kKeysShared ? warpgroup * kColumns : 0;
    stage_warp_rows<T::kN, kColumns, T::kBox>(rounded, staging, first_key(), first_column);
    store_warp_rows<T::kN, kColumns, T::kBox>(
        map, staging, first_key(),
        TileCoord{tile.n_block * T::kN, tile.kv_head, T::Sequences::slot_k(tile.batch)},
        first_column / T::kBox);
  }
};

}  // namespace flash3
