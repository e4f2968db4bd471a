// What both backward ops do with lse and with the workspace.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "checks.h"
#include "plan.h"

namespace flash3 {

// lse or dlse as the kernels read it: fp32 and contiguous. A gradient that comes from sum() is an
// expanded scalar.
inline Tensor contiguous_rows(Tensor const& rows) {
  if (dtype_of(rows) != aoti_torch_dtype_float32()) {
    return torch::stable::contiguous(torch::stable::to(rows, torch::headeronly::ScalarType::Float));
  }
  return rows.is_contiguous() ? rows : torch::stable::contiguous(rows);
}

// The schema's `order`.
inline Order order_from(int64_t number) {
  STD_TORCH_CHECK(number >= 0 && number <= 2, "order: must be 0, 1 or 2, got ", number);
  return static_cast<Order>(number);
}

// The parts of one workspace allocation.
inline void place_workspace(BwdParams& params, BwdPlan const& plan, Tensor const& workspace,
                            Order order) {
  std::byte* const base = static_cast<std::byte*>(workspace.mutable_data_ptr());
  params.seqlen_q_rounded = plan.seqlen_q_rounded;
  params.dq_accum = reinterpret_cast<float*>(base + plan.dq_accum_offset);
  params.lse_log2 = reinterpret_cast<float*>(base + plan.lse_log2_offset);
  params.dpsum = reinterpret_cast<float*>(base + plan.dpsum_offset);
  if (order != Order::kFree) params.dq_turn = reinterpret_cast<int*>(base + plan.dq_turn_offset);
}

}  // namespace flash3
