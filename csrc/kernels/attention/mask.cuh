// Masks. A mask owns both which key blocks a query block visits (and the reverse, for the backward)
// and which scores in a visited block count, so the two cannot disagree. Bottom-right alignment:
// query i stands at position i + sk - sq.
#pragma once

#include <cutlass/cutlass.h>
#include <cute/config.hpp>
#include <type_traits>

#include "params.h"

namespace flash3 {

CUTE_HOST_DEVICE constexpr int ceil_div_int(int a, int b) { return (a + b - 1) / b; }

struct BlockRange {
  int begin, end;  // [begin, end)
};

// What a row of kLocal knows beside the lengths; other rows have nothing in its place.
struct LocalLimits {
  Window window;
  float softcap;  // 0: none
};
struct NoLimits {};
template <MaskKind kKind>
using LimitsOf = std::conditional_t<kKind == MaskKind::kLocal, LocalLimits, NoLimits>;

template <MaskKind kKind>
LimitsOf<kKind> make_limits(Problem const& problem) {
  if constexpr (kKind == MaskKind::kLocal) {
    return {problem.window, problem.softcap};
  } else {
    return {};
  }
}

template <MaskKind kKind>
struct Mask {
  int seqlen_q, seqlen_k;

  // Position of query 0 on the key axis.
  CUTLASS_DEVICE int diagonal() const { return seqlen_k - seqlen_q; }

  // The last key that query `q` sees; -1 or less if none.
  CUTLASS_DEVICE int last_key(int q) const {
    if constexpr (kKind == MaskKind::kCausal) return min(seqlen_k - 1, q + diagonal());
    return seqlen_k - 1;
  }

  // The first query that sees key `k`, if it is below seqlen_q.
  CUTLASS_DEVICE int first_query(int k) const {
    if constexpr (kKind == MaskKind::kCausal) return max(0, k - diagonal());
    return 0;
  }

  // Key blocks that some query of [q_begin, q_begin + m) sees. last_key grows with q.
  template <int kM, int kN>
  CUTLASS_DEVICE BlockRange key_blocks(int q_begin) const {
    int const last = last_key(min(q_begin + kM, seqlen_q) - 1);
    return {0, ceil_div_int(max(last + 1, 0), kN)};
  }

  // Key blocks from this one on hold a score that some query of the block must not see.
  template <int kN>
  CUTLASS_DEVICE int first_masked_key_block(int q_begin) const {
    return max(last_key(q_begin) + 1, 0) / kN;
  }

  // Query blocks that see some key of [k_begin, k_begin + n).
  template <int kM, int kN>
  CUTLASS_DEVICE BlockRange query_blocks(int k_begin) const {
    return {first_query(k_begin) / kM, ceil_div_int(seqlen_q, kM)};
  }

  // Whether some pair of the two blocks must not meet.
  template <int kM, int kN>
  CUTLASS_DEVICE bool cuts(int q_begin, int k_begin) const {
    return k_begin + kN - 1 > last_key(q_begin);
  }
};

// Limits on both sides. The first and the last key that a query sees grow with the query, and two
// neighbouring queries that see keys share one or touch: the keys of a range of queries are a
// range. The same holds of the queries of keys. Each min() keeps its sum from passing 2^31.
template <>
struct Mask<MaskKind::kLocal> {
  int seqlen_q, seqlen_k;
  Window window;

  CUTLASS_DEVICE int diagonal() const { return seqlen_k - seqlen_q; }

  // The first key that query `q` sees, if it sees any.
  CUTLASS_DEVICE int first_key(int q) const {
    int const position = q + diagonal();
    int const first = position - min(window.left, position);
    return window.chunk > 0 ? max(first, chunk_begin(position)) : first;
  }
  // The last key that query `q` sees; -1 or less if none.
  CUTLASS_DEVICE int last_key(int q) const {
    int const position = q + diagonal();
    int const last = position + min(window.right, seqlen_k - 1 - position);
    if (window.chunk == 0) return last;
    if (position < 0) return -1;
    int const begin = chunk_begin(position);
    return min(last, begin + min(window.chunk, seqlen_k - begin) - 1);
  }

  // The first and the last query that see key `k`, which exist if they are in this order.
  CUTLASS_DEVICE int first_query(int k) const {
    int const opposite = k - diagonal();
    int const first = opposite - min(window.right, opposite);
    return window.chunk > 0 ? max(first, chunk_begin(k) - diagonal()) : first;
  }
  CUTLASS_DEVICE int last_query(int k) const {
    int const opposite = k - diagonal();
    int const last = opposite + min(window.left, seqlen_q - 1 - opposite);
    if (window.chunk == 0) return last;
    int const begin = chunk_begin(k) - diagonal();
    return min(last, begin + min(window.chunk, seqlen_q - begin) - 1);
  }

  template <int kM, int kN>
  CUTLASS_DEVICE BlockRange key_blocks(int q_begin) const {
    int const end = last_key(min(q_begin + kM, seqlen_q) - 1) + 1;
    return blocks<kN>(first_key(q_begin), end);
  }
  template <int kM, int kN>
  CUTLASS_DEVICE BlockRange query_blocks(int k_begin) const {
    return blocks<kM>(first_query(k_begin), last_query(min(k_begin + kN, seqlen_k) - 1) + 1);
  }

  // Blocks before this one hold a score that some query of [q_begin, q_begin + m) must not see.
  template <int kM, int kN>
  CUTLASS_DEVICE int first_whole_key_block(int q_begin) const {
    return ceil_div_int(first_key(min(q_begin + kM, seqlen_q) - 1), kN);
  }
  // So do the blocks from this one on.
  template <int kN>
  CUTLASS_DEVICE int first_masked_key_block(int q_begin) const {
    return max(last_key(q_begin) + 1, 0) / kN;
  }

  template <int kM, int kN>
  CUTLASS_DEVICE bool cuts(int q_begin, int k_begin) const {
    return k_begin + kN - 1 > last_key(q_begin) ||
           k_begin < first_key(min(q_begin + kM, seqlen_q) - 1);
  }

 private:
  // Of a position from 0 on; below, a multiple of the chunk that is not above 0.
  CUTLASS_DEVICE int chunk_begin(int position) const {
    return position / window.chunk * window.chunk;
  }

  // Blocks of `rows` rows that hold a row of [begin, end).
  template <int kRows>
  CUTLASS_DEVICE static BlockRange blocks(int begin, int end) {
    int const end_block = ceil_div_int(max(end, 0), kRows);
    return {min(begin / kRows, end_block), end_block};
  }
};

}  // namespace flash3
