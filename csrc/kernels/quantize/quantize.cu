#include "quantize.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "common/launch.h"
#include "quantize/kernel.cuh"

namespace flash3 {
namespace {

template <int kChunks>
int smem_bytes(int block, int head_dim) {
  return max_threads(kChunks) * rows_per_thread(kChunks) * kChunks * int(sizeof(uint4)) +
         TransposeTile::bytes(head_dim, block);
}

QuantizeArgs make_args(QuantizeParams const& p) {
  QuantizeArgs args{.p = p, .pass = QuantizePass::kAll};
  int64_t items = 0;
  for (int i = 0; i < 3; ++i) {
    QuantizeOperand const& x = p.operands[i];
    int const tile = x.transposed ? kQuantizeKeyTile : p.block;
    args.row_blocks[i] = (x.seqlen + tile - 1) / tile * (tile / p.block);
    args.scale_blocks[i] = (x.seqlen + p.block - 1) / p.block;
    items += int64_t(p.batch) * x.heads * args.row_blocks[i];
    if (items > std::numeric_limits<int>::max() / 2) {  // a CTA's index passes the last
      throw std::runtime_error("flash3: quantisation of more than 2^30 blocks of rows");
    }
    args.first_item[i + 1] = int(items);
  }
  return args;
}

template <class Half, int kChunks, bool kRotary>
void launch_pass(QuantizeArgs const& args, cudaStream_t stream) {
  constexpr auto kernel = quantize_kernel<Half, kChunks, kRotary>;
  QuantizeParams const& p = args.p;
  int const threads = p.block * kThreadsPerRow / rows_per_thread(kChunks);
  int const grid = std::min(args.first_item[3], p.num_sms * (512 / threads));
  allow_smem<kernel>(smem_bytes<kChunks>(kMaxBlock, 32 * kChunks));
  kernel<<<grid, threads, smem_bytes<kChunks>(p.block, p.head_dim), stream>>>(args);
  FLASH3_CUDA_CHECK(cudaGetLastError());
}

template <class Half, int kChunks>
void launch_passes(QuantizeParams const& p, cudaStream_t stream) {
  auto const launch =
      p.rotary.cos ? launch_pass<Half, kChunks, true> : launch_pass<Half, kChunks, false>;
  QuantizeArgs args = make_args(p);
  if (args.first_item[3] == 0) return;
  if (p.granularity == Granularity::kBlock) return launch(args, stream);
  std::size_t const scales =
      p.granularity == Granularity::kHead ? std::size_t(p.batch) * p.num_heads_kv : 1;
  for (QuantizeOperand const& x : p.operands) {
    FLASH3_CUDA_CHECK(cudaMemsetAsync(x.amax, 0, scales * sizeof(unsigned), stream));
  }
  args.pass = QuantizePass::kFindAmax;
  launch(args, stream);
  args.pass = QuantizePass::kWrite;
  launch(args, stream);
}

template <class Half>
void launch_for(QuantizeParams const& p, cudaStream_t stream) {
  switch ((p.head_dim + 31) / 32) {
    case 1:
      return launch_passes<Half, 1>(p, stream);
    case 2:
      return launch_passes<Half, 2>(p, stream);
    case 3:
      return launch_passes<Half, 3>(p, stream);
    case 4:
      return launch_passes<Half, 4>(p, stream);
    case 5:
      return launch_passes<Half, 5>(p, stream);
    case 6:
      return launch_passes<Half, 6>(p, stream);
    case 7:
      return launch_passes<Half, 7>(p, stream);
    default:
      return launch_passes<Half, 8>(p, stream);
  }
}

}  // namespace

void launch_quantize(QuantizeParams const& p, cudaStream_t stream) {
  p.dtype == DType::kF16 ? launch_for<__half>(p, stream) : launch_for<__nv_bfloat16>(p, stream);
}

}  // namespace flash3
