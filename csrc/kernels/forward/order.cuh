// The order of a dense forward's tiles, made on the host.
#pragma once

#include <type_traits>

#include "attention/mask.cuh"
#include "attention/scheduler.cuh"
#include "params.h"

namespace flash3 {

inline constexpr int kLeastSectionHeads = 8;  // query heads (E011)

// `kv_row_bytes` is what a key and its value bring to L2 for a head.
template <class Order>
Order make_batch_order(Problem const& p, int num_m_blocks, long long kv_row_bytes) {
  if constexpr (std::is_same_v<Order, LongestFirst>) {
    int const group = p.num_heads_q / p.num_heads_kv;
    int const kv_heads =
        heads_per_section(kv_row_bytes * p.seqlen_k, ceil_div_int(kLeastSectionHeads, group),
                          p.num_heads_kv * p.batch);
    return {num_m_blocks, p.num_heads_q, p.num_heads_q * p.batch, kv_heads * group};
  } else {
    return {num_m_blocks, p.num_heads_q};
  }
}

template <class Schedule>
Schedule make_batch_schedule(FwdParams const& params) {
  if constexpr (std::is_same_v<Schedule, StaticSchedule>) {
    return {};
  } else {
    return {params.tile_counter};
  }
}

}  // namespace flash3
