// expert_matmul_f16.cu: routed experts with weights in fp16, widened in registers; expert_matmul.cuh has the contract.
//
// launch  grid (ceil(n / (4 R)) or ceil(n / R), most tiles possible, 1), block 128; blocks past tile_count end at once
// order   sum128 of x * widen(w); bytes as in expert_matmul.cuh, 2 a weight
#include "expert_matmul.cuh"

EXPERT_MATMUL(expert_matmul_f16_w1_m1_r4, f16, 1, one_warp<1, 4, VEC>)
EXPERT_MATMUL(expert_matmul_f16_w1_m4_r2, f16, 4, one_warp<4, 2, VEC>)
EXPERT_MATMUL(expert_matmul_f16_w4_m1_r2, f16, 1, four_warps<1, 2, VEC, 1>)
EXPERT_MATMUL(expert_matmul_f16_w4_m4_r4, f16, 4, four_warps<4, 4, VEC, 1>)
