// A block's sum in the contract's order, and warp operations beside their plain meaning.
#include "fold.cuh"
#include "fold.cuh"

extern "C" __global__ void __launch_bounds__(128) block_sum(const float* x, float* y, int n) {
  __shared__ float part[4];
  float v = 0.0f;
  for (int k = threadIdx.x; k < n / 4; k += 128)
    for (int j = 0; j < 4; ++j) v = v + x[(long long)blockIdx.x * n + 4 * k + j];
  v = warp_sum(v);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = (part[0] + part[1]) + (part[2] + part[3]);
}
extern "C" __global__ void in_header(float* x) { x[threadIdx.x] = warp_sum(x[threadIdx.x]); }

#ifdef KDTR_CPU  // the collectives are the CPU device's own
#define FOLD(N)                                                                        \
  extern "C" __global__ void fold_##N(const float* x, float* collective, float* shuffles) { \
    float v[N];                                                                        \
    for (int i = 0; i < N; ++i) v[i] = x[threadIdx.x * N + i];                         \
    for (int i = 0; i < N; ++i) shuffles[threadIdx.x * N + i] = warp_sum(v[i]);        \
    cc::fold32(__LINE__, v);                                                           \
    for (int i = 0; i < N; ++i) collective[threadIdx.x * N + i] = v[i];                \
  }
FOLD(1)
FOLD(4)
FOLD(7)

struct Best {
  float value;
  int index;
};
__device__ void better(Best& into, const Best& from) {
  if (from.value > into.value || (from.value == into.value && from.index < into.index)) into = from;
}
extern "C" __global__ void best(const float* x, int* chosen) {
  Best b{x[threadIdx.x], (int)threadIdx.x};
  cc::warp_reduce(__LINE__, &b, better);
  chosen[threadIdx.x] = b.index;
}
#endif

extern "C" __global__ void shuffles(const int* x, int* y, int lane, int width) {
  const int t = threadIdx.x, v = x[t];
  y[t] = __shfl_sync(~0u, v, lane, width);
  y[32 + t] = __shfl_xor_sync(~0u, v, lane, width);
  y[64 + t] = __shfl_up_sync(~0u, v, lane, width);
  y[96 + t] = __shfl_down_sync(~0u, v, lane, width);
}
extern "C" __global__ void wide_shuffle(const double* x, double* y) { y[threadIdx.x] = __shfl_xor_sync(~0u, x[threadIdx.x], 5); }
extern "C" __global__ void votes(const int* x, int* y) {
  const int t = threadIdx.x, w = t >> 5, v = x[t];
  int* out = y + 16 * w;
  const unsigned ballot = __ballot_sync(~0u, v > 0), same = __match_any_sync(~0u, v);
  const int any = __any_sync(~0u, v > 0), all = __all_sync(~0u, v > 0);
  const int sum = __reduce_add_sync(~0u, v), low = __reduce_min_sync(~0u, v), high = __reduce_max_sync(~0u, v);
  const unsigned both = __reduce_and_sync(~0u, (unsigned)v), either = __reduce_or_sync(~0u, (unsigned)v);
  const unsigned odd = __reduce_xor_sync(~0u, (unsigned)v);
  const int count = __syncthreads_count(v > 0), every = __syncthreads_and(v > 0), some = __syncthreads_or(v > 0);
  __syncwarp();
  if ((t & 31) == 7) {
    const int all_of_them[] = {(int)ballot, (int)same, any, all, sum, low, high, (int)both, (int)either, (int)odd, count, every, some};
    for (int i = 0; i < 13; ++i) out[i] = all_of_them[i];
  }
}
// each half of a warp by itself, in different operations
extern "C" __global__ void half_warps(float* x) {
  const unsigned mask = threadIdx.x & 16 ? 0xffff0000u : 0x0000ffffu;
  float v = x[threadIdx.x];
  if (threadIdx.x & 16)
    for (int o = 8; o; o >>= 1) v += __shfl_xor_sync(mask, v, o);
  else
    v = (float)__popc(__ballot_sync(mask, v > 3.0f));
  x[threadIdx.x] = v;
}
// the order in which lanes run: each takes a ticket, waits, takes another
extern "C" __global__ void tickets(int* next, int* order) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  order[i] = atomicAdd(next, 1);
  __syncthreads();
  order[n + i] = atomicAdd(next, 1);
}
