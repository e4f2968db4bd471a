// Plain structs that cross from the host to a kernel launch. No torch, no CUTLASS: the only header
// that csrc/api, csrc/launch and csrc/kernels all see.
#pragma once

#include <cstdint>

namespace flash3 {

enum class DType : int { kF16, kBF16 };
enum class MaskKind : int {
  kFull,
  kCausal
};  // kCausal is bottom-right aligned: key j is seen by query i if j <= i + sk - sq

// A (batch, seqlen, heads, head_dim) tensor. Strides count elements; head_dim has stride 1; the
// address and the byte strides are multiples of 16, as the tensor memory accelerator (TMA)
// requires.
struct TensorView {
  void* ptr = nullptr;
  int64_t batch_stride = 0;
  int64_t seqlen_stride = 0;
  int64_t head_stride = 0;
};

// Shape of one attention call; every extent is at least 1 (empty problems never reach a kernel).
struct Problem {
  DType dtype = DType::kBF16;
  MaskKind mask = MaskKind::kFull;
  int batch = 0;
  int seqlen_q = 0;
  int seqlen_k = 0;
  int num_heads_q = 0;
  int num_heads_kv = 0;
  int head_dim = 0;
  float softmax_scale = 0.f;
};

struct FwdParams {
  Problem problem;
  TensorView q, k, v;           // inputs
  TensorView o;                 // (b, sq, hq, d)
  float* lse = nullptr;         // (b, hq, sq), natural log, contiguous
  int* tile_counter = nullptr;  // one int, 0 before and after; null if the row's schedule is static
  int grid = 0;                 // persistent CTAs
};

struct BwdParams {
  Problem problem;
  TensorView q, k, v, o, d_o;   // inputs
  TensorView dq, dk, dv;        // outputs
  float const* lse = nullptr;   // (b, hq, sq), natural log, contiguous
  float const* dlse = nullptr;  // (b, hq, sq), contiguous, or null: gradient that reached lse
  int grid = 0;                 // CTAs
  int cluster_size = 1;         // CTAs that share a block of keys and divide its query heads
  // Workspace, see BwdPlan in plan.h. seqlen_q_rounded is a multiple of the row's tile.m.
  int seqlen_q_rounded = 0;
  float* dq_accum =
      nullptr;  // (b, hq, sq_rounded, hd) fp32 partial dQ, in the accumulator order of the row
  float* lse_log2 = nullptr;  // (b, hq, sq_rounded) lse * log2(e); +inf where a row sees no key
  float* dpsum = nullptr;     // (b, hq, sq_rounded) rowsum(dO * O) - dlse
  int* dq_turn =
      nullptr;  // (b, hq, sq_rounded / tile.m) order of dQ sums; null unless deterministic
};

}  // namespace flash3
