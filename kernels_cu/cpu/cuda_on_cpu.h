// cuda_on_cpu.h: the head that every .cu file gets when it is compiled for the CPU device (engine/host_compiler.py).
//
// It gives the CUDA names that tier exact may use, and refuses, by name and at compile time, those that it may not
// (numerics rule 1: no fused, fast or approximate operation, no float atomic). What the kernel sees is what NVRTC gives
// it without headers: no <cmath>, no INFINITY, no fixed-width integer names. KDTR_CPU is defined, __CUDA_ARCH__ is not.
//
// A missing barrier, a divergent one, a read of unwritten shared memory, a lane outside its mask: an error with block,
// thread, file and line, or a NaN in the result (shared memory is filled with 0xFF before every block).
//
//   cuda_types.h   float4, dim3, ...
//   cuda_math.h    arithmetic, bits, atomics, and the names that are refused
//   fibres.h       barriers, warp operations, collectives: the bond to the runtime
//   runtime.cpp    launches, a pool of threads; scheduler.h: one block as fibres. In a library of their own.
#pragma once
#define KDTR_CPU 1
#include "fibres.h"
#include "cuda_math.h"

// ---- qualifiers -----------------------------------------------------------------------------------------------------
#define __global__ __attribute__((__used__))  // the builder finds kernels by this mark, after the preprocessor
#define __device__
#define __host__
#define __constant__
// A block runs on one OS thread, and nothing else of a module is thread-local. "used": the compiler must not conclude
// that a variable which the module never writes is zero, for the runtime fills it with NaN.
#define __shared__ __attribute__((__used__)) thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// extern __shared__ T name[]; is rewritten to this. A statement expression: it does not compile outside a function.
#define CC_DYNAMIC_SHARED(T, name) T* name = ({ reinterpret_cast<T*>(cc::tls.block->shared); })

// ---- where am I -----------------------------------------------------------------------------------------------------
#define threadIdx (cc::tls.lane->thread)
#define blockIdx (cc::tls.block->block)
#define blockDim (cc::tls.block->dim)
#define gridDim (cc::tls.block->grid)
#define warpSize 32

// ---- barriers -------------------------------------------------------------------------------------------------------
#define __syncthreads() cc::barrier(CC_HERE, 0)
#define __syncthreads_count(p) ((int)cc::count_votes(CC_HERE, (p) != 0, 0))
#define __syncthreads_and(p) ((int)cc::count_votes(CC_HERE, (p) != 0, 1))
#define __syncthreads_or(p) ((int)cc::count_votes(CC_HERE, (p) != 0, 2))
#define __syncwarp(...) cc::syncwarp(CC_HERE, ##__VA_ARGS__)
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#define __trap() cc::fail(CC_HERE, "__trap()")

// ---- warp operations ------------------------------------------------------------------------------------------------
#define __shfl_sync(...) cc::shuffle(CC_HERE, __VA_ARGS__)
#define __shfl_xor_sync(...) cc::shuffle_xor(CC_HERE, __VA_ARGS__)
#define __shfl_down_sync(...) cc::shuffle_down(CC_HERE, __VA_ARGS__)
#define __shfl_up_sync(...) cc::shuffle_up(CC_HERE, __VA_ARGS__)
#define __ballot_sync(mask, p) cc::ballot(CC_HERE, mask, (p) != 0)
#define __any_sync(mask, p) ((int)(cc::ballot(CC_HERE, mask, (p) != 0) != 0))
#define __all_sync(mask, p) ((int)(cc::ballot(CC_HERE, mask, (p) == 0) == 0))
#define __match_any_sync(mask, v) cc::match_any(CC_HERE, mask, v)
#define __reduce_add_sync(mask, v) \
  cc::reduce(CC_HERE, mask, v, +[](cc::u64 a, cc::u64 b) -> cc::u64 { return (cc::u32)(a + b); })
#define __reduce_and_sync(mask, v) cc::reduce(CC_HERE, mask, v, +[](cc::u64 a, cc::u64 b) -> cc::u64 { return a & b; })
#define __reduce_or_sync(mask, v) cc::reduce(CC_HERE, mask, v, +[](cc::u64 a, cc::u64 b) -> cc::u64 { return a | b; })
#define __reduce_xor_sync(mask, v) cc::reduce(CC_HERE, mask, v, +[](cc::u64 a, cc::u64 b) -> cc::u64 { return a ^ b; })
#define __reduce_min_sync(mask, v) cc::reduce(CC_HERE, mask, v, cc::min_fold(v))
#define __reduce_max_sync(mask, v) cc::reduce(CC_HERE, mask, v, cc::max_fold(v))
cc::refused_on_every_device __activemask() = delete;  // its answer depends on the scheduler

// ---- the module's own checks, called by the device at load ----------------------------------------------------------
namespace cc {
inline namespace CC_RUNTIME {
__attribute__((noinline, used)) static float multiply_add(float a, float b, float c) { return a * b + c; }
}  // inline namespace
}  // namespace cc
// By this variable the runtime finds the module's thread-local storage, which is its static shared memory.
extern "C" CC_EXPORT thread_local char cc_first_thread_local;
thread_local char cc_first_thread_local;
extern "C" CC_EXPORT __attribute__((noinline)) void* cc_shared_memory() { return &cc_first_thread_local; }
// 0, or 1 if this compiler fuses a * b + c: with a = b = 1 + 2^-12 the product rounds to 1 + 2^-11, c is its negative,
// and the sum is 0 by two roundings, 2^-24 by one
extern "C" CC_EXPORT int cc_contracts() {
  volatile float a = 1.000244140625f, c = -1.00048828125f;
  return cc::multiply_add(a, a, c) != 0.0f;
}
