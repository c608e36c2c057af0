// The backend for NVIDIA GPUs: a warp is a simdgroup. For NVRTC with -default-device, C++17, no headers of the system.
//
// What the compilation defines:
// - MSL_FC_<n>: the value of function constant n;
// - MSL_ONLY and MSL_ONLY_<kernel>: compile that kernel alone;
// - MSL_BY_VALUE: a bit for each buffer index whose `constant T&` is passed as a value, not as a pointer;
// - MSL_PARTIAL_SIMDGROUPS: simdgroup functions leave out lanes that have returned or never were, as Metal has it. Else
//   every simdgroup that calls one must be whole, and reductions cost five shuffles.
#pragma once
#define MSL_FN __device__ __forceinline__
#define MSL_CUDA 1
#ifndef MSL_BY_VALUE
#define MSL_BY_VALUE 0
#endif
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;

// ------------------------------------------------------------------ 16-bit float conversions, to nearest even
MSL_FN unsigned short msl_f2bf(float f) {
  unsigned short r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(f));
  return r;
}
MSL_FN float msl_bf2f(unsigned short b) { return __uint_as_float((unsigned)b << 16); }
MSL_FN unsigned short msl_f2h(float f) {
  unsigned short r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(f));
  return r;
}
MSL_FN float msl_h2f(unsigned short h) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h));
  return r;
}
#include "msl_vec.h"

// ------------------------------------------------------------------ the primitives that msl_common.h builds on
namespace metal {
#define MSL_ALL_LANES 0xffffffffu
MSL_FN unsigned msl_tid() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
MSL_FN unsigned msl_lane() {
  unsigned lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  __builtin_assume(lane < 32);
  return lane;
}
// One shuffle for each 32 bits of a value.
#define MSL_SHUFFLE(v, how)                                         \
  static_assert(sizeof(T) <= 32, "at most 32 bytes a lane");        \
  unsigned word[(sizeof(T) + 3) / 4] = {};                          \
  memcpy((void*)word, (const void*)&v, sizeof(T));                  \
  for (int i = 0; i < (int)(sizeof(T) + 3) / 4; ++i) word[i] = how; \
  T r;                                                              \
  memcpy((void*)&r, (const void*)word, sizeof(T));                  \
  return r;
template <class T> MSL_FN T msl_shfl(T v, unsigned src, int) {
  MSL_SHUFFLE(v, __shfl_sync(MSL_ALL_LANES, word[i], src))
}
template <class T> MSL_FN T msl_shfl_xor(T v, unsigned mask, int) {
  MSL_SHUFFLE(v, __shfl_xor_sync(MSL_ALL_LANES, word[i], mask))
}
template <class T> MSL_FN T msl_shfl_down(T v, unsigned distance, int) {
  MSL_SHUFFLE(v, __shfl_down_sync(MSL_ALL_LANES, word[i], distance))
}
template <class T> MSL_FN T msl_shfl_up(T v, unsigned distance, int) {
  MSL_SHUFFLE(v, __shfl_up_sync(MSL_ALL_LANES, word[i], distance))
}
MSL_FN unsigned long msl_ballot(bool b, int) { return __ballot_sync(MSL_ALL_LANES, b); }
#ifdef MSL_PARTIAL_SIMDGROUPS
MSL_FN unsigned msl_alive() { return __ballot_sync(MSL_ALL_LANES, true); }
MSL_FN unsigned msl_first_lane() { return __ffs(msl_alive()) - 1; }
// A lane's value, `id` if it is gone.
template <class T> MSL_FN T msl_value_of(T v, T id, unsigned alive, unsigned lane) {
  T x = msl_shfl(v, lane, 0);
  return alive >> (lane & 31) & 1 ? x : id;
}
// The tree of reductions, each lane for itself: the sum over every STEPth lane from `lane` on.
template <int STEP, class T, class F> MSL_FN T msl_tree(T v, T id, unsigned alive, F f, unsigned lane) {
  if constexpr (STEP == 32)
    return msl_value_of(v, id, alive, lane);
  else
    return f(msl_tree<2 * STEP>(v, id, alive, f, lane), msl_tree<2 * STEP>(v, id, alive, f, lane + STEP));
}
// The sum over the 2 * STEP lanes up to `lane`, as far as there are so many.
template <int STEP, class T> MSL_FN T msl_prefix_tree(T v, unsigned alive, unsigned lane) {
  if constexpr (STEP == 0) {
    return msl_value_of(v, T(0), alive, lane);
  } else {
    T upper = msl_prefix_tree<STEP / 2>(v, alive, lane), lower = msl_prefix_tree<STEP / 2>(v, alive, lane - STEP);
    return lane < 32 && lane >= STEP ? T(upper + lower) : upper;
  }
}
#else
MSL_FN unsigned msl_first_lane() { return 0; }
#endif
// The order of operands decides which of two zeros wins in a 16-bit maximum; all else commutes.
struct msl_max;
struct msl_min;
template <class T, class F> MSL_FN T msl_reduce(T v, T id, F f, const char*, int) {
#ifdef MSL_PARTIAL_SIMDGROUPS
  const unsigned alive = msl_alive();
  if (alive != MSL_ALL_LANES) return msl_tree<1>(v, id, alive, f, 0);
#endif
  constexpr bool commutes = msl_is_arith<T>::v || !(msl_same<F, msl_max>::v || msl_same<F, msl_min>::v);
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    T other = msl_shfl_xor(v, o, 0);
    if constexpr (commutes)
      v = f(v, other);
    else
      v = msl_lane() & o ? f(other, v) : f(v, other);
  }
  return v;
}
template <class T> MSL_FN T msl_prefix(T v, bool inclusive, int) {
  const unsigned lane = msl_lane();
#ifdef MSL_PARTIAL_SIMDGROUPS
  const unsigned alive = msl_alive();
  if (alive != MSL_ALL_LANES) {
    T sum = msl_prefix_tree<16>(v, alive, inclusive ? lane : lane - 1);
    return inclusive || lane ? sum : T(0);
  }
#endif
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    T below = msl_shfl_up(v, o, 0);
    if (lane >= o) v = T(v + below);
  }
  if (inclusive) return v;
  T below = msl_shfl_up(v, 1, 0);
  return lane ? below : T(0);
}
enum class mem_flags {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
MSL_FN mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
enum memory_order { memory_order_relaxed };
MSL_FN void threadgroup_barrier(mem_flags) { __syncthreads(); }
MSL_FN void simdgroup_barrier(mem_flags) { __syncwarp(); }

// ---- Atomics. Volatile accesses are relaxed ones; CUDA names its 64-bit type differently.
template <class T> struct atomic { T v; };
template <class T> struct msl_id { using type = T; };
template <class T> struct msl_cuda_type { using type = T; };
template <> struct msl_cuda_type<unsigned long> { using type = unsigned long long; };
template <> struct msl_cuda_type<long> { using type = long long; };
#define MSL_ATOMIC template <class T> MSL_FN
MSL_ATOMIC void atomic_store_explicit(volatile atomic<T>* a, typename msl_id<T>::type x, memory_order) { a->v = x; }
MSL_ATOMIC T atomic_load_explicit(const volatile atomic<T>* a, memory_order) { return a->v; }
#define MSL_RMW(name, function)                                                                            \
  MSL_ATOMIC T atomic_##name##_explicit(volatile atomic<T>* a, typename msl_id<T>::type x, memory_order) { \
    using U = typename msl_cuda_type<T>::type;                                                             \
    return (T)function((U*)&a->v, (U)x);                                                                   \
  }
MSL_RMW(exchange, ::atomicExch)
MSL_RMW(fetch_add, ::atomicAdd)
MSL_RMW(fetch_or, ::atomicOr)
MSL_RMW(fetch_and, ::atomicAnd)
MSL_RMW(fetch_xor, ::atomicXor)
MSL_RMW(fetch_max, ::atomicMax)
MSL_RMW(fetch_min, ::atomicMin)
MSL_ATOMIC T atomic_fetch_sub_explicit(volatile atomic<T>* a, typename msl_id<T>::type x, memory_order o) {
  return atomic_fetch_add_explicit(a, T(-x), o);
}
MSL_ATOMIC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* a, T* expected, typename msl_id<T>::type x,
                                                      memory_order, memory_order) {
  static_assert(sizeof(T) == 4, "32 bits only");
  unsigned was = ::atomicCAS((unsigned*)&a->v, *(unsigned*)expected, *(unsigned*)&x);
  bool same = was == *(unsigned*)expected;
  memcpy((void*)expected, (const void*)&was, 4);
  return same;
}

// ---- Functions of one float: within 2 units in the last place, `fast` ones by the special function unit alone.
#define MSL_M(name, function) \
  MSL_FN float msl_##name(float x) { return function(x); }
MSL_M(exp, ::expf)
MSL_M(exp2, ::exp2f)
MSL_M(log, ::logf)
MSL_M(log2, ::log2f)
MSL_M(log10, ::log10f)
MSL_M(sqrt, ::sqrtf)
MSL_M(rsqrt, ::rsqrtf)
MSL_M(sin, ::sinf)
MSL_M(cos, ::cosf)
MSL_M(tan, ::tanf)
MSL_M(tanh, ::tanhf)
MSL_M(sinh, ::sinhf)
MSL_M(cosh, ::coshf)
MSL_M(asin, ::asinf)
MSL_M(acos, ::acosf)
MSL_M(atan, ::atanf)
MSL_M(floor, ::floorf)
MSL_M(ceil, ::ceilf)
MSL_M(rint, ::rintf)
MSL_M(trunc, ::truncf)
MSL_M(round, ::roundf)
MSL_M(fabs, ::fabsf)
MSL_M(erf, ::erff)
#define MSL_HAS_FAST 1
MSL_M(fast_exp, ::__expf)
MSL_M(fast_log, ::__logf)
MSL_M(fast_log2, ::__log2f)
MSL_M(fast_sin, ::__sinf)
MSL_M(fast_cos, ::__cosf)
#undef MSL_M
MSL_FN float msl_fast_exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
MSL_FN float msl_pow(float a, float b) { return ::powf(a, b); }
MSL_FN float msl_fma(float a, float b, float c) { return ::fmaf(a, b, c); }
MSL_FN float msl_fmod(float a, float b) { return ::fmodf(a, b); }
MSL_FN float msl_atan2(float a, float b) { return ::atan2f(a, b); }
MSL_FN bool msl_isnan(float a) { return a != a; }
MSL_FN bool msl_isinf(float a) { return ::fabsf(a) == __int_as_float(0x7f800000); }
MSL_FN unsigned msl_popcount(unsigned x) { return __popc(x); }
MSL_FN unsigned msl_clz(unsigned x) { return __clz(x); }
MSL_FN unsigned msl_reverse_bits(unsigned x) { return __brev(x); }
MSL_FN unsigned msl_thread_in_scope(int threads) { return msl_tid() % threads; }
MSL_FN void msl_scope_sync(int threads) {
  if (threads == 32)
    __syncwarp();
  else if (threads > 32)
    __syncthreads();
}
}  // namespace metal
namespace mpp {
namespace tensor_ops {
using metal::msl_scope_sync;
using metal::msl_thread_in_scope;
}  // namespace tensor_ops
}  // namespace mpp
#define MSL_LINE_ARG , int line = 0
#define MSL_LINE_ARG0 int line = 0
#define __builtin_inff() __int_as_float(0x7f800000)
#define __builtin_nanf(x) __int_as_float(0x7fc00000)
#define __builtin_fminf ::fminf
#define __builtin_fmaxf ::fmaxf
#include "msl_common.h"

// ------------------------------------------------------------------ elements that are read, as the translator writes it
namespace metal {
template <class T, int N> MSL_FN T msl_choose(const vec<T, N>& v, unsigned i) {
  if constexpr (N == 2) return i & 1 ? v.v[1] : v.v[0];
  T low = i & 1 ? v.v[1] : v.v[0], high = i & 1 ? v.v[N - 1] : v.v[2];
  return i & 2 ? high : low;
}
template <class T, int N, class I> MSL_FN T msl_at(vec<T, N>& v, I i) { return msl_choose(v, i); }
template <class T, int N, class I> MSL_FN T msl_at(const vec<T, N>& v, I i) { return msl_choose(v, i); }
template <class T, int N, class I> MSL_FN T msl_at(vec<T, N>&& v, I i) { return msl_choose(v, i); }
template <class A, class I> MSL_FN decltype(auto) msl_at(A&& a, I i) { return a[i]; }
}  // namespace metal

// ------------------------------------------------------------------ parameters that the GPU fills
namespace metal {
struct msl_v3 {
  unsigned v[3];
};
template <class T> struct msl_Bi {
  static MSL_FN T get(msl_v3 v) { return (T)v.v[0]; }
};
template <class T> struct msl_Bi<vec<T, 2>> {
  static MSL_FN vec<T, 2> get(msl_v3 v) { return vec<T, 2>(T(v.v[0]), T(v.v[1])); }
};
template <class T> struct msl_Bi<vec<T, 3>> {
  static MSL_FN vec<T, 3> get(msl_v3 v) { return vec<T, 3>(T(v.v[0]), T(v.v[1]), T(v.v[2])); }
};
template <class T> struct msl_Bi<const T> : msl_Bi<T> {};
template <class T> MSL_FN T msl_bi(msl_v3 v) { return msl_Bi<T>::get(v); }
#define MSL_BUILTIN(name, x, y, z) \
  MSL_FN msl_v3 msl_bi_##name() { return {{(unsigned)(x), (unsigned)(y), (unsigned)(z)}}; }
MSL_BUILTIN(threadgroup_position_in_grid, blockIdx.x, blockIdx.y, blockIdx.z)
MSL_BUILTIN(thread_position_in_threadgroup, threadIdx.x, threadIdx.y, threadIdx.z)
MSL_BUILTIN(thread_position_in_grid, blockIdx.x* blockDim.x + threadIdx.x, blockIdx.y* blockDim.y + threadIdx.y,
            blockIdx.z* blockDim.z + threadIdx.z)
MSL_BUILTIN(threads_per_threadgroup, blockDim.x, blockDim.y, blockDim.z)
MSL_BUILTIN(dispatch_threads_per_threadgroup, blockDim.x, blockDim.y, blockDim.z)
MSL_BUILTIN(threadgroups_per_grid, gridDim.x, gridDim.y, gridDim.z)
MSL_BUILTIN(threads_per_grid, gridDim.x* blockDim.x, gridDim.y* blockDim.y, gridDim.z* blockDim.z)
MSL_BUILTIN(thread_index_in_threadgroup, msl_tid(), 0, 0)
MSL_BUILTIN(thread_index_in_simdgroup, msl_lane(), 0, 0)
MSL_BUILTIN(simdgroup_index_in_threadgroup, msl_tid() / 32, 0, 0)
MSL_BUILTIN(threads_per_simdgroup, 32, 1, 1)
MSL_BUILTIN(simdgroups_per_threadgroup, (blockDim.x * blockDim.y * blockDim.z + 31) / 32, 1, 1)
MSL_BUILTIN(thread_index_in_quadgroup, msl_tid() & 3, 0, 0)
MSL_BUILTIN(quadgroup_index_in_threadgroup, msl_tid() >> 2, 0, 0)
#undef MSL_BUILTIN
// A `constant T&` from what stands for it in the entry's parameters.
template <bool BY_VALUE> struct msl_referred {
  template <class T> static MSL_FN T& of(const T& value) { return const_cast<T&>(value); }
};
template <> struct msl_referred<false> {
  template <class T> static MSL_FN T& of(const T* pointer) { return *const_cast<T*>(pointer); }
};
// Threadgroup memory whose size the launch sets.
MSL_FN unsigned char* msl_dynamic_memory(unsigned offset) {
  extern __shared__ __align__(16) unsigned char msl_memory[];
  return msl_memory + offset;
}
}  // namespace metal
