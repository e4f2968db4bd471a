// The CUDA implementations of the ops whose schemas flash3/ops.py defines.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

namespace flash3 {

// q (b, sq, hq, d), k and v (b, sk, hk, d) -> out (b, sq, hq, d) in q's dtype, lse (b, hq, sq)
// fp32, natural log. `order` (of gradients' sums, the number of an `Order`) is part of the schema
// for the gradient formula in Python, which hands it to backward; the forward is bitwise
// reproducible.
//
// `sink` (hq), of q's dtype or fp32, is one more logit of each head's rows, without a value. A
// query at position p = i + sk - sq sees keys p - window_left to p + window_right (-1: unbounded;
// causal: window_right is 0), and with attention_chunk > 0 only those of its own chunk. With
// softcap > 0 a score s counts as softcap * tanh(s / softcap).
std::tuple<torch::stable::Tensor, torch::stable::Tensor> forward(
    torch::stable::Tensor const& q, torch::stable::Tensor const& k, torch::stable::Tensor const& v,
    double softmax_scale, bool causal, int64_t order,
    std::optional<torch::stable::Tensor> const& sink, int64_t window_left, int64_t window_right,
    int64_t attention_chunk, double softcap);

// Gradients of out and (if given) lse -> dq, dk, dv with the shapes and dtypes of q, k, v,
// contiguous.
std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> backward(
    torch::stable::Tensor const& dout, torch::stable::Tensor const& q,
    torch::stable::Tensor const& k, torch::stable::Tensor const& v,
    torch::stable::Tensor const& out, torch::stable::Tensor const& lse,
    std::optional<torch::stable::Tensor> const& dlse, double softmax_scale, bool causal,
    int64_t order, int64_t window_left, int64_t window_right, int64_t attention_chunk,
    double softcap);

// Gradient of the sinks, in their dtype, from what a forward with them returned and the gradients
// of that: dense or packed. Rows of lse -inf add nothing; rows that no packed sequence uses are
// such.
torch::stable::Tensor sink_backward(torch::stable::Tensor const& dout,
                                    torch::stable::Tensor const& out,
                                    torch::stable::Tensor const& lse,
                                    std::optional<torch::stable::Tensor> const& dlse,
                                    torch::stable::Tensor const& sink);

// e4m3 q (b, sq, hq, d), k and v (b, sk, hk, d), or with v_transposed v (b, hk, d, sk rounded up to
// 128) in the order of csrc/kernels/fp8/operands.cuh. *_descale (b, heads, blocks of *_block rows)
// float32, or none: factors to multiply by; v_scale is one more. out is bfloat16 unless out_dtype
// is float16. promote_every 1: two-level sums of P V (FwdTile).
std::tuple<torch::stable::Tensor, torch::stable::Tensor> fp8_forward(
    torch::stable::Tensor const& q, torch::stable::Tensor const& k, torch::stable::Tensor const& v,
    std::optional<torch::stable::Tensor> const& q_descale,
    std::optional<torch::stable::Tensor> const& k_descale,
    std::optional<torch::stable::Tensor> const& v_descale, int64_t q_block, int64_t k_block,
    int64_t v_block, double softmax_scale, double v_scale, bool causal, bool v_transposed,
    std::optional<torch::headeronly::ScalarType> out_dtype, int64_t promote_every);

// Attention of the same queries to two sets of keys -> to both, written to out and lse, which may
// be out_1 and lse_1. out and out_1 (b, s, h, d) are fp32 or of out_2's dtype; lse, lse_1, lse_2
// (b, h, s) fp32.
void merge(torch::stable::Tensor const& out, torch::stable::Tensor const& lse,
           torch::stable::Tensor const& out_1, torch::stable::Tensor const& lse_1,
           torch::stable::Tensor const& out_2, torch::stable::Tensor const& lse_2);

// The same of packed sequences: q (total_q, hq, d), k and v (total_k, hk, d), lse (hq, total_q).
// cu_seqlens (batch + 1) and seqused (batch) are int32: sequence b has the slot of rows
// [cu_seqlens[b], cu_seqlens[b + 1]) and uses the first seqused[b] of it, or all. Rows that no
// sequence uses are written: out 0, lse -inf, gradients 0.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> varlen_forward(
    torch::stable::Tensor const& q, torch::stable::Tensor const& k, torch::stable::Tensor const& v,
    torch::stable::Tensor const& cu_seqlens_q, torch::stable::Tensor const& cu_seqlens_k,
    std::optional<torch::stable::Tensor> const& seqused_q,
    std::optional<torch::stable::Tensor> const& seqused_k, double softmax_scale, bool causal,
    int64_t order, std::optional<torch::stable::Tensor> const& sink, int64_t window_left,
    int64_t window_right, int64_t attention_chunk, double softcap);

std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> varlen_backward(
    torch::stable::Tensor const& dout, torch::stable::Tensor const& q,
    torch::stable::Tensor const& k, torch::stable::Tensor const& v,
    torch::stable::Tensor const& out, torch::stable::Tensor const& lse,
    std::optional<torch::stable::Tensor> const& dlse, torch::stable::Tensor const& cu_seqlens_q,
    torch::stable::Tensor const& cu_seqlens_k,
    std::optional<torch::stable::Tensor> const& seqused_q,
    std::optional<torch::stable::Tensor> const& seqused_k, double softmax_scale, bool causal,
    int64_t order, int64_t window_left, int64_t window_right, int64_t attention_chunk,
    double softcap);

// q, k, v of 16 bits -> e4m3 and descales: csrc/launch/quantize.h. `granularity` is its enum's
// number.
std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor,
           torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor>
quantize_qkv(torch::stable::Tensor const& q, torch::stable::Tensor const& k,
             torch::stable::Tensor const& v, std::optional<torch::stable::Tensor> const& cos,
             std::optional<torch::stable::Tensor> const& sin, bool interleaved, int64_t granularity,
             int64_t block, bool hadamard, int64_t seed, bool transpose_v);

}  // namespace flash3
