// scheduler.h: runs one block of a kernel as fibres on the calling OS thread. Part of runtime.cpp, not of kernels.
//
// A lane that has not yet blocked needs no fibre of its own: the lane that ended before it leaves its stack, and the
// loop goes on to the next one (a kernel without barriers is a plain loop over its threads).
// A switch is 14 instructions on x86-64; elsewhere, or with -DKDTR_UCONTEXT, swapcontext does it, 20 times slower.
//
// Schedules: 0 lowest lane first; 1 highest lane first, blocks in reverse; 2 and more: seeded random lanes and warps.
// A kernel without races gives the same bits under all of them.
#pragma once
#include "fibres.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// ---- switching stacks -----------------------------------------------------------------------------------------------
#if defined(__x86_64__) && !defined(KDTR_UCONTEXT)
extern "C" void cc_swap(void** save, void* load);
// It must end in ret: with an indirect jump the return predictor goes out of step, and shuffles take twice as long.
asm(".text\n.local cc_swap\n.type cc_swap,@function\ncc_swap:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\nmov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n.size cc_swap,.-cc_swap\n");
static void* fresh(char*, char* top, void (*entry)()) {
  void** s = (void**)top;
  *--s = nullptr;
  *--s = (void*)entry;
  return s - 6;
}
#else
#include <ucontext.h>
static void cc_swap(void** save, void* load) {  // a suspended fibre's context lies on its own stack
  ucontext_t here;
  *save = &here;
  swapcontext(&here, (ucontext_t*)load);
}
static void* fresh(char* low, char* top, void (*entry)()) {
  ucontext_t* c = (ucontext_t*)(((size_t)top - sizeof(ucontext_t)) & ~(size_t)63);
  getcontext(c);
  c->uc_link = nullptr;
  c->uc_stack.ss_sp = low;
  c->uc_stack.ss_size = (size_t)((char*)c - low) & ~(size_t)63;
  makecontext(c, entry, 0);
  return c;
}
#endif

namespace cc {
inline namespace CC_RUNTIME {

__thread Tls tls;

constexpr size_t PAGE = 4096, STACK = 64 << 10;  // a stack: one unmapped page, one canary page, 64 KiB
constexpr u64 CANARY = 0x5ca1ab1e0ddba11full;
constexpr size_t PROBE_EVERY = 1024;
constexpr unsigned COLOUR = 192;  // stacks start at different cache sets

struct Lane : LaneHead {
  void* sp;
  char* stack;
  const char* file;
  int line, source;
  u32 mask;
  Op op;
  u64 in, out;
  void* function;
};
struct Block : BlockHead {
  unsigned n, warps, live, arrived, schedule;
  u64 rng;
  u32 ready[32], waiting[32], in_barrier[32], done[32];
  Lane* first_arrived;
  unsigned voted[3];
  void* home;
  void (*call)(void**);
  void** args;
  char* stack[MAX_THREADS];
  unsigned stacks;  // all that were ever mapped
  char* spare[MAX_THREADS];
  unsigned spares, fewest;  // those not in use; the fewest there were during this launch
  Block* next_idle;
  char error[640];
  Lane lane[MAX_THREADS];
};
static Block& here() { return *(Block*)tls.block; }
static Lane& me() { return *(Lane*)tls.lane; }

struct Place {
  char text[64];
};
static Place place(const Lane& l) {
  Place p;
  snprintf(p.text, sizeof p.text, "thread (%u,%u,%u)", l.thread.x, l.thread.y, l.thread.z);
  return p;
}
// Ends the launch: the message goes to the block, and the fibre is left for good.
[[noreturn]] __attribute__((format(printf, 3, 4)))
static void failf(const char* file, int line, const char* form, ...) {
  Block& b = here();
  char what[400];
  va_list args;
  va_start(args, form);
  vsnprintf(what, sizeof what, form, args);
  va_end(args);
  snprintf(b.error, sizeof b.error, "%s:%d: %s, block (%u,%u,%u) %s", file, line, what, b.block.x, b.block.y, b.block.z,
           place(me()).text);
  void* dump;
  cc_swap(&dump, b.home);
  __builtin_unreachable();
}
void fail(const char* file, int line, const char* what) { failf(file, line, "%s", what); }

// ---- which lane runs next -------------------------------------------------------------------------------------------
static unsigned roll(Block& b, unsigned n) {
  b.rng = b.rng * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)((b.rng >> 33) % n);
}
static unsigned pick(Block& b, u32 ready) {
  if (b.schedule == 0) return __builtin_ctz(ready);
  if (b.schedule == 1) return 31 - __builtin_clz(ready);
  for (unsigned k = roll(b, __builtin_popcount(ready)); k; --k) ready &= ready - 1;
  return __builtin_ctz(ready);
}
static Lane* next(Block& b, unsigned w) {  // this warp first, then its neighbours; null: nobody can run
  if (b.schedule > 1) w = roll(b, b.warps);
  for (unsigned i = 0; i < b.warps; ++i) {
    unsigned v = b.schedule == 1 ? (w >= i ? w - i : w + b.warps - i) : (w + i < b.warps ? w + i : w + i - b.warps);
    if (b.ready[v]) return &b.lane[v * 32 + pick(b, b.ready[v])];
  }
  return nullptr;
}
static void lane_main();
static bool prepare(Block& b, Lane* l) {  // gives a lane that has not begun a stack of its own
  if (!b.spares) {
    char* p = (char*)mmap(nullptr, STACK + 2 * PAGE, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == (char*)MAP_FAILED) return false;
    if (mprotect(p, PAGE, PROT_NONE)) {
      munmap(p, STACK + 2 * PAGE);
      return false;
    }
    for (size_t at = PAGE; at < 2 * PAGE; at += PROBE_EVERY) *(u64*)(p + at) = CANARY;
    b.stack[b.stacks++] = b.spare[b.spares++] = p;
    b.fewest = 0;
  }
  l->stack = b.spare[--b.spares];
  if (b.spares < b.fewest) b.fewest = b.spares;
  l->sp = fresh(l->stack + 2 * PAGE, l->stack + STACK + 2 * PAGE - l->index * COLOUR % 8192 - 64, lane_main);
  return true;
}
[[noreturn]] static void deadlock(Block& b) {
  const Lane *barred = nullptr, *stuck = nullptr;
  for (unsigned i = 0; i < b.n; ++i) {
    u32 bit = 1u << (i & 31);
    if (!barred && b.in_barrier[i >> 5] & bit) barred = &b.lane[i];
    if (!stuck && b.waiting[i >> 5] & bit) stuck = &b.lane[i];
  }
  if (barred && stuck)
    failf(stuck->file, stuck->line,
          "deadlock: %s waits at __syncthreads in %s:%d, %s in a warp operation with mask %08x", place(*barred).text,
          barred->file, barred->line, place(*stuck).text, stuck->mask);
  if (stuck)
    failf(stuck->file, stuck->line,
          "deadlock: %s waits in a warp operation for all lanes of mask %08x, which never come", place(*stuck).text,
          stuck->mask);
  failf(me().file, me().line, "deadlock: every live thread waits");
}
static void go(Lane* l) {  // leaves the running lane for l
  Block& b = here();
  Lane* self = &me();
  if (l == self) return;
  if (!l) deadlock(b);
  if (!l->sp && !prepare(b, l)) fail(self->file, self->line, "no memory for another fibre stack (try fewer threads)");
  tls.lane = l;
  cc_swap(&self->sp, l->sp);
}

// ---- barriers and warp operations -----------------------------------------------------------------------------------
static void release(Block& b) {  // every live thread has arrived
  for (unsigned w = 0; w < b.warps; ++w) {
    b.ready[w] |= b.in_barrier[w];
    b.in_barrier[w] = 0;
  }
  for (int i = 0; i < 3; ++i) b.votes[i] = b.voted[i];
  b.voted[0] = b.voted[2] = 0;
  b.voted[1] = 1;
  b.arrived = 0;
}
static bool same(const char* a, int i, const char* b, int j) { return i == j && (a == b || !strcmp(a, b)); }
void barrier(const char* file, int line, int vote) {
  Block& b = here();
  Lane& l = me();
  unsigned w = l.index >> 5;
  u32 bit = 1u << (l.index & 31);
  l.file = file;
  l.line = line;
  if (!b.arrived) b.first_arrived = &l;
  else if (!same(b.first_arrived->file, b.first_arrived->line, file, line))
    failf(file, line, "threads of one block reached different __syncthreads: %s is at the one in %s:%d",
          place(*b.first_arrived).text, b.first_arrived->file, b.first_arrived->line);
  b.voted[0] += vote;
  b.voted[1] &= vote;
  b.voted[2] |= vote;
  b.in_barrier[w] |= bit;
  b.ready[w] &= ~bit;
  if (++b.arrived == b.live) {
    release(b);
    if (b.schedule == 0) return;
  }
  go(next(b, w));
}
u64 warp(Op op, const char* file, int line, unsigned mask, u64 value, int source, void* function) {
  Block& b = here();
  Lane& l = me();
  unsigned w = l.index >> 5;
  u32 bit = 1u << (l.index & 31);
  l.op = op;
  l.file = file;
  l.line = line;
  l.mask = mask;
  l.in = value;
  l.source = source;
  l.function = function;
  if (!(mask & bit)) fail(file, line, "the calling lane is not in the mask of its warp operation");
  if (mask & b.done[w]) fail(file, line, "the mask of a warp operation names a lane that has exited or does not exist");
  b.waiting[w] |= bit;
  b.ready[w] &= ~bit;
  if ((b.waiting[w] & mask) != mask) {
    go(next(b, w));
    return l.out;
  }
  Lane* lane = &b.lane[w * 32];  // the last to come does the work for all
  for (u32 m = mask; m; m &= m - 1) {
    Lane& o = lane[__builtin_ctz(m)];
    if (o.op == op && o.mask == mask && o.function == function && same(o.file, o.line, file, line)) continue;
    failf(file, line, "lanes of one warp met in different warp operations: %s is at the one in %s:%d with mask %08x",
          place(o).text, o.file, o.line, o.mask);
  }
  if (op == SHUFFLE) {
    for (u32 m = mask; m; m &= m - 1) {
      Lane& o = lane[__builtin_ctz(m)];
      if (!(mask >> (o.source & 31) & 1)) {
        tls.lane = &o;
        fail(file, line, "a shuffle reads a lane outside its mask");
      }
      o.out = lane[o.source & 31].in;
    }
  } else if (op == COLLECTIVE) {
    void* all[32];
    for (int i = 0; i < 32; ++i) all[i] = mask >> i & 1 ? (void*)lane[i].in : nullptr;
    ((void (*)(void**))function)(all);
  } else if (op == BALLOT || op == REDUCE) {
    u64 r = 0;
    bool first = true;
    for (u32 m = mask; m; m &= m - 1) {
      u64 in = lane[__builtin_ctz(m)].in;
      r = op == BALLOT ? r | (u64)(in != 0) << __builtin_ctz(m) : first ? in : ((Fold)function)(r, in);
      first = false;
    }
    for (u32 m = mask; m; m &= m - 1) lane[__builtin_ctz(m)].out = r;
  }
  b.waiting[w] &= ~mask;
  b.ready[w] |= mask;
  if (b.schedule != 0) go(next(b, w));
  return l.out;
}
static void lane_main() {
  Block& b = here();
  for (;;) {
    b.call(b.args);
    Lane* l = &me();
    unsigned w = l->index >> 5;
    u32 bit = 1u << (l->index & 31);
    b.ready[w] &= ~bit;
    b.done[w] |= bit;
    --b.live;
    for (u32 m = b.waiting[w]; m; m &= m - 1) {
      const Lane& o = b.lane[w * 32 + __builtin_ctz(m)];
      if (!(o.mask & bit)) continue;
      failf(o.file, o.line, "this thread exited while %s waits for it in a warp operation with mask %08x",
            place(o).text, o.mask);
    }
    if (b.arrived && b.arrived == b.live) release(b);  // as in CUDA, threads that have exited need not arrive
    void* dump;
    if (!b.live) {
      b.spare[b.spares++] = l->stack;
      cc_swap(&dump, b.home);
    }
    Lane* n = next(b, w);
    if (n && !n->sp) {  // the plain loop: no switch
      n->stack = l->stack;
      n->sp = (void*)1;
      tls.lane = n;
      continue;
    }
    b.spare[b.spares++] = l->stack;
    go(n);
  }
}

// ---- a block --------------------------------------------------------------------------------------------------------
struct Launch {  // kdtr_cli/engine/devices/cpu.py holds the same structure
  void (*call)(void**);
  void* (*shared_memory)();  // an address in the module's thread-local storage: its static __shared__ variables
  long shared_offset;        // how far that address lies from where the storage begins
  size_t shared_size;
  void** args;
  const char* name;
  unsigned grid[3], block[3], shared, pad;
};

static void run_block(Block& b, const Launch& l, u64 number, char* statics) {
  b.block = {(unsigned)(number % l.grid[0]), (unsigned)(number / l.grid[0] % l.grid[1]),
             (unsigned)(number / ((u64)l.grid[0] * l.grid[1]))};
  b.live = b.n;
  b.arrived = 0;
  b.voted[0] = b.voted[2] = 0;
  b.voted[1] = 1;
  b.rng = (b.schedule + 1) * 0x9e3779b97f4a7c15ull ^ number * 0xd1342543de82ef95ull;
  for (unsigned w = 0; w < b.warps; ++w) {
    unsigned k = b.n - w * 32;
    b.ready[w] = k >= 32 ? ~0u : (1u << k) - 1;
    b.done[w] = ~b.ready[w];
    b.waiting[w] = b.in_barrier[w] = 0;
  }
  for (unsigned i = 0; i < b.n; ++i) b.lane[i].sp = nullptr;
  memset(b.shared, 0xff, l.shared);  // poison: NaN for those who read before they write
  memset(statics, 0xff, l.shared_size);
  Lane* first = next(b, b.schedule == 1 ? b.warps - 1 : 0);
  if (!prepare(b, first)) {
    snprintf(b.error, sizeof b.error, "no memory for a fibre stack");
    return;
  }
  tls.lane = first;
  cc_swap(&b.home, first->sp);
}

}  // inline namespace
}  // namespace cc
