// 16-bit floats and vectors of 2, 3 and 4 elements as structures, for the emulator and for CUDA; plain C++17 without
// the standard library.
//
// How it is structured: half and bfloat come from one macro; so do the members that the three vector structures share.
// Each structure is a union of its array, the names of its components and a proxy for each swizzle, followed by the
// constructors for every way to put it together from scalars and shorter vectors. All two-component swizzles are there;
// of the longer ones, those without a repeated component and those that repeat a single one.
#pragma once
namespace metal {
template <bool B, class T = void> struct msl_enable_if {};
template <class T> struct msl_enable_if<true, T> { using type = T; };
template <class A, class B> struct msl_same { static constexpr bool v = false; };
template <class A> struct msl_same<A, A> { static constexpr bool v = true; };
template <class T> struct msl_is_arith { static constexpr bool v = false; };
#define MSL_AR(T) \
  template <> struct msl_is_arith<T> { static constexpr bool v = true; };
MSL_AR(bool)
MSL_AR(char) MSL_AR(signed char) MSL_AR(unsigned char) MSL_AR(short) MSL_AR(unsigned short) MSL_AR(int) MSL_AR(unsigned)
    MSL_AR(long) MSL_AR(unsigned long) MSL_AR(long long) MSL_AR(unsigned long long) MSL_AR(float) MSL_AR(double)
#undef MSL_AR

// ---- 16-bit floats: storage + conversions; every operation rounds to the type, as the GPU's does
#define MSL_F16(NAME, FROM, TO)                                                                               \
  struct NAME {                                                                                               \
    unsigned short bits;                                                                                      \
    NAME() = default;                                                                                         \
    MSL_FN NAME(float f) : bits(FROM(f)) {}                                                                   \
    MSL_FN NAME(int f) : bits(FROM((float)f)) {}                                                              \
    MSL_FN NAME(unsigned f) : bits(FROM((float)f)) {}                                                         \
    MSL_FN NAME(double f) : bits(FROM((float)f)) {}                                                           \
    template <class O, class = typename msl_enable_if<O::msl_f16>::type> explicit MSL_FN NAME(O o)            \
        : bits(FROM((float)o)) {}                                                                             \
    static constexpr bool msl_f16 = true;                                                                     \
    MSL_FN operator float() const { return TO(bits); }                                                        \
    MSL_FN NAME operator-() const { return NAME(-(float)*this); }                                             \
    friend MSL_FN NAME operator+(NAME a, NAME b) { return NAME((float)a + (float)b); }                        \
    friend MSL_FN NAME operator-(NAME a, NAME b) { return NAME((float)a - (float)b); }                        \
    friend MSL_FN NAME operator*(NAME a, NAME b) { return NAME((float)a * (float)b); }                        \
    friend MSL_FN NAME operator/(NAME a, NAME b) { return NAME((float)a / (float)b); }                        \
    friend MSL_FN bool operator<(NAME a, NAME b) { return (float)a < (float)b; }                              \
    friend MSL_FN bool operator>(NAME a, NAME b) { return (float)a > (float)b; }                              \
    friend MSL_FN bool operator<=(NAME a, NAME b) { return (float)a <= (float)b; }                            \
    friend MSL_FN bool operator>=(NAME a, NAME b) { return (float)a >= (float)b; }                            \
    friend MSL_FN bool operator==(NAME a, NAME b) { return (float)a == (float)b; }                            \
    friend MSL_FN bool operator!=(NAME a, NAME b) { return (float)a != (float)b; }                            \
    MSL_MIX(NAME, +)                                                                                          \
    MSL_MIX(NAME, -) MSL_MIX(NAME, *) MSL_MIX(NAME, /) MSL_MIXC(NAME, <) MSL_MIXC(NAME, >) MSL_MIXC(NAME, <=) \
        MSL_MIXC(NAME, >=) MSL_MIXC(NAME, ==) MSL_MIXC(NAME, !=) template <class O>                           \
        MSL_FN NAME& operator+=(O o) {                                                                        \
      return *this = NAME(*this + o);                                                                         \
    }                                                                                                         \
    template <class O> MSL_FN NAME& operator-=(O o) { return *this = NAME(*this - o); }                       \
    template <class O> MSL_FN NAME& operator*=(O o) { return *this = NAME(*this * o); }                       \
    template <class O> MSL_FN NAME& operator/=(O o) { return *this = NAME(*this / o); }                       \
  };
#define MSL_MIX(NAME, op)                                                                   \
  friend MSL_FN float operator op(NAME a, float b) { return (float)a op b; }                \
  friend MSL_FN float operator op(float a, NAME b) { return a op(float) b; }                \
  friend MSL_FN NAME operator op(NAME a, int b) { return NAME((float)a op(float) b); }      \
  friend MSL_FN NAME operator op(int a, NAME b) { return NAME((float)a op(float) b); }      \
  friend MSL_FN NAME operator op(NAME a, unsigned b) { return NAME((float)a op(float) b); } \
  friend MSL_FN NAME operator op(unsigned a, NAME b) { return NAME((float)a op(float) b); }
#define MSL_MIXC(NAME, op)                                                       \
  friend MSL_FN bool operator op(NAME a, float b) { return (float)a op b; }      \
  friend MSL_FN bool operator op(float a, NAME b) { return a op(float) b; }      \
  friend MSL_FN bool operator op(NAME a, int b) { return (float)a op(float) b; } \
  friend MSL_FN bool operator op(int a, NAME b) { return (float)a op(float) b; }
        MSL_F16(bfloat, msl_f2bf, msl_bf2f) MSL_F16(half, msl_f2h, msl_h2f)

            template <class T, int N>
            struct vec;
template <class T, int N, int... I> struct msl_swz {
  T v[N];
  using V = vec<T, sizeof...(I)>;
  MSL_FN operator V() const {
    V r;
    int j = 0;
    ((r.v[j++] = v[I]), ...);
    return r;
  }
  MSL_FN msl_swz& operator=(V o) {
    int j = 0;
    ((v[I] = o.v[j++]), ...);
    return *this;
  }
  MSL_FN msl_swz& operator=(const msl_swz& o) { return *this = V(o); }
  template <class O> MSL_FN msl_swz& operator+=(O o) { return *this = V(*this) + o; }
  template <class O> MSL_FN msl_swz& operator-=(O o) { return *this = V(*this) - o; }
  template <class O> MSL_FN msl_swz& operator*=(O o) { return *this = V(*this) * o; }
  template <class O> MSL_FN msl_swz& operator/=(O o) { return *this = V(*this) / o; }
};
#define MSL_VOP(op)                                                            \
  friend MSL_FN vec operator op(vec a, vec b) {                                \
    vec r;                                                                     \
    for (int i = 0; i < n; ++i) r.v[i] = T(a.v[i] op b.v[i]);                  \
    return r;                                                                  \
  }                                                                            \
  template <class S, class = typename msl_enable_if<msl_is_arith<S>::v>::type> \
  friend MSL_FN vec operator op(vec a, S s) {                                  \
    return a op vec(T(s));                                                     \
  }                                                                            \
  template <class S, class = typename msl_enable_if<msl_is_arith<S>::v>::type> \
  friend MSL_FN vec operator op(S s, vec a) {                                  \
    return vec(T(s)) op a;                                                     \
  }                                                                            \
  template <class O> MSL_FN vec& operator op##=(O o) { return *this = *this op o; }
#define MSL_VCMP(op)                                                           \
  friend MSL_FN vec<bool, n> operator op(vec a, vec b) {                       \
    vec<bool, n> r;                                                            \
    for (int i = 0; i < n; ++i) r.v[i] = a.v[i] op b.v[i];                     \
    return r;                                                                  \
  }                                                                            \
  template <class S, class = typename msl_enable_if<msl_is_arith<S>::v>::type> \
  friend MSL_FN vec<bool, n> operator op(vec a, S s) {                         \
    return a op vec(T(s));                                                     \
  }                                                                            \
  template <class S, class = typename msl_enable_if<msl_is_arith<S>::v>::type> \
  friend MSL_FN vec<bool, n> operator op(S s, vec a) {                         \
    return vec(T(s)) op a;                                                     \
  }
// A vector is copied with one access as wide as itself, as the GPU does it: the counters see one load or store, and CUDA
// emits one.
#ifdef MSL_CUDA
typedef ::uint4 msl_w16;
typedef ::uint2 msl_w8;
typedef unsigned msl_w4;
typedef unsigned short msl_w2;
#else
typedef unsigned msl_w16 __attribute__((vector_size(16), may_alias));
typedef unsigned long msl_w8 __attribute__((may_alias));
typedef unsigned msl_w4 __attribute__((may_alias));
typedef unsigned short msl_w2 __attribute__((may_alias));
#endif
// Not one template: a type loses its may_alias as a template argument.
MSL_FN void msl_copy16(void* d, const void* s) { *(msl_w16*)d = *(const msl_w16*)s; }
MSL_FN void msl_copy8(void* d, const void* s) { *(msl_w8*)d = *(const msl_w8*)s; }
MSL_FN void msl_copy4(void* d, const void* s) { *(msl_w4*)d = *(const msl_w4*)s; }
MSL_FN void msl_copy2(void* d, const void* s) { *(msl_w2*)d = *(const msl_w2*)s; }
#define MSL_VCOPY                                                  \
  if constexpr (sizeof(vec) == 32) {                               \
    msl_copy16(this, &o);                                          \
    msl_copy16((char*)this + 16, (const char*)&o + 16);            \
  } else if constexpr (sizeof(vec) == 16)                          \
    msl_copy16(this, &o);                                          \
  else if constexpr (sizeof(vec) == 8)                             \
    msl_copy8(this, &o);                                           \
  else if constexpr (sizeof(vec) == 4)                             \
    msl_copy4(this, &o);                                           \
  else {                                                           \
    static_assert(sizeof(vec) == 2, "no vector has another size"); \
    msl_copy2(this, &o);                                           \
  }
#ifdef MSL_CUDA
#define MSL_VCOPY_CONSTRUCTOR vec(const vec&) = default;
#else
#define MSL_VCOPY_CONSTRUCTOR \
  MSL_FN vec(const vec& o) { MSL_VCOPY }
#endif
#define MSL_VCOMMON(SLOTS)                                                                                         \
  static constexpr int n = SLOTS;                                                                                  \
  using elem = T;                                                                                                  \
  vec() = default;                                                                                                 \
  MSL_VCOPY_CONSTRUCTOR                                                                                            \
  MSL_FN vec& operator=(const vec& o) { MSL_VCOPY return *this; }                                                  \
  MSL_FN vec(T s) {                                                                                                \
    for (int i = 0; i < n; ++i) v[i] = s;                                                                          \
  }                                                                                                                \
  template <class U, class = typename msl_enable_if<!msl_same<U, T>::v>::type>                                     \
  explicit MSL_FN vec(const vec<U, n>& o) {                                                                        \
    for (int i = 0; i < n; ++i) v[i] = T(o.v[i]);                                                                  \
  }                                                                                                                \
  MSL_FN T& operator[](unsigned long i) { return v[i]; }                                                           \
  MSL_FN const T& operator[](unsigned long i) const { return v[i]; }                                               \
  MSL_VOP(+)                                                                                                       \
  MSL_VOP(-) MSL_VOP(*) MSL_VOP(/) MSL_VOP(%) MSL_VOP(&) MSL_VOP(|) MSL_VOP(^) MSL_VOP(<<) MSL_VOP(>>) MSL_VCMP(<) \
      MSL_VCMP(>) MSL_VCMP(<=) MSL_VCMP(>=) MSL_VCMP(==) MSL_VCMP(!=) MSL_VCMP(&&) MSL_VCMP(||) friend MSL_FN vec  \
      operator-(vec a) {                                                                                           \
    vec r;                                                                                                         \
    for (int i = 0; i < n; ++i) r.v[i] = -a.v[i];                                                                  \
    return r;                                                                                                      \
  }                                                                                                                \
  friend MSL_FN vec operator~(vec a) {                                                                             \
    vec r;                                                                                                         \
    for (int i = 0; i < n; ++i) r.v[i] = T(~a.v[i]);                                                               \
    return r;                                                                                                      \
  }                                                                                                                \
  friend MSL_FN vec<bool, n> operator!(vec a) {                                                                    \
    vec<bool, n> r;                                                                                                \
    for (int i = 0; i < n; ++i) r.v[i] = !a.v[i];                                                                  \
    return r;                                                                                                      \
  }

template <class T> struct alignas(sizeof(T) * 2) vec<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
    msl_swz<T, 2, 0, 0> xx;
    msl_swz<T, 2, 0, 1> xy;
    msl_swz<T, 2, 1, 0> yx;
    msl_swz<T, 2, 1, 1> yy;
    msl_swz<T, 2, 0, 0, 0> xxx;
    msl_swz<T, 2, 1, 1, 1> yyy;
    msl_swz<T, 2, 0, 0, 0, 0> xxxx;
    msl_swz<T, 2, 1, 1, 1, 1> yyyy;
  };
  MSL_VCOMMON(2)
  MSL_FN vec(T a0, T a1) {
    v[0] = a0;
    v[1] = a1;
  }
};
template <class T> struct alignas(sizeof(T) * 4) vec<T, 3> {
  union {
    T v[4];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
    msl_swz<T, 4, 0, 0> xx;
    msl_swz<T, 4, 0, 1> xy;
    msl_swz<T, 4, 0, 2> xz;
    msl_swz<T, 4, 1, 0> yx;
    msl_swz<T, 4, 1, 1> yy;
    msl_swz<T, 4, 1, 2> yz;
    msl_swz<T, 4, 2, 0> zx;
    msl_swz<T, 4, 2, 1> zy;
    msl_swz<T, 4, 2, 2> zz;
    msl_swz<T, 4, 0, 0, 0> xxx;
    msl_swz<T, 4, 0, 1, 2> xyz;
    msl_swz<T, 4, 0, 2, 1> xzy;
    msl_swz<T, 4, 1, 0, 2> yxz;
    msl_swz<T, 4, 1, 1, 1> yyy;
    msl_swz<T, 4, 1, 2, 0> yzx;
    msl_swz<T, 4, 2, 0, 1> zxy;
    msl_swz<T, 4, 2, 1, 0> zyx;
    msl_swz<T, 4, 2, 2, 2> zzz;
    msl_swz<T, 4, 0, 0, 0, 0> xxxx;
    msl_swz<T, 4, 1, 1, 1, 1> yyyy;
    msl_swz<T, 4, 2, 2, 2, 2> zzzz;
  };
  MSL_VCOMMON(3)
  MSL_FN vec(T a0, T a1, T a2) {
    v[0] = a0;
    v[1] = a1;
    v[2] = a2;
  }
  MSL_FN vec(T a0, vec<T, 2> a1) {
    v[0] = a0;
    v[1] = a1.v[0];
    v[2] = a1.v[1];
  }
  MSL_FN vec(vec<T, 2> a0, T a1) {
    v[0] = a0.v[0];
    v[1] = a0.v[1];
    v[2] = a1;
  }
};
template <class T> struct alignas(sizeof(T) * 4) vec<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
    msl_swz<T, 4, 0, 0> xx;
    msl_swz<T, 4, 0, 1> xy;
    msl_swz<T, 4, 0, 2> xz;
    msl_swz<T, 4, 0, 3> xw;
    msl_swz<T, 4, 1, 0> yx;
    msl_swz<T, 4, 1, 1> yy;
    msl_swz<T, 4, 1, 2> yz;
    msl_swz<T, 4, 1, 3> yw;
    msl_swz<T, 4, 2, 0> zx;
    msl_swz<T, 4, 2, 1> zy;
    msl_swz<T, 4, 2, 2> zz;
    msl_swz<T, 4, 2, 3> zw;
    msl_swz<T, 4, 3, 0> wx;
    msl_swz<T, 4, 3, 1> wy;
    msl_swz<T, 4, 3, 2> wz;
    msl_swz<T, 4, 3, 3> ww;
    msl_swz<T, 4, 0, 0, 0> xxx;
    msl_swz<T, 4, 0, 1, 2> xyz;
    msl_swz<T, 4, 0, 1, 3> xyw;
    msl_swz<T, 4, 0, 2, 1> xzy;
    msl_swz<T, 4, 0, 2, 3> xzw;
    msl_swz<T, 4, 0, 3, 1> xwy;
    msl_swz<T, 4, 0, 3, 2> xwz;
    msl_swz<T, 4, 1, 0, 2> yxz;
    msl_swz<T, 4, 1, 0, 3> yxw;
    msl_swz<T, 4, 1, 1, 1> yyy;
    msl_swz<T, 4, 1, 2, 0> yzx;
    msl_swz<T, 4, 1, 2, 3> yzw;
    msl_swz<T, 4, 1, 3, 0> ywx;
    msl_swz<T, 4, 1, 3, 2> ywz;
    msl_swz<T, 4, 2, 0, 1> zxy;
    msl_swz<T, 4, 2, 0, 3> zxw;
    msl_swz<T, 4, 2, 1, 0> zyx;
    msl_swz<T, 4, 2, 1, 3> zyw;
    msl_swz<T, 4, 2, 2, 2> zzz;
    msl_swz<T, 4, 2, 3, 0> zwx;
    msl_swz<T, 4, 2, 3, 1> zwy;
    msl_swz<T, 4, 3, 0, 1> wxy;
    msl_swz<T, 4, 3, 0, 2> wxz;
    msl_swz<T, 4, 3, 1, 0> wyx;
    msl_swz<T, 4, 3, 1, 2> wyz;
    msl_swz<T, 4, 3, 2, 0> wzx;
    msl_swz<T, 4, 3, 2, 1> wzy;
    msl_swz<T, 4, 3, 3, 3> www;
    msl_swz<T, 4, 0, 0, 0, 0> xxxx;
    msl_swz<T, 4, 0, 1, 2, 3> xyzw;
    msl_swz<T, 4, 0, 1, 3, 2> xywz;
    msl_swz<T, 4, 0, 2, 1, 3> xzyw;
    msl_swz<T, 4, 0, 2, 3, 1> xzwy;
    msl_swz<T, 4, 0, 3, 1, 2> xwyz;
    msl_swz<T, 4, 0, 3, 2, 1> xwzy;
    msl_swz<T, 4, 1, 0, 2, 3> yxzw;
    msl_swz<T, 4, 1, 0, 3, 2> yxwz;
    msl_swz<T, 4, 1, 1, 1, 1> yyyy;
    msl_swz<T, 4, 1, 2, 0, 3> yzxw;
    msl_swz<T, 4, 1, 2, 3, 0> yzwx;
    msl_swz<T, 4, 1, 3, 0, 2> ywxz;
    msl_swz<T, 4, 1, 3, 2, 0> ywzx;
    msl_swz<T, 4, 2, 0, 1, 3> zxyw;
    msl_swz<T, 4, 2, 0, 3, 1> zxwy;
    msl_swz<T, 4, 2, 1, 0, 3> zyxw;
    msl_swz<T, 4, 2, 1, 3, 0> zywx;
    msl_swz<T, 4, 2, 2, 2, 2> zzzz;
    msl_swz<T, 4, 2, 3, 0, 1> zwxy;
    msl_swz<T, 4, 2, 3, 1, 0> zwyx;
    msl_swz<T, 4, 3, 0, 1, 2> wxyz;
    msl_swz<T, 4, 3, 0, 2, 1> wxzy;
    msl_swz<T, 4, 3, 1, 0, 2> wyxz;
    msl_swz<T, 4, 3, 1, 2, 0> wyzx;
    msl_swz<T, 4, 3, 2, 0, 1> wzxy;
    msl_swz<T, 4, 3, 2, 1, 0> wzyx;
    msl_swz<T, 4, 3, 3, 3, 3> wwww;
  };
  MSL_VCOMMON(4)
  MSL_FN vec(T a0, T a1, T a2, T a3) {
    v[0] = a0;
    v[1] = a1;
    v[2] = a2;
    v[3] = a3;
  }
  MSL_FN vec(T a0, T a1, vec<T, 2> a2) {
    v[0] = a0;
    v[1] = a1;
    v[2] = a2.v[0];
    v[3] = a2.v[1];
  }
  MSL_FN vec(T a0, vec<T, 2> a1, T a2) {
    v[0] = a0;
    v[1] = a1.v[0];
    v[2] = a1.v[1];
    v[3] = a2;
  }
  MSL_FN vec(T a0, vec<T, 3> a1) {
    v[0] = a0;
    v[1] = a1.v[0];
    v[2] = a1.v[1];
    v[3] = a1.v[2];
  }
  MSL_FN vec(vec<T, 2> a0, T a1, T a2) {
    v[0] = a0.v[0];
    v[1] = a0.v[1];
    v[2] = a1;
    v[3] = a2;
  }
  MSL_FN vec(vec<T, 2> a0, vec<T, 2> a1) {
    v[0] = a0.v[0];
    v[1] = a0.v[1];
    v[2] = a1.v[0];
    v[3] = a1.v[1];
  }
  MSL_FN vec(vec<T, 3> a0, T a1) {
    v[0] = a0.v[0];
    v[1] = a0.v[1];
    v[2] = a0.v[2];
    v[3] = a1;
  }
};
using float2 = vec<float, 2>;
using float3 = vec<float, 3>;
using float4 = vec<float, 4>;
using half2 = vec<half, 2>;
using half3 = vec<half, 3>;
using half4 = vec<half, 4>;
using bfloat2 = vec<bfloat, 2>;
using bfloat3 = vec<bfloat, 3>;
using bfloat4 = vec<bfloat, 4>;
using int2 = vec<int, 2>;
using int3 = vec<int, 3>;
using int4 = vec<int, 4>;
using uint2 = vec<unsigned, 2>;
using uint3 = vec<unsigned, 3>;
using uint4 = vec<unsigned, 4>;
using short2 = vec<short, 2>;
using short3 = vec<short, 3>;
using short4 = vec<short, 4>;
using ushort2 = vec<unsigned short, 2>;
using ushort3 = vec<unsigned short, 3>;
using ushort4 = vec<unsigned short, 4>;
using char2 = vec<signed char, 2>;
using char3 = vec<signed char, 3>;
using char4 = vec<signed char, 4>;
using uchar2 = vec<unsigned char, 2>;
using uchar3 = vec<unsigned char, 3>;
using uchar4 = vec<unsigned char, 4>;
using long2 = vec<long, 2>;
using long3 = vec<long, 3>;
using long4 = vec<long, 4>;
using ulong2 = vec<unsigned long, 2>;
using ulong3 = vec<unsigned long, 3>;
using ulong4 = vec<unsigned long, 4>;
using bool2 = vec<bool, 2>;
using bool3 = vec<bool, 3>;
using bool4 = vec<bool, 4>;
}  // namespace metal
