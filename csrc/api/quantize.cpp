#include "quantize.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <bit>
#include <cmath>
#include <optional>

#include "checks.h"
#include "device.h"
#include "memory.h"
#include "ops.h"
#include "tensor_view.h"

namespace flash3 {
namespace {

// The first four numbers of splitmix64, as 256 bits.
void set_signs(uint32_t (&words)[8], int64_t seed) {
  uint64_t state = static_cast<uint64_t>(seed);
  for (int i = 0; i < 4; ++i) {
    state += 0x9E3779B97F4A7C15u;
    uint64_t z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    words[2 * i] = static_cast<uint32_t>(z);
    words[2 * i + 1] = static_cast<uint32_t>(z >> 32);
  }
}

void check_quantize(Shape const& shape, int64_t granularity, int64_t block) {
  STD_TORCH_CHECK(shape.head_dim == shape.head_dim_v, "v: head_dim must be that of q, ",
                  shape.head_dim, ", got ", shape.head_dim_v);
  STD_TORCH_CHECK(shape.head_dim % 16 == 0 && shape.head_dim <= 256,
                  "q: head_dim must be a multiple of 16 up to 256, got ", shape.head_dim);
  STD_TORCH_CHECK(shape.num_heads_kv > 0 || shape.num_heads_q == 0, "k: must have heads");
  STD_TORCH_CHECK(block == 64 || block == 128, "block: must be 64 or 128, got ", block);
  STD_TORCH_CHECK(granularity >= 0 && granularity <= 2, "granularity: must be 0, 1 or 2, got ",
                  granularity);
}

void const* table_address(Tensor const& tensor, char const* name, Argument const& q,
                          Shape const& shape, int32_t dtype) {
  Argument const table(tensor, name);
  STD_TORCH_CHECK(table.placement == q.placement, name, ": must be on the device of q");
  STD_TORCH_CHECK(table.dtype == dtype, name, ": dtype must be that of the other table");
  bool const fits = table.sizes.size() == 2 && table.sizes[0] >= shape.seqlen_k &&
                    table.sizes[1] % 8 == 0 && table.sizes[1] > 0 &&
                    2 * table.sizes[1] <= shape.head_dim;
  STD_TORCH_CHECK(fits, name, ": must be (positions, rotary_dim / 2) for all keys, got ",
                  text(table.sizes));
  void const* const address = tensor.const_data_ptr();
  bool const reads = table.strides[1] == 1 && table.strides[0] == table.sizes[1] &&
                     reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
  STD_TORCH_CHECK(reads, name, ": must be contiguous and begin at a multiple of 16 bytes");
  return address;
}

RotaryTables rotary_tables(std::optional<Tensor> const& cos, std::optional<Tensor> const& sin,
                           bool interleaved, Argument const& q, Shape const& shape) {
  STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "cos, sin: must be given together");
  if (!cos) return {};
  int32_t const dtype = dtype_of(*cos);
  bool const fp32 = dtype == aoti_torch_dtype_float32();
  STD_TORCH_CHECK(fp32 || dtype == q.dtype, "cos: dtype must be float32 or that of q");
  STD_TORCH_CHECK(shape.seqlen_q <= shape.seqlen_k, "q: must have at most as many rows as k");
  STD_TORCH_CHECK(cos->sizes().equals(sin->sizes()), "sin: shape must be that of cos");
  return {.cos = table_address(*cos, "cos", q, shape, dtype),
          .sin = table_address(*sin, "sin", q, shape, dtype),
          .fp32 = fp32,
          .interleaved = interleaved,
          .width = static_cast<int>(2 * cos->sizes()[1])};
}

// What one of q, k, v becomes, and the memory that the kernel works with.
struct Output {
  Tensor values, descale;
  std::optional<Tensor> amax;
};

Tensor empty_scales(Granularity granularity, Argument const& x, Shape const& shape, int64_t block,
                    int32_t dtype) {
  switch (granularity) {
    case Granularity::kTensor:
      return empty<1>({1}, dtype, x.placement);
    case Granularity::kHead:
      return empty<2>({shape.batch, shape.num_heads_kv}, dtype, x.placement);
    case Granularity::kBlock:
      break;
  }
  return empty<3>({shape.batch, x.sizes[2], (x.sizes[1] + block - 1) / block}, dtype, x.placement);
}

Output allocate(Argument const& x, Shape const& shape, Granularity granularity, int64_t block,
                bool transposed) {
  int32_t const e4m3 = aoti_torch_dtype_float8_e4m3fn();
  int64_t const keys = (x.sizes[1] + kQuantizeKeyTile - 1) / kQuantizeKeyTile * kQuantizeKeyTile;
  std::array<int64_t, 4> sizes{x.sizes[0], x.sizes[1], x.sizes[2], x.sizes[3]};
  if (transposed) sizes = {x.sizes[0], x.sizes[2], x.sizes[3], keys};
  Output output{.values = empty(sizes, e4m3, x.placement),
                .descale = empty_scales(granularity, x, shape, block, aoti_torch_dtype_float32()),
                .amax = std::nullopt};
  if (granularity != Granularity::kBlock) {
    output.amax = empty_scales(granularity, x, shape, block, aoti_torch_dtype_int32());
  }
  return output;
}

QuantizeOperand operand(TensorView const& in, Argument const& x, Output const& output) {
  return {.in = in,
          .out = output.values.mutable_data_ptr(),
          .descale = static_cast<float*>(output.descale.mutable_data_ptr()),
          .amax = output.amax ? static_cast<unsigned*>(output.amax->mutable_data_ptr()) : nullptr,
          .seqlen = static_cast<int>(x.sizes[1]),
          .heads = static_cast<int>(x.sizes[2])};
}

bool is_empty(Argument const& x) { return x.sizes[0] == 0 || x.sizes[1] == 0 || x.sizes[2] == 0; }

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_qkv(
    Tensor const& q_tensor, Tensor const& k_tensor, Tensor const& v_tensor,
    std::optional<Tensor> const& cos, std::optional<Tensor> const& sin, bool interleaved,
    int64_t granularity_code, int64_t block, bool hadamard, int64_t seed, bool transpose_v) {
  Argument const arguments[3] = {{q_tensor, "q"}, {k_tensor, "k"}, {v_tensor, "v"}};
  auto const& [q, k, v] = arguments;
  Shape const shape = check_qkv(q, k, v);
  check_quantize(shape, granularity_code, block);
  Device const& device = hopper_device(q.placement.device_index);
  torch::stable::accelerator::DeviceGuard const guard(device.index);
  auto const granularity = static_cast<Granularity>(granularity_code);
  int const head_dim = static_cast<int>(shape.head_dim);

  QuantizeParams params{
      .dtype = q.dtype == aoti_torch_dtype_float16() ? DType::kF16 : DType::kBF16,
      .granularity = granularity,
      .batch = static_cast<int>(shape.batch),
      .num_heads_kv = static_cast<int>(shape.num_heads_kv),
      .head_dim = head_dim,
      .block = static_cast<int>(block),
      .rotary = rotary_tables(cos, sin, interleaved, q, shape),
      .num_sms = device.num_sms,
  };
  if (hadamard) {
    params.hadamard_block = head_dim & -head_dim;
    params.hadamard_factor =
        static_cast<float>(1.0 / std::sqrt(static_cast<double>(params.hadamard_block)));
    set_signs(params.signs, seed);
  }
  Output outputs[3] = {allocate(q, shape, granularity, block, false),
                       allocate(k, shape, granularity, block, false),
                       allocate(v, shape, granularity, block, transpose_v)};
  std::optional<TmaOperand> inputs[3];  // copies must live until the launch
  for (int i = 0; i < 3; ++i) {
    Argument const& x = arguments[i];
    if (is_empty(x)) {
      torch::stable::fill_(outputs[i].descale, 1.0);  // nobody else writes it
    } else {
      inputs[i] = tma_operand(x);
    }
    params.operands[i] = operand(inputs[i] ? inputs[i]->view : TensorView{}, x, outputs[i]);
    params.operands[i].rotated = i < 2;
  }
  if (cos) params.operands[0].first_position = static_cast<int>(shape.seqlen_k - shape.seqlen_q);
  params.operands[2].transposed = transpose_v;
  launch_quantize(params, current_stream(device.index));
  return {std::move(outputs[0].values),  std::move(outputs[1].values),
          std::move(outputs[2].values),  std::move(outputs[0].descale),
          std::move(outputs[1].descale), std::move(outputs[2].descale)};
}

}  // namespace flash3
