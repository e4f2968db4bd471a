#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "backward_workspace.h"
#include "checks.h"
#include "device.h"
#include "limits.h"
#include "memory.h"
#include "ops.h"
#include "plan.h"
#include "tensor_view.h"

namespace flash3 {

std::tuple<Tensor, Tensor, Tensor> backward(Tensor const& dout_tensor, Tensor const& q_tensor,
                                            Tensor const& k_tensor, Tensor const& v_tensor,
                                            Tensor const& out_tensor, Tensor const& lse_tensor,
                                            std::optional<Tensor> const& dlse_tensor,
                                            double softmax_scale, bool causal, int64_t order,
                                            int64_t window_left, int64_t window_right,
                                            int64_t attention_chunk, double softcap) {
  Argument const q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v"), out(out_tensor, "out"),
      dout(dout_tensor, "dout");
  Shape const shape = check_qkv(q, k, v);
  LimitArguments const limits{causal, window_left, window_right, attention_chunk, softcap};
  check_limits(limits);
  check_matches(out, q, shape.out_sizes());
  check_matches(dout, q, shape.out_sizes());
  std::array<int64_t, 3> const lse_sizes{shape.batch, shape.num_heads_q, shape.seqlen_q};
  check_rows(lse_tensor, "lse", lse_sizes, q.placement);
  if (dlse_tensor) check_rows(*dlse_tensor, "dlse", lse_sizes, q.placement);
  Device const& device = hopper_device(q.placement.device_index);
  torch::stable::accelerator::DeviceGuard const guard(device.index);

  Tensor dq = empty(shape.q_sizes(), q.dtype, q.placement);
  Tensor dk = empty(shape.k_sizes(), q.dtype, q.placement);
  Tensor dv = empty(shape.v_sizes(), q.dtype, q.placement);
  if (shape.empty()) {  // no query sees a key: whatever elements there are have no gradient
    for (Tensor* gradient : {&dq, &dk, &dv}) torch::stable::zero_(*gradient);
    return {std::move(dq), std::move(dk), std::move(dv)};
  }

  Problem problem = make_problem(shape, q.dtype, softmax_scale);
  set_limits(problem, limits);
  Order const sums = order_from(order);
  BwdPlan const plan = plan_bwd(problem, sums, device.num_sms);
  TmaOperand const q_operand = tma_operand(q), k_operand = tma_operand(k),
                   v_operand = tma_operand(v), out_operand = tma_operand(out),
                   dout_operand = tma_operand(dout);
  Tensor const lse = contiguous_rows(lse_tensor);
  std::optional<Tensor> dlse;
  if (dlse_tensor) dlse = contiguous_rows(*dlse_tensor);
  Tensor const workspace =
      empty<1>({static_cast<int64_t>(plan.workspace_bytes)}, aoti_torch_dtype_uint8(), q.placement);

  BwdParams params{
      .problem = problem,
      .q = q_operand.view,
      .k = k_operand.view,
      .v = v_operand.view,
      .o = out_operand.view,
      .d_o = dout_operand.view,
      .dq = output_view(dq, shape.q_sizes()),
      .dk = output_view(dk, shape.k_sizes()),
      .dv = output_view(dv, shape.v_sizes()),
      .lse = static_cast<float const*>(lse.const_data_ptr()),
      .dlse = dlse ? static_cast<float const*>(dlse->const_data_ptr()) : nullptr,
      .grid = plan.grid,
      .cluster_size = plan.cluster_size,
  };
  place_workspace(params, plan, workspace, sums);
  plan.row->launch(params, current_stream(device.index));
  return {std::move(dq), std::move(dk), std::move(dv)};
}

}  // namespace flash3
