#include "gemm.h"

namespace tandem {

namespace {

// R rows x W vectors in registers. The weights are not prefetched by hand: the hardware follows one stream well, and the
// instructions cost more than they gained.
template <class Format, int W, int R>
inline void tile(const typename Format::Activation* a, long lda, const typename Format::Weight* w, long ldw, int k,
                 float* sums, long lds, bool add) {
  typename Format::Sum sum[R][W];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < W; v++) sum[r][v] = typename Format::Sum{};
  for (int i = 0; i < k; i += Format::kStep, w += ldw) {
    typename Format::Factor factor[W];
#pragma GCC unroll 4
    for (int v = 0; v < W; v++) factor[v] = Format::weights(w, v);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const auto x = Format::spread(a + r * lda + i);
#pragma GCC unroll 4
      for (int v = 0; v < W; v++) sum[r][v] = Format::add(x, factor[v], sum[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < W; v++) {
      float* s = sums + r * lds + v * kLanes;
      const Vec value = Format::value(sum[r][v]);
      store(s, add ? load(s) + value : value);
    }
}

template <class Format, int W>
void tile(int rows, const typename Format::Activation* a, long lda, const typename Format::Weight* w, long ldw, int k,
          float* sums, long lds, bool add) {
  switch (rows) {
#define TANDEM_TILE(R) \
  case R:              \
    return tile<Format, W, R>(a, lda, w, ldw, k, sums, lds, add);
    TANDEM_TILE(1)
    TANDEM_TILE(2)
    TANDEM_TILE(3)
    TANDEM_TILE(4)
    TANDEM_TILE(5)
    TANDEM_TILE(6)
#if defined(__AVX512F__)
    TANDEM_TILE(7)
    TANDEM_TILE(8)
#endif
#undef TANDEM_TILE
  }
}

// Register tiles of nearly equal height.
template <class Format, int W>
void tiles(int rows, const typename Format::Activation* a, long lda, const typename Format::Weight* w, long ldw, int k,
           float* sums, long lds, bool add) {
  for (int left = (rows + kTileRows - 1) / kTileRows; rows > 0; left--) {
    const int height = (rows + left - 1) / left;
    tile<Format, W>(height, a, lda, w, ldw, k, sums, lds, add);
    a += height * lda;
    sums += height * lds;
    rows -= height;
  }
}

}  // namespace

void float_tiles(int rows, const float* a, long lda, const float* w, long ldw, int k, int vectors, float* sums,
                 long lds, bool add) {
  if (vectors == kVectors)
    tiles<Float32, kVectors>(rows, a, lda, w, ldw, k, sums, lds, add);
  else
    tiles<Float32, 2>(rows, a, lda, w, ldw, k, sums, lds, add);
}

template <class Format>
void chunk_product(int rows, const typename Format::Activation* a, long lda, const typename Format::Weight* panel,
                   long from, long to, float* sums) {
  to = round_up(to, Format::kStep);
  for (long at = from; at < to; at += kDepth)
    tiles<Format, kVectors>(rows, a + at, lda, panel + at * kPanel, kPanel * Format::kStep,
                            int(to - at < kDepth ? to - at : kDepth), sums, kPanel, at > from);
}

#define TANDEM_INSTANCE(Format)                                                                                    \
  template void chunk_product<Format>(int, const Format::Activation*, long, const Format::Weight*, long, long, float*);
TANDEM_INSTANCE(Float32)
TANDEM_INSTANCE(BFloat16)
TANDEM_INSTANCE(Int8)
#undef TANDEM_INSTANCE

}  // namespace tandem
