// mma_expert.cu: the routed experts' products for every (token, slot) item, bf16, sums in float32 (tier bf16).
//
// in   x      bf16 [x_rows, k]                          gate+up: a row a token, items_a_row = slots; down: a row an item, 1
//      w      bf16 [experts, tiles_n, units, 1024]      each expert a matrix in fragment order (mma_matmul.cuh), gate and up
//                                                       tile by tile in turn (mma_gate_up.cu)
//      items  int32 [items]                             item numbers sorted by expert      } made by group_experts
//      tiles  int32 [tiles, 3]                          expert, first place in items, rows } on the device, at most 8 rows
//      tile_count int32 [1]
// out  h      bf16 [items, n]  (gate+up)     y  float32 [items, n]  (down)
//
// launch  grid (ceil(n / 16 / T), tiles), block 32 W, shared memory 512 W T with T = 2 for gate+up and 1 for down; blocks past
//         tile_count end at once
// work    mma_matmul.cuh; the list is waited for before anything is read. An expert with more than 8 rows is read once for
//         every 8, from the second-level cache if they run side by side
// order   mma_matmul.cuh: an item's bits depend on its token and expert alone
// bytes   touched experts * 2 n k + items * (2 k + 2 or 4 n)
#include "mma_matmul.cuh"

template <int W, int T, int D, int K, class Put>
__device__ __forceinline__ void expert_tile(const bf16* x, const bf16* w, const int* items, const int* tiles, const int* tile_count,
                                            int n, int k, int items_a_row, Put put) {
  wait_for_inputs();
  if ((int)blockIdx.y >= *tile_count) return;
  const int expert = tiles[3 * blockIdx.y], first = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
  const int g = (threadIdx.x & 31) >> 2, tiles_n = (n + 15) / 16 * T;
  const i64 tile_step = (i64)(((K ? K : k) + 63) / 64) * 1024;
  const bf16* mine[1] = {g < count ? x + (i64)(items[first + g] / items_a_row) * (K ? K : k) : nullptr};
  mma_product<W, 1, T, D, K>(w + ((i64)expert * tiles_n + blockIdx.x * T) * tile_step, tile_step, T, mine, k);
  for (int j = threadIdx.x; j < 128; j += W * 32) {
    const Place p = place_at(j);
    const int output = blockIdx.x * 16 + p.output;
    if (output < n && p.row < count) put((i64)items[first + p.row] * n + output, j);
  }
}

#define GATE_UP(name, W, D, K, BLOCKS)                                                                                       \
  extern "C" __global__ void __launch_bounds__(32 * W, BLOCKS)                                                               \
      name(const bf16* x, const bf16* w, const int* items, const int* tiles, const int* tile_count, bf16* h, int n, int k,      \
           int items_a_row) {                                                                                                \
    expert_tile<W, 2, D, K>(x, w, items, tiles, tile_count, n, k, items_a_row, [=](i64 at, int j) {                          \
      const float gate = sum_at<W, 1>(0, j), up = sum_at<W, 1>(1, j);                                                        \
      h[at] = round_bf16(exact_silu(gate) * up);                                                                             \
    });                                                                                                                      \
  }
#define DOWN(name, W, D, K, BLOCKS)                                                                                          \
  extern "C" __global__ void __launch_bounds__(32 * W, BLOCKS)                                                               \
      name(const bf16* x, const bf16* w, const int* items, const int* tiles, const int* tile_count, float* y, int n, int k,    \
           int items_a_row) {                                                                                                \
    expert_tile<W, 1, D, K>(x, w, items, tiles, tile_count, n, k, items_a_row,                                               \
                            [=](i64 at, int j) { y[at] = sum_at<W, 1>(0, j); });                                             \
  }
GATE_UP(mma_expert_gate_up_w1, 1, 1, 0, 16)
GATE_UP(mma_expert_gate_up_w4, 4, 2, 0, 4)
GATE_UP(mma_expert_gate_up_w8, 8, 2, 0, 2)
GATE_UP(mma_expert_gate_up_w8_k7168, 8, 2, 7168, 2)
DOWN(mma_expert_down_w1, 1, 2, 0, 16)
DOWN(mma_expert_down_w4, 4, 3, 0, 4)
DOWN(mma_expert_down_w4_k2048, 4, 3, 2048, 4)
DOWN(mma_expert_down_w8, 8, 4, 0, 2)
