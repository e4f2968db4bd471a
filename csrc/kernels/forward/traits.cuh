// Types that follow from one forward row of csrc/variants/table.py.
#pragma once

#include "attention/mask.cuh"
#include "attention/scheduler.cuh"
#include "attention/sequences.cuh"
#include "common/roles.cuh"
#include "common/wgmma.cuh"
#include "plan.h"

namespace flash3 {

template <class Row>
struct FwdTraits {
  using Element = typename Row::Element;
  static constexpr int kM = Row::tile.m;
  static constexpr int kN = Row::tile.n;
  static constexpr int kHeadDim = Row::key.head_dim;     // of Q and K
  static constexpr int kHeadDimV = Row::key.head_dim_v;  // of V and O
  static constexpr int kBox = box_columns(kHeadDim, kHeadDimV);
  static_assert(kHeadDimV <= kHeadDim, "O is staged over Q");
  static constexpr int kKvSlots = Row::tile.kv_stages;
  static constexpr int kQSlots = Row::tile.q_stages;
  static constexpr int kMmaWarpgroups = Row::tile.mma_warpgroups;
  static constexpr int kConsumerWarps = kMmaWarpgroups * kWarpsPerWarpgroup;
  static constexpr int kThreads = (kMmaWarpgroups + 1) * kThreadsPerWarpgroup;
  // The producer also walks the schedule: with two consumers it can have 40 registers, and needs
  // more than 24.
  static constexpr RegisterBudget kRegisters =
      kMmaWarpgroups == 3 ? RegisterBudget{32, 160} : RegisterBudget{40, 232};
  static_assert(fits_launch(kRegisters, kMmaWarpgroups));
  // Of the next packed tile, before this one is loaded to the end: with 32 registers the producer
  // would spill.
  static constexpr bool kPublishesAhead =
      Row::key.layout == SeqLayout::kPacked && kMmaWarpgroups == 2;
  static_assert(kM == 64 * kMmaWarpgroups, "one 64-row accumulator per warpgroup");

  static constexpr bool kPacked = Row::key.layout == SeqLayout::kPacked;
  using Tile = std::conditional_t<kPacked, PackedTile, WorkTile>;
  // A packed tile is read in shared memory where it is needed: it would take registers.
  using TileArg = std::conditional_t<kPacked, Tile const&, Tile>;
  using Sequences = std::conditional_t<kPacked, PackedSequences, DenseSequences>;

  using MaskType = Mask<Row::key.mask>;
  static constexpr bool kLocal = Row::key.mask == MaskKind::kLocal;
  using Limits = LimitsOf<Row::key.mask>;
  using BatchOrder = std::conditional_t<Row::key.mask == MaskKind::kFull, InOrder, LongestFirst>;
  using Order =
      std::conditional_t<kPacked, PackedOrder<BatchOrder, Side::kQueries, kM>, BatchOrder>;
  using BatchSchedule =
      std::conditional_t<Row::tile.dynamic_schedule, DynamicSchedule, StaticSchedule>;
  using Schedule = std::conditional_t<kPacked, CountedSchedule, BatchSchedule>;
  static_assert(Row::tile.dynamic_schedule || !kPacked, "sequences differ in length");

  using WarpgroupsAlongM = Layout<Shape<Int<kMmaWarpgroups>, _1, _1>>;
  // S (m x n) = Q K^T, both from shared memory.
  template <int kKeys>
  using MmaQKOf = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<kM>, Int<kKeys>, Int<kHeadDim>>>(),
      WarpgroupsAlongM{}));
  using MmaQK = MmaQKOf<kN>;
  // Under a causal mask the warpgroups of a tile with more rows than keys a step end in different
  // blocks, and often in the middle of one: each then visits only what its own rows see (E014).
  static constexpr bool kOwnRange = Row::key.mask == MaskKind::kCausal && (kM > kN);
  static constexpr bool kHalfSteps = kOwnRange && kN % 32 == 0;  // a half is whole k steps of P V
  using MmaQKHalf = MmaQKOf<kHalfSteps ? kN / 2 : kN>;
  // Whether steps go by references as they are, and look at maxima only where that fails (E028).
  static constexpr bool kGuesses = Row::tile.guesses;
  static_assert(!(kGuesses && kLocal), "a row may then see its first key in any step");
  // O (m x head_dim_v) += P V: P from registers, V with the reduced extent (keys) as its rows.
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<kM>, Int<kHeadDimV>, Int<kN>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      WarpgroupsAlongM{}));

  using LayoutQ = SwizzledTile<Element, kM, kHeadDim, kBox>;
  using LayoutK = SwizzledTiles<Element, kN, kHeadDim, kKvSlots, kBox>;
  using LayoutV = SwizzledTiles<Element, kN, kHeadDimV, kKvSlots, kBox>;
  static constexpr int kQBytes = kM * kHeadDim * sizeof(Element);
  static constexpr int kKBytes = kN * kHeadDim * sizeof(Element);
  static constexpr int kVBytes = kN * kHeadDimV * sizeof(Element);
};

// Ids of the kernel's named barriers; one of each kind per consumer warpgroup.
enum class FwdBarrier : int {
  kTurn = 1,               // pingpong: this warpgroup may issue its GEMMs
  kWarpgroup = kTurn + 3,  // the warpgroup's four warps have finished with Q
  kCount = kWarpgroup + 3
};
static_assert(static_cast<int>(FwdBarrier::kCount) <= kNumNamedBarriers);

}  // namespace flash3
