// Types that follow from one backward row of csrc/variants/table.py.
#pragma once

#include "attention/mask.cuh"
#include "attention/sequences.cuh"
#include "common/roles.cuh"
#include "common/wgmma.cuh"
#include "plan.h"

namespace flash3 {

template <class Row>
struct BwdTraits {
  using Element = typename Row::Element;
  static constexpr int kM = Row::tile.m;                 // query rows per step
  static constexpr int kN = Row::tile.n;                 // keys per CTA
  static constexpr int kHeadDim = Row::key.head_dim;     // of Q and K
  static constexpr int kHeadDimV = Row::key.head_dim_v;  // of V and dO
  static constexpr int kQSlots = Row::tile.q_stages;
  static constexpr int kDoSlots = Row::tile.do_stages;
  static constexpr int kDsSlots = 2;
  static constexpr int kMmaWarpgroups = Row::tile.mma_warpgroups;
  static constexpr int kConsumerWarps = kMmaWarpgroups * kWarpsPerWarpgroup;
  static constexpr int kConsumerThreads = kMmaWarpgroups * kThreadsPerWarpgroup;
  static constexpr int kThreads = kConsumerThreads + kThreadsPerWarpgroup;
  static constexpr RegisterBudget kRegisters = {24, 240};
  static_assert(fits_launch(kRegisters, kMmaWarpgroups));
  static_assert(kMmaWarpgroups == 2, "the register budget is for two consumer warpgroups");
  // With 64 keys a warpgroup has all of them, and the two divide what else there is: the queries of
  // the scores, the columns of the gradients. At head_dim 256 a warpgroup could not hold dK and dV
  // of 64 keys of its own.
  static constexpr bool kKeysShared = kN == 64;
  static_assert(kKeysShared || kN == 64 * kMmaWarpgroups, "64 keys in a warpgroup's accumulators");
  static constexpr int kPSlots = kKeysShared ? kDsSlots : 0;  // P^T is exchanged as dS^T is
  static constexpr int kScoreColumns = kKeysShared ? kM / kMmaWarpgroups : kM;
  static constexpr int kDkColumns = kKeysShared ? kHeadDim / kMmaWarpgroups : kHeadDim;
  static constexpr int kDvColumns = kKeysShared ? kHeadDimV / kMmaWarpgroups : kHeadDimV;

  static constexpr bool kPacked = Row::key.layout == SeqLayout::kPacked;
  using Sequence = std::conditional_t<kPacked, PackedSequence, int>;  // what TileCoord comes from
  using Sequences = std::conditional_t<kPacked, PackedSequences, DenseSequences>;
  using Order =
      std::conditional_t<kPacked, PackedOrder<BlockByBlock, Side::kKeys, kN>, BlockByBlock>;

  using MaskType = Mask<Row::key.mask>;
  static constexpr bool kLocal = Row::key.mask == MaskKind::kLocal;
  using Limits = LimitsOf<Row::key.mask>;

  // With keys of its own and 64 queries a step, a warpgroup has registers left: for its rows'
  // statistics, read early, and for P, whose dV is issued early (consumer_own_keys.cuh). Not for
  // the former beside what a mask of two sides and a packed sequence need.
  static constexpr bool kDvEarly = !kKeysShared && kM == 64;
  static constexpr bool kStatsInRegisters = kDvEarly && !(kPacked && kLocal);

  using Warpgroups = std::conditional_t<kKeysShared, Layout<Shape<_1, Int<kMmaWarpgroups>, _1>>,
                                        Layout<Shape<Int<kMmaWarpgroups>, _1, _1>>>;
  // dQ (m x head_dim) is split over the warpgroups by rows where m allows it, else by columns.
  static constexpr int kDqWarpgroupsAlongM = kM / 64;
  using WarpgroupsOfDq =
      Layout<Shape<Int<kDqWarpgroupsAlongM>, Int<kMmaWarpgroups / kDqWarpgroupsAlongM>, _1>>;
  static constexpr int kDqColumns = kHeadDim * kDqWarpgroupsAlongM / kMmaWarpgroups;

  // Columns of a box: of Q, V, dO, dK and dV, and of K and dQ, which are taken apart as dQ is.
  static constexpr int kBox = box_columns(kDkColumns, kDvColumns);
  static constexpr int kBoxOfK = box_columns(kBox, kDqColumns);

  // S^T (n x m) = K Q^T and dP^T (n x m) = V dO^T. Keys are the rows, so that P^T and dS^T are, in
  // registers, the A operands of the next two.
  using MmaScores = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float,
                           Shape<Int<kN>, Int<kScoreColumns>, Int<kHeadDim>>>(),
      Warpgroups{}));
  // dK (n x head_dim) += dS^T Q. dS^T is in registers and, for dQ, in shared memory. From shared
  // memory it leaves room for the next step's S and dP (E004, E010).
  using MmaDk = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<kN>, Int<kDkColumns>, Int<kM>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      Warpgroups{}));
  // dV (n x head_dim_v) += P^T dO, P^T from registers, or from shared memory where the other
  // warpgroup has a half of it.
  using MmaDvOfOwnKeys = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<kN>, Int<kDvColumns>, Int<kM>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      Warpgroups{}));
  using MmaDvOfSharedKeys = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<kN>, Int<kDvColumns>, Int<kM>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      Warpgroups{}));
  using MmaDv = std::conditional_t<kKeysShared, MmaDvOfSharedKeys, MmaDvOfOwnKeys>;
  // dQ (m x head_dim) = dS K, dS from shared memory, where the other warpgroup's keys are too.
  using MmaDq = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<kM>, Int<kDqColumns>, Int<kN>>,
                           GMMA::Major::MN, GMMA::Major::MN>(),
      WarpgroupsOfDq{}));

  using LayoutK = SwizzledTile<Element, kN, kHeadDim, kBoxOfK>;
  using LayoutV = SwizzledTile<Element, kN, kHeadDimV, kBox>;
  using LayoutQ = SwizzledTiles<Element, kM, kHeadDim, kQSlots, kBox>;
  using LayoutDo = SwizzledTiles<Element, kM, kHeadDimV, kDoSlots, kBox>;
  // dS^T, P^T: keys by queries
  using LayoutDs = SwizzledTiles<Element, kN, kM, kDsSlots + kPSlots, kWidestBox>;
  static constexpr int kKBytes = kN * kHeadDim * sizeof(Element);
  static constexpr int kVBytes = kN * kHeadDimV * sizeof(Element);
  static constexpr int kQBytes = kM * kHeadDim * sizeof(Element);
  static constexpr int kDoBytes = kM * kHeadDimV * sizeof(Element);
  static constexpr int kRowStatBytes = kM * sizeof(float);
  static constexpr int kDqPerThread = kM * kHeadDim / kConsumerThreads;
};

// Those of deterministic sums are one for each of two warpgroups.
enum class BwdBarrier : int {
  kDsReady = 1,                   // keys shared: every consumer has written its part of dS and P
  kConsumersDone = kDsReady + 1,  // every consumer has left the main loop
  kDqTurn = kConsumersDone + 1,   // deterministic sums: the CTA's turn has come
  kDqAdded = kDqTurn + 2,         // and the warpgroup has added
  kCount = kDqAdded + 2
};
static_assert(static_cast<int>(BwdBarrier::kCount) <= kNumNamedBarriers);

}  // namespace flash3
