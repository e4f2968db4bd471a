// From a problem to the row that serves it, among the rows that this build holds.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "names.h"
#include "plan.h"

namespace flash3 {
namespace {

// "192", or "192 and 128 of v"
std::string head_dims(Problem const& problem) {
  std::string const text = std::to_string(problem.head_dim);
  if (problem.head_dim_v == problem.head_dim) return text;
  return text + " and " + std::to_string(problem.head_dim_v) + " of v";
}

bool sums_as_asked(FwdTile const& tile, Problem const& problem) {
  return tile.two_level == problem.two_level;
}
bool sums_as_asked(BwdTile const&, Problem const&) { return true; }

// What the queries and keys of a head cost in tiles of a row, of which the last ones may be nearly
// empty: in scores of a row with three warpgroups and 192 keys a step. A tile of two takes 1.2
// times as long for each query (E030), a step of fewer keys 1.1 times for each key (E032).
double cost_in_tiles(FwdTile const& tile, Problem const& problem) {
  auto const whole = [](int length, int tile_length) {
    return double((int64_t{length} + tile_length - 1) / tile_length * tile_length);
  };
  double const queries = whole(problem.seqlen_q, tile.m) * (tile.mma_warpgroups == 3 ? 1.0 : 1.2);
  double const keys = whole(problem.seqlen_k, tile.n) * (tile.n >= 192 ? 1.0 : 1.1);
  return queries * keys;
}
double cost_in_tiles(BwdTile const&, Problem const&) { return 0.0; }

// The smallest row whose head_dims hold the problem's, and of equals the one whose tiles suit its
// lengths; null if none holds it. TMA pads the difference with zeros.
template <class Entry>
Entry const* find(std::span<Entry const> table, Problem const& problem) {
  auto const order = [&](Entry const& row) {
    return std::tuple(row.key.head_dim, row.key.head_dim_v, cost_in_tiles(row.tile, problem));
  };
  Entry const* best = nullptr;
  for (Entry const& row : table) {
    KernelKey const& key = row.key;
    bool const serves = key.dtype == problem.dtype && key.mask == problem.mask &&
                        key.layout == problem.layout && key.head_dim >= problem.head_dim &&
                        key.head_dim_v >= problem.head_dim_v && sums_as_asked(row.tile, problem);
    if (serves && (best == nullptr || order(row) < order(*best))) best = &row;
  }
  return best;
}

// Names of the rows that differ least from the problem: in dtype, mask or layout first, then in
// head_dim.
template <class Entry>
std::string nearest_rows(std::span<Entry const> table, Problem const& problem) {
  constexpr std::size_t kShown = 3;
  auto const distance = [&](Entry const* row) {
    int const words = (row->key.dtype != problem.dtype) + (row->key.mask != problem.mask) +
                      (row->key.layout != problem.layout);
    return std::tuple(words, std::abs(row->key.head_dim - problem.head_dim) +
                                 std::abs(row->key.head_dim_v - problem.head_dim_v));
  };
  std::vector<Entry const*> rows;
  for (Entry const& row : table) rows.push_back(&row);
  std::ranges::stable_sort(rows, {}, distance);
  if (rows.size() > kShown) rows.resize(kShown);
  std::string names;
  for (Entry const* row : rows) names += (names.empty() ? "" : ", ") + std::string(row->name);
  return names.empty() ? "none, this build has no row for this pass" : names;
}

template <class Entry>
[[noreturn]] void throw_not_built(std::span<Entry const> table, Problem const& problem,
                                  char const* pass) {
  std::string const dtype = word(problem.dtype), mask = word(problem.mask);
  std::string const layout = word(problem.layout);
  throw NotBuilt(
      "flash3: this build has no " + std::string(pass) + " kernel for dtype " + dtype +
      ", head_dim " + head_dims(problem) + ", mask " + mask + ", layout " + layout +
      (problem.two_level ? ", two-level sums" : "") +
      ". Nearest built rows: " + nearest_rows(table, problem) + ". FLASH3_VARIANTS=\"" + dtype +
      "," + mask + (problem.layout == SeqLayout::kPacked ? ",packed" : "") +
      "\" builds every row of this dtype and mask, FLASH3_VARIANTS=all builds every row.");
}

}  // namespace

FwdEntry const& find_fwd(Problem const& problem) {
  FwdEntry const* row = find(fwd_table(), problem);
  if (row == nullptr) throw_not_built(fwd_table(), problem, "forward");
  return *row;
}

BwdEntry const& find_bwd(Problem const& problem) {
  BwdEntry const* row = find(bwd_table(), problem);
  if (row == nullptr) throw_not_built(bwd_table(), problem, "backward");
  return *row;
}

}  // namespace flash3
