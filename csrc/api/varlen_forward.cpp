#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <optional>

#include "device.h"
#include "limits.h"
#include "memory.h"
#include "ops.h"
#include "packed.h"
#include "plan.h"
#include "tensor_view.h"

namespace flash3 {

std::tuple<Tensor, Tensor> varlen_forward(
    Tensor const& q_tensor, Tensor const& k_tensor, Tensor const& v_tensor,
    Tensor const& cu_seqlens_q, Tensor const& cu_seqlens_k, std::optional<Tensor> const& seqused_q,
    std::optional<Tensor> const& seqused_k, double softmax_scale, bool causal, int64_t order,
    std::optional<Tensor> const& sink_tensor, int64_t window_left, int64_t window_right,
    int64_t attention_chunk, double softcap) {
  Argument const q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
  SequenceTensors const sequences{cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k};
  PackedShape const shape = check_packed(q, k, v, sequences);
  LimitArguments const limits{causal, window_left, window_right, attention_chunk, softcap};
  check_limits(limits);
  Sink const sink = check_sink(sink_tensor, shape.num_heads_q, q);
  Device const& device = hopper_device(q.placement.device_index);
  torch::stable::accelerator::DeviceGuard const guard(device.index);

  if (sink_tensor && shape.total_k == 0) {
    // Only the device knows which rows a sequence uses: those have lse = sink. A kernel wants a row
    // of keys to point at, which no sequence uses.
    Tensor const key = empty<3>({1, shape.num_heads_kv, shape.head_dim}, q.dtype, q.placement);
    Tensor const value = empty<3>({1, shape.num_heads_kv, shape.head_dim_v}, q.dtype, q.placement);
    return varlen_forward(q_tensor, key, value, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
                          softmax_scale, causal, order, sink_tensor, window_left, window_right,
                          attention_chunk, softcap);
  }
  Tensor out = empty(shape.out_sizes(), q.dtype, q.placement);
  Tensor lse = empty(shape.lse_sizes(), aoti_torch_dtype_float32(), q.placement);
  if (shape.empty()) {  // nothing to write, or no key to see
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    return {std::move(out), std::move(lse)};
  }

  Problem problem = make_packed_problem(shape, q.dtype, softmax_scale);
  set_limits(problem, limits);
  FwdPlan const plan = plan_fwd(problem, device.num_sms);
  TmaOperand const q_operand = tma_operand(q), k_operand = tma_operand(k),
                   v_operand = tma_operand(v);
  Tensor const workspace =
      empty<1>({static_cast<int64_t>(plan.workspace_bytes)}, aoti_torch_dtype_uint8(), q.placement);
  std::byte* const base = static_cast<std::byte*>(workspace.mutable_data_ptr());

  FwdParams const params{
      .problem = problem,
      .q = q_operand.view,
      .k = k_operand.view,
      .v = v_operand.view,
      .o = output_view(out, shape.out_sizes()),
      .lse = static_cast<float*>(lse.mutable_data_ptr()),
      .tile_counter = reinterpret_cast<int*>(base + plan.tile_counter_offset),
      .grid = plan.grid,
      .rows = packed_rows(sequences),
      .q_blocks = block_list(workspace, plan.blocks_offset, plan.block_count_offset),
      .sink = sink.address,
      .sink_is_fp32 = sink.is_fp32,
  };
  plan.row->launch(params, current_stream(device.index));
  return {std::move(out), std::move(lse)};
}

}  // namespace flash3
