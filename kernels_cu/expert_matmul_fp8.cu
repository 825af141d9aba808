// expert_matmul_fp8.cu: routed experts with weights in e4m3, scaled in blocks as DeepSeek-V3's; expert_matmul.cuh has the contract.
//
// launch  grid (ceil(n / (4 R)) or ceil(n / R), most tiles possible, 1), block 128; blocks past tile_count end at once
// order   sum128 of x * (float(e4m3) * scale), each product rounded; bytes as in expert_matmul.cuh, 1 a weight and a scale a block
#include "expert_matmul.cuh"

FP8_EXPERT_MATMUL(expert_matmul_fp8_w1_m1_r4, 1, one_warp<1, 4, VEC>)
FP8_EXPERT_MATMUL(expert_matmul_fp8_w1_m4_r2, 4, one_warp<4, 2, VEC>)
FP8_EXPERT_MATMUL(expert_matmul_fp8_w4_m1_r2, 1, four_warps<1, 2, VEC, 1>)
FP8_EXPERT_MATMUL(expert_matmul_fp8_w4_m1_r4, 1, four_warps<1, 4, VEC, 1>)
FP8_EXPERT_MATMUL(expert_matmul_fp8_w4_m4_r4, 4, four_warps<4, 4, VEC, 1>)
