// The emulator's backend: one fiber a thread, simdgroups of 32 lanes that exchange in lockstep, barriers as
// yields. Every translated kernel file includes this header and nothing else.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#define MSL_FN inline
#define MSL_CPU 1
// The runtime's own functions are not watched by the race build.
#define MSL_NOSAN __attribute__((no_sanitize("thread")))
#define MSL_EXPORT extern "C" __attribute__((visibility("default")))

// ------------------------------------------------------------------ what the host passes in and gets back
extern "C" {
// A bound buffer. `line_offset` is where it starts in its allocation: 128-byte lines are counted from there,
// not from wherever the host's allocator put it. A tensor is bound by a descriptor that points into the buffer.
struct MslBuffer {
  void* pointer;
  uint64_t bytes, line_offset;
  void* descriptor;
  uint32_t read_only, pad;
};
struct MslConstant {
  const void* value;
  uint32_t index, bytes;
};
struct MslDispatch {
  const MslBuffer* buffers;
  const uint32_t* threadgroup_bytes;
  const MslConstant* constants;
  uint32_t buffer_count, threadgroup_count, constant_count, counters_only;
  uint32_t grid[3], threads[3];
  uint64_t seed;  // 0: program order
};
struct MslTraffic {
  uint64_t read_bytes, written_bytes, read_lines, written_lines, read_accesses, written_accesses;
};
// Buffers from index MSL_BUFFERS on are no parameters: kernels reach them by addresses that other buffers hold. They are
// counted together.
enum { MSL_BUFFERS = 31 };
struct MslReport {
  uint64_t switches, threadgroup_barriers, simdgroup_barriers, simdgroup_operations;
  MslTraffic buffers[MSL_BUFFERS + 1];
  uint64_t threadgroup_read_bytes, threadgroup_written_bytes, threadgroup_accesses, bank_conflicts;
  // A fault: its kind, who met it, the address of the code (relative to the library) if an access did.
  uint64_t code_offset;
  uint32_t fault, threadgroup[3], thread, partial_simdgroup_operations;
  char message[1024];
};
}

// ------------------------------------------------------------------ runtime structures
namespace msl {
typedef unsigned char u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
enum {
  MAX_THREADS = 1024,
  STACK = 128 * 1024,
  ARENA = 64 * 1024,
  MAX_THREADGROUP_BYTES = 32768,
  MAX_VARIABLES = 64,
  MAX_THREADGROUP_PARAMETERS = 31
};
enum Fault { NO_FAULT, DIVERGENCE, RACE, OUT_OF_BOUNDS, UNINITIALISED, MISALIGNED, LIMIT, BINDING };
enum State : u8 { RUNNING, AT_SIMD, AT_BARRIER, DONE };

// A place in the kernel's source.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* f = __builtin_FILE(), int l = __builtin_LINE()) { return Site{f, l}; }
  bool same(Site o) const { return line == o.line && (file == o.file || !strcmp(file, o.file)); }
};
struct Lane {
  void* sp;
  const char* what;
  Site site;
  State state;
  u16 tid, sgi, px, py, pz;
};
struct Sg {
  u32 alive, ready, first, arrived, gen, res_gen;
  Site site;
  u32 dev_epoch, tg_epoch;
  alignas(32) u8 slot[2][32][32];  // what the lanes exchange, in two generations
  alignas(32) u8 res[32][32];      // what the first lane to resume computed for all
};
struct Args {
  const MslBuffer* buf;
  u32 nbuf;
};
typedef void (*KernelFn)(const Args&);
struct Ctx {
  Lane lane[MAX_THREADS];
  Sg sg[MAX_THREADS / 32];
  int nlanes, nsg, alive, arrived;
  Site tg_site;
  u32 sg_ready, tg_epoch, dev_epoch, tgpig[3], tpt[3], tpg[3], tgid_linear;
  Lane* cur;
  void* host_sp;
  KernelFn fn;
  const Args* args;
  const MslDispatch* dispatch;
  MslReport* report;
  u8* stacks;
  u8* arena;
  u32 arena_used;
  void* slots[MAX_VARIABLES];
  u32 slot_ids[MAX_VARIABLES], slot_bytes[MAX_VARIABLES];
  int nslots;
  void* tgparam[MAX_THREADGROUP_PARAMETERS];
  u64 rng;
  bool shuffle, error;
};
extern Ctx* C;

// Ends the dispatch with a report; does not return.
[[noreturn, gnu::noinline, gnu::format(printf, 2, 3)]] MSL_NOSAN void fail(Fault kind, const char* format, ...);
// Every living lane of the simdgroup meets here; returns the generation of the exchange.
[[gnu::noinline]] MSL_NOSAN u32 simd_sync(const char* what, Site site);
[[gnu::noinline]] MSL_NOSAN void tg_sync(Site site, int flags);
// Storage of a threadgroup variable, the same for all threads of a threadgroup.
[[gnu::noinline]] MSL_NOSAN void* tg_static(u32 id, size_t bytes);
// An atomic access, for the race build: 1 a load, 2 a store, 3 a read-modify-write.
#ifdef MSL_RACE
[[gnu::noinline]] MSL_NOSAN void race_atomic(const volatile void* pointer, int bytes, int kind);
#else
static inline void race_atomic(const volatile void*, int, int) {}
#endif
MSL_NOSAN inline Lane& me() { return *C->cur; }
MSL_NOSAN inline Sg& mysg() { return C->sg[C->cur->sgi]; }
MSL_NOSAN inline u32 lane_id() { return C->cur->tid & 31; }

// Kernels and function constants of the library, registered as it is loaded.
struct Kernel {
  const char* name;
  KernelFn fn;
  Kernel* next;
};
extern Kernel* kernels;
struct Reg {
  Kernel k;
  Reg(const char* n, KernelFn f) {
    k = {n, f, kernels};
    kernels = &k;
  }
};
struct Fc {
  u32 index;
  void* p;
  size_t bytes;
  bool* defined;
  Fc* next;
};
extern Fc* fcs;
struct FcReg {
  Fc f;
  FcReg(u32 i, void* p, size_t n, bool* d) {
    f = {i, p, n, d, fcs};
    fcs = &f;
  }
};

// Arguments by the parameter's type.
template <class T> struct BufferArgument {
  MSL_NOSAN static T get(const MslBuffer& b) { return *(T*)b.descriptor; }
};
template <class T> struct BufferArgument<T*> {
  MSL_NOSAN static T* get(const MslBuffer& b) { return (T*)b.pointer; }
};
template <class T> struct BufferArgument<T&> {
  MSL_NOSAN static T& get(const MslBuffer& b) { return *(T*)b.pointer; }
};
template <class T> MSL_NOSAN T buf(const Args& a, u32 i) { return BufferArgument<T>::get(a.buf[i]); }
template <class T> MSL_NOSAN T tgparam(int i) { return (T)C->tgparam[i]; }
}  // namespace msl

// ------------------------------------------------------------------ 16-bit float conversions, to nearest even
MSL_FN MSL_NOSAN unsigned short msl_f2bf(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (u >> 16) | 64;
  return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
MSL_FN MSL_NOSAN float msl_bf2f(unsigned short b) {
  uint32_t u = (uint32_t)b << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
#if defined(__F16C__)
#include <immintrin.h>
MSL_FN MSL_NOSAN unsigned short msl_f2h(float f) { return _cvtss_sh(f, 0); }
MSL_FN MSL_NOSAN float msl_h2f(unsigned short h) { return _cvtsh_ss(h); }
#elif defined(__aarch64__)
MSL_FN MSL_NOSAN unsigned short msl_f2h(float f) {
  __fp16 h = (__fp16)f;
  unsigned short u;
  memcpy(&u, &h, 2);
  return u;
}
MSL_FN MSL_NOSAN float msl_h2f(unsigned short u) {
  __fp16 h;
  memcpy(&h, &u, 2);
  return (float)h;
}
#else
MSL_FN MSL_NOSAN float msl_h2f(unsigned short h) {
  uint32_t s = (h & 0x8000u) << 16, e = (h >> 10) & 31, m = h & 1023, u;
  float f;
  if (e == 0) {
    f = std::ldexp((float)m, -24);
    memcpy(&u, &f, 4);
    u |= s;
  } else if (e == 31)
    u = s | 0x7f800000 | m << 13;
  else
    u = s | (e + 112) << 23 | m << 13;
  memcpy(&f, &u, 4);
  return f;
}
MSL_FN MSL_NOSAN unsigned short msl_f2h(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint32_t s = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return s | 0x7e00;
  if (a >= 0x477ff000) return s | 0x7c00;
  if (a < 0x38800000) {
    float g;
    memcpy(&g, &a, 4);
    return s | (unsigned short)std::nearbyint(std::ldexp(g, 24));
  }
  uint32_t r = a - 0x38000000;
  return s | ((r + 0xfff + ((r >> 13) & 1)) >> 13);
}
#endif
#include "msl_vec.h"

// ------------------------------------------------------------------ the primitives that msl_common.h builds on
namespace metal {
template <class T> MSL_NOSAN inline T msl_shfl(T v, unsigned src, msl::Site site) {
  static_assert(sizeof(T) <= 32, "at most 32 bytes a lane");
  msl::Sg& s = msl::mysg();
  memcpy(s.slot[s.gen & 1][msl::lane_id()], &v, sizeof(T));
  unsigned g = msl::simd_sync("a simd shuffle", site);
  T r;
  memcpy(&r, s.slot[g & 1][src & 31], sizeof(T));
  return r;
}
template <class T> MSL_NOSAN inline T msl_shfl_xor(T v, unsigned mask, msl::Site site) {
  return msl_shfl(v, msl::lane_id() ^ mask, site);
}
template <class T> MSL_NOSAN inline T msl_shfl_down(T v, unsigned distance, msl::Site site) {
  unsigned lane = msl::lane_id(), src = lane + distance;
  return msl_shfl(v, src > 31 ? lane : src, site);
}
template <class T> MSL_NOSAN inline T msl_shfl_up(T v, unsigned distance, msl::Site site) {
  unsigned lane = msl::lane_id();
  return msl_shfl(v, lane < distance ? lane : lane - distance, site);
}
// A tree over the 32 slots (lanes that are gone hold the identity), computed once by the first lane to resume.
template <class T, class F> MSL_NOSAN inline T msl_reduce(T v, T id, F f, const char* what, msl::Site site) {
  static_assert(sizeof(T) <= 32, "at most 32 bytes a lane");
  msl::Sg& s = msl::mysg();
  memcpy(s.slot[s.gen & 1][msl::lane_id()], &v, sizeof(T));
  unsigned g = msl::simd_sync(what, site);
  if (s.res_gen != g) {
    T t[32];
    for (int i = 0; i < 32; ++i)
      if (s.alive >> i & 1)
        memcpy(&t[i], s.slot[g & 1][i], sizeof(T));
      else
        t[i] = id;
    for (int o = 16; o; o >>= 1)
      for (int i = 0; i < o; ++i) t[i] = f(t[i], t[i + o]);
    memcpy(s.res[0], &t[0], sizeof(T));
    s.res_gen = g;
  }
  T r;
  memcpy(&r, s.res[0], sizeof(T));
  return r;
}
template <class T> MSL_NOSAN inline T msl_prefix(T v, bool inclusive, msl::Site site) {
  msl::Sg& s = msl::mysg();
  memcpy(s.slot[s.gen & 1][msl::lane_id()], &v, sizeof(T));
  unsigned g = msl::simd_sync("a simd prefix sum", site);
  if (s.res_gen != g) {
    // Each lane adds the one 1 below it, then 2, 4, 8 and 16: the order in which lanes do it side by side.
    T t[32];
    for (int i = 0; i < 32; ++i)
      if (s.alive >> i & 1)
        memcpy(&t[i], s.slot[g & 1][i], sizeof(T));
      else
        t[i] = T(0);
    for (int o = 1; o < 32; o *= 2)
      for (int i = 31; i >= o; --i) t[i] = T(t[i] + t[i - o]);
    for (int i = 0; i < 32; ++i) {
      T sum = inclusive ? t[i] : i ? t[i - 1] : T(0);
      memcpy(s.res[i], &sum, sizeof(T));
    }
    s.res_gen = g;
  }
  T r;
  memcpy(&r, s.res[msl::lane_id()], sizeof(T));
  return r;
}
MSL_NOSAN inline uint64_t msl_ballot(bool b, msl::Site site) {
  return msl_reduce<uint64_t>(
      b ? 1ull << msl::lane_id() : 0, 0, [](uint64_t a, uint64_t c) { return a | c; }, "simd_ballot", site);
}
MSL_NOSAN inline unsigned msl_lane() { return msl::lane_id(); }
MSL_NOSAN inline unsigned msl_first_lane() { return __builtin_ctz(msl::mysg().alive); }
enum class mem_flags {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
MSL_NOSAN inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
enum memory_order { memory_order_relaxed };
MSL_NOSAN inline void threadgroup_barrier(mem_flags f, msl::Site site = msl::Site::here()) {
  msl::tg_sync(site, (int)f);
}
MSL_NOSAN inline void simdgroup_barrier(mem_flags f, msl::Site site = msl::Site::here()) {
  unsigned g = msl::simd_sync("simdgroup_barrier", site);
  msl::Sg& s = msl::mysg();
  if ((int)f & 1) s.dev_epoch = g;
  if ((int)f & 2) s.tg_epoch = g;
}
template <class T> struct atomic { T v; };
template <class T> struct msl_id { using type = T; };
// Inlined into the kernel, so that the race build sees where each access was written.
#define MSL_ATOMIC template <class T> inline __attribute__((always_inline))
// One fiber runs at a time: plain accesses are atomic. They are made out of sight of the race build, which is told of
// each instead.
template <class T> MSL_NOSAN inline T msl_get(const volatile T* p) { return *p; }
template <class T> MSL_NOSAN inline void msl_put(volatile T* p, T x) { *p = x; }
MSL_ATOMIC void atomic_store_explicit(volatile atomic<T>* a, typename msl_id<T>::type x, memory_order) {
  msl::race_atomic(a, sizeof(T), 2);
  msl_put(&a->v, x);
}
MSL_ATOMIC T atomic_load_explicit(const volatile atomic<T>* a, memory_order) {
  msl::race_atomic(a, sizeof(T), 1);
  return msl_get(&a->v);
}
#define MSL_RMW(name, expr)                                                                                \
  MSL_ATOMIC T atomic_##name##_explicit(volatile atomic<T>* a, typename msl_id<T>::type x, memory_order) { \
    msl::race_atomic(a, sizeof(T), 3);                                                                     \
    T o = msl_get(&a->v);                                                                                  \
    msl_put(&a->v, T(expr));                                                                               \
    return o;                                                                                              \
  }
MSL_RMW(exchange, x)
MSL_RMW(fetch_add, o + x) MSL_RMW(fetch_sub, o - x) MSL_RMW(fetch_or, o | x) MSL_RMW(fetch_and, o& x)
    MSL_RMW(fetch_xor, o ^ x) MSL_RMW(fetch_max, o > x ? o : x) MSL_RMW(fetch_min, o < x ? o : x) MSL_ATOMIC
    bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* a, T* expected, typename msl_id<T>::type x,
                                               memory_order, memory_order) {
  msl::race_atomic(a, sizeof(T), 3);
  T o = msl_get(&a->v);
  if (o == *expected) {
    msl_put(&a->v, T(x));
    return true;
  }
  *expected = o;
  return false;
}
using std::memcpy;
#define MSL_M(f) \
  MSL_NOSAN inline float msl_##f(float x) { return std::f(x); }
MSL_M(exp)
MSL_M(exp2) MSL_M(log) MSL_M(log2) MSL_M(sqrt) MSL_M(sin) MSL_M(cos) MSL_M(tan) MSL_M(tanh) MSL_M(floor) MSL_M(ceil)
    MSL_M(rint) MSL_M(trunc) MSL_M(round) MSL_M(fabs) MSL_M(erf) MSL_M(sinh) MSL_M(cosh) MSL_M(asin) MSL_M(acos)
        MSL_M(atan) MSL_M(log10)
#undef MSL_M
            MSL_NOSAN inline float msl_pow(float a, float b) {
  return std::pow(a, b);
}
MSL_NOSAN inline float msl_rsqrt(float x) { return 1.0f / std::sqrt(x); }
MSL_NOSAN inline unsigned msl_popcount(unsigned x) { return __builtin_popcount(x); }
MSL_NOSAN inline unsigned msl_clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
MSL_NOSAN inline unsigned msl_reverse_bits(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
  return r;
}
MSL_NOSAN inline float msl_fma(float a, float b, float c) { return std::fma(a, b, c); }
MSL_NOSAN inline float msl_fmod(float a, float b) { return std::fmod(a, b); }
MSL_NOSAN inline float msl_atan2(float a, float b) { return std::atan2(a, b); }
MSL_NOSAN inline bool msl_isnan(float a) { return std::isnan(a); }
MSL_NOSAN inline bool msl_isinf(float a) { return std::isinf(a); }
MSL_NOSAN inline unsigned msl_thread_in_scope(int threads) { return msl::me().tid % threads; }
MSL_NOSAN inline void msl_scope_sync(int threads, msl::Site site = msl::Site{"matmul2d::run", 0}) {
  if (threads == 32)
    msl::simd_sync("matmul2d::run", site);
  else if (threads > 32)
    msl::tg_sync(site, 3);
}
}  // namespace metal
#undef INFINITY
#undef NAN
namespace mpp {
namespace tensor_ops {
using metal::msl_scope_sync;
using metal::msl_thread_in_scope;
}  // namespace tensor_ops
}  // namespace mpp
#define MSL_LINE_ARG , msl::Site line = msl::Site::here()
#define MSL_LINE_ARG0 msl::Site line = msl::Site::here()
#include "msl_common.h"

// ------------------------------------------------------------------ parameters that the GPU fills
namespace msl {
struct V3 {
  u32 v[3];
};
template <class T> struct Bi {
  MSL_NOSAN static T get(const u32* v) { return (T)v[0]; }
};
template <class T> struct Bi<metal::vec<T, 2>> {
  MSL_NOSAN static metal::vec<T, 2> get(const u32* v) { return {T(v[0]), T(v[1])}; }
};
template <class T> struct Bi<metal::vec<T, 3>> {
  MSL_NOSAN static metal::vec<T, 3> get(const u32* v) { return {T(v[0]), T(v[1]), T(v[2])}; }
};
template <class T> struct Bi<const T> : Bi<T> {};
template <class T> MSL_NOSAN T bi(V3 v) { return Bi<T>::get(v.v); }
#define MSL_BUILTIN(name, x, y, z) \
  MSL_NOSAN inline V3 bi_##name() { return {{(u32)(x), (u32)(y), (u32)(z)}}; }
MSL_BUILTIN(threadgroup_position_in_grid, C->tgpig[0], C->tgpig[1], C->tgpig[2])
MSL_BUILTIN(thread_position_in_threadgroup, me().px, me().py, me().pz)
MSL_BUILTIN(thread_position_in_grid, C->tgpig[0] * C->tpt[0] + me().px, C->tgpig[1] * C->tpt[1] + me().py,
            C->tgpig[2] * C->tpt[2] + me().pz)
MSL_BUILTIN(threads_per_threadgroup, C->tpt[0], C->tpt[1], C->tpt[2])
MSL_BUILTIN(dispatch_threads_per_threadgroup, C->tpt[0], C->tpt[1], C->tpt[2])
MSL_BUILTIN(threadgroups_per_grid, C->tpg[0], C->tpg[1], C->tpg[2])
MSL_BUILTIN(threads_per_grid, C->tpg[0] * C->tpt[0], C->tpg[1] * C->tpt[1], C->tpg[2] * C->tpt[2])
MSL_BUILTIN(thread_index_in_threadgroup, me().tid, 0, 0)
MSL_BUILTIN(thread_index_in_simdgroup, me().tid & 31, 0, 0)
MSL_BUILTIN(simdgroup_index_in_threadgroup, me().sgi, 0, 0)
MSL_BUILTIN(threads_per_simdgroup, 32, 1, 1)
MSL_BUILTIN(simdgroups_per_threadgroup, C->nsg, 1, 1)
MSL_BUILTIN(thread_index_in_quadgroup, me().tid & 3, 0, 0)
MSL_BUILTIN(quadgroup_index_in_threadgroup, me().tid >> 2, 0, 0)
#undef MSL_BUILTIN
}  // namespace msl
