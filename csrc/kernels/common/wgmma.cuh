// Warpgroup matrix multiplies (wgmma): shared-memory layouts, and the issue of one GEMM over a
// whole k extent.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

namespace flash3 {

using namespace cute;

// (rows, columns[, slots]) in boxes of 64, 32 or 16 columns, whose rows are swizzled over 128, 64
// or 32 bytes: what TMA writes and wgmma reads.
template <class Element, int kBox>
using SwizzleAtom =
    std::conditional_t<kBox == 64, GMMA::Layout_K_SW128_Atom<Element>,
                       std::conditional_t<kBox == 32, GMMA::Layout_K_SW64_Atom<Element>,
                                          std::enable_if_t<kBox == 64 || kBox == 32 || kBox == 16,
                                                           GMMA::Layout_K_SW32_Atom<Element>>>>;
template <class Element, int kRows, int kColumns, int kBox>
using SwizzledTile =
    decltype(tile_to_shape(SwizzleAtom<Element, kBox>{}, Shape<Int<kRows>, Int<kColumns>>{}));
template <class Element, int kRows, int kColumns, int kSlots, int kBox>
using SwizzledTiles = decltype(tile_to_shape(SwizzleAtom<Element, kBox>{},
                                             Shape<Int<kRows>, Int<kColumns>, Int<kSlots>>{}));

// The same memory seen as (columns, rows[, slots]): an operand whose rows are the reduced extent
// ("MN-major").
template <class Layout>
CUTE_HOST_DEVICE constexpr auto transposed(Layout const& layout) {
  auto const rows = size<0>(layout);
  auto const columns = size<1>(layout);
  if constexpr (rank_v<Layout> == 3) {
    return composition(layout, make_layout(make_shape(columns, rows, size<2>(layout)),
                                           make_stride(rows, Int<1>{}, rows * columns)));
  } else {
    return composition(layout, make_layout(make_shape(columns, rows), make_stride(rows, Int<1>{})));
  }
}

// The same shared-memory operand, but with descriptors that the compiler forms where they are used.
// It would otherwise lift those of a loop's invariant operands out of the loop, one register pair
// for each k step, and spill.
template <class Operand>
CUTLASS_DEVICE auto formed_in_place(Operand const& operand) {
  int zero;
  asm volatile("mov.b32 %0, 0;" : "=r"(zero));
  return make_tensor(operand.data() + zero, operand.layout());
}

enum class Accumulate { kReplace, kAdd };

// Issues C = A B or C += A B and commits it as one wgmma group; the caller waits with
// warpgroup_wait. A is a register fragment or a descriptor, B a descriptor, both (MMA, MMA_MN,
// MMA_K). Until that wait nobody may touch C, nor A in registers, or ptxas serialises the pipeline.
template <Accumulate kAccumulate, class Mma, class TensorA, class TensorB, class TensorC>
CUTLASS_DEVICE void issue_gemm(Mma& mma, TensorA const& a, TensorB const& b, TensorC& c) {
  constexpr bool kAInRegisters =
      !std::is_base_of_v<GMMA::DescriptorIterator, typename Mma::FrgTypeA>;
  if constexpr (kAInRegisters) warpgroup_fence_operand(const_cast<TensorA&>(a));
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  if constexpr (kAccumulate == Accumulate::kReplace) mma.accumulate_ = GMMA::ScaleOut::Zero;
  CUTLASS_PRAGMA_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    cute::gemm(mma, a(_, _, k), b(_, _, k), c);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(c);
  if constexpr (kAInRegisters) warpgroup_fence_operand(const_cast<TensorA&>(a));
}

// Keeps a following wait for wgmma behind `value`, which is never negative (it may be NaN). ptxas
// moves such a wait up past arithmetic, but not past an arrival at a barrier, and this one it must
// take for possible.
CUTLASS_DEVICE void hold_wait_until_known(float value) {
  asm volatile(
      "{\n"
      "  .reg .pred never;\n"
      "  setp.lt.f32 never, %0, 0fBF800000;\n"  // value < -1
      "  @never mbarrier.arrive.shared::cta.b64 _, [%1];\n"
      "}" ::"f"(value),
      "r"(0)
      : "memory");
}

// A warpgroup's 64 x N fp32 accumulator gives each thread two rows, lane / 4 and lane / 4 + 8 of
// its warp's 16, and in each 8-column group the columns 2 * (lane % 4) and the next. CuTe's
// fragment is ((2, 2, N / 8), 1, 1): column in the pair, row, group. This view is (2 rows, N / 4
// columns).
template <class Fragment>
CUTLASS_DEVICE auto rows_and_columns(Fragment& fragment) {
  auto const layout = fragment.layout();
  static_assert(size<1>(layout) == 1 && size<2>(layout) == 1, "one 64-row tile per warpgroup");
  return make_tensor(
      fragment.data(),
      make_layout(get<0, 1>(layout), make_layout(get<0, 0>(layout), get<0, 2>(layout))));
}

// Column, within an accumulator tile, of index `j` of rows_and_columns, less the lane's own 2 *
// (lane % 4).
CUTE_HOST_DEVICE constexpr int accumulator_column(int j) { return j / 2 * 8 + j % 2; }
CUTLASS_DEVICE int lane_first_column() { return threadIdx.x % 4 * 2; }
CUTLASS_DEVICE int lane_first_row() { return threadIdx.x % 32 / 4; }

// The accumulator of one GEMM is, element for element, the register A operand ((2, 2, 2), 1, N /
// 16) of the next.
template <class Element, class Fragment>
CUTLASS_DEVICE auto make_operand_a_like(Fragment const& accumulator) {
  constexpr int kSize = decltype(size(accumulator.layout()))::value;
  return make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<kSize / 8>>{});
}

// Rounds fp32 values to 16 bits, pairwise.
template <class Source, class Target>
CUTLASS_DEVICE void convert(Source const& source, Target& target) {
  using Element = typename Target::value_type;
  constexpr int kSize = decltype(size(source.layout()))::value;
  static_assert(kSize == decltype(size(target.layout()))::value && kSize % 2 == 0);
  cutlass::NumericArrayConverter<Element, float, 2> const round;
  auto const from = recast<cutlass::Array<float, 2> const>(source);
  auto to = recast<cutlass::Array<Element, 2>>(target);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kSize / 2; ++i) to(i) = round(from(i));
}

}  // namespace flash3
