#include "gemm.h"

namespace tandem {

namespace {

constexpr int kDepth = 512;           // products per sub-sum; a panel's share of it stays in the L2 cache
constexpr int kPrefetchBytes = 2048;  // ahead in the weights: across the page where the hardware's own prefetch stops

// R rows in registers.
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
void tile(int rows, const typename Format::Activation* a, long lda, const typename Format::Weight* w, long ldw,
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

}  // namespace

// Register tiles of nearly equal height.
template <class Format>
void tiles(int rows, const typename Format::Activation* a, long lda, const typename Format::Weight* w, long ldw, int k,
           float* sums, long lds, bool add) {
  for (int left = (rows + kMaxTile - 1) / kMaxTile; rows > 0; left--) {
    int height = (rows + left - 1) / left;
    tile<Format>(height, a, lda, w, ldw, k, sums, lds, add);
    a += height * lda;
    sums += height * lds;
    rows -= height;
  }
}

template <class Format>
void panel_product(int rows, const typename Format::Activation* a, long lda, const typename Format::Weight* panel, long k,
                   float* sums) {
  k = round_up(k, Format::kStep);
  for (long from = 0; from < k; from += kDepth) {
    int depth = int(k - from < kDepth ? k - from : kDepth);
    tiles<Format>(rows, a + from, lda, panel + from * kPanel, kPanel * Format::kStep, depth, sums, kPanel, from > 0);
  }
}

#define TANDEM_INSTANCES(Format)                                                                                     \
  template void tiles<Format>(int, const Format::Activation*, long, const Format::Weight*, long, int, float*, long,  \
                              bool);                                                                                 \
  template void panel_product<Format>(int, const Format::Activation*, long, const Format::Weight*, long, float*);
TANDEM_INSTANCES(Float32)
TANDEM_INSTANCES(BFloat16)
#undef TANDEM_INSTANCES

}  // namespace tandem
