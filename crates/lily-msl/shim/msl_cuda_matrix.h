// Matrices of 8x8 on NVIDIA GPUs: tensor cores for products of 16-bit matrices, shuffles for others.
//
// Two elements a lane: row lane / 4, columns 2 * (lane % 4) and the next, as mma.sync has its operands and results. Only
// a file that uses thread_elements() sees where elements are: it gets Apple's layout (MSL_APPLE_LAYOUT, which the
// translator defines), and its products pay six shuffles each to move to the other and back.
//
// mma.sync has no 8x8x8: the left matrix is padded to 16 rows, so half of the tensor core's work is lost. Sums are those
// of the tensor core: products are exact, but the order of additions and their last bits are its own.
#pragma once
namespace metal {
#ifdef MSL_APPLE_LAYOUT
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
// From this layout to the tensor core's, and back.
template <class T> MSL_FN T msl_to_core(T v) { return msl_shfl(v, msl_mlane(msl_lane() / 4, msl_lane() % 4 * 2), 0); }
template <class T> MSL_FN T msl_from_core(T v) { return msl_shfl(v, msl_mrow() * 4 + msl_mcol() / 2, 0); }
#else
MSL_FN unsigned msl_mrow() { return msl_lane() / 4; }
MSL_FN unsigned msl_mcol() { return msl_lane() % 4 * 2; }
MSL_FN unsigned msl_mlane(unsigned r, unsigned c) { return r * 4 + c / 2; }
template <class T> MSL_FN T msl_to_core(T v) { return v; }
template <class T> MSL_FN T msl_from_core(T v) { return v; }
#endif

// What a matrix holds besides its elements: a matrix of floats the results of rows 8 to 15, which nobody asked for but
// which spare every product the clearing of two registers; one of 16 bits whether its elements are those of the
// transposed matrix.
template <class T> struct msl_matrix_state {};
template <> struct msl_matrix_state<float> {
  float below[2] = {0.f, 0.f};
};
template <> struct msl_matrix_state<half> {
  bool flipped = false;
};
template <> struct msl_matrix_state<bfloat> {
  bool flipped = false;
};
template <class T, int R = 8, int C = 8> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "8x8 only");
  vec<T, 2> e;
  msl_matrix_state<T> state;
  simdgroup_matrix() = default;
  explicit MSL_FN simdgroup_matrix(T d) {
    e.v[0] = msl_mrow() == msl_mcol() ? d : T(0);
    e.v[1] = msl_mrow() == msl_mcol() + 1 ? d : T(0);
  }
#ifdef MSL_APPLE_LAYOUT
  MSL_FN vec<T, 2>& thread_elements() { return e; }
#endif
};
template <class T, int R, int C> MSL_FN simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m;
  m.e = vec<T, 2>(v);
  return m;
}

// Two 16-bit elements as a register.
template <class T> MSL_FN unsigned msl_pair(vec<T, 2> e) {
  unsigned r;
  memcpy((void*)&r, (const void*)&e, 4);
  return r;
}
MSL_FN unsigned msl_transpose(unsigned pair) {
  unsigned r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
// The elements of a 16-bit matrix, or of its transpose, as the tensor core has them.
template <class T> MSL_FN unsigned msl_core_pair(const simdgroup_matrix<T>& m, bool transposed) {
  unsigned pair = msl_to_core(msl_pair(m.e));
  return m.state.flipped == transposed ? pair : msl_transpose(pair);
}

template <class T> MSL_FN void msl_unflip(simdgroup_matrix<T>& m) {
  if constexpr (sizeof(T) == 2) {
    if (m.state.flipped) m.e = as_type<vec<T, 2>>(msl_transpose(msl_pair(m.e)));
    m.state.flipped = false;
  }
}

// A lane's two elements, which lie side by side. Rows of 16-bit matrices begin at even elements, so that it takes one
// access; the emulator checks it.
template <class T> MSL_FN vec<T, 2> msl_load_pair(const T* p) {
  if constexpr (sizeof(T) == 2)
    return *(const vec<T, 2>*)p;
  else
    return vec<T, 2>(p[0], p[1]);
}
template <class T> MSL_FN void msl_store_pair(T* p, vec<T, 2> e) {
  if constexpr (sizeof(T) == 2) {
    *(vec<T, 2>*)p = e;
  } else {
    p[0] = e.v[0];
    p[1] = e.v[1];
  }
}
#ifdef MSL_APPLE_LAYOUT
template <class T> struct msl_can_flip { static constexpr bool v = false; };
#else
template <class T> struct msl_can_flip { static constexpr bool v = sizeof(T) == 2; };
#endif
template <class T, class U> MSL_FN void simdgroup_load(simdgroup_matrix<T>& m, const U* p, ulong stride = 8,
                                                       vec<ulong, 2> org = vec<ulong, 2>(0), bool tr = false) {
  static_assert(msl_same<T, U>::v, "simdgroup_load: element types differ");
  p += org.v[1] * stride + org.v[0];
  unsigned r = msl_mrow(), c = msl_mcol();
  m.state = msl_matrix_state<T>();
  if constexpr (msl_can_flip<T>::v) {
    m.e = msl_load_pair(p + r * stride + c);
    m.state.flipped = tr;
  } else if (tr) {
    m.e = vec<T, 2>(p[c * stride + r], p[(c + 1) * stride + r]);
  } else {
    m.e = msl_load_pair(p + r * stride + c);
  }
}
template <class T, class U> MSL_FN void simdgroup_store(simdgroup_matrix<T> m, U* p, ulong stride = 8,
                                                        vec<ulong, 2> org = vec<ulong, 2>(0), bool tr = false) {
  static_assert(msl_same<T, U>::v, "simdgroup_store: element types differ");
  p += org.v[1] * stride + org.v[0];
  unsigned r = msl_mrow(), c = msl_mcol();
  if constexpr (msl_can_flip<T>::v) {
    unsigned pair = msl_core_pair(m, tr);
    msl_store_pair(p + r * stride + c, as_type<vec<T, 2>>(pair));
  } else if (tr) {
    p[c * stride + r] = m.e.v[0];
    p[(c + 1) * stride + r] = m.e.v[1];
  } else {
    msl_store_pair(p + r * stride + c, m.e);
  }
}

#define MSL_MMA(TYPE, NAME)                                                 \
  MSL_FN void msl_mma(TYPE, float (&d)[4], unsigned a, unsigned b) {        \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." NAME "." NAME      \
                 ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])           \
                 : "r"(a), "r"(0), "r"(b));                                 \
  }
MSL_MMA(bfloat, "bf16")
MSL_MMA(half, "f16")
#undef MSL_MMA
template <class D, class A, class B, class Cc>
MSL_FN void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b,
                                          simdgroup_matrix<Cc> c) {
  msl_unflip(c);
  if constexpr (sizeof(A) == 2 && msl_same<A, B>::v) {
    float core[4] = {msl_to_core((float)c.e.v[0]), msl_to_core((float)c.e.v[1]), 0.f, 0.f};
    if constexpr (msl_same<Cc, float>::v) {
      core[2] = c.state.below[0];
      core[3] = c.state.below[1];
    }
    msl_mma(A(), core, msl_core_pair(a, false), msl_core_pair(b, true));
    simdgroup_matrix<D> r;
    r.e = vec<D, 2>(D(msl_from_core(core[0])), D(msl_from_core(core[1])));
    if constexpr (msl_same<D, float>::v) {
      r.state.below[0] = core[2];
      r.state.below[1] = core[3];
    }
    d = r;
  } else {
    msl_unflip(a);
    msl_unflip(b);
    float a0 = (float)a.e.v[0], a1 = (float)a.e.v[1], b0 = (float)b.e.v[0], b1 = (float)b.e.v[1];
    float o0 = (float)c.e.v[0], o1 = (float)c.e.v[1];
    unsigned r = msl_mrow(), c0 = msl_mcol();
#pragma unroll
    for (unsigned k = 0; k < 8; ++k) {
      float x = msl_shfl(k & 1 ? a1 : a0, msl_mlane(r, k & ~1u), 0);
      o0 = msl_fma(x, msl_shfl(b0, msl_mlane(k, c0), 0), o0);
      o1 = msl_fma(x, msl_shfl(b1, msl_mlane(k, c0), 0), o1);
    }
    simdgroup_matrix<D> result;
    result.e = vec<D, 2>(D(o0), D(o1));
    d = result;
  }
}
}  // namespace metal
