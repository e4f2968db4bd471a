// Plain structs that cross from the host to a kernel launch. No torch, no CUTLASS: the only header
// that csrc/api, csrc/launch and csrc/kernels all see.
#pragma once

#include <cstdint>

namespace flash3 {

enum class DType : int { kF16, kBF16, kE4M3 };
// Bottom-right aligned: query i stands at position p = i + sk - sq on the key axis. kCausal: key j
// is seen if j <= p. kLocal: if `Window` says so; its rows also cap scores (Problem::softcap).
enum class MaskKind : int { kFull, kCausal, kLocal };

// kDense: (batch, seqlen, heads, head_dim). kPacked: (rows, heads, head_dim), one sequence after
// the other.
enum class SeqLayout : int { kDense, kPacked };

// A (batch, seqlen, heads, head_dim) tensor, or a packed one, which has no batch_stride. Strides
// count elements; head_dim has stride 1; the address and the byte strides are multiples of 16, as
// the tensor memory accelerator (TMA) requires.
struct TensorView {
  void* ptr = nullptr;
  int64_t batch_stride = 0;
  int64_t seqlen_stride = 0;
  int64_t head_stride = 0;
};

// Query at position p sees keys p - left to p + right and, if chunk > 0, of those the ones in its
// own chunk, [p / chunk * chunk, p / chunk * chunk + chunk); a query before key 0 has no chunk.
struct Window {
  static constexpr int kUnbounded = 0x7fffffff;

  int left = kUnbounded, right = kUnbounded;
  int chunk = 0;
  bool operator==(Window const&) const = default;
};

// Shape of one attention call; every extent is at least 1 (empty problems never reach a kernel).
struct Problem {
  DType dtype = DType::kBF16;
  MaskKind mask = MaskKind::kFull;
  SeqLayout layout = SeqLayout::kDense;
  int batch = 0;
  int seqlen_q = 0;  // packed: rows of q, all sequences together
  int seqlen_k = 0;  // packed: rows of k
  int num_heads_q = 0;
  int num_heads_kv = 0;
  int head_dim = 0;    // of q and k
  int head_dim_v = 0;  // of v and out
  float softmax_scale = 0.f;
  bool two_level = false;  // e4m3: see FwdTile
  Window window;           // of kLocal
  float softcap = 0.f;     // of kLocal, if above 0: score s counts as softcap * tanh(s / softcap)
};

// Where the sequences of a packed call lie, on the device. Sequence b has the slot of rows
// [cu_seqlens[b], cu_seqlens[b + 1]) and uses the first seqused[b] of it, or all.
struct PackedRows {
  int const* cu_seqlens_q = nullptr;  // (batch + 1)
  int const* cu_seqlens_k = nullptr;
  int const* seqused_q = nullptr;  // (batch) or null
  int const* seqused_k = nullptr;
};

// Rows [start, start + length) of a packed tensor.
struct RowRange {
  int start, length;
};

// One block of rows of a packed call: everything that a CTA must know of the block's sequence.
struct ListedBlock {
  RowRange q, k;      // the rows that the sequence uses
  int slot;           // rows of its slot on the side that is listed, which may be more
  int first;          // place of the sequence's first block in the list
  int q_first;        // the same in the list of query blocks
  int section_heads;  // heads whose blocks take turns (kernels/attention/scheduler.cuh)
};

// The blocks of all slots of one side, and a last slot of the rows behind all sequences. A kernel
// fills it (kernels/attention/list_blocks.cuh).
struct BlockList {
  ListedBlock* blocks = nullptr;
  int* count = nullptr;  // how many there are
};

// Factors that turn e4m3 numbers back into what they stand for: (batch, heads, blocks of 64 or 128
// rows), any strides. Null: all 1.
struct Fp8Scales {
  float const* ptr = nullptr;
  int64_t batch_stride = 0, head_stride = 0, block_stride = 0;
  int log2_block = 7;
};

// The keys of a transposed V are padded with zeros to a multiple of this.
inline constexpr int kTransposedKeys = 128;

struct Fp8Params {
  Fp8Scales q_scales, k_scales, v_scales;
  float v_scale = 1.f;
  bool v_transposed =
      false;  // v is (batch, heads, head_dim, keys) in the order of fp8/operands.cuh
  DType out_dtype = DType::kBF16;
};

struct FwdParams {
  Problem problem;
  TensorView q, k, v;           // inputs
  TensorView o;                 // (b, sq, hq, d)
  float* lse = nullptr;         // (b, hq, sq), natural log, contiguous
  int* tile_counter = nullptr;  // one int, 0 before and after; null if the row's schedule is static
  int grid = 0;                 // persistent CTAs
  PackedRows rows;              // of a packed call, likewise:
  BlockList q_blocks;           // of tile.m queries
  Fp8Params fp8;                // of an e4m3 call
  void const* sink = nullptr;   // (hq), a logit for each head beside the keys' scores, or null
  bool sink_is_fp32 = false;    // else of the call's dtype
};

struct BwdParams {
  Problem problem;
  TensorView q, k, v, o, d_o;   // inputs
  TensorView dq, dk, dv;        // outputs
  float const* lse = nullptr;   // (b, hq, sq), natural log, contiguous
  float const* dlse = nullptr;  // (b, hq, sq), contiguous, or null: gradient that reached lse
  int grid = 0;                 // CTAs
  int cluster_size = 1;         // CTAs that share a block of keys and divide its query heads
  // Workspace, see BwdPlan in plan.h. seqlen_q_rounded is a multiple of the row's tile.m. A packed
  // call counts as one batch entry: its sequences, each rounded up to whole blocks of tile.m,
  // follow one another in seqlen_q_rounded rows.
  int seqlen_q_rounded = 0;
  float* dq_accum =
      nullptr;  // (b, hq, sq_rounded, hd) fp32 partial dQ, in the accumulator order of the row
  float* lse_log2 = nullptr;  // (b, hq, sq_rounded) lse * log2(e); +inf where a row sees no key
  float* dpsum = nullptr;     // (b, hq, sq_rounded) rowsum(dO * O) - dlse
  int* dq_turn =
      nullptr;      // (b, hq, sq_rounded / tile.m) order of dQ sums; null unless deterministic
  PackedRows rows;  // of a packed call, likewise:
  BlockList q_blocks, k_blocks;  // of tile.m queries, of tile.n keys
};

}  // namespace flash3
