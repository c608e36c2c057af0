// The emulator's runtime: fibers, scheduling, dispatch, and the functions that a host calls. Never compiled with a
// sanitizer; MSL_RACE says that msl_race.cpp is linked in.
#include "msl_cpu.h"
#include <cstdarg>
#include <dlfcn.h>
#include <mutex>
#include <sys/mman.h>
#ifdef MSL_RACE
namespace msl {
void race_begin(const MslDispatch& dispatch);
void race_flush(int simdgroup);
void race_end(MslReport& report);
extern const void* race_code;
}  // namespace msl
#endif
namespace msl {
Ctx* C;
Kernel* kernels;
Fc* fcs;

// ---- switching fibers: saves what the calling convention keeps, on the stack that is left
#ifdef __APPLE__
#define MSL_SWITCH_BEGIN ".text\n.globl _msl_switch\n.private_extern _msl_switch\n.p2align 2\n_msl_switch:\n"
#else
#define MSL_SWITCH_BEGIN \
  ".text\n.globl msl_switch\n.hidden msl_switch\n.type msl_switch,%function\n.p2align 4\nmsl_switch:\n"
#endif
extern "C" void msl_switch(void** save, void* load);
#if defined(__x86_64__)
asm(MSL_SWITCH_BEGIN R"(
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
static void* fresh_stack(u8* end, void (*entry)()) {
  u64* top = (u64*)end - 1;  // as after a call: 8 bytes off a multiple of 16
  *--top = (u64)entry;
  for (int i = 0; i < 6; ++i) *--top = 0;
  return top;
}
#elif defined(__aarch64__)
asm(MSL_SWITCH_BEGIN R"(
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
static void* fresh_stack(u8* end, void (*entry)()) {
  u64* top = (u64*)end - 20;
  memset(top, 0, 160);
  top[11] = (u64)entry;  // the link register
  return top;
}
#else
#error "fibers: x86-64 and aarch64 only"
#endif

// ---- faults
static void to_host() {
  void* left;
  msl_switch(&left, C->host_sp);
}
void fail(Fault kind, const char* format, ...) {
  MslReport& r = *C->report;
  va_list list;
  va_start(list, format);
  vsnprintf(r.message, sizeof r.message, format, list);
  va_end(list);
  r.fault = kind;
  for (int i = 0; i < 3; ++i) r.threadgroup[i] = C->tgpig[i];
  r.thread = C->cur->tid;
  C->error = true;
  // The fibers are left where they are: their stacks are used afresh by the next threadgroup.
  to_host();
  abort();
}
#define AT "%s (%s:%d)"
#define AT_OF(what, site) what, (site).file, (site).line

// ---- scheduling
static inline u64 rnd() {
  u64 x = C->rng;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return C->rng = x;
}
static inline int nth_bit(u32 bits, int n) {
  while (n--) bits &= bits - 1;
  return __builtin_ctz(bits);
}
// The next lane to run: the one after `from` in order, going round, or a random one.
static inline Lane* pick(Lane* from) {
  int si, bit;
  if (C->shuffle) {
    si = nth_bit(C->sg_ready, rnd() % __builtin_popcount(C->sg_ready));
    u32 ready = C->sg[si].ready;
    bit = nth_bit(ready, rnd() % __builtin_popcount(ready));
  } else {
    auto after = [](u32 bits, int n) {
      u32 higher = n == 31 ? 0 : bits & ~((2u << n) - 1);
      return __builtin_ctz(higher ? higher : bits);
    };
    si = from->sgi;
    if (C->sg[si].ready)
      bit = after(C->sg[si].ready, from->tid & 31);
    else {
      si = after(C->sg_ready, si);
      bit = __builtin_ctz(C->sg[si].ready);
    }
  }
  return &C->lane[C->sg[si].first + bit];
}
static inline void go(Lane* from, Lane* to) {
  C->cur = to;
  C->report->switches++;
  msl_switch(&from->sp, to->sp);
}
static inline void reshuffle(Lane* l) {
  if (C->shuffle) {
    Lane* next = pick(l);
    if (next != l) go(l, next);
  }
}
// Nobody can run. Names two places where threads wait.
[[noreturn]] static void deadlock() {
  const Lane *a = nullptr, *b = nullptr;
  for (int i = 0; i < C->nlanes && !b; ++i) {
    Lane& l = C->lane[i];
    if (l.state == DONE) continue;
    if (!a)
      a = &l;
    else if (l.what != a->what || !l.site.same(a->site))
      b = &l;
  }
  if (b)
    fail(DIVERGENCE, "thread %d waits in " AT ", thread %d in " AT "; %d of %d threads have returned", a->tid,
         AT_OF(a->what, a->site), b->tid, AT_OF(b->what, b->site), C->nlanes - C->alive, C->nlanes);
  fail(DIVERGENCE, "thread %d waits in " AT " for threads that do not come; %d of %d threads have returned", a->tid,
       AT_OF(a->what, a->site), C->nlanes - C->alive, C->nlanes);
}
static void block(State why) {
  Lane* l = C->cur;
  Sg& s = C->sg[l->sgi];
  l->state = why;
  s.ready &= ~(1u << (l->tid & 31));
  if (!s.ready) C->sg_ready &= ~(1u << l->sgi);
  if (!C->sg_ready) deadlock();
  go(l, pick(l));
  l->state = RUNNING;
}
// All lanes that live have come: by the last one's coming, or by its return.
static void release(Sg& s, int i) {
  if (strcmp(C->lane[s.first + __builtin_ctz(s.alive)].what, "simdgroup_barrier")) {
    C->report->simdgroup_operations++;
    C->report->partial_simdgroup_operations += s.alive != ~0u;
  } else {
    C->report->simdgroup_barriers++;
  }
#ifdef MSL_RACE
  race_flush(i);
#endif
  s.arrived = 0;
  s.gen++;
  s.ready = s.alive;
  C->sg_ready |= 1u << i;
}
u32 simd_sync(const char* what, Site site) {
  Lane* l = C->cur;
  Sg& s = C->sg[l->sgi];
  u32 g = s.gen;
  if (s.arrived == 0)
    s.site = site;
  else if (!s.site.same(site))
    fail(DIVERGENCE, AT " meets lanes that wait in a simdgroup operation at %s:%d", AT_OF(what, site), s.site.file,
         s.site.line);
  l->what = what;
  l->site = site;
  if (++s.arrived < (u32)__builtin_popcount(s.alive)) {
    block(AT_SIMD);
    return g;
  }
  release(s, l->sgi);
  reshuffle(l);
  return g;
}
void tg_sync(Site site, int flags) {
  Lane* l = C->cur;
  l->what = "threadgroup_barrier";
  l->site = site;
  if (C->arrived == 0)
    C->tg_site = site;
  else if (!C->tg_site.same(site))
    fail(DIVERGENCE, "threads wait in threadgroup_barrier at %s:%d and at %s:%d", C->tg_site.file, C->tg_site.line,
         site.file, site.line);
  if (C->alive != C->nlanes)
    fail(DIVERGENCE, AT " after %d threads have returned", AT_OF("threadgroup_barrier", site), C->nlanes - C->alive);
  if (++C->arrived < C->nlanes) {
    block(AT_BARRIER);
    return;
  }
  C->arrived = 0;
  C->report->threadgroup_barriers++;
  if (flags & 2) C->tg_epoch++;
  if (flags & 1) C->dev_epoch++;
  for (int i = 0; i < C->nsg; ++i) {
#ifdef MSL_RACE
    race_flush(i);
#endif
    C->sg[i].ready = C->sg[i].alive;
    C->sg_ready |= 1u << i;
  }
  reshuffle(l);
}
static void lane_main() {
  C->fn(*C->args);
  Lane* l = C->cur;
  Sg& s = C->sg[l->sgi];
  u32 bit = 1u << (l->tid & 31);
  l->state = DONE;
  C->alive--;
  s.alive &= ~bit;
  s.ready &= ~bit;
  if (s.alive && s.arrived && s.arrived == (u32)__builtin_popcount(s.alive)) release(s, l->sgi);
  if (!s.ready) C->sg_ready &= ~(1u << l->sgi);
  if (!C->alive) to_host();
  if (C->arrived)
    fail(DIVERGENCE, "a thread returned while others wait in " AT, AT_OF("threadgroup_barrier", C->tg_site));
  if (!C->sg_ready) deadlock();
  go(l, pick(l));
  abort();
}

// ---- threadgroup memory: one arena, filled with garbage for each threadgroup
void* tg_static(u32 id, size_t bytes) {
  for (int i = 0; i < C->nslots; ++i)
    if (C->slot_ids[i] == id) return C->slots[i];
  u32 at = (C->arena_used + 15) & ~15u;
  if (at + bytes > MAX_THREADGROUP_BYTES) fail(LIMIT, "threadgroup memory over 32 KiB: %ld bytes", (long)(at + bytes));
  if (C->nslots == MAX_VARIABLES) fail(LIMIT, "too many threadgroup variables");
  C->arena_used = at + bytes;
  C->slot_ids[C->nslots] = id;
  C->slot_bytes[C->nslots] = bytes;
  return C->slots[C->nslots++] = C->arena + at;
}
static Ctx* make_context() {
  Ctx* c = (Ctx*)calloc(1, sizeof(Ctx) + 64);
  c = (Ctx*)(((uintptr_t)c + 63) & ~(uintptr_t)63);
  auto map = [](size_t bytes) {
    return (u8*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  c->stacks = map((size_t)MAX_THREADS * STACK);
  c->arena = map(ARENA);
  return c;
}
static bool run_threadgroup(u32 linear) {
  Ctx* c = C;
  const MslDispatch& d = *c->dispatch;
  c->tgid_linear = linear;
  c->tgpig[0] = linear % c->tpg[0];
  c->tgpig[1] = linear / c->tpg[0] % c->tpg[1];
  c->tgpig[2] = linear / c->tpg[0] / c->tpg[1];
  c->nlanes = c->alive = c->tpt[0] * c->tpt[1] * c->tpt[2];
  c->nsg = (c->nlanes + 31) / 32;
  c->arrived = 0;
  c->arena_used = 0;
  c->nslots = 0;
  c->tg_epoch++;
  c->dev_epoch++;
  // Garbage, so that memory that was never written shows as nonsense.
  memset(c->arena, 0xC7, MAX_THREADGROUP_BYTES + 64);
  for (u32 i = 0; i < d.threadgroup_count; ++i) {
    u32 at = (c->arena_used + 15) & ~15u;
    c->tgparam[i] = c->arena + at;
    c->arena_used = at + d.threadgroup_bytes[i];
  }
  for (int i = 0; i < c->nlanes; ++i) {
    Lane& l = c->lane[i];
    l.tid = i;
    l.sgi = i / 32;
    l.state = RUNNING;
    l.what = "the start";
    l.site = Site{"-", 0};
    l.px = i % c->tpt[0];
    l.py = i / c->tpt[0] % c->tpt[1];
    l.pz = i / c->tpt[0] / c->tpt[1];
    l.sp = fresh_stack(c->stacks + (size_t)(i + 1) * STACK, lane_main);
  }
  for (int i = 0; i < c->nsg; ++i) {
    Sg& s = c->sg[i];
    int n = c->nlanes - i * 32;
    s.first = i * 32;
    s.alive = s.ready = n >= 32 ? ~0u : (1u << n) - 1;
    s.arrived = 0;
    s.dev_epoch = s.tg_epoch = s.res_gen = s.gen - 1;
  }
  c->sg_ready = c->nsg == 32 ? ~0u : (1u << c->nsg) - 1;
  Lane* first = c->shuffle ? pick(&c->lane[0]) : &c->lane[0];
  c->cur = first;
  msl_switch(&c->host_sp, first->sp);
#ifdef MSL_RACE
  if (!c->error)
    for (int i = 0; i < c->nsg; ++i) race_flush(i);
#endif
  c->cur = nullptr;
  return !c->error;
}
static int refuse(MslReport* report, const char* format, u32 a, u32 b) {
  report->fault = BINDING;
  snprintf(report->message, sizeof report->message, format, a, b);
  return BINDING;
}
static int set_constants(const MslDispatch& d, MslReport* report) {
  for (Fc* f = fcs; f; f = f->next) {
    memset(f->p, 0, f->bytes);
    *f->defined = false;
  }
  for (u32 i = 0; i < d.constant_count; ++i) {
    const MslConstant& c = d.constants[i];
    Fc* f = fcs;
    while (f && f->index != c.index) f = f->next;
    if (!f) return refuse(report, "no function constant %u", c.index, 0);
    if (f->bytes != c.bytes) return refuse(report, "function constant %u has %u bytes", c.index, (u32)f->bytes);
    memcpy(f->p, c.value, c.bytes);
    *f->defined = true;
  }
  return 0;
}
}  // namespace msl
using namespace msl;

MSL_EXPORT const void* msl_find(const char* name) {
  for (Kernel* k = kernels; k; k = k->next)
    if (!strcmp(k->name, name)) return k;
  return nullptr;
}
// Runs a kernel; 0, or the kind of fault that the report describes. One dispatch at a time in a library: function
// constants are its globals.
MSL_EXPORT int msl_dispatch(const void* kernel, const MslDispatch* d, MslReport* report) {
  static std::mutex one;
  std::lock_guard<std::mutex> guard(one);
  memset(report, 0, sizeof *report);
  if (int fault = set_constants(*d, report)) return fault;
  if (!C) C = make_context();
  Args args{d->buffers, d->buffer_count};
  C->fn = ((const Kernel*)kernel)->fn;
  C->args = &args;
  C->dispatch = d;
  C->report = report;
  C->error = false;
  C->cur = nullptr;
  for (int i = 0; i < 3; ++i) {
    C->tpg[i] = d->grid[i];
    C->tpt[i] = d->threads[i];
  }
  C->shuffle = d->seed != 0;
  C->rng = d->seed * 0x9E3779B97F4A7C15ull + 1;
  u64 total = (u64)d->grid[0] * d->grid[1] * d->grid[2];
#ifdef MSL_RACE
  race_begin(*d);
#endif
  for (u64 i = 0; i < total; ++i) {
    // A permutation: the multiplier is a prime larger than any count of threadgroups in use.
    u64 j = d->seed ? (i * 2654435761ull + d->seed % total) % total : i;
    if (!run_threadgroup((u32)j)) break;
  }
#ifdef MSL_RACE
  race_end(*report);
  Dl_info info;
  if (report->fault && race_code && dladdr((void*)&msl_find, &info))
    report->code_offset = (u64)race_code - (u64)info.dli_fbase;
#endif
  return report->fault;
}
