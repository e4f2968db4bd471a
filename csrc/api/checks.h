// What the ops read of their arguments, and the checks before anything is allocated or launched.
// Python checks the same with TypeError, ValueError and NotImplementedError; these are the backstop
// for callers of torch.ops.flash3 itself, and raise RuntimeError.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <limits>
#include <string>

#include "params.h"

namespace flash3 {

using torch::stable::Tensor;

// `dtype` is that of q.
inline void check_dtype(Tensor const& q, int32_t dtype) {
  if (dtype != aoti_torch_dtype_bfloat16() && dtype != aoti_torch_dtype_float16()) {
    STD_TORCH_CHECK(false, "q: dtype must be float16 or bfloat16, got ",
                    torch::headeronly::toString(q.scalar_type()));
  }
}

inline void check_head_dim(char const* name, int64_t head_dim) {
  bool const fits = head_dim > 0 && head_dim % 8 == 0;
  STD_TORCH_CHECK(fits, name, ": head_dim must be a multiple of 8, got ", head_dim);
}

inline void check_heads(int64_t num_heads_q, int64_t num_heads_kv) {
  bool const heads_fit = num_heads_kv == 0 ? num_heads_q == 0 : num_heads_q % num_heads_kv == 0;
  STD_TORCH_CHECK(heads_fit, "k: the number of heads must divide that of q, ", num_heads_q,
                  ", got ", num_heads_kv);
}

// Where a tensor lives, in torch's own codes.
struct Placement {
  int32_t device_type;
  int32_t device_index;
  bool operator==(Placement const&) const = default;
};

inline Placement placement_of(Tensor const& tensor) {
  Placement placement{};
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &placement.device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &placement.device_index));
  return placement;
}

inline int32_t dtype_of(Tensor const& tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

// A (batch, seqlen, heads, head_dim) or (rows, heads, head_dim) argument and its attributes, each
// read from torch once: every reading is a call into libtorch. Refers to the tensor; an op's
// arguments outlive it.
struct Argument {
  Tensor const& tensor;
  char const* name;
  int32_t dtype;
  Placement placement;
  torch::headeronly::IntHeaderOnlyArrayRef sizes, strides;

  Argument(Tensor const& tensor, char const* name)
      : tensor(tensor),
        name(name),
        dtype(dtype_of(tensor)),
        placement(placement_of(tensor)),
        sizes(tensor.sizes()),
        strides(tensor.strides()) {}
};

// Extents of one call, equal to those of its tensors; zeros are legal but for head_dim.
struct Shape {
  int64_t batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim, head_dim_v;

  std::array<int64_t, 4> q_sizes() const { return {batch, seqlen_q, num_heads_q, head_dim}; }
  std::array<int64_t, 4> k_sizes() const { return {batch, seqlen_k, num_heads_kv, head_dim}; }
  std::array<int64_t, 4> v_sizes() const { return {batch, seqlen_k, num_heads_kv, head_dim_v}; }
  std::array<int64_t, 4> out_sizes() const { return {batch, seqlen_q, num_heads_q, head_dim_v}; }
  bool empty() const { return batch == 0 || seqlen_q == 0 || seqlen_k == 0 || num_heads_q == 0; }
};

inline std::string text(torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  std::string joined;
  for (int64_t const size : sizes) joined += (joined.empty() ? "" : ", ") + std::to_string(size);
  return "(" + joined + ")";
}

// `other` must have the dtype and device of q and the extents given.
template <std::size_t kDims>
void check_matches(Argument const& other, Argument const& q,
                   std::array<int64_t, kDims> const& sizes) {
  STD_TORCH_CHECK(other.placement == q.placement, other.name, ": must be on the device of q");
  STD_TORCH_CHECK(other.dtype == q.dtype, other.name, ": dtype must be that of q, ",
                  torch::headeronly::toString(q.tensor.scalar_type()), ", got ",
                  torch::headeronly::toString(other.tensor.scalar_type()));
  STD_TORCH_CHECK(other.sizes.equals({sizes.data(), sizes.size()}), other.name, ": shape must be ",
                  text({sizes.data(), sizes.size()}), ", got ", text(other.sizes));
}

inline Shape check_qkv(Argument const& q, Argument const& k, Argument const& v) {
  for (Argument const* x : {&q, &k, &v}) {
    STD_TORCH_CHECK(x->sizes.size() == 4, x->name,
                    ": must be (batch, seqlen, heads, head_dim), got ", text(x->sizes));
    for (int64_t const size : x->sizes) {
      STD_TORCH_CHECK(size <= std::numeric_limits<int>::max(), x->name,
                      ": extents must be below 2^31, got ", text(x->sizes));
    }
  }
  check_dtype(q.tensor, q.dtype);
  Shape const shape{.batch = q.sizes[0],
                    .seqlen_q = q.sizes[1],
                    .seqlen_k = k.sizes[1],
                    .num_heads_q = q.sizes[2],
                    .num_heads_kv = k.sizes[2],
                    .head_dim = q.sizes[3],
                    .head_dim_v = v.sizes[3]};
  check_matches(k, q, shape.k_sizes());
  check_matches(v, q, shape.v_sizes());
  check_heads(shape.num_heads_q, shape.num_heads_kv);
  check_head_dim("q", shape.head_dim);
  check_head_dim("v", shape.head_dim_v);
  return shape;
}

// `rows` is lse or its gradient: (batch, heads_q, seqlen_q), packed (heads_q, total_q).
template <std::size_t kDims>
void check_rows(Tensor const& rows, char const* name, std::array<int64_t, kDims> const& sizes,
                Placement const& placement) {
  STD_TORCH_CHECK(placement_of(rows) == placement, name, ": must be on the device of q");
  STD_TORCH_CHECK(rows.sizes().equals({sizes.data(), sizes.size()}), name, ": shape must be ",
                  text({sizes.data(), sizes.size()}), ", got ", text(rows.sizes()));
}

inline Problem make_problem(Shape const& shape, int32_t dtype, double softmax_scale) {
  return {.dtype = dtype == aoti_torch_dtype_float16() ? DType::kF16 : DType::kBF16,
          .batch = static_cast<int>(shape.batch),
          .seqlen_q = static_cast<int>(shape.seqlen_q),
          .seqlen_k = static_cast<int>(shape.seqlen_k),
          .num_heads_q = static_cast<int>(shape.num_heads_q),
          .num_heads_kv = static_cast<int>(shape.num_heads_kv),
          .head_dim = static_cast<int>(shape.head_dim),
          .head_dim_v = static_cast<int>(shape.head_dim_v),
          .softmax_scale = static_cast<float>(softmax_scale)};
}

}  // namespace flash3
