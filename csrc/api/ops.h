// The CUDA implementations of the ops whose schemas flash3/ops.py defines.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

namespace flash3 {

// q (b, sq, hq, d), k and v (b, sk, hk, d) -> out (b, sq, hq, d) in q's dtype, lse (b, hq, sq)
// fp32, natural log. `deterministic` is part of the schema for the gradient formula in Python,
// which hands it to backward; the forward is bitwise reproducible either way.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> forward(torch::stable::Tensor const& q,
                                                                 torch::stable::Tensor const& k,
                                                                 torch::stable::Tensor const& v,
                                                                 double softmax_scale, bool causal,
                                                                 bool deterministic);

// Gradients of out and (if given) lse -> dq, dk, dv with the shapes and dtypes of q, k, v,
// contiguous.
std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> backward(
    torch::stable::Tensor const& dout, torch::stable::Tensor const& q,
    torch::stable::Tensor const& k, torch::stable::Tensor const& v,
    torch::stable::Tensor const& out, torch::stable::Tensor const& lse,
    std::optional<torch::stable::Tensor> const& dlse, double softmax_scale, bool causal,
    bool deterministic);

// Attention of the same queries to two sets of keys -> to both, written to out and lse, which may
// be out_1 and lse_1. out and out_1 (b, s, h, d) are fp32 or of out_2's dtype; lse, lse_1, lse_2
// (b, h, s) fp32.
void merge(torch::stable::Tensor const& out, torch::stable::Tensor const& lse,
           torch::stable::Tensor const& out_1, torch::stable::Tensor const& lse_1,
           torch::stable::Tensor const& out_2, torch::stable::Tensor const& lse_2);

}  // namespace flash3
