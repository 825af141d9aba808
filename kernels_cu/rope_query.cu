// rope_query.cu: rotates the rotary part of every head's query into the tail of the absorbed query (rule 9).
//
// in   q         float32 [rows, heads, nope + 2 half]   row stride q_row
//      positions int32 [rows]
//      cos, sin  float32 [max_positions, half]
// out  query     float32 [rows, heads, latent + 2 half]: elements latent.. of each head are written, the rest kept
//
// launch  grid (ceil(heads * half / 128), rows), block 128; one pair a thread
// order   none: (a, b) -> (a c - b s, b c + a s)
// bytes   16 * rows * heads * half + 8 * rows * half
#include "rope.cuh"

extern "C" __global__ void __launch_bounds__(128)
    rope_query(const float* q, const int* positions, const float* cos, const float* sin, float* query, int heads, int nope,
               int half, int latent, int interleaved, i64 q_row) {
  const int j = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y;
  if (j >= heads * half) return;
  const int h = j / half, i = j % half;
  const i64 angle = (i64)positions[row] * half + i;
  rotate_pair(q + (i64)row * q_row + (i64)h * (nope + 2 * half) + nope,
              query + ((i64)row * heads + h) * (latent + 2 * half) + latent, i, half, interleaved, cos[angle], sin[angle]);
}
