// The gradient of learnable sinks: memory-bound, one pass over out and its gradient.
#include "sink.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>
#include <stdexcept>

#include "cuda_check.h"

namespace flash3 {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements that a thread handles
constexpr float kLog2e = 1.4426950408889634f;

template <class Half>
struct alignas(16) Vector {
  Half x[kVector];
};

// Lanes that share a row: as many vectors as the row has, up to a power of two.
__host__ __device__ constexpr int lanes_per_row(int head_dim) {
  int lanes = 1;
  while (lanes * kVector < head_dim) lanes *= 2;
  return lanes;
}

template <class Element>
__device__ Element const* row_of(TensorView const& view, int64_t batch, int64_t position,
                                 int head) {
  return static_cast<Element const*>(view.ptr) + batch * view.batch_stride +
         position * view.seqlen_stride + head * view.head_stride;
}

// The sum of x over the block, in thread 0: always in the same order.
__device__ float block_sum(float x) {
  __shared__ float of_threads[kThreads];
  of_threads[threadIdx.x] = x;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) of_threads[threadIdx.x] += of_threads[threadIdx.x + half];
  }
  return of_threads[0];
}

template <class Half>
__device__ float sink_of(SinkBwdParams const& p, int head) {
  if (p.sink_is_fp32) return static_cast<float const*>(p.sink)[head];
  return static_cast<float>(static_cast<Half const*>(p.sink)[head]);
}

// A block takes a chunk of the rows of one head. Each thread keeps the weighted sum of its columns:
// rows need not be put together before.
template <class Half>
__global__ void __launch_bounds__(kThreads) sink_bwd_kernel(SinkBwdParams const p, int lanes) {
  int const head = int(blockIdx.x % p.heads);
  int64_t const chunk = blockIdx.x / p.heads;
  int64_t const rows = int64_t(p.batch) * p.seqlen;
  int64_t const first = chunk * kSinkChunkRows + threadIdx.x / lanes;
  int64_t const end = min(rows, (chunk + 1) * kSinkChunkRows);
  int const column = threadIdx.x % lanes * kVector;
  float const sink = sink_of<Half>(p, head);

  float sum = 0.f;
#pragma unroll 4
  for (int64_t row = first; row < end; row += kThreads / lanes) {
    int64_t const batch = row / p.seqlen, position = row % p.seqlen;
    int64_t const at = (batch * p.heads + head) * p.seqlen + position;
    float const lse = p.lse[at];
    if (lse == -INFINITY) continue;
    float share = column == 0 && p.dlse != nullptr ? -p.dlse[at] : 0.f;
    if (column < p.head_dim) {
      auto const* const o = row_of<Half>(p.o, batch, position, head) + column;
      auto const* const d_o = row_of<Half>(p.d_o, batch, position, head) + column;
      Vector<Half> const a = *reinterpret_cast<Vector<Half> const*>(o);
      Vector<Half> const b = *reinterpret_cast<Vector<Half> const*>(d_o);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        share += static_cast<float>(a.x[e]) * static_cast<float>(b.x[e]);
      }
    }
    sum -= exp2f((sink - lse) * kLog2e) * share;
  }
  sum = block_sum(sum);
  int64_t const chunks = sink_bwd_chunks(p.batch, p.seqlen);
  if (threadIdx.x == 0) p.partial[head * chunks + chunk] = sum;
}

// A block puts the chunks of one head together.
template <class Half>
__global__ void __launch_bounds__(kThreads) sink_sum_kernel(SinkBwdParams const p) {
  int const head = int(blockIdx.x);
  int64_t const chunks = sink_bwd_chunks(p.batch, p.seqlen);
  float sum = 0.f;
  for (int64_t i = threadIdx.x; i < chunks; i += kThreads) sum += p.partial[head * chunks + i];
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  if (p.sink_is_fp32) {
    static_cast<float*>(p.dsink)[head] = sum;
  } else {
    static_cast<Half*>(p.dsink)[head] = static_cast<Half>(sum);
  }
}

template <class Half>
void launch(SinkBwdParams const& p, cudaStream_t stream) {
  int64_t const blocks = sink_bwd_chunks(p.batch, p.seqlen) * p.heads;
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::runtime_error("flash3: the gradient of sinks over more than 2^31 blocks of rows");
  }
  if (blocks > 0) {
    sink_bwd_kernel<Half><<<unsigned(blocks), kThreads, 0, stream>>>(p, lanes_per_row(p.head_dim));
    FLASH3_CUDA_CHECK(cudaGetLastError());
  }
  sink_sum_kernel<Half><<<unsigned(p.heads), kThreads, 0, stream>>>(p);
  FLASH3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void launch_sink_bwd(SinkBwdParams const& p, cudaStream_t stream) {
  p.dtype == DType::kF16 ? launch<__half>(p, stream) : launch<__nv_bfloat16>(p, stream);
}

}  // namespace flash3
