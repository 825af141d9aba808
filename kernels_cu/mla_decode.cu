// mla_decode.cu: absorbed attention over a bf16 latent cache of 512 + 64, on matrix units: ranges of positions, each by itself
// (tier bf16). mla_combine.cu joins them.
//
// in   query     bf16 [rows, heads, 576]                   absorbed latent query | rotated query; heads a multiple of H
//      cache     bf16 [slots, capacity, 576]               latent | rotated key
//      positions int32 [rows], slots int32 [rows]          row i sees positions 0..positions[i] of slot slots[i]
//      tree_starts int32 [rows] or null, paths int32 [rows, path_row] or null
//                                                          position p lies in cache row p, from tree_starts[i] on in row
//                                                          paths[i, p - tree_starts[i]]
// out  states    float32 [rows, heads, ranges, 2]          maximum of the range's scores * log2(e), sum of 2^(score - maximum)
//      vectors   float32 [rows, heads, ranges, 512]        sum of 2^(score - maximum) * latent
//
// launch  mla_decode_hH: grid (heads / H, ranges, rows), block 128, shared memory 2 * 32 * 1168 + H * (1152 + 64 + 28) + 16: two
//         blocks an SM of sm_90; of sm_120 one, and H = 16 alone.
// work    a block has H heads of a row and tiles of 32 keys: scores by 8 keys a warp, vectors by 128 columns a warp. Keys are
//         gathered by position while they are fetched, so the rows of a tree cost what others do. H = 32 reads each key half
//         as often: from 16384 positions or several rows on. The bits are those of H = 16.
// order   by position. Ranges of range_size(length) positions from 0 on, so a row's own length decides; in a range tiles
//         ascending: score = (even steps of 16 elements) + (odd steps), a running maximum, 2^x rounded to bf16 before it is
//         summed (by the same instruction, with a column of ones) and multiplied
// bytes   rows * heads / H * length * 1152, mostly from the second-level cache; states and vectors written and read
#include "mla.cuh"

#define WIDTH 576
#define TILE 32
#define QUERY_BYTES 1152          // a query row in shared memory, its 16-byte units swizzled by row
#define KEY_BYTES 1168            // a key row: 16 bytes more, so that eight rows fall on different banks

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at));
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at));
}
__device__ __forceinline__ u32 two_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Tiles of keys on their way into shared memory: one bulk copy a row from sm_90 on, else 16 bytes a thread at a time.
struct Fetch {
  u32 keys, barriers;
#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;\n mbarrier.init.shared.b64 [%1], 1;" ::"r"(barriers), "r"(barriers + 8));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }
  template <class Row> __device__ __forceinline__ void start(int stage, Row row) {
    const int i = threadIdx.x;
    const u32 barrier = barriers + 8 * stage;
    if (i == 0) asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(TILE * QUERY_BYTES) : "memory");
    if (i < TILE)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       keys + (stage * TILE + i) * KEY_BYTES),
                   "l"(row(i)), "r"(QUERY_BYTES), "r"(barrier)
                   : "memory");
  }
  __device__ __forceinline__ void wait(int stage, int turn) {
    asm volatile(
        "{\n .reg .pred p;\n L%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n @p bra.uni E%=;\n bra.uni L%=;\n E%=:\n}" ::"r"(
            barriers + 8 * stage),
        "r"(turn & 1)
        : "memory");
  }
#else
  __device__ __forceinline__ void begin() {}
  template <class Row> __device__ __forceinline__ void start(int stage, Row row) {
    for (int i = threadIdx.x; i < TILE * (QUERY_BYTES / 16); i += 128) {
      const int r = i / (QUERY_BYTES / 16), u = i % (QUERY_BYTES / 16);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(keys + (stage * TILE + r) * KEY_BYTES + u * 16), "l"(row(r) + u * 8)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  __device__ __forceinline__ void wait(int stage, int turn) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
  }
#endif
};

// 16 G heads of one row over one range.
template <int G>
__device__ __forceinline__ void decode(const bf16* query, const bf16* cache, const int* positions, const int* slots,
                                       const int* tree_starts, const int* paths, float* states, float* vectors, int heads,
                                       int capacity, int ranges, int path_row, float scale) {
  constexpr int H = 16 * G;
  extern __shared__ __align__(128) char memory[];
  wait_for_inputs();
  start_dependents();
  const int row = blockIdx.z, head = blockIdx.x * H, length = positions[row] + 1, size = range_size(length);
  const int first = blockIdx.y * size;
  if (first >= length) return;
  const int last = min(length, first + size), tiles = (last - first + TILE - 1) / TILE;
  const int start = tree_starts ? tree_starts[row] : 0x7fffffff;
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5, g = lane >> 2, c4 = lane & 3;
  char* const query_part = memory + 2 * TILE * KEY_BYTES;
  char* const weights_part = query_part + H * QUERY_BYTES;
  float* const peaks = (float*)(weights_part + H * TILE * 2);  // of the warps [4][H]
  float *const running = peaks + 4 * H, *const factors = running + 2 * H;
  const u32 keys = shared_address(memory), q = shared_address(query_part), p = shared_address(weights_part);
  Fetch fetch = {keys, shared_address(factors + H)};
  fetch.begin();
  const bf16* const base = cache + (i64)slots[row] * capacity * WIDTH;
  auto start_tile = [&](int tile) {
    fetch.start(tile & 1, [&](int i) {
      // keys past the range are seen by nobody, but they are multiplied by 0, so they must be numbers
      const int at = min(first + tile * TILE + i, last - 1);
      return base + (i64)(at < start ? at : paths[(i64)row * path_row + at - start]) * WIDTH;
    });
  };
  start_tile(0);
  for (int i = t; i < H * (WIDTH / 8); i += 128) {
    const int r = i / (WIDTH / 8), u = i % (WIDTH / 8);
    *(uint4*)(query_part + r * QUERY_BYTES + ((u ^ (r & 7)) << 4)) = ((const uint4*)(query + ((i64)row * heads + head + r) * WIDTH))[u];
  }
  if (t < H) running[t] = -1e30f;
  float o[G][16][4], sum[G][4];
#pragma unroll
  for (int i = 0; i < G; ++i) {
    sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.f;
#pragma unroll
    for (int j = 0; j < 16; ++j) o[i][j][0] = o[i][j][1] = o[i][j][2] = o[i][j][3] = 0.f;
  }
  for (int tile = 0; tile < tiles; ++tile) {
    fetch.wait(tile & 1, tile >> 1);
    __syncthreads();  // everybody has left the other half of the buffer
    if (tile + 1 < tiles) start_tile(tile + 1);
    const u32 here = keys + (tile & 1) * TILE * KEY_BYTES;
    float s[G][2][4];
#pragma unroll
    for (int i = 0; i < G; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[i][0][c] = s[i][1][c] = 0.f;
#pragma unroll 6
    for (int k = 0; k < WIDTH / 32; ++k) {
      u32 b[4], a[4];
      load_matrices(b, here + (warp * 8 + (lane & 7)) * KEY_BYTES + (k * 4 + (lane >> 3)) * 16);
#pragma unroll
      for (int i = 0; i < G; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int r = i * 16 + (lane & 15), u = k * 4 + e * 2 + (lane >> 4);
          load_matrices(a, q + r * QUERY_BYTES + ((u ^ (r & 7)) << 4));
          mma(s[i][e], a[0], a[1], a[2], a[3], b[e * 2], b[e * 2 + 1]);
        }
    }
    // this lane: of each 16 heads g and g + 8, keys 2 c4 and 2 c4 + 1 of the warp's eight
#pragma unroll
    for (int i = 0; i < G; ++i) {
      float top[2] = {-1e30f, -1e30f};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int at = first + tile * TILE + warp * 8 + 2 * c4 + (c & 1);
        s[i][0][c] = at < last ? (s[i][0][c] + s[i][1][c]) * scale : -1e30f;
        top[c >> 1] = fmaxf(top[c >> 1], s[i][0][c]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = fmaxf(top[h], __shfl_xor_sync(FULL_WARP, top[h], 1));
        top[h] = fmaxf(top[h], __shfl_xor_sync(FULL_WARP, top[h], 2));
        if (c4 == 0) peaks[warp * H + i * 16 + g + 8 * h] = top[h];
      }
    }
    __syncthreads();
    const int now = tile & 1;
    auto peak = [&](int h) {
      float m = running[now * H + h];
#pragma unroll
      for (int w = 0; w < 4; ++w) m = fmaxf(m, peaks[w * H + h]);
      return m;
    };
    if (t < H) {
      const float m = peak(t);
      factors[t] = exp2_fast(running[now * H + t] - m);
      running[(now ^ 1) * H + t] = m;
    }
#pragma unroll
    for (int i = 0; i < G; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = i * 16 + g + 8 * h;
        const float m = peak(r);
        const u32 at = p + r * (TILE * 2) + ((warp ^ (r >> 1 & 3)) << 4) + c4 * 4;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(two_bf16(exp2_fast(s[i][0][2 * h] - m), exp2_fast(s[i][0][2 * h + 1] - m)))
                     : "memory");
      }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < G; ++i) {
      const float low = factors[i * 16 + g], high = factors[i * 16 + g + 8];
      sum[i][0] *= low, sum[i][1] *= low, sum[i][2] *= high, sum[i][3] *= high;
#pragma unroll
      for (int j = 0; j < 16; ++j) o[i][j][0] *= low, o[i][j][1] *= low, o[i][j][2] *= high, o[i][j][3] *= high;
    }
#pragma unroll
    for (int k = 0; k < TILE / 16; ++k) {
      u32 a[G][4];
#pragma unroll
      for (int i = 0; i < G; ++i) {
        const int r = i * 16 + (lane & 15), u = k * 2 + (lane >> 4);
        load_matrices(a[i], p + r * (TILE * 2) + ((u ^ (r >> 1 & 3)) << 4));
        mma(sum[i], a[i][0], a[i][1], a[i][2], a[i][3], 0x3f803f80u, 0x3f803f80u);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        u32 v[4];
        load_transposed(v, here + (k * 16 + (lane & 15)) * KEY_BYTES + (warp * 16 + j * 2 + (lane >> 4)) * 16);
#pragma unroll
        for (int i = 0; i < G; ++i) {
          mma(o[i][2 * j], a[i][0], a[i][1], a[i][2], a[i][3], v[0], v[1]);
          mma(o[i][2 * j + 1], a[i][0], a[i][1], a[i][2], a[i][3], v[2], v[3]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < G; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = i * 16 + g + 8 * h;
      const i64 out = ((i64)row * heads + head + r) * ranges + blockIdx.y;
#pragma unroll
      for (int j = 0; j < 16; ++j)
        *(float2*)(vectors + out * LATENT + warp * 128 + j * 8 + c4 * 2) = {o[i][j][2 * h], o[i][j][2 * h + 1]};
      if (warp == 0 && c4 == 0) {
        states[2 * out] = running[(tiles & 1) * H + r];
        states[2 * out + 1] = sum[i][2 * h];
      }
    }
}

#define KERNEL(name, G)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(128, 2)                                                                      \
      name(const bf16* query, const bf16* cache, const int* positions, const int* slots, const int* tree_starts,            \
           const int* paths, float* states, float* vectors, int heads, int capacity, int ranges, int path_row,              \
           float scale) {                                                                                                   \
    decode<G>(query, cache, positions, slots, tree_starts, paths, states, vectors, heads, capacity, ranges, path_row,       \
              scale);                                                                                                       \
  }
KERNEL(mla_decode_h16, 1)
KERNEL(mla_decode_h32, 2)
