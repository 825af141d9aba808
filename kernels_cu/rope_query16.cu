// rope_query16.cu: rotates the rotary part of every head's bf16 query into the tail of the absorbed query (tier bf16).
//
// in   q         bf16 [rows, heads, nope + 2 half]   row stride q_row
//      positions int32 [rows]
//      cos, sin  float32 [max_positions, half]
// out  query     bf16 [rows, heads, latent + 2 half]: elements latent.. of each head are written, the rest kept
//
// launch  grid (ceil(heads * half / 128), rows), block 128; one pair a thread
// order   none: (a, b) -> (a c - b s, b c + a s) in float32, each rounded once
// bytes   8 * rows * heads * half + 8 * rows * half
#include "mma.cuh"

extern "C" __global__ void __launch_bounds__(128)
    rope_query16(const bf16* q, const int* positions, const float* cos, const float* sin, bf16* query, int heads, int nope, int half,
                 int latent, int interleaved, i64 q_row) {
  const int j = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y;
  wait_for_inputs();
  start_dependents();
  if (j >= heads * half) return;
  const int h = j / half, i = j % half;
  const i64 angle = (i64)positions[row] * half + i;
  const bf16* x = q + row * q_row + (i64)h * (nope + 2 * half) + nope;
  const float a = widen(interleaved ? x[2 * i] : x[i]), b = widen(interleaved ? x[2 * i + 1] : x[i + half]);
  const float c = cos[angle], s = sin[angle];
  bf16* y = query + ((i64)row * heads + h) * (latent + 2 * half) + latent;
  y[i] = round_bf16(a * c - b * s);
  y[i + half] = round_bf16(b * c + a * s);
}
