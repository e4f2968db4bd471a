// From torch tensors to the views that kernels take, by a copy where the tensor memory accelerator
// (TMA) cannot read the tensor as it lies.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>

#include "checks.h"
#include "memory.h"
#include "params.h"

namespace flash3 {

// A view, and the tensor that owns its memory: the argument itself or a copy, which must live until
// the launch.
struct TmaOperand {
  Tensor owner;
  TensorView view;
};

// TMA wants an address and strides that are multiples of 16 bytes, strides below 2^40 bytes, and no
// stride 0.
inline bool tma_reads(Argument const& x, void const* address) {
  int64_t const element_bytes = x.dtype == aoti_torch_dtype_float8_e4m3fn() ? 1 : 2;
  int64_t const unit = 16 / element_bytes;
  // Packed rows: kWrap of tensor_map.h.
  int64_t const max_stride =
      x.sizes.size() == 3 ? int64_t{1} << 34 : (int64_t{1} << 40) / element_bytes;
  std::size_t const last = x.sizes.size() - 1;
  if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0 || x.strides[last] != 1) return false;
  for (std::size_t dim = 0; dim < last; ++dim) {
    int64_t const stride = x.strides[dim];
    bool const fits = stride > 0 && stride % unit == 0 && stride < max_stride;
    if (x.sizes[dim] > 1 && !fits) return false;
  }
  return true;
}

// View of contiguous memory of these extents: (batch, seqlen, heads, head_dim), or packed (rows,
// heads, head_dim).
inline TensorView contiguous_view(void* address, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  std::size_t const last = sizes.size() - 1;
  int64_t const head_stride = sizes[last], row_stride = sizes[last - 1] * head_stride;
  return {.ptr = address,
          .batch_stride = last == 3 ? sizes[1] * row_stride : 0,
          .seqlen_stride = row_stride,
          .head_stride = head_stride};
}

// View of an output or of a copy, made contiguous by empty() and of these extents.
template <std::size_t kDims>
TensorView output_view(Tensor const& tensor, std::array<int64_t, kDims> const& sizes) {
  return contiguous_view(tensor.mutable_data_ptr(), {sizes.data(), sizes.size()});
}

// An input of at least one element. contiguous() would not do for the copy: a contiguous tensor at
// an odd address is its own contiguous().
inline TmaOperand tma_operand(Argument const& x) {
  void const* const address = x.tensor.const_data_ptr();
  std::size_t const last = x.sizes.size() - 1;
  if (tma_reads(x, address)) {
    // The stride of an extent of 1 is never walked, and may be anything in torch; TMA checks it all
    // the same.
    auto const stride = [&x, last](std::size_t dim) {
      return x.sizes[dim] > 1 ? x.strides[dim] : x.sizes[last];
    };
    return {.owner = x.tensor,
            .view = {.ptr = const_cast<void*>(address),
                     .batch_stride = last == 3 ? stride(0) : 0,
                     .seqlen_stride = stride(last - 2),
                     .head_stride = stride(last - 1)}};
  }
  Tensor copy =
      last == 3 ? empty<4>({x.sizes[0], x.sizes[1], x.sizes[2], x.sizes[3]}, x.dtype, x.placement)
                : empty<3>({x.sizes[0], x.sizes[1], x.sizes[2]}, x.dtype, x.placement);
  torch::stable::copy_(copy, x.tensor);
  TensorView const view = contiguous_view(copy.mutable_data_ptr(), x.sizes);
  return {.owner = std::move(copy), .view = view};
}

}  // namespace flash3
