// The library of the Metal Shading Language, as far as kernels use it, written on a few primitives of the backend:
// msl_shfl and its kin, msl_reduce, msl_prefix, msl_ballot, the functions of one float (msl_exp and so on) and of bits.
#pragma once
#define M_LOG2E_F 1.44269504f
#define M_LN2_F 0.693147181f
#define M_PI_F 3.14159265f
#define M_SQRT1_2_F 0.707106781f
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#undef MAXFLOAT
#define MAXFLOAT 3.402823466e+38f
#define METAL_FUNC inline
namespace metal {
using uint = unsigned;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;
using size_t = decltype(sizeof(0));
using atomic_uint = atomic<unsigned>;
using atomic_int = atomic<int>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;

template <class T, class U> MSL_FN T as_type(const U& u) {
  static_assert(sizeof(T) == sizeof(U), "as_type: sizes differ");
  T t;
  memcpy((void*)&t, (const void*)&u, sizeof(T));
  return t;
}

// ---- Functions of float, of 16-bit floats (computed in float and rounded once) and of vectors.
#define MSL_F1N(name, impl)                                       \
  MSL_FN float name(float x) { return impl(x); }                  \
  MSL_FN half name(half x) { return half(impl((float)x)); }       \
  MSL_FN bfloat name(bfloat x) { return bfloat(impl((float)x)); } \
  template <class T, int N> MSL_FN vec<T, N> name(vec<T, N> x) {  \
    vec<T, N> r;                                                  \
    for (int i = 0; i < N; ++i) r.v[i] = T(name(x.v[i]));         \
    return r;                                                     \
  }
#define MSL_F1(name) MSL_F1N(name, msl_##name)
MSL_F1(exp)
MSL_F1(exp2) MSL_F1(log) MSL_F1(log2) MSL_F1(log10) MSL_F1(sqrt) MSL_F1(sin) MSL_F1(cos) MSL_F1(tan) MSL_F1(tanh)
    MSL_F1(sinh) MSL_F1(cosh) MSL_F1(asin) MSL_F1(acos) MSL_F1(atan) MSL_F1(floor) MSL_F1(ceil) MSL_F1(rint)
        MSL_F1(trunc) MSL_F1(round) MSL_F1(fabs) MSL_F1(rsqrt)
MSL_FN int abs(int x) { return x < 0 ? -x : x; }
MSL_F1N(abs, msl_fabs)
namespace precise {
using metal::cos;
using metal::exp;
using metal::exp2;
using metal::log;
using metal::log2;
using metal::rsqrt;
using metal::sin;
using metal::sqrt;
using metal::tanh;
}  // namespace precise
#ifdef MSL_HAS_FAST
#define MSL_FAST(name)                                                       \
  MSL_FN float name(float x) { return msl_fast_##name(x); }                  \
  MSL_FN half name(half x) { return half(msl_fast_##name((float)x)); }       \
  MSL_FN bfloat name(bfloat x) { return bfloat(msl_fast_##name((float)x)); } \
  template <class T, int N> MSL_FN vec<T, N> name(vec<T, N> x) {             \
    vec<T, N> r;                                                             \
    for (int i = 0; i < N; ++i) r.v[i] = T(msl_fast_##name((float)x.v[i]));  \
    return r;                                                                \
  }
namespace fast {
MSL_FAST(exp)
MSL_FAST(exp2)
MSL_FAST(log)
MSL_FAST(log2)
MSL_FAST(sin)
MSL_FAST(cos)
using metal::rsqrt;
using metal::sqrt;
using metal::tanh;
}  // namespace fast
#else
namespace fast = precise;
#endif
MSL_FN bool isnan(float x) { return msl_isnan(x); }
MSL_FN bool isinf(float x) { return msl_isinf(x); }
MSL_FN float pow(float a, float b) { return msl_pow(a, b); }
MSL_FN float powr(float a, float b) { return msl_pow(a, b); }
MSL_FN float fmod(float a, float b) { return msl_fmod(a, b); }
MSL_FN float atan2(float a, float b) { return msl_atan2(a, b); }
MSL_FN float fma(float a, float b, float c) { return msl_fma(a, b, c); }
template <class T, int N> MSL_FN vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r.v[i] = T(fma(a.v[i], b.v[i], c.v[i]));
  return r;
}
#define MSL_MM(T)                                  \
  MSL_FN T min(T a, T b) { return b < a ? b : a; } \
  MSL_FN T max(T a, T b) { return a < b ? b : a; } \
  MSL_FN T clamp(T x, T a, T b) { return min(max(x, a), b); }
MSL_MM(int)
MSL_MM(unsigned) MSL_MM(short) MSL_MM(unsigned short) MSL_MM(long) MSL_MM(unsigned long) MSL_MM(half)
    MSL_MM(bfloat) MSL_FN float min(float a, float b) {
  return __builtin_fminf(a, b);
}
MSL_FN float max(float a, float b) { return __builtin_fmaxf(a, b); }
MSL_FN float fmin(float a, float b) { return __builtin_fminf(a, b); }
MSL_FN float fmax(float a, float b) { return __builtin_fmaxf(a, b); }
MSL_FN float max3(float a, float b, float c) { return max(a, max(b, c)); }
MSL_FN float clamp(float x, float a, float b) { return min(max(x, a), b); }
template <class T, int N> MSL_FN vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r.v[i] = min(a.v[i], b.v[i]);
  return r;
}
template <class T, int N> MSL_FN vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r.v[i] = max(a.v[i], b.v[i]);
  return r;
}
template <class T, int N> MSL_FN vec<T, N> clamp(vec<T, N> x, vec<T, N> a, vec<T, N> b) { return min(max(x, a), b); }
template <class T, int N> MSL_FN T dot(vec<T, N> a, vec<T, N> b) {
  T r = a.v[0] * b.v[0];
  for (int i = 1; i < N; ++i) r = T(r + a.v[i] * b.v[i]);
  return r;
}
MSL_FN float mix(float a, float b, float t) { return a + (b - a) * t; }
template <class T, int N> MSL_FN vec<T, N> mix(vec<T, N> a, vec<T, N> b, T t) { return a + (b - a) * vec<T, N>(t); }
template <class T> MSL_FN T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> MSL_FN vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r.v[i] = c.v[i] ? b.v[i] : a.v[i];
  return r;
}
// Swizzle proxies reach select through one conversion.
template <class T, int N, int S, int... I> MSL_FN vec<T, N> select(vec<T, N> a, msl_swz<T, S, I...> b, vec<bool, N> c) {
  return select(a, vec<T, N>(b), c);
}
template <int N> MSL_FN bool any(vec<bool, N> a) {
  bool r = false;
  for (int i = 0; i < N; ++i) r |= a.v[i];
  return r;
}
template <int N> MSL_FN bool all(vec<bool, N> a) {
  bool r = true;
  for (int i = 0; i < N; ++i) r &= a.v[i];
  return r;
}
MSL_FN unsigned popcount(unsigned x) { return msl_popcount(x); }
MSL_FN unsigned clz(unsigned x) { return msl_clz(x); }
MSL_FN unsigned ctz(unsigned x) { return x ? msl_clz(msl_reverse_bits(x)) : 32; }
MSL_FN unsigned extract_bits(unsigned x, unsigned o, unsigned n) {
  return n >= 32 ? x >> o : (x >> o) & ((1u << n) - 1);
}
MSL_FN unsigned insert_bits(unsigned base, unsigned x, unsigned o, unsigned n) {
  unsigned m = (n >= 32 ? ~0u : (1u << n) - 1) << o;
  return (base & ~m) | ((x << o) & m);
}
MSL_FN unsigned reverse_bits(unsigned x) { return msl_reverse_bits(x); }
MSL_FN unsigned rotate(unsigned x, unsigned n) {
  n &= 31;
  return n ? x << n | x >> (32 - n) : x;
}
MSL_FN unsigned mulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long)a * b >> 32); }
MSL_FN int mulhi(int a, int b) { return (int)((long)a * b >> 32); }
template <class T> MSL_FN T absdiff(T a, T b) { return a < b ? T(b - a) : T(a - b); }
MSL_FN float sign(float x) { return x > 0 ? 1.f : x < 0 ? -1.f : 0.f; }

// ---- Functions of a simdgroup.
struct msl_add {
  template <class T> MSL_FN T operator()(T a, T b) const { return T(a + b); }
};
struct msl_mul {
  template <class T> MSL_FN T operator()(T a, T b) const { return T(a * b); }
};
struct msl_max {
  template <class T> MSL_FN T operator()(T a, T b) const { return max(a, b); }
};
struct msl_min {
  template <class T> MSL_FN T operator()(T a, T b) const { return min(a, b); }
};
struct msl_or {
  template <class T> MSL_FN T operator()(T a, T b) const { return T(a | b); }
};
struct msl_and {
  template <class T> MSL_FN T operator()(T a, T b) const { return T(a & b); }
};
template <class T> MSL_FN T simd_sum(T v MSL_LINE_ARG) { return msl_reduce(v, T(0), msl_add(), "simd_sum", line); }
template <class T> MSL_FN T simd_product(T v MSL_LINE_ARG) {
  return msl_reduce(v, T(1), msl_mul(), "simd_product", line);
}
template <class T> MSL_FN T simd_max(T v MSL_LINE_ARG) { return msl_reduce(v, v, msl_max(), "simd_max", line); }
template <class T> MSL_FN T simd_min(T v MSL_LINE_ARG) { return msl_reduce(v, v, msl_min(), "simd_min", line); }
template <class T> MSL_FN T simd_or(T v MSL_LINE_ARG) { return msl_reduce(v, T(0), msl_or(), "simd_or", line); }
template <class T> MSL_FN T simd_and(T v MSL_LINE_ARG) { return msl_reduce(v, T(~T(0)), msl_and(), "simd_and", line); }
template <class T> MSL_FN T simd_prefix_exclusive_sum(T v MSL_LINE_ARG) { return msl_prefix(v, false, line); }
template <class T> MSL_FN T simd_prefix_inclusive_sum(T v MSL_LINE_ARG) { return msl_prefix(v, true, line); }
template <class T> MSL_FN T simd_shuffle(T v, ushort l MSL_LINE_ARG) { return msl_shfl(v, l, line); }
template <class T> MSL_FN T simd_broadcast(T v, ushort l MSL_LINE_ARG) { return msl_shfl(v, l, line); }
template <class T> MSL_FN T simd_broadcast_first(T v MSL_LINE_ARG) { return msl_shfl(v, msl_first_lane(), line); }
template <class T> MSL_FN T simd_shuffle_xor(T v, ushort m MSL_LINE_ARG) { return msl_shfl_xor(v, m, line); }
// Lanes out of range are undefined on the GPU; here they get their own value.
template <class T> MSL_FN T simd_shuffle_down(T v, ushort d MSL_LINE_ARG) { return msl_shfl_down(v, d, line); }
template <class T> MSL_FN T simd_shuffle_up(T v, ushort d MSL_LINE_ARG) { return msl_shfl_up(v, d, line); }
MSL_FN bool simd_any(bool b MSL_LINE_ARG) { return msl_ballot(b, line) != 0; }
MSL_FN bool simd_all(bool b MSL_LINE_ARG) { return msl_ballot(!b, line) == 0; }
struct simd_vote {
  unsigned long m;
  explicit MSL_FN operator unsigned long() const { return m; }
  MSL_FN bool any() const { return m != 0; }
};
MSL_FN simd_vote simd_ballot(bool b MSL_LINE_ARG) { return simd_vote{(unsigned long)msl_ballot(b, line)}; }
MSL_FN simd_vote simd_active_threads_mask(MSL_LINE_ARG0) { return simd_vote{(unsigned long)msl_ballot(true, line)}; }
MSL_FN bool simd_is_first() { return msl_lane() == msl_first_lane(); }

// ---- Matrices of 8x8: two elements a lane, laid out as Apple GPUs lay them out.
#ifdef MSL_CUDA
}  // namespace metal
#include "msl_cuda_matrix.h"
namespace metal {
#else
MSL_FN unsigned msl_mrow() {
  unsigned l = msl_lane(), q = l / 4;
  return (q & 4) + (l / 2) % 4;
}
MSL_FN unsigned msl_mcol() {
  unsigned l = msl_lane(), q = l / 4;
  return (q & 2) * 2 + (l % 2) * 2;
}
MSL_FN unsigned msl_mlane(unsigned r, unsigned c) {
  return ((r & 4) | ((c & 4) >> 1)) * 4 + (r & 3) * 2 + ((c & 2) >> 1);
}
template <class T, int R = 8, int C = 8> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "8x8 only");
  vec<T, 2> e;
  simdgroup_matrix() = default;
  explicit MSL_FN simdgroup_matrix(T d) {
    e.v[0] = msl_mrow() == msl_mcol() ? d : T(0);
    e.v[1] = msl_mrow() == msl_mcol() + 1 ? d : T(0);
  }
  MSL_FN vec<T, 2>& thread_elements() { return e; }
};
template <class T, int R, int C> MSL_FN simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m;
  m.e = vec<T, 2>(v);
  return m;
}
// A lane's two elements are one access on GPUs.
template <class T> MSL_FN void msl_check_rows(const char* what, const T* p, ulong stride) {
  if (sizeof(T) == 2 && (((size_t)p | stride * 2) & 3))
    msl::fail(msl::MISALIGNED, "%s: rows of 16-bit elements begin at odd elements", what);
}
template <class T, class U> MSL_FN void simdgroup_load(simdgroup_matrix<T>& m, const U* p, ulong stride = 8,
                                                       vec<ulong, 2> org = vec<ulong, 2>(0), bool tr = false) {
  static_assert(msl_same<T, U>::v, "simdgroup_load: element types differ");
  p += org.v[1] * stride + org.v[0];
  msl_check_rows("simdgroup_load", p, stride);
  for (int i = 0; i < 2; ++i) {
    unsigned r = msl_mrow(), c = msl_mcol() + i;
    m.e.v[i] = tr ? p[c * stride + r] : p[r * stride + c];
  }
}
template <class T, class U> MSL_FN void simdgroup_store(simdgroup_matrix<T> m, U* p, ulong stride = 8,
                                                        vec<ulong, 2> org = vec<ulong, 2>(0), bool tr = false) {
  static_assert(msl_same<T, U>::v, "simdgroup_store: element types differ");
  p += org.v[1] * stride + org.v[0];
  msl_check_rows("simdgroup_store", p, stride);
  for (int i = 0; i < 2; ++i) {
    unsigned r = msl_mrow(), c = msl_mcol() + i;
    if (tr)
      p[c * stride + r] = m.e.v[i];
    else
      p[r * stride + c] = m.e.v[i];
  }
}
template <class D, class A, class B, class Cc>
MSL_FN void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b,
                                          simdgroup_matrix<Cc> c MSL_LINE_ARG) {
  msl::Sg& s = msl::mysg();
  float in[6] = {(float)a.e.v[0], (float)a.e.v[1], (float)b.e.v[0], (float)b.e.v[1], (float)c.e.v[0], (float)c.e.v[1]};
  memcpy(s.slot[s.gen & 1][msl_lane()], in, sizeof in);
  unsigned g = msl::simd_sync("simdgroup_multiply_accumulate", line);
  if (s.res_gen != g) {  // The first lane to resume computes the product for all.
    float fa[8][8], fb[8][8], fc[8][8];
    for (unsigned l = 0; l < 32; ++l) {
      float t[6];
      memcpy(t, s.slot[g & 1][l], sizeof t);
      unsigned q = l / 4, r = (q & 4) + (l / 2) % 4, c0 = (q & 2) * 2 + (l % 2) * 2;
      fa[r][c0] = t[0];
      fa[r][c0 + 1] = t[1];
      fb[r][c0] = t[2];
      fb[r][c0 + 1] = t[3];
      fc[r][c0] = t[4];
      fc[r][c0 + 1] = t[5];
    }
    for (int i = 0; i < 8; ++i)
      for (int k = 0; k < 8; ++k)
        for (int j = 0; j < 8; ++j) fc[i][j] += fa[i][k] * fb[k][j];
    for (unsigned l = 0; l < 32; ++l) {
      unsigned q = l / 4, r = (q & 4) + (l / 2) % 4, c0 = (q & 2) * 2 + (l % 2) * 2;
      memcpy(s.res[l], &fc[r][c0], 8);
    }
    s.res_gen = g;
  }
  float o[2];
  memcpy(o, s.res[msl_lane()], 8);
  d.e.v[0] = D(o[0]);
  d.e.v[1] = D(o[1]);
}
#endif
using simdgroup_float8x8 = simdgroup_matrix<float>;
using simdgroup_half8x8 = simdgroup_matrix<half>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat>;
template <class D, class A, class B>
MSL_FN void simdgroup_multiply(simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0.f)));
}

// ---- Tensors of Metal 4 (rank 2) and mpp::tensor_ops::matmul2d.
constexpr size_t dynamic_extent = ~(size_t)0;
template <class I, int R> struct dextents {
  I e[R];
  dextents() = default;
  template <class... A> MSL_FN dextents(A... a) : e{I(a)...} {}
  MSL_FN I extent(int i) const { return e[i]; }
};
template <class T, int N> struct array {
  T e[N];
};
struct tensor_handle {};
struct tensor_inline {};
struct tensor_offset {};
template <class T, class E, class Tag = tensor_handle> struct tensor {
  T* p;
  E ext;
  long stride;
  long off[2];
  using element = T;
  tensor() = default;
  MSL_FN tensor(T* q, E e) : p(q), ext(e), stride(e.e[0]), off{0, 0} {}
  // Elements of a row lie side by side.
  MSL_FN tensor(T* q, E e, array<int, 2> s) : p(q), ext(e), stride(s.e[1]), off{0, 0} {}
  template <class A, class B> MSL_FN tensor slice(A i, B j) const {
    tensor t = *this;
    t.off[0] += (long)i;
    t.off[1] += (long)j;
    return t;
  }
  template <class A, class B> MSL_FN tensor offset(A i, B j) const { return slice(i, j); }
  MSL_FN bool in(long i, long j) const {
    i += off[0];
    j += off[1];
    return i >= 0 && j >= 0 && i < (long)ext.e[0] && j < (long)ext.e[1];
  }
  MSL_FN T& at(long i, long j) const { return p[(j + off[1]) * stride + i + off[0]]; }
  MSL_FN E get_extents() const { return ext; }
};
// Numbers of four bits, two a byte, the first in its low half: made of a pointer to bytes, everything else in elements.
struct uint4b_format {};
template <class E, class Tag> struct tensor<uint4b_format, E, Tag> {
  uchar* p;
  E ext;
  long stride;
  long off[2];
  tensor() = default;
  MSL_FN tensor(uchar* q, E e) : p(q), ext(e), stride(e.e[0]), off{0, 0} {}
  MSL_FN tensor(uchar* q, E e, array<int, 2> s) : p(q), ext(e), stride(s.e[1]), off{0, 0} {}
  template <class A, class B> MSL_FN tensor slice(A i, B j) const {
    tensor t = *this;
    t.off[0] += (long)i;
    t.off[1] += (long)j;
    return t;
  }
  MSL_FN bool in(long i, long j) const {
    i += off[0];
    j += off[1];
    return i >= 0 && j >= 0 && i < (long)ext.e[0] && j < (long)ext.e[1];
  }
  MSL_FN float at(long i, long j) const {
    long element = (j + off[1]) * stride + i + off[0];
    return float(p[element / 2] >> (element % 2 * 4) & 15);
  }
  MSL_FN E get_extents() const { return ext; }
};
template <int N> struct execution_simdgroups { static constexpr int n = N; };
using execution_simdgroup = execution_simdgroups<1>;
struct execution_thread {
  static constexpr int n = 0;
};
}  // namespace metal
namespace mpp {
namespace tensor_ops {
using namespace metal;
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool tl, tr, relaxed;
  mode md;
  constexpr matmul2d_descriptor(int m_, int n_, int k_ = -1, bool a = false, bool b = false, bool r = false,
                                mode o = mode::multiply)
      : m(m_), n(n_), k(k_), tl(a), tr(b), relaxed(r), md(o) {}
};
template <class T, int M, int N, int THREADS> struct msl_coop {
  static constexpr int CAP = (M * N + THREADS - 1) / THREADS;
  T e[CAP];
  static MSL_FN unsigned me() { return THREADS == 1 ? 0 : msl_thread_in_scope(THREADS); }
  MSL_FN unsigned short get_capacity() const { return CAP; }
  MSL_FN bool get_mask(int i) const { return i * THREADS + (int)me() < M * N; }
  MSL_FN bool is_valid_element(int i) const { return get_mask(i); }
  MSL_FN T& operator[](int i) { return e[i]; }
  MSL_FN metal::vec<int, 2> get_multidimensional_index(int i) const {
    int f = i * THREADS + me();
    return metal::vec<int, 2>(f % N, f / N);
  }
  template <class Ten> MSL_FN void store(const Ten& t) const {
    for (int i = 0; i < CAP; ++i)
      if (get_mask(i)) {
        auto x = get_multidimensional_index(i);
        if (t.in(x.x, x.y)) t.at(x.x, x.y) = typename Ten::element(e[i]);
      }
  }
  template <class Ten> MSL_FN void load(const Ten& t) {
    for (int i = 0; i < CAP; ++i)
      if (get_mask(i)) {
        auto x = get_multidimensional_index(i);
        e[i] = t.in(x.x, x.y) ? T(t.at(x.x, x.y)) : T(0);
      }
  }
  MSL_FN T& coop_at(int i, long, long) { return e[i]; }
};
template <int M, int N, int K, bool TL, bool TR, bool ACC, class Scope> struct msl_matmul2d {
  static constexpr int TH = Scope::n ? Scope::n * 32 : 1;
  template <class A, class B, class E> MSL_FN msl_coop<E, M, N, TH> get_destination_cooperative_tensor() const {
    return {};
  }
  template <class A, class B> static MSL_FN float el(const A& a, const B& b, long kk, int i, int x, int y) {
    long k = (K > 0 ? K : kk);
    float s = 0;
    (void)i;
    for (long t = 0; t < k; ++t) {
      float l = (TL ? a.in(y, t) : a.in(t, y)) ? (float)(TL ? a.at(y, t) : a.at(t, y)) : 0.f;
      float r = (TR ? b.in(t, x) : b.in(x, t)) ? (float)(TR ? b.at(t, x) : b.at(x, t)) : 0.f;
      s = s + l * r;
    }
    return s;
  }
  template <class A> static MSL_FN long inner(const A& a) {
    return TL ? (long)a.ext.e[1] - a.off[1] : (long)a.ext.e[0] - a.off[0];
  }
  template <class A, class B, class T, int M2, int N2, int T2>
  MSL_FN void run(A& a, B& b, msl_coop<T, M2, N2, T2>& c) const {
    msl_scope_sync(TH);
    for (int i = 0; i < c.CAP; ++i)
      if (c.get_mask(i)) {
        auto x = c.get_multidimensional_index(i);
        float v = el(a, b, inner(a), i, x.x, x.y);
        c.e[i] = T(ACC ? (float)c.e[i] + v : v);
      }
    msl_scope_sync(TH);
  }
  template <class A, class B, class T, class X, class G> MSL_FN void run(A& a, B& b, metal::tensor<T, X, G>& c) const {
    msl_coop<float, M, N, TH> t;
    msl_scope_sync(TH);
    for (int i = 0; i < t.CAP; ++i)
      if (t.get_mask(i)) {
        auto x = t.get_multidimensional_index(i);
        if (c.in(x.x, x.y)) {
          float v = el(a, b, inner(a), i, x.x, x.y);
          T& o = c.at(x.x, x.y);
          o = T(ACC ? (float)o + v : v);
        }
      }
    msl_scope_sync(TH);
  }
};
// A class as a template argument needs C++20: the translator writes matmul2d<msl_pack(desc), ...> instead.
constexpr unsigned long msl_pack(matmul2d_descriptor d) {
  return (unsigned long)d.m | (unsigned long)d.n << 12 | (unsigned long)(d.k > 0 ? d.k : 0) << 24 |
         (unsigned long)d.tl << 56 | (unsigned long)d.tr << 57 |
         (unsigned long)(d.md == matmul2d_descriptor::mode::multiply_accumulate) << 58;
}
template <unsigned long P, class Scope> using matmul2d =
    msl_matmul2d<int(P & 4095), int((P >> 12) & 4095), int((P >> 24) & 0xffffffff), ((P >> 56) & 1) != 0,
                 ((P >> 57) & 1) != 0, ((P >> 58) & 1) != 0, Scope>;
}  // namespace tensor_ops
}  // namespace mpp
