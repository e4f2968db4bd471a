// 16-bit tensors to float8 e4m3: rotary embedding, Hadamard transform, scales, the layout of V that
// the attention kernel reads. flash3/reference_fp8.py is the specification.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"

namespace flash3 {

// What shares a scale: a block of rows of a head; the heads of a key/value head; the tensor.
enum class Granularity : int { kBlock, kHead, kTensor };

inline constexpr int kQuantizeKeyTile = 128;  // transposed values end at a multiple of it

struct QuantizeOperand {
  TensorView in;             // (b, s, h, d), 16 bits
  void* out = nullptr;       // e4m3, contiguous (b, s, h, d); transposed (b, h, d, s rounded up)
  float* descale = nullptr;  // contiguous: (b, h, ceil(s / block)), (b, heads_kv) or (1)
  unsigned* amax = nullptr;  // one word per descale; null where scales are of blocks
  int seqlen = 0, heads = 0;
  int first_position = 0;   // of row 0 in the rotary tables
  bool rotated = false;     // rotary embedding and Hadamard transform apply
  bool transposed = false;  // out is in the transposed layout
};

struct RotaryTables {
  void const *cos = nullptr, *sin = nullptr;  // (positions, width / 2) contiguous; null: no rotary
  bool fp32 = false;                          // otherwise of the inputs' dtype
  bool interleaved = false;                   // pairs (2i, 2i + 1), otherwise (i, i + width / 2)
  int width = 0;                              // dimensions that are rotated, a multiple of 16
};

struct QuantizeParams {
  DType dtype = DType::kBF16;
  Granularity granularity = Granularity::kBlock;
  int batch = 0, num_heads_kv = 0;
  int head_dim = 0;  // a multiple of 16 up to 256
  int block = 0;     // 64 or 128 rows: of a CTA's step, and of a scale where scales are of blocks
  QuantizeOperand operands[3];  // q, k, v
  RotaryTables rotary;
  int hadamard_block = 0;  // elements that one transform mixes, a power of two; 0: no transform
  float hadamard_factor = 1.f;  // hadamard_block ** -0.5
  uint32_t signs[8] = {};       // bit i % 32 of word i / 32: element i changes its sign
  int num_sms = 0;
};

void launch_quantize(QuantizeParams const&, cudaStream_t);

}  // namespace flash3
