// y = x W^T for packed W, every output element by one chain of multiply-adds.
//
// W's rows (output columns) lie in panels of kPanel: panel p holds [K][kPanel], so a thread reads memory in one run.
// Batch invariance: y[r][n] adds its K products in the order of k, in sub-sums of kDepth, in lane n % kPanel of its own
// accumulator. How many rows share a register tile only decides how often a loaded weight is used, never an order.
#pragma once

#include "pool.h"
#include "vector.h"

namespace tandem {

constexpr int kDepth = 512;          // products per sub-sum; a panel's share of it stays in the L2 cache
constexpr int kPrefetchBytes = 2048;  // ahead in the weights: across the page where the hardware's own prefetch stops

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

// sums[r][0..kPanel) (+)= a[r][0..k) · w[0..k)[0..kPanel) for R rows. `ldw` counts elements from one step of w to the
// next.
template <class Format, int R>
inline void tile(const typename Format::Activation* a, long lda, const typename Format::Weight* w, long ldw, int k,
                 float* sums, long lds, bool add) {
  Vec low[R], high[R];
  for (int r = 0; r < R; r++) low[r] = high[r] = Vec{};
  for (int i = 0; i < k; i += Format::kStep) {
    typename Format::Pair pair = Format::weights(w);
    __builtin_prefetch(reinterpret_cast<const char*>(w) + kPrefetchBytes);
    if (sizeof(typename Format::Weight) * kPanel * Format::kStep > 64)
      __builtin_prefetch(reinterpret_cast<const char*>(w) + kPrefetchBytes + 64);
    w += ldw;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      auto x = Format::spread(a + r * lda + i);
      low[r] = Format::low(x, pair, low[r]);
      high[r] = Format::high(x, pair, high[r]);
    }
  }
  for (int r = 0; r < R; r++) {
    float* s = sums + r * lds;
    if (add) {
      low[r] += load(s);
      high[r] += load(s + kLanes);
    }
    store(s, low[r]);
    store(s + kLanes, high[r]);
  }
}

template <class Format>
__attribute__((noinline)) void tile(int rows, const typename Format::Activation* a, long lda, const typename Format::Weight* w, long ldw,
                 int k, float* sums, long lds, bool add) {
  switch (rows) {
#define TANDEM_TILE(R) \
  case R:              \
    return tile<Format, R>(a, lda, w, ldw, k, sums, lds, add);
    TANDEM_TILE(1)
    TANDEM_TILE(2)
    TANDEM_TILE(3)
    TANDEM_TILE(4)
    TANDEM_TILE(5)
    TANDEM_TILE(6)
#if defined(__AVX512F__) || defined(__ARM_NEON)
    TANDEM_TILE(7)
    TANDEM_TILE(8)
    TANDEM_TILE(9)
    TANDEM_TILE(10)
    TANDEM_TILE(11)
    TANDEM_TILE(12)
#endif
#undef TANDEM_TILE
  }
}

// Any number of rows, in register tiles of nearly equal height.
template <class Format>
inline void tiles(int rows, const typename Format::Activation* a, long lda, const typename Format::Weight* w, long ldw,
                  int k, float* sums, long lds, bool add) {
  for (int left = (rows + kMaxTile - 1) / kMaxTile; rows > 0; left--) {
    int height = (rows + left - 1) / left;
    tile<Format>(height, a, lda, w, ldw, k, sums, lds, add);
    a += height * lda;
    sums += height * lds;
    rows -= height;
  }
}

// sums[rows][kPanel] = a · one panel.
template <class Format>
inline void panel_product(int rows, const typename Format::Activation* a, long lda,
                          const typename Format::Weight* panel, long k, float* sums) {
  k = round_up(k, Format::kStep);
  for (long from = 0; from < k; from += kDepth) {
    int depth = int(k - from < kDepth ? k - from : kDepth);
    tiles<Format>(rows, a + from, lda, panel + from * kPanel, kPanel * Format::kStep, depth, sums, kPanel, from > 0);
  }
}

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
inline void product(Counter& counter, int rows, const typename Format::Activation* a, long lda,
                    const typename Format::Weight* weight, long k, int groups, int group, long stride, float* sums, Done&& done) {
  int blocks = (rows + kRowBlock - 1) / kRowBlock;
  int height = (rows + blocks - 1) / blocks;
  for (int item; (item = counter.next()) < groups * blocks;) {
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
