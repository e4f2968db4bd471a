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
#include "sink.h"
#include "tensor_view.h"

namespace flash3 {
namespace {

// Extents of out: dense (batch, seqlen, heads, head_dim), packed (rows, heads, head_dim), which is
// a batch of one.
struct OutShape {
  int64_t batch, seqlen, heads, head_dim;
  bool packed;
};

OutShape check_out(Argument const& out) {
  STD_TORCH_CHECK(out.sizes.size() == 3 || out.sizes.size() == 4,
                  "out: must be (batch, seqlen, heads, head_dim) or (rows, heads, head_dim), got ",
                  text(out.sizes));
  for (int64_t const size : out.sizes) {
    STD_TORCH_CHECK(size <= std::numeric_limits<int>::max(),
                    "out: extents must be below 2^31, got ", text(out.sizes));
  }
  STD_TORCH_CHECK(
      out.dtype == aoti_torch_dtype_bfloat16() || out.dtype == aoti_torch_dtype_float16(),
      "out: dtype must be float16 or bfloat16, got ",
      torch::headeronly::toString(out.tensor.scalar_type()));
  std::size_t const last = out.sizes.size() - 1;
  bool const packed = last == 2;
  STD_TORCH_CHECK(out.sizes[last] <= 256, "out: head_dim must be at most 256, got ",
                  out.sizes[last]);
  check_head_dim("out", out.sizes[last]);
  return {.batch = packed ? 1 : out.sizes[0],
          .seqlen = out.sizes[last - 2],
          .heads = out.sizes[last - 1],
          .head_dim = out.sizes[last],
          .packed = packed};
}

void check_dout(Argument const& dout, Argument const& out) {
  STD_TORCH_CHECK(dout.placement == out.placement, "dout: must be on the device of out");
  STD_TORCH_CHECK(dout.dtype == out.dtype, "dout: dtype must be that of out, ",
                  torch::headeronly::toString(out.tensor.scalar_type()), ", got ",
                  torch::headeronly::toString(dout.tensor.scalar_type()));
  STD_TORCH_CHECK(dout.sizes.equals(out.sizes), "dout: shape must be that of out, ",
                  text(out.sizes), ", got ", text(dout.sizes));
}

void check_out_rows(Tensor const& rows, char const* name, OutShape const& shape,
                    Placement const& placement) {
  if (shape.packed) {
    check_rows(rows, name, std::array{shape.heads, shape.seqlen}, placement);
  } else {
    check_rows(rows, name, std::array{shape.batch, shape.heads, shape.seqlen}, placement);
  }
}

}  // namespace

Tensor sink_backward(Tensor const& dout_tensor, Tensor const& out_tensor, Tensor const& lse_tensor,
                     std::optional<Tensor> const& dlse_tensor, Tensor const& sink_tensor) {
  Argument const out(out_tensor, "out"), dout(dout_tensor, "dout");
  OutShape const shape = check_out(out);
  check_dout(dout, out);
  check_out_rows(lse_tensor, "lse", shape, out.placement);
  if (dlse_tensor) check_out_rows(*dlse_tensor, "dlse", shape, out.placement);
  Sink const sink = check_sink(sink_tensor, shape.heads, out.dtype, out.placement);
  Device const& device = hopper_device(out.placement.device_index);
  torch::stable::accelerator::DeviceGuard const guard(device.index);

  Tensor dsink = empty<1>({shape.heads}, dtype_of(sink_tensor), out.placement);
  if (shape.batch == 0 || shape.seqlen == 0 || shape.heads == 0) {
    torch::stable::zero_(dsink);
    return dsink;
  }
  TmaOperand const out_operand = tma_operand(out), dout_operand = tma_operand(dout);
  Tensor const lse = contiguous_rows(lse_tensor);
  std::optional<Tensor> dlse;
  if (dlse_tensor) dlse = contiguous_rows(*dlse_tensor);
  Tensor const partial = empty<1>({shape.heads * sink_bwd_chunks(shape.batch, shape.seqlen)},
                                  aoti_torch_dtype_float32(), out.placement);
  launch_sink_bwd({.dtype = out.dtype == aoti_torch_dtype_float16() ? DType::kF16 : DType::kBF16,
                   .sink_is_fp32 = sink.is_fp32,
                   .batch = static_cast<int>(shape.batch),
                   .seqlen = static_cast<int>(shape.seqlen),
                   .heads = static_cast<int>(shape.heads),
                   .head_dim = static_cast<int>(shape.head_dim),
                   .o = out_operand.view,
                   .d_o = dout_operand.view,
                   .lse = static_cast<float const*>(lse.const_data_ptr()),
                   .dlse = dlse ? static_cast<float const*>(dlse->const_data_ptr()) : nullptr,
                   .sink = sink.address,
                   .dsink = dsink.mutable_data_ptr(),
                   .partial = static_cast<float*>(partial.mutable_data_ptr())},
                  current_stream(device.index));
  return dsink;
}

}  // namespace flash3
