// expert_matmul.cu: y[item] = x[item / items_a_row] W_e^T for every (token, slot) item of every touched expert.
//
// in   x      float32 [items / items_a_row, k]   items_a_row = slots for gate+up (one row a token), 1 for down
//      w      float32 [experts, n, k]
//      items  int32 [items]                      item numbers sorted by expert      } made by group_experts
//      tiles  int32 [tiles, 3]                   expert, first place in items, rows } on the device
//      tile_count int32 [1]
// out  y      float32 [items, n]
//
// launch  grid (ceil(n / (4 R)) or ceil(n / R), most tiles possible, 1), block 128; blocks past tile_count end at once
// work    one tile: up to M rows of one expert, by one warp (w1) or four (w4) as in matmul.cuh
// order   sum128 (rules 3, 4)
// bytes   4 * (tiles * n * k + items * (k + n))
#include "matmul.cuh"

EXPERT_MATMUL(expert_matmul_w1_m1_r4, 1, one_warp<1, 4, VEC>)
EXPERT_MATMUL(expert_matmul_w1_m4_r2, 4, one_warp<4, 2, VEC>)
EXPERT_MATMUL(expert_matmul_w4_m1_r2, 1, four_warps<1, 2, VEC, 1>)
EXPERT_MATMUL(expert_matmul_w4_m4_r4, 4, four_warps<4, 4, VEC, 1>)
