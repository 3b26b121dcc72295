// Products of grouped weights, and packing them.
#include "gemm.h"
#include "struct_table.h"

#if defined(__SSSE3__)
#include <tmmintrin.h>
#endif

namespace tandem {

namespace {

constexpr int kIntoL2 = 2;  // of __builtin_prefetch

// How 4 weights of each column meet 4 activations: Factor, the weights; Spread, the activations in every lane. Weights are
// kShift above what they mean where the instruction wants no sign; then a sum begins with -kShift times the activations'.
#if defined(__AVX512VNNI__)
constexpr int kShift = 128;
using Factor = __m512i;
using Spread = __m512i;
inline Factor factor(Bytes w) { return (__m512i)w; }
inline Spread spread(const int8_t* a) { return _mm512_set1_epi32(load_as<int32_t>(a)); }
inline IVec dot(IVec sum, Factor w, Spread a) { return (IVec)_mm512_dpbusd_epi32((__m512i)sum, w, a); }
#elif defined(__AVX512BW__)
constexpr int kShift = 0;
struct Factor {
  __m512i even, odd;
};
using Spread = Factor;
inline Factor halves(__m512i x) { return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)}; }
inline Factor factor(Bytes w) { return halves((__m512i)w); }
inline Spread spread(const int8_t* a) { return halves(_mm512_set1_epi32(load_as<int32_t>(a))); }
inline IVec dot(IVec sum, Factor w, Spread a) {
  return sum + (IVec)_mm512_madd_epi16(w.even, a.even) + (IVec)_mm512_madd_epi16(w.odd, a.odd);
}
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__) && defined(__AVXVNNI__)
constexpr int kShift = 128;
using Factor = __m256i;
using Spread = __m256i;
inline Factor factor(Bytes w) { return (__m256i)w; }
inline Spread spread(const int8_t* a) { return _mm256_set1_epi32(load_as<int32_t>(a)); }
inline IVec dot(IVec sum, Factor w, Spread a) { return (IVec)_mm256_dpbusd_avx_epi32((__m256i)sum, w, a); }
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
// Pairs are summed in 16 bits: 2 x 128 x 127 fits, as long as the magnitudes are the weights'.
constexpr int kShift = 0;
struct Factor {
  __m256i weights, magnitudes;
};
using Spread = __m256i;
inline Factor factor(Bytes w) { return {(__m256i)w, _mm256_abs_epi8((__m256i)w)}; }
inline Spread spread(const int8_t* a) { return _mm256_set1_epi32(load_as<int32_t>(a)); }
inline IVec dot(IVec sum, Factor w, Spread a) {
  const __m256i pairs = _mm256_maddubs_epi16(w.magnitudes, _mm256_sign_epi8(a, w.weights));
  return sum + (IVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#elif defined(__ARM_NEON) && !defined(__AVX512F__)
constexpr int kShift = 0;
using Factor = int8x16_t;
using Spread = int8x16_t;
inline Factor factor(Bytes w) { return (int8x16_t)w; }
inline Spread spread(const int8_t* a) { return vreinterpretq_s8_s32(vdupq_n_s32(load_as<int32_t>(a))); }
inline IVec dot(IVec sum, Factor w, Spread a) {
#if defined(__ARM_FEATURE_DOTPROD)
  return (IVec)vdotq_s32((int32x4_t)sum, w, a);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(a)), high = vmull_high_s8(w, a);
  return sum + (IVec)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
}
#else
constexpr int kShift = 0;
using Factor = IVec;
using Spread = IVec;
inline Factor factor(Bytes w) { return (IVec)w; }
inline Spread spread(const int8_t* a) { return load_as<int32_t>(a) - IVec{}; }
inline IVec dot(IVec sum, Factor w, Spread a) {
  for (int shift = 24; shift >= 0; shift -= 8) sum += ((w << shift) >> 24) * ((a << shift) >> 24);
  return sum;
}
#endif

template <class V>
inline void keep_in_register(V& v) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(v));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(v));
#elif defined(__ARM_NEON)
  asm volatile("" : "+w"(v));
#else
  (void)v;
#endif
}

inline Bytes look_up(Bytes table, Bytes codes) {
#if defined(__AVX512BW__)
  return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#elif defined(__ARM_NEON)
  return (Bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
#elif defined(__SSSE3__) && !defined(__AVX512F__)
  return (Bytes)_mm_shuffle_epi8((__m128i)table, (__m128i)codes);
#else
  Bytes found;
  for (size_t i = 0; i < sizeof(Bytes); i++) found[i] = table[codes[i]];
  return found;
#endif
}

// What a chain of a tile reads: the codes of the columns and their scales, offsets behind those; activations, and for each
// row its scale and the sum of its activations.
struct Chain {
  const uint8_t* codes;
  const float* scales;
  const int8_t* activations;
  const int8_t* row_scales;
  const int8_t* row_sums;
  long lda, inputs, prefetch;
};

// R rows x W vectors: adds one chain to the sums. `OneGroup`: the columns' scales are left out.
template <int Bits, int W, int R, bool OneGroup>
__attribute__((always_inline)) inline void multiply_chain(const Chain& chain, const Bytes& entries, bool has_offsets, float* sums) {
  constexpr int kInputs = Bits == 4 ? 8 : 4;  // of a step
  const Bytes table = entries;
  const long lda = chain.lda;
  const long ahead = chain.prefetch;
  const uint8_t* codes = chain.codes;
  const int8_t* a = chain.activations;
  IVec whole[R][W];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const IVec start = -kShift * load_as<int32_t>(chain.row_sums + r * lda) - IVec{};
#pragma GCC unroll 4
    for (int v = 0; v < W; v++) whole[r][v] = start;
  }
  for (const int8_t* end = a + chain.inputs; a < end; a += kInputs, codes += kPanel * 4) {
#pragma GCC unroll 4
    for (int line = 0; line < W * kLanes * 4; line += 64) __builtin_prefetch(codes + ahead + line, 0, kIntoL2);
    // Of 4 bits first the low halves, then the high ones, read anew: both would not fit into registers beside the sums.
#pragma GCC unroll 2
    for (int half = 0; half < (Bits == 4 ? 2 : 1); half++) {
      Factor weights[W];
#pragma GCC unroll 4
      for (int v = 0; v < W; v++) {
        const Bytes bytes = load_as<Bytes>(codes + v * kLanes * 4);
        if constexpr (Bits == 4)
          weights[v] = factor(look_up(table, half ? bytes >> 4 : bytes & 15));
        else
          weights[v] = factor(bytes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const Spread x = spread(a + r * lda + half * 4);
#pragma GCC unroll 4
        for (int v = 0; v < W; v++) whole[r][v] = dot(whole[r][v], weights[v], x);
      }
    }
  }
  // Else GCC 12 keeps them in memory for the sake of what follows.
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < W; v++) keep_in_register(whole[r][v]);
  Vec scales[W];
#pragma GCC unroll 4
  for (int v = 0; v < W; v++) scales[v] = load(chain.scales + v * kLanes);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const Vec scale = splat(load_as<float>(chain.row_scales + r * lda));
#pragma GCC unroll 4
    for (int v = 0; v < W; v++) {
      float* sum = sums + r * kPanel + v * kLanes;
      store(sum, fma(OneGroup ? scale : scales[v] * scale, __builtin_convertvector(whole[r][v], Vec), load(sum)));
    }
  }
  if (OneGroup || !has_offsets) return;
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const float scale = load_as<float>(chain.row_scales + r * lda);
    const Vec x = splat(-scale * float(load_as<int32_t>(chain.row_sums + r * lda)));
#pragma GCC unroll 4
    for (int v = 0; v < W; v++) {
      float* sum = sums + r * kPanel + v * kLanes;
      store(sum, fma(load(chain.scales + kPanel + v * kLanes), x, load(sum)));
    }
  }
}

// The same as a function of its own with one loop: else compilers keep the sums of many rows in memory.
template <int Bits, int W, int R, bool OneGroup>
__attribute__((noinline)) void add_chain(const Chain& chain, const Bytes& entries, bool has_offsets, float* sums) {
  multiply_chain<Bits, W, R, OneGroup>(chain, entries, has_offsets, sums);
}

// R rows x W vectors of a panel's columns from `first` on; sums are added to.
template <int Bits, int W, int R, bool OneGroup>
void tile(const int8_t* a, long lda, Grouped::Panel panel, long from, long to, int first, float* sums, long prefetch) {
  const GroupedHeader& header = Grouped::header(panel);
  const Bytes table = header.table;
  const uint8_t* block = panel + kHeaderBytes + from / header.group * header.block_bytes;
  long left = header.group - from % header.group;  // inputs of the block
  const long step = header.chain * header.bits / 8 * kPanel;
  const int8_t* row_scales = a + Grouped::scales_at(header.inputs);
  const int8_t* row_sums = a + Grouped::sums_at(header.inputs, header.chain) + from / header.chain * 4;
  Chain chain{nullptr, nullptr, nullptr, nullptr, nullptr, lda, header.chain, prefetch};
  chain.codes = block + header.codes_at + (header.group - left) * header.bits / 8 * kPanel + first * kLanes * 4;
  for (long at = from; at < to; at += header.chain, left -= header.chain, chain.codes += step, row_sums += 4) {
    if (left == 0) {
      block += header.block_bytes;
      left = header.group;
      chain.codes = block + header.codes_at + first * kLanes * 4;
    }
    chain.scales = reinterpret_cast<const float*>(block) + first * kLanes;
    chain.activations = a + at;
    chain.row_scales = row_scales + at / kRun * 4;
    chain.row_sums = row_sums;
    if constexpr (R < 4)
      multiply_chain<Bits, W, R, OneGroup>(chain, table, header.has_offsets, sums);
    else
      add_chain<Bits, W, R, OneGroup>(chain, table, header.has_offsets, sums);
  }
}

template <int Bits, bool OneGroup, int R>
void wide_tile(const int8_t* a, long lda, Grouped::Panel panel, long from, long to, float* sums, long prefetch) {
  constexpr int W = R > 6 && kVectors > 2 ? 2 : kVectors;
  for (int first = 0; first < kVectors; first += W)
    tile<Bits, W, R, OneGroup>(a, lda, panel, from, to, first, sums + first * kLanes, prefetch);
}

template <int Bits, bool OneGroup>
void rows_of_tile(int rows, const int8_t* a, long lda, Grouped::Panel panel, long from, long to, float* sums, long prefetch) {
  switch (rows) {
#define TANDEM_TILE(R) \
  case R:              \
    return wide_tile<Bits, OneGroup, R>(a, lda, panel, from, to, sums, prefetch);
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

}  // namespace

template <>
void chunk_product<Grouped>(int rows, const int8_t* a, long lda, Grouped::Panel panel, long from, long to, long prefetch,
                            float* sums) {
  const GroupedHeader& header = Grouped::header(panel);
  const bool one_group = header.group == header.inputs && !header.has_offsets;
  auto run = header.bits == 4 ? one_group ? rows_of_tile<4, true> : rows_of_tile<4, false>
             : one_group      ? rows_of_tile<8, true>
                              : rows_of_tile<8, false>;
  to = round_up(to, kRun);
  std::memset(sums, 0, size_t(rows) * kPanel * sizeof(float));
  for (long at = from; at < to; at += kDepth) {
    const long end = to < at + kDepth ? to : at + kDepth;
    long ahead = prefetch;
    int left = rows <= kTileRows ? 1 : (rows + kRepeatedRows - 1) / kRepeatedRows;
    for (int first = 0; first < rows; left--) {
      const int height = (rows - first + left - 1) / left;
      run(height, a + first * lda, lda, panel, at, end, sums + first * kPanel, ahead);
      ahead = 0;
      first += height;
    }
  }
  if (!one_group) return;
  const float* scales = reinterpret_cast<const float*>(panel + kHeaderBytes);
  for (int v = 0; v < kPanel; v += kLanes) {
    const Vec scale = load(scales + v);
    for (int r = 0; r < rows; r++) store(sums + r * kPanel + v, load(sums + r * kPanel + v) * scale);
  }
}

// A weight [n, k] row-major: codes of 4 bits, two to a byte, the first in the low half, rows of (k + 1) / 2 bytes; or
// int8. Scales and offsets (or null) [n, groups].
struct GroupedSource {
  const uint8_t* codes;
  const int8_t* table;  // [16], null for 8 bits
  const float* scales;
  const float* offsets;
  const int32_t* order;  // [k] or null: which activation each input is; it must outlive the panels
  int64_t n, k, group;   // group: 0 is all inputs
  int32_t bits;
};
TANDEM_STRUCT(GroupedSource, codes, table, scales, offsets, order, n, k, group, bits)

namespace {

GroupedHeader header_of(const GroupedSource& source) {
  GroupedHeader header{};
  header.inputs = Grouped::inputs(source.k);
  header.group = source.group > 0 && source.group < header.inputs ? source.group : header.inputs;
  header.chain = header.group % 64 == 0 ? 64 : header.group % 32 == 0 ? 32 : 16;
  header.bits = source.bits;
  header.has_offsets = source.offsets != nullptr;
  header.order = source.order;
  header.codes_at = kPanel * (header.has_offsets ? 8 : 4);
  header.block_bytes = header.codes_at + header.group * kPanel * source.bits / 8;
  header.panel_bytes = kHeaderBytes + (header.inputs + header.group - 1) / header.group * header.block_bytes;
  if (source.table)
    for (size_t i = 0; i < sizeof(Bytes); i++) header.table[i] = uint8_t(source.table[i % 16] + kShift);
  return header;
}

void pack_panel(const GroupedSource& source, const GroupedHeader& header, long column, uint8_t* panel) {
  const long columns = source.n - column < kPanel ? source.n - column : kPanel;
  const long blocks = (header.inputs + header.group - 1) / header.group;
  const long groups = (source.k + header.group - 1) / header.group;
  std::memset(panel, 0, size_t(header.panel_bytes));
  std::memcpy(panel, &header, sizeof(header));
  for (long b = 0; b < blocks; b++) {
    uint8_t* block = panel + kHeaderBytes + b * header.block_bytes;
    uint8_t* codes = block + header.codes_at;
    const long from = b * header.group, to = from + header.group < source.k ? from + header.group : source.k;
    for (long j = 0; j < columns; j++) {
      const long n = column + j;
      if (b < groups) {
        std::memcpy(block + j * 4, source.scales + n * groups + b, 4);
        if (source.offsets) std::memcpy(block + kPanel * 4 + j * 4, source.offsets + n * groups + b, 4);
      }
      const uint8_t* row = source.codes + n * (source.bits == 4 ? (source.k + 1) / 2 : source.k);
      for (long k = from; k < to; k++) {
        const long i = k - from;
        if (source.bits == 4)
          codes[(i / 8 * kPanel + j) * 4 + i % 4] |= uint8_t((row[k / 2] >> k % 2 * 4 & 15) << (i % 8 / 4 * 4));
        else
          codes[(i / 4 * kPanel + j) * 4 + i % 4] = uint8_t(row[k] + kShift);
      }
    }
  }
}

}  // namespace
}  // namespace tandem

using namespace tandem;

#define TANDEM_API extern "C" __attribute__((visibility("default")))

// Bytes of a panel.
TANDEM_API int64_t tandem_grouped_panel_bytes(const GroupedSource* source) { return header_of(*source).panel_bytes; }

// Panels at memory, memory + memory_step, …; entries first_panel, first_panel + panel_step, … of the list name them.
TANDEM_API void tandem_pack_grouped(const GroupedSource* source, char* memory, int64_t memory_step, const uint8_t** list,
                                    int64_t first_panel, int64_t panel_step, int threads) {
  const GroupedHeader header = header_of(*source);
  const long panels = (source->n + kPanel - 1) / kPanel;
  Counter counter;
  Pool::local().run(threads, [&](Team& team) {
    for (long p; (p = team.next(counter)) < panels;) {
      uint8_t* panel = reinterpret_cast<uint8_t*>(memory) + p * memory_step;
      pack_panel(*source, header, p * kPanel, panel);
      list[first_panel + p * panel_step] = panel;
    }
  });
}
