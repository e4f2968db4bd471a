// Puts partial results together: attention of the same queries to two sets of keys.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"

namespace flash3 {

// A (batch, heads, seqlen) tensor of fp32 whose seqlen has stride 1.
struct RowsView {
  float* ptr = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
};

// out = sum of out_i * exp(lse_i - lse), lse = log(exp(lse_1) + exp(lse_2)). Outputs may be in the
// place of the first part. head_dim is a multiple of 8; addresses and strides of out, out_1, out_2
// are multiples of 16 bytes.
struct MergeParams {
  DType dtype = DType::kBF16;  // of out_2, and of out and out_1 where they are not fp32
  bool out_is_fp32 = false, first_is_fp32 = false;
  int batch = 0, seqlen = 0, heads = 0, head_dim = 0;
  TensorView out, out_1, out_2;
  RowsView lse, lse_1, lse_2;
};

void launch_merge(MergeParams const&, cudaStream_t);

}  // namespace flash3
