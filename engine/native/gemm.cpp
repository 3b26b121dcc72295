#include "gemm.h"

namespace tandem {

namespace {

constexpr int kIntoL2 = 2;  // of __builtin_prefetch; into L1 was slower, past the caches far slower
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int kScoreRows = 6;  // of a tile of scores: two sums each, of 32 registers
#else
constexpr int kScoreRows = 3;  // of 16
#endif

// R rows x W vectors in registers. `Prefetches`: each step asks for the weights `prefetch` bytes behind its own.
template <class Format, int W, int R, bool Prefetches>
inline void tile(const typename Format::Activation* a, long lda, const typename Format::Weight* w, long ldw, int k,
                 float* sums, long lds, bool add, long prefetch) {
  constexpr int kStepBytes = W * kLanes * Format::kStep * int(sizeof(typename Format::Weight));
  typename Format::Sum sum[R][W];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < W; v++) sum[r][v] = typename Format::Sum{};
  for (int i = 0; i < k; i += Format::kStep, w += ldw) {
    if constexpr (Prefetches)
#pragma GCC unroll 4
      for (int line = 0; line < kStepBytes; line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(w) + prefetch + line, 0, kIntoL2);
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

template <class Format, int W, bool Prefetches>
void tile(int rows, const typename Format::Activation* a, long lda, const typename Format::Weight* w, long ldw, int k,
          float* sums, long lds, bool add, long prefetch) {
  switch (rows) {
#define TANDEM_TILE(R) \
  case R:              \
    return tile<Format, W, R, Prefetches>(a, lda, w, ldw, k, sums, lds, add, prefetch);
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

// Register tiles of nearly equal height: one up to kTileRows rows, several of kRepeatedRows at most beyond. The first
// fetches the weights for all of them.
template <class Format, int W>
void tiles(int rows, const typename Format::Activation* a, long lda, const typename Format::Weight* w, long ldw, int k,
           float* sums, long lds, bool add, long prefetch) {
  for (int left = rows <= kTileRows ? 1 : (rows + kRepeatedRows - 1) / kRepeatedRows; rows > 0; left--) {
    const int height = (rows + left - 1) / left;
    if (prefetch)
      tile<Format, W, true>(height, a, lda, w, ldw, k, sums, lds, add, prefetch);
    else
      tile<Format, W, false>(height, a, lda, w, ldw, k, sums, lds, add, 0);
    prefetch = 0;
    a += height * lda;
    sums += height * lds;
    rows -= height;
  }
}

// R rows x 2 vectors of scores: sub-sums of kScoreDepth products, added up in registers.
template <int R>
void score_tile(const float* q, long ldq, const float* keys, long ldk, int depth, float* scores, bool add) {
  Vec sum[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int v = 0; v < 2; v++) sum[r][v] = add ? load(scores + r * 2 * kLanes + v * kLanes) : Vec{};
  for (int d = 0; d < depth; d += kScoreDepth) {
    Vec part[R][2] = {};
    const int end = depth - d < kScoreDepth ? depth : d + kScoreDepth;
    for (int i = d; i < end; i++) {
      const Vec key[2] = {load(keys + i * ldk), load(keys + i * ldk + kLanes)};
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Vec x = splat(q[r * ldq + i]);
        for (int v = 0; v < 2; v++) part[r][v] = fma(x, key[v], part[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int v = 0; v < 2; v++) sum[r][v] += part[r][v];
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int v = 0; v < 2; v++) store(scores + r * 2 * kLanes + v * kLanes, sum[r][v]);
}

}  // namespace

void float_tiles(int rows, const float* a, long lda, const float* w, long ldw, int k, int vectors, float* sums,
                 long lds, bool add) {
  if (vectors == kVectors)
    tiles<Float32, kVectors>(rows, a, lda, w, ldw, k, sums, lds, add, 0);
  else
    tiles<Float32, 2>(rows, a, lda, w, ldw, k, sums, lds, add, 0);
}

void score_tiles(int rows, const float* q, long ldq, const float* keys, long ldk, int depth, float* scores, bool add) {
  for (int left = (rows + kScoreRows - 1) / kScoreRows; rows > 0; left--) {
    const int height = (rows + left - 1) / left;
    switch (height) {
#define TANDEM_TILE(R) \
  case R:              \
    score_tile<R>(q, ldq, keys, ldk, depth, scores, add);  \
    break;
      TANDEM_TILE(1)
      TANDEM_TILE(2)
      TANDEM_TILE(3)
#if defined(__AVX512F__) || defined(__ARM_NEON)
      TANDEM_TILE(4)
      TANDEM_TILE(5)
      TANDEM_TILE(6)
#endif
#undef TANDEM_TILE
    }
    q += height * ldq;
    scores += height * 2 * kLanes;
    rows -= height;
  }
}

template <class Format>
void chunk_product(int rows, const typename Format::Activation* a, long lda, typename Format::Panel panel, long from,
                   long to, long prefetch, float* sums) {
  to = round_up(to, Format::kStep);
  for (long at = from; at < to; at += kDepth)
    tiles<Format, kVectors>(rows, a + at, lda, panel + at * kPanel, kPanel * Format::kStep,
                            int(to - at < kDepth ? to - at : kDepth), sums, kPanel, at > from,
                            prefetch);
}

#define TANDEM_INSTANCE(Format)                                                                                    \
  template void chunk_product<Format>(int, const Format::Activation*, long, Format::Panel, long, long, long, float*);
TANDEM_INSTANCE(Float32)
TANDEM_INSTANCE(BFloat16)
TANDEM_INSTANCE(Int8)
#undef TANDEM_INSTANCE

}  // namespace tandem
