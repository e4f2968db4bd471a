#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <optional>

#include "checks.h"
#include "device.h"
#include "limits.h"
#include "memory.h"
#include "ops.h"
#include "plan.h"
#include "tensor_view.h"
#include "tile_counter.h"

namespace flash3 {

std::tuple<Tensor, Tensor> forward(Tensor const& q_tensor, Tensor const& k_tensor,
                                   Tensor const& v_tensor, double softmax_scale, bool causal,
                                   int64_t /*order: see ops.h*/,
                                   std::optional<Tensor> const& sink_tensor, int64_t window_left,
                                   int64_t window_right, int64_t attention_chunk, double softcap) {
  Argument const q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
  Shape const shape = check_qkv(q, k, v);
  LimitArguments const limits{causal, window_left, window_right, attention_chunk, softcap};
  check_limits(limits);
  Sink const sink = check_sink(sink_tensor, shape.num_heads_q, q);
  Device const& device = hopper_device(q.placement.device_index);
  torch::stable::accelerator::DeviceGuard const guard(device.index);

  Tensor out = empty(shape.out_sizes(), q.dtype, q.placement);
  Tensor lse = empty<3>({shape.batch, shape.num_heads_q, shape.seqlen_q},
                        aoti_torch_dtype_float32(), q.placement);
  if (shape.empty()) {  // nothing to write, or no key to see
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    if (sink_tensor) torch::stable::copy_(lse, torch::stable::unsqueeze(*sink_tensor, 1));
    return {std::move(out), std::move(lse)};
  }

  Problem problem = make_problem(shape, q.dtype, softmax_scale);
  set_limits(problem, limits);
  FwdPlan const plan = plan_fwd(problem, device.num_sms);
  TmaOperand const q_operand = tma_operand(q), k_operand = tma_operand(k),
                   v_operand = tma_operand(v);
  cudaStream_t const stream = current_stream(device.index);
  std::optional<Tensor> counter;
  if (plan.workspace_bytes > 0) counter = tile_counter(stream, q.placement);

  FwdParams const params{
      .problem = problem,
      .q = q_operand.view,
      .k = k_operand.view,
      .v = v_operand.view,
      .o = output_view(out, shape.out_sizes()),
      .lse = static_cast<float*>(lse.mutable_data_ptr()),
      .tile_counter = counter ? static_cast<int*>(counter->mutable_data_ptr()) : nullptr,
      .grid = plan.grid,
      .sink = sink.address,
      .sink_is_fp32 = sink.is_fp32,
  };
  plan.row->launch(params, stream);
  return {std::move(out), std::move(lse)};
}

}  // namespace flash3
