// Which keys a query sees, how scores are capped and which sinks stand beside them: from the
// arguments of an op to what a kernel takes.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "checks.h"
#include "params.h"

namespace flash3 {

struct LimitArguments {
  bool causal;
  int64_t window_left, window_right, attention_chunk;
  double softcap;
};

inline void check_limits(LimitArguments const& given) {
  STD_TORCH_CHECK(given.window_left >= -1, "window_left: must be -1 (unbounded) or more, got ",
                  given.window_left);
  STD_TORCH_CHECK(given.window_right >= -1, "window_right: must be -1 (unbounded) or more, got ",
                  given.window_right);
  STD_TORCH_CHECK(given.attention_chunk >= 0, "attention_chunk: must be 0 (none) or more, got ",
                  given.attention_chunk);
  bool const is_cap = given.softcap > 0 && std::isnormal(static_cast<float>(given.softcap));
  STD_TORCH_CHECK(is_cap || given.softcap == 0,
                  "softcap: must be 0 (none) or a positive number that float32 holds, got ",
                  given.softcap);
}

// A limit that nothing in the problem reaches is none. What is left without one, or with a causal
// one alone, is served by the rows of full and of causal masks. Not so of packed calls: which row a
// sequence meets, and so its bits, must not depend on the others.
inline void set_limits(Problem& problem, LimitArguments const& given) {
  int64_t const right = given.causal ? 0 : given.window_right;
  bool const causal = right == 0;
  bool const packed = problem.layout == SeqLayout::kPacked;
  bool const left_reached =
      given.window_left >= 0 && (packed || given.window_left < problem.seqlen_k - 1);
  bool const right_reached = right > 0 && (packed || right < problem.seqlen_q - 1);
  // Queries that stand before key 0 have no chunk and so no keys.
  bool const may_stand_before = packed || problem.seqlen_q > problem.seqlen_k;
  bool const chunked =
      given.attention_chunk > 0 && (given.attention_chunk < problem.seqlen_k || may_stand_before);
  problem.softcap = static_cast<float>(given.softcap);
  if (!left_reached && !right_reached && !chunked && given.softcap == 0) {
    problem.mask = causal ? MaskKind::kCausal : MaskKind::kFull;
    return;
  }
  auto const as_int = [](int64_t limit) {
    return static_cast<int>(std::min(limit, int64_t{Window::kUnbounded}));
  };
  problem.mask = MaskKind::kLocal;
  if (left_reached) problem.window.left = as_int(given.window_left);
  if (right_reached || causal) problem.window.right = as_int(right);
  if (chunked) problem.window.chunk = as_int(given.attention_chunk);
}

// One logit per query head, of q's dtype or fp32, as the kernels read it; `owner` must live until
// the launch.
struct Sink {
  std::optional<Tensor> owner;
  void const* address = nullptr;
  bool is_fp32 = false;
};

inline Sink check_sink(Tensor const& sink, int64_t num_heads_q, int32_t dtype,
                       Placement const& placement) {
  int32_t const own = dtype_of(sink);
  STD_TORCH_CHECK(placement_of(sink) == placement, "sink: must be on the device of q");
  STD_TORCH_CHECK(own == dtype || own == aoti_torch_dtype_float32(),
                  "sink: dtype must be float32 or that of q, got ",
                  torch::headeronly::toString(sink.scalar_type()));
  STD_TORCH_CHECK(sink.sizes().equals({&num_heads_q, 1}), "sink: shape must be (", num_heads_q,
                  "), one number for each head of q, got ", text(sink.sizes()));
  Tensor owner = sink.is_contiguous() ? sink : torch::stable::contiguous(sink);
  void const* const address = owner.const_data_ptr();
  return {
      .owner = std::move(owner), .address = address, .is_fp32 = own == aoti_torch_dtype_float32()};
}

inline Sink check_sink(std::optional<Tensor> const& sink, int64_t num_heads_q, Argument const& q) {
  return sink ? check_sink(*sink, num_heads_q, q.dtype, q.placement) : Sink{};
}

}  // namespace flash3
