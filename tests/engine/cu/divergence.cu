// Faults that the CPU device must name. A comment "at: NAME" marks the line that the message for kernel NAME must point to.
extern "C" __global__ void two_barriers(float* x) {
  if (threadIdx.x < 32) {
    __syncthreads();
    x[0] = 1.0f;
  } else {
    __syncthreads();  // at: two_barriers
  }
}
extern "C" __global__ void barrier_against_shuffle(float* x) {
  if (threadIdx.x < 16) __syncthreads();
  x[0] = __shfl_xor_sync(0xffffffffu, x[0], 1);  // at: barrier_against_shuffle
}
extern "C" __global__ void early_exit(float* x) {
  if (threadIdx.x == 3) return;
  x[0] = __shfl_xor_sync(0xffffffffu, x[0], 1);  // at: early_exit
}
extern "C" __global__ void tail_warp(float* x) {
  x[0] = __shfl_xor_sync(0xffffffffu, x[0], 1);  // at: tail_warp
}
extern "C" __global__ void not_in_mask(float* x) {
  x[0] = __shfl_xor_sync(0xfffffffeu, x[0], 1);  // at: not_in_mask
}
extern "C" __global__ void reads_outside_mask(float* x) {
  const unsigned mask = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
  x[threadIdx.x] = __shfl_sync(mask, x[threadIdx.x], 20);  // at: reads_outside_mask
}
extern "C" __global__ void two_shuffles(float* x) {
  if (threadIdx.x & 1)
    x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 2);  // at: two_shuffles
  else
    x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 4);
}
extern "C" __global__ void shuffle_against_vote(float* x) {
  // one line: the operations differ, not the place
  x[threadIdx.x] = threadIdx.x & 1 ? __shfl_xor_sync(~0u, x[0], 2) : (float)__any_sync(~0u, 1);  // at: shuffle_against_vote
}
extern "C" __global__ void never_all(float* x) {
  // the lower half waits for all, the upper half for itself, then for all at a barrier
  if (threadIdx.x < 16) __syncwarp();  // at: never_all
  __syncthreads();
}
extern "C" __global__ void trapped(float* x) {
  if (blockIdx.x == 2 && threadIdx.x == 5) __trap();  // at: trapped
}
__device__ int depth(float* x, int n) {
  volatile char frame[2048];
  for (int i = 0; i < 2048; i += 4) frame[i] = (char)n;
  return n ? depth(x, n - 1) + frame[n] : frame[0];
}
extern "C" __global__ void deep(float* x, int n) { x[threadIdx.x] = (float)depth(x, n); }
// sound: threads that have exited need not arrive at a barrier
extern "C" __global__ void exit_then_barrier(float* x) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  x[threadIdx.x] = 1.0f;
}
