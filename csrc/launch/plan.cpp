// From a problem to grid and workspace. All sizes are computed in 64 bits: a legal call may hold
// more than 2^31 elements.
#include "plan.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>

#include "names.h"

namespace flash3 {
namespace {

constexpr std::size_t kPartAlignment = 256;  // of each part of a workspace
constexpr int kRowsPerAlignedRun = 64;       // fp32 values in kPartAlignment bytes
static_assert(kRowsPerAlignedRun * sizeof(float) == kPartAlignment);

template <class Int>
constexpr Int ceil_div(Int a, Int b) {
  return (a + b - 1) / b;
}

template <class Int>
constexpr Int round_up(Int a, Int b) {
  return ceil_div(a, b) * b;
}

// Kernels count CTAs and rows in 32 bits.
int to_int(int64_t count, char const* what) {
  if (count > std::numeric_limits<int>::max()) {
    throw std::runtime_error("flash3: " + std::string(what) + " would be " + std::to_string(count) +
                             ", more than 2^31 - 1; split the batch");
  }
  return static_cast<int>(count);
}

// Lays the parts of a workspace one after the other.
struct WorkspaceLayout {
  std::size_t bytes = 0;

  // Offset of a part of `count` elements.
  template <class Element>
  std::size_t add(int64_t count) {
    std::size_t const offset = bytes;
    bytes += round_up(static_cast<std::size_t>(count) * sizeof(Element), kPartAlignment);
    return offset;
  }
};

// Blocks of `tile` rows on one side of the call, of all batch entries. Of a packed call that is the
// most that there can be: each slot, and the rows behind all slots, may end in a block that is not
// full.
int64_t count_blocks(Problem const& problem, int seqlen, int tile) {
  if (problem.layout == SeqLayout::kPacked) return int64_t{seqlen} / tile + problem.batch + 1;
  return ceil_div<int64_t>(seqlen, tile) * problem.batch;
}

// SMs that clusters of this size can fill. A cluster lies within a GPC, whose number of SMs larger
// clusters do not divide: an H200 holds 66 clusters of 2 but 30 of 4 and 15 of 8 (E013).
int usable_sms(int cluster_size, int num_sms) {
  return std::max(1, cluster_size <= 2 ? num_sms : num_sms * 10 / 11);
}

// Whether key blocks have the fewer queries the further they lie: if a limit cuts off one side, as
// the causal one does. A window cuts off both, and all but the blocks at the ends have as many.
bool is_triangle(Problem const& problem) {
  if (problem.mask != MaskKind::kLocal) return problem.mask == MaskKind::kCausal;
  Window const& window = problem.window;
  bool const left = window.left != Window::kUnbounded, right = window.right != Window::kUnbounded;
  return window.chunk == 0 && left != right;
}

// How long the CTAs of a backward take together, as a multiple of the time in which one of the
// longest visits the queries of a group. CTAs of equal length come in waves. Under a causal mask
// the longest of a section of heads go first and the short ones fill the gaps; what the last
// section leaves uneven is about half of a longest CTA.
double relative_time(Problem const& problem, int64_t key_blocks, int cluster_size, int num_sms) {
  constexpr double kUnevenEnd = 0.5;
  double const ctas = double(key_blocks) * cluster_size / usable_sms(cluster_size, num_sms);
  if (!is_triangle(problem)) return std::ceil(ctas) / cluster_size;
  double const mean_length =
      1.0 - 0.5 * std::min(problem.seqlen_q, problem.seqlen_k) / problem.seqlen_k;
  double const load = mean_length * ctas;
  return (load <= 1.0 ? 1.0 : load + kUnevenEnd) / cluster_size;
}

// How many CTAs share a block of keys and divide the query heads of its group equally: more where
// one for each block would leave SMs idle or uneven. The sums of dK and dV cost about 5 % with 2,
// and more with 4 and 8 (E013).
int choose_cluster_size(Problem const& problem, int64_t key_blocks, int num_sms) {
  int const group = problem.num_heads_q / problem.num_heads_kv;
  int best = 1;
  for (int size : {2, 4, 8}) {
    if (group % size != 0) break;
    double const worth_it = size == 2 ? 0.95 : 0.8;
    if (relative_time(problem, key_blocks, size, num_sms) <
        worth_it * relative_time(problem, key_blocks, best, num_sms)) {
      best = size;
    }
  }
  return best;
}

// "tile 128x176 (E001) for head_dim 128"
template <class Entry>
std::string tile_choice(Problem const& problem, Entry const& row) {
  std::string text = "tile " + std::to_string(row.tile.m) + "x" + std::to_string(row.tile.n) +
                     " (" + row.why + ") for head_dim " + std::to_string(problem.head_dim);
  if (problem.head_dim_v != problem.head_dim)
    text += " and " + std::to_string(problem.head_dim_v) + " of v";
  if (problem.head_dim != row.key.head_dim || problem.head_dim_v != row.key.head_dim_v) {
    text += ", padded to " + std::to_string(row.key.head_dim);
    if (row.key.head_dim_v != row.key.head_dim)
      text += " and " + std::to_string(row.key.head_dim_v);
    text += " by TMA";
  }
  return text;
}

}  // namespace

FwdPlan plan_fwd(Problem const& problem, int num_sms) {
  FwdEntry const& row = find_fwd(problem);
  int64_t const m_blocks = count_blocks(problem, problem.seqlen_q, row.tile.m);
  int const tiles = to_int(m_blocks * problem.num_heads_q, "the number of forward tiles");
  FwdPlan plan{.row = &row,
               .tiles = tiles,
               .grid = std::min(tiles, num_sms),
               .workspace_bytes = row.tile.dynamic_schedule ? sizeof(int) : 0};
  if (problem.layout == SeqLayout::kPacked) {
    WorkspaceLayout layout;
    plan.tile_counter_offset = layout.add<int>(1);
    plan.block_count_offset = layout.add<int>(1);
    plan.blocks_offset = layout.add<ListedBlock>(m_blocks);
    plan.workspace_bytes = layout.bytes;
  }
  return plan;
}

BwdPlan plan_bwd(Problem const& problem, Order order, int num_sms) {
  BwdEntry const& row = find_bwd(problem);
  bool const packed = problem.layout == SeqLayout::kPacked;
  int64_t const n_blocks = count_blocks(problem, problem.seqlen_k, row.tile.n);
  int64_t const m_blocks = count_blocks(problem, problem.seqlen_q, row.tile.m);
  // Whole tiles, and rows of lse_log2 and dpsum that start on an aligned address.
  int64_t const rounding = std::lcm(row.tile.m, kRowsPerAlignedRun);
  int64_t const seqlen_q_rounded =
      round_up<int64_t>(packed ? m_blocks * row.tile.m : problem.seqlen_q, rounding);
  int64_t const rows = seqlen_q_rounded * problem.num_heads_q * (packed ? 1 : problem.batch);
  int const query_tiles = to_int(rows / row.tile.m, "the number of query tiles");

  WorkspaceLayout layout;
  BwdPlan plan{};
  plan.row = &row;
  int64_t const key_blocks = n_blocks * problem.num_heads_kv;
  plan.cluster_size =
      order == Order::kSameInEveryBatch ? 1 : choose_cluster_size(problem, key_blocks, num_sms);
  plan.grid = to_int(key_blocks * plan.cluster_size, "the backward grid");
  plan.seqlen_q_rounded = to_int(seqlen_q_rounded, "seqlen_q rounded up to whole tiles");
  plan.dq_accum_offset = layout.add<float>(rows * row.key.head_dim);
  plan.lse_log2_offset = layout.add<float>(rows);
  plan.dpsum_offset = layout.add<float>(rows);
  plan.dq_turn_offset = layout.add<int>(order == Order::kFree ? 0 : query_tiles);
  if (packed) {
    plan.q_count_offset = layout.add<int>(1);
    plan.k_count_offset = layout.add<int>(1);
    plan.q_blocks_offset = layout.add<ListedBlock>(m_blocks);
    plan.k_blocks_offset = layout.add<ListedBlock>(n_blocks);
  }
  plan.workspace_bytes = layout.bytes;
  return plan;
}

std::string explain(Problem const& problem, FwdPlan const& plan, int num_sms) {
  FwdTile const& tile = plan.row->tile;
  std::string why = tile_choice(problem, *plan.row) + "; " + std::to_string(plan.tiles) +
                    " tiles of " + std::to_string(tile.m) + " query rows on " +
                    std::to_string(num_sms) + " SMs: ";
  if (plan.tiles <= num_sms) {
    why += "one per CTA, " + std::to_string(num_sms - plan.grid) + " SMs idle";
  } else {
    why += "one persistent CTA per SM, about " + std::to_string(ceil_div(plan.tiles, plan.grid)) +
           " tiles each, ";
    why += tile.dynamic_schedule ? "handed out by an atomic counter, heaviest first"
                                 : "handed out at a fixed stride";
  }
  return why;
}

std::string explain(Problem const& problem, BwdPlan const& plan, Order order) {
  BwdTile const& tile = plan.row->tile;
  int const group = problem.num_heads_q / problem.num_heads_kv;
  std::string const ctas =
      plan.cluster_size == 1
          ? "one CTA per " + std::to_string(tile.n) + " keys of a KV head, which visits"
          : "a cluster of " + std::to_string(plan.cluster_size) + " CTAs per " +
                std::to_string(tile.n) + " keys of a KV head, which divide among them";
  return tile_choice(problem, *plan.row) + "; " + ctas + " the queries of its " +
         std::to_string(group) +
         " query heads; workspace: fp32 dQ sums and two floats per query row, seqlen_q rounded up "
         "to " +
         std::to_string(plan.seqlen_q_rounded) +
         (order == Order::kFree ? "" : ", and one int per query tile that orders the sums");
}

}  // namespace flash3
