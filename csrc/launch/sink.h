// The gradient of learnable sinks: one logit per query head, beside the scores of the keys.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"

namespace flash3 {

// dsink[h] = -sum over the rows of head h of exp(sink[h] - lse) * (rowsum(d_o * o) - dlse). A row
// of lse -inf, which neither sees a key nor has a sink, adds nothing. Packed tensors are a batch of
// one.
struct SinkBwdParams {
  DType dtype = DType::kBF16;  // of o and d_o, and of sink and dsink where they are not fp32
  bool sink_is_fp32 = false;
  int batch = 0, seqlen = 0, heads = 0, head_dim = 0;
  TensorView o, d_o;            // head_dim a multiple of 8; addresses and strides of 16 bytes
  float const* lse = nullptr;   // (batch, heads, seqlen), contiguous
  float const* dlse = nullptr;  // likewise, or null
  void const* sink = nullptr;   // (heads)
  void* dsink = nullptr;        // (heads)
  float* partial = nullptr;     // (heads, sink_bwd_chunks)
};

// The sum has two levels: chunks of the rows, whatever the GPU, and the chunks' sums in order. So
// every run has the same result.
inline constexpr int kSinkChunkRows = 256;
constexpr int64_t sink_bwd_chunks(int64_t batch, int64_t seqlen) {
  return (batch * seqlen + kSinkChunkRows - 1) / kSinkChunkRows;
}

void launch_sink_bwd(SinkBwdParams const&, cudaStream_t);

}  // namespace flash3
