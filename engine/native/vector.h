// The one vector type the kernels are written in: 16, 8 or 4 floats, whatever the machine has.
//
// GCC's and clang's vector extensions give arithmetic, comparison and selection on every architecture; only the fused
// multiply-add and bf16 dot product are intrinsics. The build turns the compiler's own contraction off, so whether a
// product is fused is written here and cannot differ between two instances of one kernel: batch invariance rests on it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace tandem {

// A register tile holds up to kTileRows rows x kVectors vectors of sums: the wider, the fewer loads for each product.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4, kTileRows = 8;  // of 32 registers: eight rows spill, but read the weights once
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8, kVectors = 2, kTileRows = 6;  // of 16
#elif defined(__ARM_NEON)
constexpr int kLanes = 4, kVectors = 4, kTileRows = 6;  // of 32
#else
constexpr int kLanes = 4, kVectors = 2, kTileRows = 6;  // of 16
#endif

// Rows of a tile where several share the weights: none spills. With 24 rows and more a thread of an Intel Xeon (Emerald
// Rapids) makes 1.08 to 1.26 times as many products as with eight.
constexpr int kRepeatedRows = 6;

constexpr int kPanel = kVectors * kLanes;  // output columns that are computed together

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HVec __attribute__((vector_size(kLanes * 2)));
typedef uint8_t SVec __attribute__((vector_size(kLanes)));

struct bf16 {
  uint16_t bits;
};

template <class V, class T>
inline V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

inline Vec splat(float x) { return x - Vec{}; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t word = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &word, 4);
  return f;
}

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  if (x != x) return bf16{uint16_t((word >> 16) | 0x40)};
  return bf16{uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16)};
}

inline Vec load(const float* p) { return load_as<Vec>(p); }
inline Vec load(const bf16* p) {
  UVec wide = __builtin_convertvector(load_as<HVec>(p), UVec) << 16;
  return (Vec)wide;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
inline void store(bf16* p, Vec v) {
  UVec word = (UVec)v;
  UVec rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  UVec nan = (word >> 16) | 0x40;
  UVec bits = (v != v) ? nan : rounded;
  HVec half = __builtin_convertvector(bits, HVec);
  std::memcpy(p, &half, sizeof(half));
}
inline void store_one(float* p, float x) { *p = x; }
inline void store_one(bf16* p, float x) { *p = to_bf16(x); }

// The first n (1 <= n <= kLanes) lanes only; the others read as 0 and are not written.
template <class T>
inline Vec load_part(const T* p, int n) {
  if (n >= kLanes) return load(p);
  T tmp[kLanes] = {};
  std::memcpy(tmp, p, size_t(n) * sizeof(T));
  return load(tmp);
}
template <class T>
inline void store_part(T* p, Vec v, int n) {
  if (n >= kLanes) return store(p, v);
  T tmp[kLanes];
  store(tmp, v);
  std::memcpy(p, tmp, size_t(n) * sizeof(T));
}

// a * b + c, rounded once where the machine can.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// (a > b) ? a : b and (a < b) ? a : b. GCC makes a mask and a blend of those: silu and rounding take 1.14 times as long.
#if defined(__AVX512F__)
inline Vec max(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
inline Vec min(Vec a, Vec b) { return (Vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__) && defined(__FMA__)
inline Vec max(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
inline Vec min(Vec a, Vec b) { return (Vec)_mm256_min_ps((__m256)a, (__m256)b); }
#else
inline Vec max(Vec a, Vec b) { return (a > b) ? a : b; }
inline Vec min(Vec a, Vec b) { return (a < b) ? a : b; }
#endif

// Halves combined pairwise: one fixed order for every caller.
template <class Combine>
inline float fold(Vec v, Combine combine) {
#if defined(__AVX512F__)
  typedef float Half __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  Half a, b;
  std::memcpy(&a, &v, 32);
  std::memcpy(&b, reinterpret_cast<const char*>(&v) + 32, 32);
  a = combine(a, b);
  Quarter c, d;
  std::memcpy(&c, &a, 16);
  std::memcpy(&d, reinterpret_cast<const char*>(&a) + 16, 16);
  c = combine(c, d);
  const float even = combine(c[0], c[2]), odd = combine(c[1], c[3]);
  return combine(even, odd);
#else
  float x[kLanes];
  store(x, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x[i] = combine(x[i], x[i + half]);
  return x[0];
#endif
}
inline float sum(Vec v) {
  return fold(v, [](auto a, auto b) { return a + b; });
}
inline float largest(Vec v) {
  return fold(v, [](auto a, auto b) { return a > b ? a : b; });
}

// out[i] = sum(v[i]), to the bit.
template <int kCount>
inline void sums(const Vec (&v)[kCount], float* out) {
#if defined(__AVX512F__)
  if constexpr (kCount == 16) {  // the halves of two vectors, then of four, … side by side
    __m512 a[8], b[4];
    auto of = [&](int i) { return (__m512)v[4 * (i % 4) + i / 4]; };  // the order that comes out as `v` is
    for (int i = 0; i < 8; i++)
      a[i] = _mm512_shuffle_f32x4(of(2 * i), of(2 * i + 1), 0x44) + _mm512_shuffle_f32x4(of(2 * i), of(2 * i + 1), 0xee);
    for (int i = 0; i < 4; i++)
      b[i] = _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88) + _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd);
    for (int i = 0; i < 2; i++)
      a[i] = _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0x44) + _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0xee);
    return store(out, (Vec)(_mm512_shuffle_ps(a[0], a[1], 0x88) + _mm512_shuffle_ps(a[0], a[1], 0xdd)));
  }
#endif
  for (int i = 0; i < kCount; i++) out[i] = sum(v[i]);
}

// e^x to 2 ulp, clamped to the range of normal floats (Cephes' expf).
inline Vec exp(Vec x) {
  x = min(max(x, splat(-87.33654f)), splat(88.37626f));
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  Vec shifted = fma(x, splat(1.44269504088896341f), splat(magic));
  Vec n = shifted - magic;
  Vec r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  IVec exponent = __builtin_convertvector(n, IVec) << 23;
  return (Vec)((IVec)p + exponent);
}

inline Vec tanh(Vec x) {
  Vec e = exp(x * 2.0f);
  return 1.0f - 2.0f / (e + 1.0f);
}

inline long round_up(long n, long step) { return (n + step - 1) / step * step; }

}  // namespace tandem
