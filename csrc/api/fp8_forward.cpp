#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <optional>

#include "checks.h"
#include "device.h"
#include "memory.h"
#include "ops.h"
#include "plan.h"
#include "tensor_view.h"
#include "tile_counter.h"

namespace flash3 {
namespace {

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// `scales` are one factor for each `block` rows of a head, float32.
Fp8Scales read_scales(std::optional<Tensor> const& scales, char const* name, int64_t block,
                      std::array<int64_t, 3> const& batch_heads_rows, Placement const& placement) {
  if (!scales) return {};
  STD_TORCH_CHECK(block == 64 || block == 128, name, ": the block must be 64 or 128 rows, got ",
                  block);
  auto const [batch, heads, rows] = batch_heads_rows;
  std::array<int64_t, 3> const sizes{batch, heads, (rows + block - 1) / block};
  STD_TORCH_CHECK(placement_of(*scales) == placement, name, ": must be on the device of q");
  STD_TORCH_CHECK(dtype_of(*scales) == aoti_torch_dtype_float32(), name,
                  ": dtype must be float32, got ",
                  torch::headeronly::toString(scales->scalar_type()));
  STD_TORCH_CHECK(scales->sizes().equals({sizes.data(), sizes.size()}), name, ": shape must be ",
                  text({sizes.data(), sizes.size()}), ", got ", text(scales->sizes()));
  Sizes const strides = scales->strides();
  return {.ptr = static_cast<float const*>(scales->const_data_ptr()),
          .batch_stride = strides[0],
          .head_stride = strides[1],
          .block_stride = strides[2],
          .log2_block = block == 64 ? 6 : 7};
}

void check_e4m3(Argument const& x) {
  STD_TORCH_CHECK(x.dtype == aoti_torch_dtype_float8_e4m3fn(), x.name,
                  ": dtype must be float8_e4m3fn, got ",
                  torch::headeronly::toString(x.tensor.scalar_type()));
  STD_TORCH_CHECK(x.sizes.size() == 4, x.name, ": must have 4 dimensions, got ", text(x.sizes));
  for (int64_t const size : x.sizes) {
    STD_TORCH_CHECK(size <= std::numeric_limits<int>::max(), x.name,
                    ": extents must be below 2^31, got ", text(x.sizes));
  }
}

Shape check_e4m3_qkv(Argument const& q, Argument const& k, Argument const& v, bool v_transposed) {
  for (Argument const* x : {&q, &k, &v}) check_e4m3(*x);
  Shape const shape{.batch = q.sizes[0],
                    .seqlen_q = q.sizes[1],
                    .seqlen_k = k.sizes[1],
                    .num_heads_q = q.sizes[2],
                    .num_heads_kv = k.sizes[2],
                    .head_dim = q.sizes[3],
                    .head_dim_v = q.sizes[3]};
  check_matches(k, q, shape.k_sizes());
  int64_t const keys = (shape.seqlen_k + kTransposedKeys - 1) / kTransposedKeys * kTransposedKeys;
  check_matches(v, q,
                v_transposed
                    ? std::array<int64_t, 4>{shape.batch, shape.num_heads_kv, shape.head_dim, keys}
                    : shape.v_sizes());
  check_heads(shape.num_heads_q, shape.num_heads_kv);
  STD_TORCH_CHECK(shape.head_dim > 0 && shape.head_dim % 16 == 0,
                  "q: head_dim must be a multiple of 16, got ", shape.head_dim);
  return shape;
}

}  // namespace

std::tuple<Tensor, Tensor> fp8_forward(
    Tensor const& q_tensor, Tensor const& k_tensor, Tensor const& v_tensor,
    std::optional<Tensor> const& q_descale, std::optional<Tensor> const& k_descale,
    std::optional<Tensor> const& v_descale, int64_t q_block, int64_t k_block, int64_t v_block,
    double softmax_scale, double v_scale, bool causal, bool v_transposed,
    std::optional<torch::headeronly::ScalarType> out_dtype, int64_t promote_every) {
  using torch::headeronly::ScalarType;
  bool const out_f16 = out_dtype == ScalarType::Half;
  STD_TORCH_CHECK(!out_dtype || out_f16 || out_dtype == ScalarType::BFloat16,
                  "out_dtype: must be float16 or bfloat16, got ",
                  torch::headeronly::toString(*out_dtype));
  STD_TORCH_CHECK(promote_every == 0 || promote_every == 1, "promote_every: must be 0 or 1, got ",
                  promote_every);
  Argument const q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
  Shape const shape = check_e4m3_qkv(q, k, v, v_transposed);
  std::array<int64_t, 3> const keys{shape.batch, shape.num_heads_kv, shape.seqlen_k};
  Fp8Params const fp8{
      .q_scales = read_scales(q_descale, "q_descale", q_block,
                              {shape.batch, shape.num_heads_q, shape.seqlen_q}, q.placement),
      .k_scales = read_scales(k_descale, "k_descale", k_block, keys, q.placement),
      .v_scales = read_scales(v_descale, "v_descale", v_block, keys, q.placement),
      .v_scale = static_cast<float>(v_scale),
      .v_transposed = v_transposed,
      .out_dtype = out_f16 ? DType::kF16 : DType::kBF16};
  Device const& device = hopper_device(q.placement.device_index);
  torch::stable::accelerator::DeviceGuard const guard(device.index);

  Tensor out =
      empty(shape.out_sizes(), out_f16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16(),
            q.placement);
  Tensor lse = empty<3>({shape.batch, shape.num_heads_q, shape.seqlen_q},
                        aoti_torch_dtype_float32(), q.placement);
  if (shape.empty()) {  // nothing to write, or no key to see
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    return {std::move(out), std::move(lse)};
  }

  Problem problem = make_problem(shape, q.dtype, softmax_scale);
  problem.mask = causal ? MaskKind::kCausal : MaskKind::kFull;
  problem.dtype = DType::kE4M3;
  problem.two_level = promote_every == 1;
  FwdPlan const plan = plan_fwd(problem, device.num_sms);
  TmaOperand const q_operand = tma_operand(q), k_operand = tma_operand(k),
                   v_operand = tma_operand(v);
  cudaStream_t const stream = current_stream(device.index);
  std::optional<Tensor> counter;
  if (plan.workspace_bytes > 0) counter = tile_counter(stream, q.placement);

  TensorView v_view = v_operand.view;
  if (v_transposed) {
    // (batch, heads, head_dim, keys): the rows of a head are its dimensions.
    v_view.seqlen_stride = v_operand.view.head_stride;
    v_view.head_stride = v_operand.view.seqlen_stride;
  }
  FwdParams const params{
      .problem = problem,
      .q = q_operand.view,
      .k = k_operand.view,
      .v = v_view,
      .o = output_view(out, shape.out_sizes()),
      .lse = static_cast<float*>(lse.mutable_data_ptr()),
      .tile_counter = counter ? static_cast<int*>(counter->mutable_data_ptr()) : nullptr,
      .grid = plan.grid,
      .fp8 = fp8,
  };
  plan.row->launch(params, stream);
  return {std::move(out), std::move(lse)};
}

}  // namespace flash3
