// What the ops on packed sequences read of their arguments: (rows, heads, head_dim) tensors and the
// int32 tensors that say where the sequences lie. Only the device knows what those hold.
#pragma once

#include <optional>

#include "checks.h"

namespace flash3 {

// The most rows of a packed tensor: kRaggedRows of kernels/common/tma.cuh.
inline constexpr int64_t kMaxPackedRows = int64_t{1} << 30;

// Extents of one call; zeros are legal but for head_dim.
struct PackedShape {
  int64_t batch, total_q, total_k, num_heads_q, num_heads_kv, head_dim, head_dim_v;

  std::array<int64_t, 3> q_sizes() const { return {total_q, num_heads_q, head_dim}; }
  std::array<int64_t, 3> k_sizes() const { return {total_k, num_heads_kv, head_dim}; }
  std::array<int64_t, 3> v_sizes() const { return {total_k, num_heads_kv, head_dim_v}; }
  std::array<int64_t, 3> out_sizes() const { return {total_q, num_heads_q, head_dim_v}; }
  std::array<int64_t, 2> lse_sizes() const { return {num_heads_q, total_q}; }
  bool empty() const { return batch == 0 || total_q == 0 || total_k == 0 || num_heads_q == 0; }
};

// The tensors of a packed call that hold lengths, as the ops receive them.
struct SequenceTensors {
  Tensor const &cu_seqlens_q, &cu_seqlens_k;
  std::optional<Tensor> const &seqused_q, &seqused_k;
};

inline void check_packed_rows(Argument const& x) {
  STD_TORCH_CHECK(x.sizes.size() == 3, x.name, ": must be (rows, heads, head_dim), got ",
                  text(x.sizes));
  STD_TORCH_CHECK(x.sizes[0] <= kMaxPackedRows, x.name, ": must have at most 2^30 rows, got ",
                  text(x.sizes));
  STD_TORCH_CHECK(x.sizes[1] <= std::numeric_limits<int>::max(), x.name,
                  ": extents must be below 2^31, got ", text(x.sizes));
}

// An int32 vector of `length` on the device of q.
inline void check_lengths(Tensor const& x, char const* name, int64_t length,
                          Placement const& placement) {
  STD_TORCH_CHECK(placement_of(x) == placement, name, ": must be on the device of q");
  STD_TORCH_CHECK(dtype_of(x) == aoti_torch_dtype_int32(), name, ": dtype must be int32, got ",
                  torch::headeronly::toString(x.scalar_type()));
  STD_TORCH_CHECK(x.sizes().equals({&length, 1}) && x.is_contiguous(), name,
                  ": must be contiguous and of shape (", length, "), got ", text(x.sizes()));
}

inline PackedShape check_packed(Argument const& q, Argument const& k, Argument const& v,
                                SequenceTensors const& at) {
  for (Argument const* x : {&q, &k, &v}) check_packed_rows(*x);
  check_dtype(q.tensor, q.dtype);
  STD_TORCH_CHECK(at.cu_seqlens_q.sizes().size() == 1 && at.cu_seqlens_q.sizes()[0] > 0,
                  "cu_seqlens_q: must be (batch + 1), got ", text(at.cu_seqlens_q.sizes()));
  PackedShape const shape{.batch = at.cu_seqlens_q.sizes()[0] - 1,
                          .total_q = q.sizes[0],
                          .total_k = k.sizes[0],
                          .num_heads_q = q.sizes[1],
                          .num_heads_kv = k.sizes[1],
                          .head_dim = q.sizes[2],
                          .head_dim_v = v.sizes[2]};
  check_matches(k, q, shape.k_sizes());
  check_matches(v, q, shape.v_sizes());
  check_heads(shape.num_heads_q, shape.num_heads_kv);
  check_head_dim("q", shape.head_dim);
  check_head_dim("v", shape.head_dim_v);
  STD_TORCH_CHECK(shape.batch < std::numeric_limits<int>::max(),
                  "cu_seqlens_q: must hold fewer than 2^31 numbers, got ", shape.batch + 1);
  check_lengths(at.cu_seqlens_q, "cu_seqlens_q", shape.batch + 1, q.placement);
  check_lengths(at.cu_seqlens_k, "cu_seqlens_k", shape.batch + 1, q.placement);
  if (at.seqused_q) check_lengths(*at.seqused_q, "seqused_q", shape.batch, q.placement);
  if (at.seqused_k) check_lengths(*at.seqused_k, "seqused_k", shape.batch, q.placement);
  return shape;
}

inline Problem make_packed_problem(PackedShape const& shape, int32_t dtype, double softmax_scale) {
  return {.dtype = dtype == aoti_torch_dtype_float16() ? DType::kF16 : DType::kBF16,
          .layout = SeqLayout::kPacked,
          .batch = static_cast<int>(shape.batch),
          .seqlen_q = static_cast<int>(shape.total_q),
          .seqlen_k = static_cast<int>(shape.total_k),
          .num_heads_q = static_cast<int>(shape.num_heads_q),
          .num_heads_kv = static_cast<int>(shape.num_heads_kv),
          .head_dim = static_cast<int>(shape.head_dim),
          .head_dim_v = static_cast<int>(shape.head_dim_v),
          .softmax_scale = static_cast<float>(softmax_scale)};
}

inline PackedRows packed_rows(SequenceTensors const& at) {
  auto const numbers = [](Tensor const& x) { return static_cast<int const*>(x.const_data_ptr()); };
  return {.cu_seqlens_q = numbers(at.cu_seqlens_q),
          .cu_seqlens_k = numbers(at.cu_seqlens_k),
          .seqused_q = at.seqused_q ? numbers(*at.seqused_q) : nullptr,
          .seqused_k = at.seqused_k ? numbers(*at.seqused_k) : nullptr};
}

// A list of blocks in a workspace.
inline BlockList block_list(Tensor const& workspace, std::size_t blocks_offset,
                            std::size_t count_offset) {
  std::byte* const base = static_cast<std::byte*>(workspace.mutable_data_ptr());
  return {.blocks = reinterpret_cast<ListedBlock*>(base + blocks_offset),
          .count = reinterpret_cast<int*>(base + count_offset)};
}

}  // namespace flash3
