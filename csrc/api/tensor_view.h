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
  constexpr int64_t kUnit = 8;  // elements in 16 bytes
  constexpr int64_t kMaxStride = (int64_t{1} << 40) / 2;
  if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0 || x.strides[3] != 1) return false;
  for (std::size_t dim = 0; dim < 3; ++dim) {
    int64_t const stride = x.strides[dim];
    bool const fits = stride > 0 && stride % kUnit == 0 && stride < kMaxStride;
    if (x.sizes[dim] > 1 && !fits) return false;
  }
  return true;
}

// View of contiguous memory of these extents.
inline TensorView contiguous_view(void* address, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  return {.ptr = address,
          .batch_stride = sizes[1] * sizes[2] * sizes[3],
          .seqlen_stride = sizes[2] * sizes[3],
          .head_stride = sizes[3]};
}

// View of an output or of a copy, made contiguous by empty() and of q's or k's extents.
inline TensorView output_view(Tensor const& tensor, Argument const& like) {
  return contiguous_view(tensor.mutable_data_ptr(), like.sizes);
}

// An input of at least one element. contiguous() would not do for the copy: a contiguous tensor at
// an odd address is its own contiguous().
inline TmaOperand tma_operand(Argument const& x) {
  void const* const address = x.tensor.const_data_ptr();
  if (tma_reads(x, address)) {
    // The stride of an extent of 1 is never walked, and may be anything in torch; TMA checks it all
    // the same.
    auto const stride = [&x](std::size_t dim) {
      return x.sizes[dim] > 1 ? x.strides[dim] : x.sizes[3];
    };
    return {.owner = x.tensor,
            .view = {.ptr = const_cast<void*>(address),
                     .batch_stride = stride(0),
                     .seqlen_stride = stride(1),
                     .head_stride = stride(2)}};
  }
  Tensor copy = empty<4>({x.sizes[0], x.sizes[1], x.sizes[2], x.sizes[3]}, x.dtype, x.placement);
  torch::stable::copy_(copy, x.tensor);
  TensorView const view = output_view(copy, x);
  return {.owner = std::move(copy), .view = view};
}

}  // namespace flash3
