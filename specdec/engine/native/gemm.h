// y = x W^T for packed W, every output element by one chain of multiply-adds.
//
// W's rows (output columns) lie in panels of kPanel: panel p holds [K][kPanel], so a thread reads memory in one run.
// Batch invariance: y[r][n] adds its K products in the order of k, in sub-sums of kDepth, in lane n % kPanel of its own
// accumulator. How many rows share a register tile only decides how often a loaded weight is used, never an order.
#pragma once

#include "pool.h"
#include "vector.h"

namespace tandem {

// float32 weights and activations.
struct Float32 {
  using Weight = float;
  using Activation = float;
  static constexpr int kStep = 1;  // products per element of a panel row
  struct Pair {
    Vec low, high;
  };
  static inline Pair weights(const float* p) { return {load(p), load(p + kLanes)}; }
  static inline Vec spread(const float* a) { return splat(*a); }
  static inline Vec low(Vec a, const Pair& w, Vec acc) { return fma(a, w.low, acc); }
  static inline Vec high(Vec a, const Pair& w, Vec acc) { return fma(a, w.high, acc); }
};

#if defined(__AVX512BF16__)
// bfloat16 weights and activations, float32 sums: two products per instruction. A panel row holds w[k], w[k+1] side by
// side for each column; products of bfloat16 are exact.
struct BFloat16 {
  using Weight = bf16;
  using Activation = bf16;
  static constexpr int kStep = 2;
  struct Pair {
    __m512bh low, high;
  };
  static inline Pair weights(const bf16* p) {
    return {(__m512bh)_mm512_loadu_si512(p), (__m512bh)_mm512_loadu_si512(p + kPanel)};
  }
  static inline __m512bh spread(const bf16* a) {
    int32_t two;
    std::memcpy(&two, a, 4);
    return (__m512bh)_mm512_set1_epi32(two);
  }
  static inline Vec low(__m512bh a, const Pair& w, Vec acc) { return (Vec)_mm512_dpbf16_ps((__m512)acc, w.low, a); }
  static inline Vec high(__m512bh a, const Pair& w, Vec acc) { return (Vec)_mm512_dpbf16_ps((__m512)acc, w.high, a); }
};
#else
// bfloat16 weights widened in registers, float32 activations. Word j of a panel row holds column j in its low and
// column j + kLanes in its high half.
struct BFloat16 {
  using Weight = bf16;
  using Activation = float;
  static constexpr int kStep = 1;
  struct Pair {
    Vec low, high;
  };
  static inline Pair weights(const bf16* p) {
    UVec word = load_as<UVec>(p);
    return {(Vec)(word << 16), (Vec)(word & 0xffff0000u)};
  }
  static inline Vec spread(const float* a) { return splat(*a); }
  static inline Vec low(Vec a, const Pair& w, Vec acc) { return fma(a, w.low, acc); }
  static inline Vec high(Vec a, const Pair& w, Vec acc) { return fma(a, w.high, acc); }
};
#endif

// Elements of one panel: K rounded up to whole steps. Activations are padded with zeros to the same K.
template <class Format>
inline long panel_size(long k) {
  return round_up(k, Format::kStep) * kPanel;
}

// sums[r][0..kPanel) (+)= a[r][0..k) · w[0..k)[0..kPanel) for any number of rows. `ldw` counts elements from one step
// of w to the next. Defined in gemm.cpp for both formats, where the register tiles are compiled once.
template <class Format>
void tiles(int rows, const typename Format::Activation* a, long lda, const typename Format::Weight* w, long ldw, int k,
           float* sums, long lds, bool add);

// sums[rows][kPanel] = a · one panel.
template <class Format>
void panel_product(int rows, const typename Format::Activation* a, long lda, const typename Format::Weight* panel, long k,
                   float* sums);

// Activation rows lie this far apart: whole panels, zero padded, plus a cache line so that rows a power of two long do
// not all fall into the same cache sets.
inline long row_stride(long n) { return round_up(n, 64) + 32; }

constexpr int kRowBlock = 192;  // rows a thread takes at a time: their sums stay in the L1 cache

// Floats of scratch memory each thread needs for `group` panels at a time.
inline long product_scratch(int rows, int group) {
  return long(rows < kRowBlock ? rows : kRowBlock) * kPanel * group;
}

// All groups of `group` neighbouring panels times all rows, shared out over the team; groups lie `stride` elements
// apart. done(first_row, rows, index of the group, sums) sees sums[panel of the group][row][kPanel].
template <class Format, class Done>
inline void product(Team& team, Counter& counter, int rows, const typename Format::Activation* a, long lda,
                    const typename Format::Weight* weight, long k, int groups, int group, long stride, float* sums, Done&& done) {
  int blocks = (rows + kRowBlock - 1) / kRowBlock;
  int height = (rows + blocks - 1) / blocks;
  for (int item; (item = team.next(counter)) < groups * blocks;) {
    int index = item / blocks;
    int first = item % blocks * height;
    int count = rows - first < height ? rows - first : height;
    for (int i = 0; i < group; i++)
      panel_product<Format>(count, a + first * lda, lda, weight + index * stride + i * panel_size<Format>(k), k,
                            sums + long(i) * count * kPanel);
    done(first, count, index, sums);
  }
}

}  // namespace tandem
