// The library of the Metal Shading Language as the strict check sees it: declarations alone, for clang in its mode
// "C++ for OpenCL", where address spaces are part of types. Nothing of this ever runs. Where it was not certain that
// Apple's library has something, it is left out: what passes here is a subset.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define METAL_FUNC inline
#define M_E_F 2.71828183f
#define M_LOG2E_F 1.44269504f
#define M_LN2_F 0.693147181f
#define M_PI_F 3.14159265f
#define M_SQRT2_F 1.41421356f
#define M_SQRT1_2_F 0.707106781f
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HUGE_VALF __builtin_huge_valf()
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
// What clang's OpenCL has of its own under these names is something else.
#define atomic_uint msl_atomic_uint
#define atomic_int msl_atomic_int
#define atomic_float msl_atomic_float
#define atomic_bool msl_atomic_bool
#define atomic_ulong msl_atomic_ulong

// ---- Types, which MSL has in the global namespace.
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef decltype(sizeof(0)) size_t;
typedef long ptrdiff_t;
typedef __bf16 bfloat;
#define MSL_VECTORS(T)                                       \
  typedef __attribute__((ext_vector_type(2))) T T##2;        \
  typedef __attribute__((ext_vector_type(3))) T T##3;        \
  typedef __attribute__((ext_vector_type(4))) T T##4;
MSL_VECTORS(float)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
// Comparisons of clang's vectors give vectors of int.
typedef int2 bool2;
typedef int3 bool3;
typedef int4 bool4;
// Where threadgroup variables of kernels refer to.
static __local char* const __constant msl_threadgroup = 0;

namespace metal {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

// ---- Traits.
template <class T, T V> struct integral_constant {
  static constexpr __constant T value = V;
  constexpr operator T() const { return V; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class U> struct conditional {
  typedef T type;
};
template <class T, class U> struct conditional<false, T, U> {
  typedef U type;
};
template <bool B, class T, class U> using conditional_t = typename conditional<B, T, U>::type;
template <class T> struct remove_const {
  typedef T type;
};
template <class T> struct remove_const<const T> {
  typedef T type;
};
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T, class U> inline constexpr __constant bool is_same_v = __is_same(T, U);
template <class T, class U> struct is_same : bool_constant<is_same_v<T, U>> {};
template <class T, class U> inline constexpr __constant bool is_convertible_v = __is_convertible(T, U);
template <class T> inline constexpr __constant bool is_integral_v = __is_integral(T);
template <class T> struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T> inline constexpr __constant bool is_signed_v = __is_signed(T);
template <class T> inline constexpr __constant bool is_unsigned_v = __is_unsigned(T);
template <class T> inline constexpr __constant bool is_floating_point_v =
    is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T> inline constexpr __constant bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T> struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};

// Elements of a vector, 0 for what is none; and their type.
template <class T> struct msl_vector {
  static constexpr __constant int n = 0;
  typedef T e;
};
template <class T, int N> struct msl_vector<T __attribute__((ext_vector_type(N)))> {
  static constexpr __constant int n = N;
  typedef T e;
};
template <class T> using msl_element = typename msl_vector<T>::e;
template <class T> inline constexpr __constant int msl_n = msl_vector<T>::n;
// The library computes in float and half. What it has for bfloat depends on its version: a kernel converts.
template <class T> inline constexpr __constant bool msl_is_real = is_same_v<T, float> || is_same_v<T, half>;
template <class T> inline constexpr __constant bool msl_is_number =
    msl_is_real<T> || (is_integral_v<T> && !is_same_v<T, bool>);
template <class T> using msl_real = enable_if_t<msl_is_real<msl_element<T>>, T>;
template <class T> using msl_number = enable_if_t<msl_is_number<msl_element<T>>, T>;
template <class T> using msl_whole = enable_if_t<msl_is_number<msl_element<T>> && !msl_is_real<msl_element<T>>, T>;
// Lanes exchange no bool and nothing of 64 bits.
template <class T> using msl_lanes = enable_if_t<msl_is_number<msl_element<T>> && sizeof(msl_element<T>) <= 4, T>;
template <class T> using msl_vector_only = enable_if_t<(msl_n<T> > 0), T>;
template <class T> struct msl_identity {
  typedef T type;
};
template <class T> using msl_as_given = typename msl_identity<T>::type;

template <class T> struct numeric_limits {
  static constexpr T max() {
    if constexpr (is_same_v<T, float>) return 3.402823466e+38f;
    else if constexpr (is_same_v<T, half>) return T(65504.0f);
    else if constexpr (is_same_v<T, bfloat>) return T(3.38953139e+38f);
    else return T(is_signed_v<T> ? (1ul << (sizeof(T) * 8 - 1)) - 1 : ~0ul);
  }
  static constexpr T lowest() {
    if constexpr (is_floating_point_v<T>) return T(-max());
    else return T(is_signed_v<T> ? 1ul << (sizeof(T) * 8 - 1) : 0ul);
  }
  static constexpr T min() {
    if constexpr (is_floating_point_v<T>) return T(1.17549435e-38f);
    else return lowest();
  }
  static constexpr T infinity() { return T(__builtin_inff()); }
  static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }
};

// ---- Functions of numbers and of vectors of them.
#define MSL_1(kind, f) template <class T> msl_##kind<T> f(T);
#define MSL_2(kind, f) template <class T> msl_##kind<T> f(T, T);
#define MSL_3(kind, f) template <class T> msl_##kind<T> f(T, T, T);
#define MSL_MATH                                                                                             \
  MSL_1(real, exp) MSL_1(real, exp2) MSL_1(real, exp10) MSL_1(real, log) MSL_1(real, log2) MSL_1(real, log10) \
  MSL_1(real, sqrt) MSL_1(real, rsqrt) MSL_1(real, sin) MSL_1(real, cos) MSL_1(real, tan) MSL_1(real, sinh)   \
  MSL_1(real, cosh) MSL_1(real, tanh) MSL_1(real, asin) MSL_1(real, acos) MSL_1(real, atan)                   \
  MSL_1(real, asinh) MSL_1(real, acosh) MSL_1(real, atanh) MSL_1(real, sinpi) MSL_1(real, cospi)              \
  MSL_1(real, floor) MSL_1(real, ceil) MSL_1(real, rint) MSL_1(real, trunc) MSL_1(real, round)                \
  MSL_1(real, fabs) MSL_1(real, fract) MSL_2(real, pow) MSL_2(real, powr) MSL_2(real, fmod)                   \
  MSL_2(real, atan2) MSL_2(real, fmin) MSL_2(real, fmax) MSL_2(real, divide)
MSL_MATH
namespace precise {
MSL_MATH
}
namespace fast {
MSL_MATH
}
MSL_1(real, sign) MSL_1(real, saturate) MSL_2(real, copysign) MSL_2(real, fdim) MSL_2(real, step)
MSL_3(real, fma) MSL_3(real, smoothstep) MSL_3(real, fmax3) MSL_3(real, fmin3) MSL_3(real, mix)
template <class T> msl_real<msl_vector_only<T>> mix(T, T, msl_element<T>);
template <class T> msl_real<T> ldexp(T, conditional_t<msl_n<T> == 0, int, vec<int, msl_n<T> ? msl_n<T> : 2>>);
MSL_1(number, abs) MSL_2(number, min) MSL_2(number, max) MSL_3(number, clamp)
MSL_3(number, min3) MSL_3(number, max3) MSL_3(number, median3)
MSL_2(whole, absdiff) MSL_2(whole, addsat) MSL_2(whole, subsat) MSL_2(whole, hadd) MSL_2(whole, rhadd)
MSL_2(whole, mulhi) MSL_2(whole, mul24) MSL_2(whole, rotate) MSL_3(whole, mad24) MSL_3(whole, madhi)
MSL_3(whole, madsat) MSL_1(whole, popcount) MSL_1(whole, clz) MSL_1(whole, ctz) MSL_1(whole, reverse_bits)
template <class T> msl_whole<T> extract_bits(T, uint offset, uint bits);
template <class T> msl_whole<T> insert_bits(T base, T insert, uint offset, uint bits);
#define MSL_GEOMETRY(f, ...) template <class T> msl_element<msl_real<msl_vector_only<T>>> f(__VA_ARGS__);
MSL_GEOMETRY(dot, T, T) MSL_GEOMETRY(distance, T, T) MSL_GEOMETRY(distance_squared, T, T)
MSL_GEOMETRY(length, T) MSL_GEOMETRY(length_squared, T)
template <class T> msl_real<msl_vector_only<T>> normalize(T);
template <class T> enable_if_t<is_arithmetic_v<T>, T> select(T, T, bool);
// A condition is a vector of integers here, whatever the width of what was compared.
template <class T, class C> enable_if_t<(msl_n<T> > 0) && msl_n<T> == msl_n<C> && is_integral_v<msl_element<C>>, T>
select(T, T, C);
template <class C> enable_if_t<(msl_n<C> > 0) && is_integral_v<msl_element<C>>, bool> any(C);
template <class C> enable_if_t<(msl_n<C> > 0) && is_integral_v<msl_element<C>>, bool> all(C);
#define MSL_IS(f)                                                         \
  template <class T> enable_if_t<is_floating_point_v<T>, bool> f(T);      \
  template <class T> enable_if_t<(msl_n<T> > 0), vec<int, msl_n<T>>> f(T);
MSL_IS(isnan) MSL_IS(isinf) MSL_IS(isfinite) MSL_IS(isnormal) MSL_IS(signbit)

// ---- Synchronisation and atomics.
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
// Atomic operations take the first alone; fences the others too.
enum memory_order { memory_order_relaxed };
enum msl_fence_order { memory_order_acquire, memory_order_release, memory_order_acq_rel, memory_order_seq_cst };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags, thread_scope);
void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device);
void atomic_thread_fence(mem_flags, msl_fence_order, thread_scope = thread_scope_device);
template <class T> struct atomic {
  static_assert(is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, float> || is_same_v<T, bool> ||
                    is_same_v<T, ulong>,
                "atomics are of int, uint, float, bool or ulong");
  T msl_value;
  atomic() = default;
};
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;
template <class T> using msl_word = enable_if_t<sizeof(T) <= 4, T>;
template <class T> using msl_int = enable_if_t<is_same_v<T, int> || is_same_v<T, uint>, T>;
// Floats are added in device memory alone.
template <class T> using msl_sum_device =
    enable_if_t<is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, float>, T>;
template <class T> using msl_sum_threadgroup = msl_int<T>;
#define MSL_MODIFY(AS, kind, op) \
  template <class T> kind<T> atomic_fetch_##op##_explicit(volatile AS atomic<T>*, msl_as_given<T>, memory_order);
#define MSL_ATOMICS(AS, space)                                                                                    \
  template <class T> enable_if_t<sizeof(T) <= 4> atomic_store_explicit(volatile AS atomic<T>*, msl_as_given<T>,   \
                                                                       memory_order);                             \
  template <class T> msl_word<T> atomic_load_explicit(const volatile AS atomic<T>*, memory_order);                \
  template <class T> msl_word<T> atomic_exchange_explicit(volatile AS atomic<T>*, msl_as_given<T>, memory_order); \
  template <class T> enable_if_t<sizeof(T) <= 4, bool> atomic_compare_exchange_weak_explicit(                     \
      volatile AS atomic<T>*, __private T*, msl_as_given<T>, memory_order, memory_order);                         \
  MSL_MODIFY(AS, msl_sum_##space, add) MSL_MODIFY(AS, msl_sum_##space, sub) MSL_MODIFY(AS, msl_int, and)          \
  MSL_MODIFY(AS, msl_int, or) MSL_MODIFY(AS, msl_int, xor) MSL_MODIFY(AS, msl_int, min) MSL_MODIFY(AS, msl_int, max)
MSL_ATOMICS(__global, device)
MSL_ATOMICS(__local, threadgroup)

// ---- Functions of a simdgroup.
#define MSL_FROM(f) template <class T> msl_lanes<T> f(T, ushort);
MSL_1(lanes, simd_sum) MSL_1(lanes, simd_product) MSL_1(lanes, simd_max) MSL_1(lanes, simd_min)
MSL_1(lanes, simd_prefix_exclusive_sum) MSL_1(lanes, simd_prefix_inclusive_sum)
MSL_1(lanes, simd_prefix_exclusive_product) MSL_1(lanes, simd_prefix_inclusive_product)
MSL_1(lanes, simd_broadcast_first) MSL_1(lanes, quad_sum) MSL_1(lanes, quad_max) MSL_1(lanes, quad_min)
MSL_1(whole, simd_or) MSL_1(whole, simd_and) MSL_1(whole, simd_xor)
MSL_FROM(simd_shuffle) MSL_FROM(simd_broadcast) MSL_FROM(simd_shuffle_xor) MSL_FROM(simd_shuffle_down)
MSL_FROM(simd_shuffle_up) MSL_FROM(simd_shuffle_rotate_down) MSL_FROM(simd_shuffle_rotate_up)
MSL_FROM(quad_shuffle) MSL_FROM(quad_shuffle_xor) MSL_FROM(quad_shuffle_down) MSL_FROM(quad_shuffle_up)
MSL_FROM(quad_broadcast)
template <class T> msl_lanes<T> simd_shuffle_and_fill_down(T, T fill, ushort);
template <class T> msl_lanes<T> simd_shuffle_and_fill_up(T, T fill, ushort);
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();
struct simd_vote {
  typedef ulong vote_t;
  explicit simd_vote(vote_t);
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();

// ---- Matrices of 8x8.
template <class T, int C, int R> struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "matrices of a simdgroup are 8x8");
  static_assert(is_floating_point_v<T>, "matrices of a simdgroup are of half, bfloat or float");
  vec<T, 2> msl_elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  __private vec<T, 2>& thread_elements() __private;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int C, int R> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
#define MSL_MATRICES(AS)                                                                                           \
  template <class T, int C, int R> void simdgroup_load(__private simdgroup_matrix<T, C, R>&, const AS T*,          \
                                                       ulong = C, ulong2 = ulong2(0), bool = false);               \
  template <class T, int C, int R> void simdgroup_store(simdgroup_matrix<T, C, R>, AS T*, ulong = C,               \
                                                        ulong2 = ulong2(0), bool = false);
MSL_MATRICES(__global)
MSL_MATRICES(__local)
template <class D, class A, class B> void simdgroup_multiply(__private simdgroup_matrix<D, 8, 8>&,
                                                             simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                                   simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>);

// ---- Tensors of Metal 4.
inline constexpr __constant size_t dynamic_extent = ~size_t(0);
template <class I, size_t... E> struct extents {
  I msl_extents[sizeof...(E)];
  extents() = default;
  template <class... A> extents(A...) { static_assert(sizeof...(A) == sizeof...(E), "one extent for each dimension"); }
  I extent(int) const;
};
template <int R> struct msl_dynamic;
template <> struct msl_dynamic<1> {
  template <class I> using t = extents<I, dynamic_extent>;
};
template <> struct msl_dynamic<2> {
  template <class I> using t = extents<I, dynamic_extent, dynamic_extent>;
};
template <> struct msl_dynamic<3> {
  template <class I> using t = extents<I, dynamic_extent, dynamic_extent, dynamic_extent>;
};
template <class I, int R> using dextents = typename msl_dynamic<R>::template t<I>;
template <class T, size_t N> struct array {
  T msl_elements[N];
};
struct tensor_handle {};
struct tensor_inline {};
struct tensor_offset {};
template <class T> struct msl_space {
  static constexpr __constant bool known = false;
};
template <class T> struct msl_space<__global T> {
  static constexpr __constant bool known = true;
  typedef remove_const_t<T> e;
};
template <class T> struct msl_space<__local T> {
  static constexpr __constant bool known = true;
  typedef remove_const_t<T> e;
};
// Numbers of four bits: a name of a tensor's elements, not a type of values. Such a tensor is made of a pointer to bytes.
struct uint4b_format {
  uint4b_format() = delete;
};
template <class T> struct msl_stored {
  typedef T t;
};
template <> struct msl_stored<__global uint4b_format> {
  typedef __global uchar t;
};
template <> struct msl_stored<__local uint4b_format> {
  typedef __local uchar t;
};
template <class T, class E, class Tag = tensor_handle> struct tensor {
  static_assert(msl_space<T>::known, "a tensor's elements are in device or threadgroup memory");
  typedef typename msl_space<T>::e msl_value;
  typename msl_stored<T>::t* msl_pointer;
  E msl_extents;
  tensor() = default;
  tensor(typename msl_stored<T>::t* p, E e) : msl_pointer(p), msl_extents(e) {
    static_assert(is_same_v<Tag, tensor_inline>, "only a tensor_inline is made of a pointer");
  }
  // With the distance of neighbours in each dimension, in elements.
  template <size_t R> tensor(typename msl_stored<T>::t* p, E e, array<int, R> strides) : tensor(p, e) {
    static_assert(sizeof(E) == sizeof(strides), "one stride for each dimension");
  }
  template <class... A> tensor slice(A...) const;
  template <class... A> tensor offset(A...) const;
  E get_extents() const;
};
template <int N> struct execution_simdgroups {};
using execution_simdgroup = execution_simdgroups<1>;
struct execution_thread {};
template <class T> inline constexpr __constant bool msl_is_scope = is_same_v<T, execution_thread>;
template <int N> inline constexpr __constant bool msl_is_scope<execution_simdgroups<N>> = true;
template <class T> struct msl_cooperative_tensor {
  T msl_elements[1];
  ushort get_capacity() const;
  bool get_mask(int) const;
  bool is_valid_element(int) const;
  vec<int, 2> get_multidimensional_index(int) const;
  __private T& operator[](int) __private;
  template <class X> void load(X);
  template <class X> void store(X) const;
};
}  // namespace metal

// Constructors of vectors arrive here as calls: clang's vectors have none.
template <class T> constexpr int msl_count() { return metal::msl_n<T> ? metal::msl_n<T> : 1; }
template <class T, class... A> constexpr T msl_mk(A... a) {
  if constexpr (metal::msl_n<T> == 0) {
    return T(a...);
  } else {
    constexpr int given = (0 + ... + msl_count<A>());
    static_assert(sizeof...(A) == 0 || given == metal::msl_n<T> || (sizeof...(A) == 1 && given == 1),
                  "wrong number of elements for a vector");
    static_assert((true && ... && metal::is_arithmetic_v<metal::msl_element<A>>), "a vector is made of numbers");
    return T{};
  }
}
template <class T, class U> T as_type(U value) {
  static_assert(sizeof(T) == sizeof(U), "as_type between types of different sizes");
  return T{};
}

namespace mpp {
namespace tensor_ops {
using namespace metal;
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int msl_m, msl_n;
  constexpr matmul2d_descriptor(int m, int n, int k = int(dynamic_extent), bool left = false, bool right = false,
                                bool relaxed = false, mode how = mode::multiply)
      : msl_m(m), msl_n(n) {}
};
// A class as a template argument needs C++20: the translator writes matmul2d<msl_pack(desc), ...> instead.
constexpr ulong msl_pack(matmul2d_descriptor d) { return ulong(d.msl_m) | ulong(d.msl_n) << 12; }
// Element types of the left and the right operand and the destination, as of macOS 26.1 (26.0 lacked bfloat); those of
// four bits as of 26.4.
template <class L, class R, class D> inline constexpr __constant bool msl_multiplies = false;
#define MSL_MULTIPLIES(L, R, D) template <> inline constexpr __constant bool msl_multiplies<L, R, D> = true;
MSL_MULTIPLIES(half, half, half) MSL_MULTIPLIES(half, half, float) MSL_MULTIPLIES(half, float, float)
MSL_MULTIPLIES(half, int8_t, half) MSL_MULTIPLIES(half, int8_t, float) MSL_MULTIPLIES(int8_t, half, half)
MSL_MULTIPLIES(int8_t, half, float) MSL_MULTIPLIES(int8_t, float, float) MSL_MULTIPLIES(int8_t, int8_t, int)
MSL_MULTIPLIES(float, half, float) MSL_MULTIPLIES(float, float, float) MSL_MULTIPLIES(float, int8_t, float)
MSL_MULTIPLIES(bfloat, bfloat, bfloat) MSL_MULTIPLIES(bfloat, bfloat, float) MSL_MULTIPLIES(bfloat, float, float)
MSL_MULTIPLIES(float, bfloat, float) MSL_MULTIPLIES(bfloat, int8_t, bfloat) MSL_MULTIPLIES(bfloat, int8_t, float)
MSL_MULTIPLIES(int8_t, bfloat, bfloat) MSL_MULTIPLIES(int8_t, bfloat, float) MSL_MULTIPLIES(bfloat, half, bfloat)
MSL_MULTIPLIES(bfloat, half, half) MSL_MULTIPLIES(bfloat, half, float) MSL_MULTIPLIES(half, bfloat, bfloat)
MSL_MULTIPLIES(half, bfloat, half) MSL_MULTIPLIES(half, bfloat, float) MSL_MULTIPLIES(bfloat, uint8_t, bfloat)
MSL_MULTIPLIES(bfloat, uint8_t, float) MSL_MULTIPLIES(half, uint8_t, half) MSL_MULTIPLIES(half, uint8_t, float)
MSL_MULTIPLIES(bfloat, uint4b_format, bfloat) MSL_MULTIPLIES(bfloat, uint4b_format, float)
MSL_MULTIPLIES(half, uint4b_format, half) MSL_MULTIPLIES(half, uint4b_format, float)
template <class T> struct msl_operand;
// What decltype says of a variable.
template <class T> struct msl_operand<__private T> : msl_operand<T> {};
template <class T> struct msl_operand<const __private T> : msl_operand<T> {};
template <class T, class E, class G> struct msl_operand<tensor<T, E, G>> {
  typedef typename tensor<T, E, G>::msl_value e;
};
template <class T> struct msl_operand<msl_cooperative_tensor<T>> {
  typedef T e;
};
template <class T> using msl_operand_of = typename msl_operand<T>::e;
template <ulong Descriptor, class Scope> struct matmul2d {
  static_assert(msl_is_scope<Scope>, "the second argument of matmul2d is an execution scope");
  template <class A, class B, class T> msl_cooperative_tensor<T> get_destination_cooperative_tensor() const {
    static_assert(msl_multiplies<msl_operand_of<A>, msl_operand_of<B>, T>, "no such product: element types");
    return {};
  }
  template <class A, class B, class D> void run(__private A&, __private B&, __private D&) const {
    static_assert(msl_multiplies<msl_operand_of<A>, msl_operand_of<B>, msl_operand_of<D>>,
                  "no such product: element types");
  }
};
}  // namespace tensor_ops
}  // namespace mpp
