// Holds the block ranges of csrc/kernels/attention/mask.cuh against its definition, pair by pair.
// test_mask.py compiles this with empty headers in the place of CUTLASS's.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#define CUTLASS_DEVICE inline
#define CUTE_HOST_DEVICE inline
using std::max;
using std::min;

#include "attention/mask.cuh"

namespace {

using namespace flash3;
using Local = Mask<MaskKind::kLocal>;

long pairs_of_blocks = 0;

[[noreturn]] void fail(Local const& m, char const* what, int at) {
  std::printf("%s at %d: seqlen_q %d, seqlen_k %d, left %d, right %d, chunk %d\n", what, at,
              m.seqlen_q, m.seqlen_k, m.window.left, m.window.right, m.window.chunk);
  std::exit(1);
}

// The definition: flash3/mask.py.
bool sees(Local const& m, int q, int k) {
  long const p = long(q) + m.seqlen_k - m.seqlen_q;
  if (q >= m.seqlen_q || k >= m.seqlen_k) return false;
  if (k < p - m.window.left || k > p + m.window.right) return false;
  return m.window.chunk == 0 || (p >= 0 && k / m.window.chunk == p / m.window.chunk);
}

void check_rows(Local const& m) {
  for (int q = 0; q < m.seqlen_q; ++q) {
    for (int k = 0; k < m.seqlen_k; ++k) {
      bool const seen = sees(m, q, k);
      if (seen != (m.first_key(q) <= k && k <= m.last_key(q))) fail(m, "keys of a query", q);
      if (seen != (m.first_query(k) <= q && q <= m.last_query(k))) fail(m, "queries of a key", k);
    }
  }
}

template <int kM, int kN>
void check_pair(Local const& m, int i, int j) {
  bool any = false, all = true;
  for (int q = i * kM; q < min(m.seqlen_q, (i + 1) * kM); ++q) {
    for (int k = j * kN; k < (j + 1) * kN; ++k) {
      any = any || sees(m, q, k);
      all = all && sees(m, q, k);
    }
  }
  BlockRange const keys = m.key_blocks<kM, kN>(i * kM), queries = m.query_blocks<kM, kN>(j * kN);
  if (any != (keys.begin <= j && j < keys.end)) fail(m, "key blocks of a query block", i);
  // Deterministic sums of dQ count on it that both ranges say the same.
  if (any != (queries.begin <= i && i < queries.end)) fail(m, "query blocks of a key block", j);
  if (!any) return;
  bool const whole =
      m.first_whole_key_block<kM, kN>(i * kM) <= j && j < m.first_masked_key_block<kN>(i * kM);
  if (whole != all) fail(m, "blocks without a mask", i);
  if (m.cuts<kM, kN>(i * kM, j * kN) == all) fail(m, "cut blocks", i);
}

template <int kM, int kN>
void check_blocks(Local const& m) {
  for (int i = 0; i * kM < m.seqlen_q; ++i) {
    for (int j = 0; j * kN < m.seqlen_k; ++j) {
      check_pair<kM, kN>(m, i, j);
      ++pairs_of_blocks;
    }
  }
}

// A block behind the rows that a packed sequence uses: the other side counts as empty.
void check_unused(Local m) {
  for (int row = 0; row < 48; row += 4) {
    int const length = m.seqlen_q;
    BlockRange const keys = Local{length, 0, m.window}.key_blocks<4, 8>(row);
    BlockRange const queries = Local{0, length, m.window}.query_blocks<4, 8>(row);
    if (keys.begin != keys.end) fail(m, "key blocks of an unused block", row);
    if (queries.begin != queries.end) fail(m, "query blocks of an unused block", row);
  }
}

// Sums must not overflow: the sanitizer watches.
void check_long(Window const& window) {
  int const lengths[] = {1, 1 << 30};
  for (int const seqlen_q : lengths) {
    for (int const seqlen_k : lengths) {
      Local const m{seqlen_q, seqlen_k, window};
      for (int const row : {0, seqlen_q / 2, seqlen_q - 1}) {
        BlockRange const keys = m.key_blocks<64, 128>(row);
        if (keys.begin > keys.end || keys.end > ceil_div_int(seqlen_k, 128)) fail(m, "long", row);
      }
      for (int const row : {0, seqlen_k / 2, seqlen_k - 1}) {
        BlockRange const queries = m.query_blocks<64, 128>(row);
        if (queries.begin > queries.end || queries.end > ceil_div_int(seqlen_q, 64))
          fail(m, "long", row);
      }
    }
  }
}

}  // namespace

int main() {
  constexpr int kNone = Window::kUnbounded;
  for (int const left : {kNone, 0, 1, 2, 5, 8, 13, 40}) {
    for (int const right : {kNone, 0, 1, 2, 5, 8, 13, 40}) {
      for (int const chunk : {0, 1, 3, 8, 10, 16, 50, kNone}) {
        Window const window{left, right, chunk};
        check_long(window);
        for (int const seqlen_q : {1, 2, 3, 5, 8, 11, 16, 29}) {
          check_unused({seqlen_q, 1, window});
          for (int const seqlen_k : {1, 2, 3, 7, 8, 9, 16, 23, 31}) {
            Local const m{seqlen_q, seqlen_k, window};
            check_rows(m);
            check_blocks<4, 8>(m);
            check_blocks<8, 4>(m);
            check_blocks<4, 4>(m);
          }
        }
      }
    }
  }
  std::printf("%ld pairs of blocks\n", pairs_of_blocks);
}
