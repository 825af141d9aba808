// group_experts.cu: sorts the (token, slot) items by expert and cuts each expert's list into tiles, on the device.
//
// in   ids        int32 [items]        expert of each item; item = token * slots + slot
// out  items      int32 [items]        item numbers by ascending expert, then ascending item
//      tiles      int32 [tiles, 3]     expert, first place in items, rows (1..tile)
//      tile_count int32 [1]            at most min(experts, items) + items / tile
//
// launch  grid (1), block 128, shared 12 * experts bytes; experts <= 2048
// work    a thread counts and lists the items of experts t, t + 128, ...; warp 0 makes the prefix sums
// order   integers only; the lists do not depend on the schedule
// bytes   4 * items * (2 * experts / 128 + 1): the ids come from cache after the first pass
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
    group_experts(const int* ids, int* items, int* tiles, int* tile_count, int item_count, int experts, int tile) {
  extern __shared__ int shared_int[];
  int *count = shared_int, *place = shared_int + experts, *tile_place = shared_int + 2 * experts;
  const int t = threadIdx.x;
  for (int e = t; e < experts; e += 128) {
    int n = 0;
    for (int i = 0; i < item_count; ++i) n += ids[i] == e;
    count[e] = n;
  }
  __syncthreads();
  if (t < 32) {
    const int size = (experts + 31) / 32, first = min(experts, t * size), last = min(experts, first + size);
    int n = 0, m = 0;
    for (int e = first; e < last; ++e) {
      n += count[e];
      m += (count[e] + tile - 1) / tile;
    }
    int n_sum = n, m_sum = m;
    for (int o = 1; o < 32; o <<= 1) {
      const int a = __shfl_up_sync(FULL_WARP, n_sum, o), b = __shfl_up_sync(FULL_WARP, m_sum, o);
      if (t >= o) {
        n_sum += a;
        m_sum += b;
      }
    }
    if (t == 31) *tile_count = m_sum;
    n = n_sum - n;
    m = m_sum - m;
    for (int e = first; e < last; ++e) {
      place[e] = n;
      tile_place[e] = m;
      n += count[e];
      m += (count[e] + tile - 1) / tile;
    }
  }
  __syncthreads();
  for (int e = t; e < experts; e += 128) {
    if (!count[e]) continue;
    int at = place[e];
    for (int i = 0; i < item_count; ++i)
      if (ids[i] == e) items[at++] = i;
    for (int first = 0, j = tile_place[e]; first < count[e]; first += tile, ++j) {
      tiles[3 * j] = e;
      tiles[3 * j + 1] = place[e] + first;
      tiles[3 * j + 2] = min(tile, count[e] - first);
    }
  }
}
