// Static and dynamic shared memory: unwritten, left over from before, private to a block; a missing barrier.
extern "C" __global__ void unwritten(float* y) {
  __shared__ float fixed[64];
  extern __shared__ float dynamic[];
  y[blockIdx.x * 128 + threadIdx.x] = fixed[threadIdx.x];
  y[blockIdx.x * 128 + 64 + threadIdx.x] = dynamic[threadIdx.x];
}
extern "C" __global__ void left_over(float* y, int write) {
  __shared__ float fixed[64];
  extern __shared__ __align__(16) unsigned char raw[];
  float* dynamic = reinterpret_cast<float*>(raw);
  if (write) {
    fixed[threadIdx.x] = 1.0f;
    dynamic[threadIdx.x] = 2.0f;
  }
  y[threadIdx.x] = fixed[threadIdx.x];
  y[64 + threadIdx.x] = dynamic[threadIdx.x];
}
extern "C" __global__ void reversed(const float* x, float* y, int barrier) {
  __shared__ float s[256];
  s[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
  if (barrier) __syncthreads();
  y[blockIdx.x * blockDim.x + threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}
template <int N> __device__ float through_template(float v) {
  __shared__ float s[N];  // a static of a template: each module must have its own
  s[threadIdx.x] = v;
  __syncthreads();
  return s[N - 1 - threadIdx.x];
}
extern "C" __global__ void templated(const float* x, float* y) { y[threadIdx.x] = through_template<64>(x[threadIdx.x]); }
extern "C" __global__ void store_at(float* x, long long at) { x[at] = 1.0f; }
