// The five GEMMs of a step, each of which issues one wgmma group that the caller waits for.
#pragma once

#include "backward/smem.cuh"

namespace flash3 {

template <class Row>
struct BwdGemms {
  using T = BwdTraits<Row>;
  using Element = typename T::Element;

  BwdSmem<Row>& smem;
  // Any thread of the warpgroup, and the same for all of it: the descriptors of its operands are
  // then in uniform registers.
  int const consumer_thread;

  // Accumulators, ((2, 2, columns / 8), 1, 1) fp32 each.
  CUTLASS_DEVICE static auto scores() {
    return partition_fragment_C(typename T::MmaScores{}, Shape<Int<T::kN>, Int<T::kM>>{});
  }
  CUTLASS_DEVICE static auto dq() {
    return partition_fragment_C(typename T::MmaDq{}, Shape<Int<T::kM>, Int<T::kHeadDim>>{});
  }
  CUTLASS_DEVICE static auto dk() {
    return partition_fragment_C(typename T::MmaDk{}, Shape<Int<T::kN>, Int<T::kHeadDim>>{});
  }
  CUTLASS_DEVICE static auto dv() {
    return partition_fragment_C(typename T::MmaDv{}, Shape<Int<T::kN>, Int<T::kHeadDimV>>{});
  }

  // S^T = K Q^T
  template <class Scores>
  CUTLASS_DEVICE void issue_s(int q_slot, Scores& s) const {
    typename T::MmaScores mma;
    auto const thread = mma.get_thread_slice(consumer_thread);
    Tensor k = thread.partition_fragment_A(tile<typename T::LayoutK>(smem.k));
    Tensor q = thread.partition_fragment_B(tile<typename T::LayoutQ>(smem.q[0]));
    issue_gemm<Accumulate::kReplace>(mma, formed_in_place(k), q(_, _, _, q_slot), s);
  }

  // dP^T = V dO^T
  template <class Scores>
  CUTLASS_DEVICE void issue_dp(int do_slot, Scores& dp) const {
    typename T::MmaScores mma;
    auto const thread = mma.get_thread_slice(consumer_thread);
    Tensor v = thread.partition_fragment_A(tile<typename T::LayoutV>(smem.v));
    Tensor d_o = thread.partition_fragment_B(tile<typename T::LayoutDo>(smem.d_o[0]));
    issue_gemm<Accumulate::kReplace>(mma, formed_in_place(v), d_o(_, _, _, do_slot), dp);
  }

  // dV += P^T dO, P^T in registers
  template <class Rounded, class Dv>
  CUTLASS_DEVICE void issue_dv(Rounded const& p, int do_slot, Dv& dv) const {
    typename T::MmaDv mma;
    Tensor d_o = operand_of_dv(mma);
    issue_gemm<Accumulate::kAdd>(mma, p, d_o(_, _, _, do_slot), dv);
  }

  // dV += P^T dO, P^T in a slot of `ds`
  template <class Dv>
  CUTLASS_DEVICE void issue_dv_of_slot(int p_slot, int do_slot, Dv& dv) const {
    typename T::MmaDv mma;
    auto const thread = mma.get_thread_slice(consumer_thread);
    Tensor p = thread.partition_fragment_A(tile<typename T::LayoutDs>(smem.ds[0]));
    Tensor d_o = operand_of_dv(mma);
    issue_gemm<Accumulate::kAdd>(mma, p(_, _, _, p_slot), d_o(_, _, _, do_slot), dv);
  }

  // dK += dS^T Q
  template <class Dk>
  CUTLASS_DEVICE void issue_dk(int ds_slot, int q_slot, Dk& dk) const {
    typename T::MmaDk mma;
    auto const thread = mma.get_thread_slice(consumer_thread);
    Tensor ds = thread.partition_fragment_A(tile<typename T::LayoutDs>(smem.ds[0]));
    Tensor q = thread.partition_fragment_B(transposed_tile<typename T::LayoutQ>(smem.q[0]));
    issue_gemm<Accumulate::kAdd>(mma, ds(_, _, _, ds_slot), q(_, _, _, q_slot), dk);
  }

  // dQ = dS K
  template <class Dq>
  CUTLASS_DEVICE void issue_dq(int ds_slot, Dq& dq) const {
    typename T::MmaDq mma;
    auto const thread = mma.get_thread_slice(consumer_thread);
    Tensor ds = thread.partition_fragment_A(transposed_tile<typename T::LayoutDs>(smem.ds[0]));
    Tensor k = thread.partition_fragment_B(transposed_tile<typename T::LayoutK>(smem.k));
    issue_gemm<Accumulate::kReplace>(mma, ds(_, _, _, ds_slot), formed_in_place(k), dq);
  }

 private:
  template <class Layout>
  CUTLASS_DEVICE static auto tile(Element* first) {
    return make_tensor(make_smem_ptr(first), Layout{});
  }
  template <class Layout>
  CUTLASS_DEVICE static auto transposed_tile(Element* first) {
    return make_tensor(make_smem_ptr(first), transposed(Layout{}));
  }
  CUTLASS_DEVICE auto operand_of_dv(typename T::MmaDv const& mma) const {
    return mma.get_thread_slice(consumer_thread)
        .partition_fragment_B(transposed_tile<typename T::LayoutDo>(smem.d_o[0]));
  }
};

}  // namespace flash3
