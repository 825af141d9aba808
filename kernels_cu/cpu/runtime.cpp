// runtime.cpp: launches of the CPU device: a kept pool of OS threads over the blocks of a grid.
// Built once into a library of its own; every kernel module binds to it.
//
// A small launch runs on the caller's thread. Helper threads and the stacks of a block are kept between launches; the
// child of a fork starts helpers of its own. A launch that never ends (a kernel that spins on another block) can't be
// interrupted: tests put a time limit on their process.
//
// Only C library calls, no C++ library: it builds fast and links the same under g++, clang++ and zig.
#include "scheduler.h"
#include <link.h>
#include <pthread.h>
#include <signal.h>

namespace cc {
inline namespace CC_RUNTIME {

struct Job {
  const Launch* launch;
  u64 total, next;  // blocks; next is taken by whoever is free
  unsigned n, schedule;
  int failed;
  char* error;
  int error_size;
};
static const char* bad_float_mode() {
#if defined(__x86_64__)
  unsigned mode = __builtin_ia32_stmxcsr();
  bool flush = mode & 0x8040, rounding = mode & 0x6000;
#elif defined(__aarch64__)
  u64 mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  bool flush = mode >> 24 & 1, rounding = mode >> 22 & 3;
#else
  bool flush = false, rounding = false;
#endif
  if (flush)
    return "this thread flushes subnormal numbers to zero, which the exact tier needs (a library built with "
           "-ffast-math does that: find out which by leaving imports out)";
  return rounding ? "this thread does not round to nearest even, as the exact tier needs" : nullptr;
}

struct Pool {
  pthread_mutex_t serial, lock;  // serial: one parallel launch at a time
  pthread_cond_t wake, idle;
  Job* job;
  unsigned helpers, tickets, active;
  u64 generation;
  Block* blocks;  // kept between launches, with their stacks
};
static Pool* pool;
static void forget_pool() { pool = nullptr; }  // the child of a fork has none of these threads: it hires its own
static Pool& the_pool() {
  static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
  if (Pool* p = __atomic_load_n(&pool, __ATOMIC_ACQUIRE)) return *p;
  pthread_mutex_lock(&once);
  if (!pool) {
    static bool registered = false;
    if (!registered) {
      pthread_atfork(nullptr, nullptr, forget_pool);
      registered = true;
    }
    Pool* p = (Pool*)calloc(1, sizeof(Pool));
    pthread_mutex_init(&p->serial, nullptr);
    pthread_mutex_init(&p->lock, nullptr);
    pthread_cond_init(&p->wake, nullptr);
    pthread_cond_init(&p->idle, nullptr);
    __atomic_store_n(&pool, p, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&once);
  return *pool;
}
static Block* take_block(Pool& p) {
  pthread_mutex_lock(&p.lock);
  Block* b = p.blocks;
  if (b) p.blocks = b->next_idle;
  pthread_mutex_unlock(&p.lock);
  if (b) return b;
  b = (Block*)calloc(1, sizeof(Block));
  if (b && !(b->shared = (char*)aligned_alloc(1024, MAX_SHARED))) {
    free(b);
    b = nullptr;
  }
  return b;
}
static bool overrun(const Block& b) {  // of the stacks that this launch used
  for (unsigned i = b.fewest; i < b.spares; ++i)
    for (size_t at = PAGE; at < 2 * PAGE; at += PROBE_EVERY)
      if (*(u64*)(b.spare[i] + at) != CANARY) return true;
  return false;
}
static void renew(Block& b) {  // after a failure: take all stacks back and mend their canaries
  b.spares = b.stacks;
  for (unsigned i = 0; i < b.stacks; ++i) {
    b.spare[i] = b.stack[i];
    for (size_t at = PAGE; at < 2 * PAGE; at += PROBE_EVERY) *(u64*)(b.stack[i] + at) = CANARY;
  }
}
static void report(Job& j, const char* what) {
  if (!__atomic_exchange_n(&j.failed, 1, __ATOMIC_ACQ_REL))
    snprintf(j.error, j.error_size, "kernel %s: %s", j.launch->name, what);
}
static void work(Pool& p, Job& j) {
  const Launch& l = *j.launch;
  if (const char* bad = bad_float_mode()) return report(j, bad);
  Block* got = take_block(p);
  if (!got) return report(j, "out of memory");
  Block& b = *got;
  bool new_shape = b.n != j.n || b.dim.x != l.block[0] || b.dim.y != l.block[1];
  b.grid = dim3(l.grid[0], l.grid[1], l.grid[2]);
  b.dim = dim3(l.block[0], l.block[1], l.block[2]);
  b.n = j.n;
  b.warps = (j.n + 31) / 32;
  b.schedule = j.schedule;
  b.call = l.call;
  b.args = l.args;
  b.error[0] = 0;
  b.fewest = b.spares;
  if (new_shape)
    for (unsigned i = 0; i < b.n; ++i) {
      b.lane[i].index = i;
      b.lane[i].thread = {i % b.dim.x, i / b.dim.x % b.dim.y, i / (b.dim.x * b.dim.y)};
    }
  Tls before = tls;
  tls.block = &b;
  char* statics = (char*)l.shared_memory() - l.shared_offset;
  for (u64 i; !__atomic_load_n(&j.failed, __ATOMIC_RELAXED) &&
              (i = __atomic_fetch_add(&j.next, 1, __ATOMIC_RELAXED)) < j.total;) {
    const u64 turned = j.schedule == 1 ? j.total - 1 - i : (i + j.schedule * 7919ull) % j.total;
    run_block(b, l, j.schedule == 0 ? i : turned, statics);
    if (b.error[0]) {
      report(j, b.error);
      break;
    }
  }
  tls = before;
  if (!b.error[0] && overrun(b)) {
    snprintf(b.error, sizeof b.error, "a thread overran its stack of 64 KiB (a large local array, or recursion)");
    report(j, b.error);
  }
  if (b.error[0]) renew(b);
  pthread_mutex_lock(&p.lock);
  b.next_idle = p.blocks;
  p.blocks = &b;
  pthread_mutex_unlock(&p.lock);
}
static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}
constexpr int SPINS = 1500;          // some 20 to 70 us: a step's launches follow each other faster than a thread wakes
constexpr u64 WORTH_SHARING = 1024;  // threads of a launch from which on helpers are woken: some 10 us of work
static void* help(void* arg) {
  Pool& p = *(Pool*)arg;
  for (u64 seen = 0;;) {
    for (int i = 0; i < SPINS && __atomic_load_n(&p.generation, __ATOMIC_RELAXED) == seen; ++i) relax();
    pthread_mutex_lock(&p.lock);
    while (p.generation == seen) pthread_cond_wait(&p.wake, &p.lock);
    seen = p.generation;
    if (p.tickets) {
      --p.tickets;
      ++p.active;
      Job* j = p.job;
      pthread_mutex_unlock(&p.lock);
      work(p, *j);
      pthread_mutex_lock(&p.lock);
      if (!--p.active) pthread_cond_signal(&p.idle);
    }
    pthread_mutex_unlock(&p.lock);
  }
}
static void hire(Pool& p, unsigned wanted) {
  sigset_t all, old;  // signals are for the caller's threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, 1 << 20);
  for (pthread_t t; p.helpers < wanted && !pthread_create(&t, &small, help, &p); ++p.helpers) pthread_detach(t);
  pthread_attr_destroy(&small);
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}
static void run(const Launch& l, unsigned threads, unsigned schedule, Job& j) {
  const u64 n = (u64)l.block[0] * l.block[1] * l.block[2];
  j.launch = &l;
  j.total = (u64)l.grid[0] * l.grid[1] * l.grid[2];
  j.next = 0;
  j.n = (unsigned)n;
  j.schedule = schedule;
  j.failed = 0;
  char text[160] = "";
  const unsigned *g = l.grid, *d = l.block;
  if (!n || n > MAX_THREADS || d[2] > 64)
    snprintf(text, sizeof text, "launch refused: a block of %ux%ux%u threads (1 to 1024, at most 64 in z)", d[0], d[1],
             d[2]);
  else if (g[0] > 0x7fffffffu || g[1] > 65535 || g[2] > 65535)
    snprintf(text, sizeof text, "launch refused: a grid of %ux%ux%u blocks (at most 2147483647x65535x65535)", g[0],
             g[1], g[2]);
  else if (l.shared > MAX_SHARED)
    snprintf(text, sizeof text, "launch refused: %u bytes of dynamic shared memory (at most %u)", l.shared, MAX_SHARED);
  if (text[0]) return report(j, text);
  Pool& p = the_pool();
  if (threads <= 1 || j.total <= 1 || j.total * n < WORTH_SHARING) return work(p, j);
  pthread_mutex_lock(&p.serial);
  hire(p, threads - 1);
  pthread_mutex_lock(&p.lock);
  p.job = &j;
  p.tickets = threads - 1 < j.total - 1 ? threads - 1 : (unsigned)(j.total - 1);
  __atomic_store_n(&p.generation, p.generation + 1, __ATOMIC_RELAXED);
  pthread_cond_broadcast(&p.wake);
  pthread_mutex_unlock(&p.lock);
  work(p, j);
  for (int i = 0; i < SPINS && __atomic_load_n(&p.active, __ATOMIC_RELAXED); ++i) relax();
  pthread_mutex_lock(&p.lock);
  p.tickets = 0;
  while (p.active) pthread_cond_wait(&p.idle, &p.lock);
  pthread_mutex_unlock(&p.lock);
  pthread_mutex_unlock(&p.serial);
}
// A module's thread-local storage: its size is that of the PT_TLS segment, and the place in it of the variable that
// marks it is the value of its symbol. (dlpi_tls_data would say where it begins, but not under TLS descriptors.)
struct Search {
  size_t code;
  long offset;
  size_t size;
  int found;
};
static int find_statics(dl_phdr_info* info, size_t, void* arg) {
  Search& s = *(Search*)arg;
  const ElfW(Dyn)* dynamic = nullptr;
  size_t tls_size = 0;
  bool mine = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& h = info->dlpi_phdr[i];
    if (h.p_type == PT_LOAD && s.code - (info->dlpi_addr + h.p_vaddr) < h.p_memsz) mine = true;
    if (h.p_type == PT_DYNAMIC) dynamic = (const ElfW(Dyn)*)(info->dlpi_addr + h.p_vaddr);
    if (h.p_type == PT_TLS) tls_size = h.p_memsz;
  }
  if (!mine || !dynamic || !tls_size) return mine;
  size_t symbols = 0, names = 0;
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    if (dynamic->d_tag == DT_SYMTAB) symbols = dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_STRTAB) names = dynamic->d_un.d_ptr;
  }
  if (!symbols || !names) return 1;
  if (symbols < info->dlpi_addr) symbols += info->dlpi_addr;  // glibc has relocated these entries, musl has not
  if (names < info->dlpi_addr) names += info->dlpi_addr;
  for (const ElfW(Sym)* y = (const ElfW(Sym)*)symbols; !s.found; ++y)  // the symbol is there: every module exports it
    if (!strcmp((const char*)names + y->st_name, "cc_first_thread_local")) {
      s.offset = (long)y->st_value;
      s.size = tls_size;
      s.found = 1;
    }
  return 1;
}
}  // inline namespace
}  // namespace cc

// ---- what the device calls (ctypes) ---------------------------------------------------------------------------------
extern "C" {
// Runs launches one after another; 0, or 1 with a line in error.
CC_EXPORT int cc_run(const cc::Launch* launches, int count, unsigned threads, unsigned schedule, char* error,
                     int error_size) {
  for (int i = 0; i < count; ++i) {
    cc::Job j{};
    j.error = error;
    j.error_size = error_size;
    cc::run(launches[i], threads, schedule, j);
    if (j.failed) return 1;
  }
  return 0;
}
// Where a module's thread-local storage lies relative to the address that its cc_shared_memory returns; 0 if not found.
CC_EXPORT int cc_find_shared(void* (*shared_memory)(), long* offset, size_t* size) {
  cc::Search s{(size_t)shared_memory, 0, 0, 0};
  dl_iterate_phdr(cc::find_statics, &s);
  *offset = s.offset;
  *size = s.size;
  return s.found;
}
CC_EXPORT const char* cc_bad_float_mode() { return cc::bad_float_mode(); }
}
