// From a problem to the kernel that serves it: which row of the variant table, how many CTAs, how
// much workspace. Host only, no torch, no CUTLASS: tests run it without a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "params.h"

namespace flash3 {

// What a caller asks for. The head_dims are the row's own; a call is served by the smallest row
// that holds both of its own.
struct KernelKey {
  DType dtype;
  int head_dim;    // of q and k
  int head_dim_v;  // of v and out
  MaskKind mask;
  SeqLayout layout = SeqLayout::kDense;
  bool operator==(KernelKey const&) const = default;
};

// How a forward row runs. m counts query rows of one CTA tile, n the keys of one step.
struct FwdTile {
  int m, n;
  int kv_stages, q_stages;
  int mma_warpgroups;
  bool pingpong;          // warpgroups take turns to issue their GEMMs
  bool dynamic_schedule;  // tiles are handed out by an atomic counter instead of a fixed stride
  // 16-bit rows: P relative to earlier blocks' maxima, a block's own only where it outgrew them.
  bool guesses = false;
  // e4m3 rows: whether softmax runs under P V of its own warpgroup, for which P of the block before
  // must stay in registers beside S and O; else it runs under the other warpgroups' GEMMs alone.
  bool overlap = true;
  // e4m3 rows: P V of each step goes into accumulators of its own, which are added to O in fp32:
  // the tensor cores' own sums of 8-bit products keep about 13 bits.
  bool two_level = false;
};

// How a backward row runs. n counts the keys that one CTA owns, m the query rows of one step.
struct BwdTile {
  int m, n;
  int q_stages, do_stages;
  int mma_warpgroups;
};

struct FwdEntry {
  KernelKey key;
  FwdTile tile;
  char const* name;  // "fwd_bf16_hd128_causal"
  char const* why;   // the experiment that chose the tile
  void (*launch)(FwdParams const&, cudaStream_t);
};

struct BwdEntry {
  KernelKey key;
  BwdTile tile;
  char const* name;
  char const* why;
  void (*launch)(BwdParams const&, cudaStream_t);
};

// The rows that this build holds (generated from csrc/variants/table.py).
std::span<FwdEntry const> fwd_table();
std::span<BwdEntry const> bwd_table();

// No row in this build serves the call; the message names the key and the nearest built rows.
struct NotBuilt : std::runtime_error {
  using std::runtime_error::runtime_error;
};

FwdEntry const& find_fwd(Problem const&);
BwdEntry const& find_bwd(Problem const&);

struct FwdPlan {
  FwdEntry const* row;
  int tiles;  // m-blocks * heads * batch; packed: at most, the lengths are known to the device
  int grid;   // persistent CTAs, at most one per SM
  // The tile counter, if the schedule is dynamic. Packed: counter, list of blocks and its count.
  std::size_t tile_counter_offset, block_count_offset, blocks_offset;
  std::size_t workspace_bytes;
};

struct BwdPlan {
  BwdEntry const* row;
  int grid;          // packed: at most, as in FwdPlan
  int cluster_size;  // CTAs that share a block of keys and divide the query heads of its group
  int seqlen_q_rounded;
  // One allocation, each part 256-byte aligned.
  std::size_t dq_accum_offset, lse_log2_offset, dpsum_offset, dq_turn_offset;
  std::size_t q_count_offset, k_count_offset, q_blocks_offset, k_blocks_offset;  // packed
  std::size_t workspace_bytes;
};

// Of the sums of gradients. kSameInEveryBatch: deterministic, and dK and dV of grouped heads are
// never divided among CTAs, whose number goes by the size of the batch.
enum class Order { kFree, kDeterministic, kSameInEveryBatch };

FwdPlan plan_fwd(Problem const&, int num_sms);
BwdPlan plan_bwd(Problem const&, Order, int num_sms);

// The plan in a sentence, for `python -m flash3.doctor --plan`; apart from the plan because a call
// has no use for it.
std::string explain(Problem const&, FwdPlan const&, int num_sms);
std::string explain(Problem const&, BwdPlan const&, Order);

}  // namespace flash3
