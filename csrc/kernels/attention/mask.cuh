// Masks. A mask owns both which key blocks a query block visits (and the reverse, for the backward)
// and which scores in a visited block count, so the two cannot disagree. Bottom-right alignment:
// query i stands at position i + sk - sq.
#pragma once

#include <cutlass/cutlass.h>
#include <cute/config.hpp>

#include "params.h"

namespace flash3 {

CUTE_HOST_DEVICE constexpr int ceil_div_int(int a, int b) { return (a + b - 1) / b; }

struct BlockRange {
  int begin, end;  // [begin, end)
};

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
  template <int kM>
  CUTLASS_DEVICE BlockRange query_blocks(int k_begin) const {
    return {first_query(k_begin) / kM, ceil_div_int(seqlen_q, kM)};
  }

  // Whether some pair of the two blocks must not meet.
  template <int kN>
  CUTLASS_DEVICE bool cuts(int q_begin, int k_begin) const {
    return k_begin + kN - 1 > last_key(q_begin);
  }
};

}  // namespace flash3
