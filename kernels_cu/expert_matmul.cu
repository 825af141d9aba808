// expert_matmul.cu: routed experts with weights in float32; expert_matmul.cuh has the contract.
//
// launch  grid (ceil(n / (4 R)) or ceil(n / R), most tiles possible, 1), block 128; blocks past tile_count end at once
// order   sum128 (rules 3, 4); bytes as in expert_matmul.cuh, 4 a weight
#include "expert_matmul.cuh"

EXPERT_MATMUL(expert_matmul_w1_m1_r4, float, 1, one_warp<1, 4, VEC>)
EXPERT_MATMUL(expert_matmul_w1_m4_r2, float, 4, one_warp<4, 2, VEC>)
EXPERT_MATMUL(expert_matmul_w4_m1_r2, float, 1, four_warps<1, 2, VEC, 1>)
EXPERT_MATMUL(expert_matmul_w4_m4_r4, float, 4, four_warps<4, 4, VEC, 1>)
