// Types that follow from one e4m3 forward row of csrc/variants/table.py.
#pragma once

#include "attention/mask.cuh"
#include "attention/scheduler.cuh"
#include "common/roles.cuh"
#include "common/wgmma.cuh"
#include "fp8/operands.cuh"
#include "plan.h"

namespace flash3 {

// Rows that one scale may cover are 64 or 128, so 64 rows always share theirs.
inline constexpr int kScaleGroup = 64;

template <class Row>
struct Fp8Traits {
  using Element = typename Row::Element;
  static constexpr int kM = Row::tile.m;
  static constexpr int kN = Row::tile.n;
  static constexpr int kHeadDim = Row::key.head_dim;
  static constexpr int kKvSlots = Row::tile.kv_stages;
  static constexpr int kQSlots = Row::tile.q_stages;
  static constexpr int kMmaWarpgroups = Row::tile.mma_warpgroups;
  static constexpr int kConsumerWarps = kMmaWarpgroups * kWarpsPerWarpgroup;
  static constexpr int kTransposerWarps = kWarpsPerWarpgroup - 1;  // of the producer warpgroup
  static constexpr int kThreads = (kMmaWarpgroups + 1) * kThreadsPerWarpgroup;
  // The transposers need more than a thread that only loads.
  static constexpr RegisterBudget kRegisters = kMmaWarpgroups == 3 ? RegisterBudget{56, 152}
                                               : kHeadDim > 128    ? RegisterBudget{40, 232}
                                                                   : RegisterBudget{56, 224};
  static_assert(fits_launch(kRegisters, kMmaWarpgroups));
  static_assert(kM == 64 * kMmaWarpgroups, "one 64-row accumulator per warpgroup");
  static_assert(kN % kScaleGroup == 0, "a group of keys has one scale");
  static constexpr int kScaleGroups = kN / kScaleGroup;

  static constexpr bool kOverlap = Row::tile.overlap;
  static constexpr bool kTwoLevel = Row::tile.two_level;
  static constexpr bool kGuesses = Row::tile.guesses;
  // With three warpgroups issue slots are short, with two the rounding of P gets between the
  // exponentials only if the vote on a guess needs it (E032).
  static constexpr bool kJudgesSums = kGuesses && kMmaWarpgroups == 3;

  using MaskType = Mask<Row::key.mask>;
  using Order = std::conditional_t<Row::key.mask == MaskKind::kCausal, LongestFirst, InOrder>;
  using Schedule = std::conditional_t<Row::tile.dynamic_schedule, DynamicSchedule, StaticSchedule>;

  using WarpgroupsAlongM = Layout<Shape<Int<kMmaWarpgroups>, _1, _1>>;
  // S (m x n) = Q K^T, both from shared memory.
  using MmaQK = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<kM>, Int<kN>, Int<kHeadDim>>>(),
      WarpgroupsAlongM{}));
  // O (m x head_dim) += P V: P from registers, V transposed, because 8-bit operands have the
  // reduced extent (keys) along their rows.
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<kM>, Int<kHeadDim>, Int<kN>>>(),
      WarpgroupsAlongM{}));
  // As in the forward: where a tile has more rows than a step has keys, each warpgroup visits the
  // blocks that its own rows see (E014).
  static constexpr bool kOwnRange = Row::key.mask == MaskKind::kCausal && (kM > kN);

  using TileQ = ByteTile<kM, kHeadDim>;
  using TileKV = ByteTile<kN, kHeadDim>;
  using TileVt = ByteTile<kHeadDim, kN>;
};

// Ids of the kernel's named barriers.
enum class Fp8Barrier : int {
  kTurn = 1,  // pingpong: this warpgroup may issue its GEMMs
  kCount = kTurn + 3
};
static_assert(static_cast<int>(Fp8Barrier::kCount) <= kNumNamedBarriers);

}  // namespace flash3
