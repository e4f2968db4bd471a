// From the accumulator to global memory: O rounded to 16 bits, and LSE.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fp8/args.cuh"

namespace flash3 {

template <class Row>
struct Fp8Output {
  using T = Fp8Traits<Row>;

  Fp8Args<Row> const& args;
  WorkTile tile;
  int first_row;  // of the lane's two, 8 apart

  template <class Output>
  CUTLASS_DEVICE void write(Output const& o, float const (&lse)[2]) const {
    int64_t const head = int64_t(tile.batch) * args.num_heads_q + tile.head;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const row = first_row + 8 * r;
      if (row >= args.seqlen_q) continue;
      if (threadIdx.x % 4 == 0) args.lse[head * args.seqlen_q + row] = lse[r];
      int64_t const place =
          (int64_t(tile.batch) * args.seqlen_q + row) * args.num_heads_q + tile.head;
      uint2* const to = reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.o) +
                                                 place * args.head_dim + threadIdx.x % 4 * 4);
      // Columns come in the order of V's rows (operands.cuh): of 16, the lane holds four
      // neighbours, and its quad a sector of 32 bytes.
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < T::kHeadDim / 16; ++block) {
        if (block * 16 >= args.head_dim) break;
        int const even = 2 * r + 8 * block, odd = even + 4;
        to[block * 4] = {pack(o(even), o(odd)), pack(o(even + 1), o(odd + 1))};
      }
    }
  }

 private:
  CUTLASS_DEVICE uint32_t pack(float low, float high) const {
    if (args.o_is_f16) {
      __half2 const pair = __floats2half2_rn(low, high);
      return reinterpret_cast<uint32_t const&>(pair);
    }
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(pair);
  }
};

}  // namespace flash3
