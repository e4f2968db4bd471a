#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "checks.h"
#include "device.h"
#include "memory.h"
#include "merge.h"
#include "ops.h"

namespace flash3 {
namespace {

constexpr int64_t kVectorBytes = 16;

bool is_fp32(Argument const& x) { return x.dtype == aoti_torch_dtype_float32(); }

TensorView vector_view(Argument const& x) {
  void const* const address = x.tensor.const_data_ptr();
  int64_t const unit = kVectorBytes / (is_fp32(x) ? 4 : 2);
  bool fits = reinterpret_cast<std::uintptr_t>(address) % kVectorBytes == 0 && x.strides[3] == 1;
  for (std::size_t dim = 0; dim < 3; ++dim) {
    fits = fits && (x.sizes[dim] <= 1 || x.strides[dim] % unit == 0);
  }
  STD_TORCH_CHECK(fits, x.name, ": rows must be contiguous and begin at multiples of 16 bytes");
  return {.ptr = const_cast<void*>(address),
          .batch_stride = x.strides[0],
          .seqlen_stride = x.strides[1],
          .head_stride = x.strides[2]};
}

RowsView rows_view(Tensor const& rows, char const* name, Argument const& like) {
  Argument const x(rows, name);
  std::array<int64_t, 3> const sizes{like.sizes[0], like.sizes[2], like.sizes[1]};
  STD_TORCH_CHECK(x.placement == like.placement, name, ": must be on the device of out");
  STD_TORCH_CHECK(is_fp32(x), name, ": dtype must be float32");
  STD_TORCH_CHECK(x.sizes.equals({sizes.data(), sizes.size()}), name, ": shape must be ",
                  text({sizes.data(), sizes.size()}), ", got ", text(x.sizes));
  STD_TORCH_CHECK(x.sizes[2] <= 1 || x.strides[2] == 1, name, ": the last stride must be 1");
  return {.ptr = static_cast<float*>(const_cast<void*>(rows.const_data_ptr())),
          .batch_stride = x.strides[0],
          .head_stride = x.strides[1]};
}

void check_parts(Argument const& out, Argument const& first, Argument const& second) {
  STD_TORCH_CHECK(second.sizes.size() == 4, "out_2: must be (batch, seqlen, heads, head_dim), got ",
                  text(second.sizes));
  STD_TORCH_CHECK(
      second.dtype == aoti_torch_dtype_bfloat16() || second.dtype == aoti_torch_dtype_float16(),
      "out_2: dtype must be float16 or bfloat16");
  int64_t const head_dim = second.sizes[3];
  STD_TORCH_CHECK(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0,
                  "out_2: head_dim must be a multiple of 8 up to 256, got ", head_dim);
  for (Argument const* x : {&out, &first}) {
    STD_TORCH_CHECK(x->placement == second.placement, x->name, ": must be on the device of out_2");
    STD_TORCH_CHECK(x->sizes.equals(second.sizes), x->name, ": shape must be that of out_2, ",
                    text(second.sizes), ", got ", text(x->sizes));
    STD_TORCH_CHECK(x->dtype == second.dtype || is_fp32(*x), x->name,
                    ": dtype must be float32 or that of out_2");
  }
  for (int64_t const size : second.sizes) {
    STD_TORCH_CHECK(size <= std::numeric_limits<int>::max(),
                    "out_2: extents must be below 2^31, got ", text(second.sizes));
  }
}

}  // namespace

void merge(Tensor const& out_tensor, Tensor const& lse, Tensor const& first_tensor,
           Tensor const& first_lse, Tensor const& second_tensor, Tensor const& second_lse) {
  Argument const out(out_tensor, "out"), first(first_tensor, "out_1"),
      second(second_tensor, "out_2");
  check_parts(out, first, second);
  Device const& device = hopper_device(out.placement.device_index);
  torch::stable::accelerator::DeviceGuard const guard(device.index);
  MergeParams const params{
      .dtype = second.dtype == aoti_torch_dtype_float16() ? DType::kF16 : DType::kBF16,
      .out_is_fp32 = is_fp32(out),
      .first_is_fp32 = is_fp32(first),
      .batch = static_cast<int>(out.sizes[0]),
      .seqlen = static_cast<int>(out.sizes[1]),
      .heads = static_cast<int>(out.sizes[2]),
      .head_dim = static_cast<int>(out.sizes[3]),
      .out = vector_view(out),
      .out_1 = vector_view(first),
      .out_2 = vector_view(second),
      .lse = rows_view(lse, "lse", out),
      .lse_1 = rows_view(first_lse, "lse_1", out),
      .lse_2 = rows_view(second_lse, "lse_2", out),
  };
  if (params.batch == 0 || params.seqlen == 0 || params.heads == 0) return;
  launch_merge(params, current_stream(device.index));
}

}  // namespace flash3
