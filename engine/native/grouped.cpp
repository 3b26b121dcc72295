// Products of grouped weights, and packing them.
#include "amx.h"
#include "gemm.h"
#include "struct_table.h"

#if defined(__SSSE3__)
#include <tmmintrin.h>
#endif

namespace tandem {

namespace {

constexpr int kIntoL2 = 2;  // of __builtin_prefetch

// How 4 weights of each column meet 4 activations: Factor, the weights; Spread, the activations in every lane.
#if defined(__AVX512VNNI__)
using Factor = __m512i;
using Spread = __m512i;
inline Factor factor(Bytes w) { return (__m512i)w; }
inline Spread spread(const int8_t* a) { return _mm512_set1_epi32(load_as<int32_t>(a)); }
inline IVec dot(IVec sum, Factor w, Spread a) { return (IVec)_mm512_dpbusd_epi32((__m512i)sum, w, a); }
#elif defined(__AVX512BW__)
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
using Factor = __m256i;
using Spread = __m256i;
inline Factor factor(Bytes w) { return (__m256i)w; }
inline Spread spread(const int8_t* a) { return _mm256_set1_epi32(load_as<int32_t>(a)); }
inline IVec dot(IVec sum, Factor w, Spread a) { return (IVec)_mm256_dpbusd_avx_epi32((__m256i)sum, w, a); }
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
// Pairs are summed in 16 bits: 2 x 128 x 127 fits, as long as the magnitudes are the weights'.
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
using Factor = IVec;
using Spread = IVec;
inline Factor factor(Bytes w) { return (IVec)w; }
inline Spread spread(const int8_t* a) { return load_as<int32_t>(a) - IVec{}; }
inline IVec dot(IVec sum, Factor w, Spread a) {
  for (int shift = 24; shift >= 0; shift -= 8) sum += ((w << shift) >> 24) * ((a << shift) >> 24);
  return sum;
}
#endif

inline void keep_in_register(const int8_t*& at) { asm volatile("" : "+r"(at)); }
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

// Sums of a tile that fit into registers beside those of its chain, and the rows of the highest tile.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int kHeldSums = 12;
#else
constexpr int kHeldSums = 6;
#endif
constexpr int kMostRows = 6;

constexpr int kLines = kPanel * 4 / 64 > 0 ? kPanel * 4 / 64 : 1;  // of a step's weights

// R rows x W vectors of a panel's columns from `first` on; sums are added to. `OneGroup`: the columns' scales are left out.
// `Fetched`: so many lines are asked for in each step, `prefetch` bytes behind its own weights.
template <int Bits, int W, int R, bool OneGroup, int Fetched>
__attribute__((noinline)) void tile(const int8_t* a, long lda, Grouped::Panel panel, long from, long to, int first,
                                    float* sums, long prefetch) {
  constexpr int kInputs = Bits == 4 ? 8 : 4;  // of a step
  const GroupedHeader& header = Grouped::header(panel);
  const bool has_offsets = !OneGroup && header.has_offsets;
  const long length = OneGroup ? kRun : header.chain;
  const uint8_t* block = panel + kHeaderBytes + from / header.group * header.block_bytes;
  long left = header.group - from % header.group;  // inputs of the block
  const uint8_t* codes = block + header.codes_at + (header.group - left) * Bits / 8 * kPanel + first * kLanes * 4;
  const Bytes table = header.table;
  constexpr bool kHolds = R * W <= kHeldSums;  // the sums, in registers
  Vec held[R][W];
  auto sum_at = [&](int r, int v) { return sums + r * kPanel + v * kLanes; };
  if (kHolds)
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < W; v++) held[r][v] = load(sum_at(r, v));
  auto add = [&](int r, int v, Vec x, Vec y) __attribute__((always_inline)) {
    kHolds ? void(held[r][v] = fma(x, y, held[r][v])) : store(sum_at(r, v), fma(x, y, load(sum_at(r, v))));
  };
  for (long at = from; at < to; at += length, left -= length) {
    if (!OneGroup && left == 0) {
      block += header.block_bytes;
      left = header.group;
      codes = block + header.codes_at + first * kLanes * 4;
    }
    // Rows as a few addresses: general registers are scarce, and GCC saves them in those that sums need.
    const int8_t *run = a + at / kRun * kRunSize, *behind = run + 3 * lda;
    keep_in_register(behind);
    auto row = [&](const int8_t* first_row, const int8_t* fourth_row, int r) {
      return r < 3 ? first_row + r * lda : fourth_row + (r - 3) * lda;
    };
    const int total_at = OneGroup ? 4 : Grouped::total_at(int(at % kRun), int(length));
    IVec whole[R][W];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const IVec start = kShift ? load_as<int32_t>(row(run, behind, r) + total_at) - IVec{} : IVec{};
#pragma GCC unroll 4
      for (int v = 0; v < W; v++) whole[r][v] = start;
    }
    const long skipped = kRunHead + (OneGroup ? 0 : at % kRun);
    const int8_t *x = run + skipped, *y = behind + skipped;
    for (const int8_t* end = x + length; x < end; x += kInputs, y += kInputs, codes += kPanel * 4) {
#pragma GCC unroll 4
      for (int line = 0; line < Fetched; line++) __builtin_prefetch(codes + prefetch + line * 64, 0, kIntoL2);
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
          const Spread four = spread(row(x, y, r) + half * 4);
#pragma GCC unroll 4
          for (int v = 0; v < W; v++) whole[r][v] = dot(whole[r][v], weights[v], four);
        }
      }
    }
    const float* scales = reinterpret_cast<const float*>(block) + first * kLanes;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const float scale = load_as<float>(row(run, behind, r));
#pragma GCC unroll 4
      for (int v = 0; v < W; v++) {
        keep_in_register(whole[r][v]);  // else GCC 12 keeps it in memory for the sake of what follows
        const Vec product = __builtin_convertvector(whole[r][v], Vec);
        add(r, v, OneGroup ? splat(scale) : load(scales + v * kLanes) * scale, product);
      }
    }
    if (!has_offsets) continue;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const int8_t* head = row(run, behind, r);
      const Vec total = splat(load_as<float>(head) * (float(load_as<int32_t>(head + total_at)) / -float(kTotalUnit)));
#pragma GCC unroll 4
      for (int v = 0; v < W; v++) add(r, v, load(scales + kPanel + v * kLanes), total);
    }
  }
  if (kHolds)
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < W; v++) store(sum_at(r, v), held[r][v]);
}

// Weights that come from memory for few rows are read in one run, of all columns, and fetched `prefetch` bytes ahead. Of
// many rows the tiles before number `kLines` ask for a line of each step of the next weights: those come while these are
// multiplied. `number`: of the tile; -1: there is no other.
template <int Bits, bool OneGroup, int R>
void wide_tile(const int8_t* a, long lda, Grouped::Panel panel, long from, long to, float* sums, long prefetch, int number) {
  if (number < 0) return tile<Bits, kVectors, R, OneGroup, kLines>(a, lda, panel, from, to, 0, sums, prefetch);
  constexpr int W = R * kVectors <= kHeldSums ? kVectors : 2;
  for (int first = 0; first < kVectors; first += W) {
    const int line = number * (kVectors / W) + first / W;
    const long ahead = (to - from) * kPanel * Bits / 8 + line * 64 - first * kLanes * 4;
    line < kLines ? tile<Bits, W, R, OneGroup, 1>(a, lda, panel, from, to, first, sums + first * kLanes, ahead)
                  : tile<Bits, W, R, OneGroup, 0>(a, lda, panel, from, to, first, sums + first * kLanes, 0);
  }
}

template <int Bits, bool OneGroup>
void rows_of_tile(int rows, const int8_t* a, long lda, Grouped::Panel panel, long from, long to, float* sums, long prefetch,
                  int number) {
  switch (rows) {
#define TANDEM_TILE(R) \
  case R:              \
    return wide_tile<Bits, OneGroup, R>(a, lda, panel, from, to, sums, prefetch, number);
    TANDEM_TILE(1)
    TANDEM_TILE(2)
    TANDEM_TILE(3)
    TANDEM_TILE(4)
    TANDEM_TILE(5)
    TANDEM_TILE(6)
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
#if defined(TANDEM_AMX)
    if (header.amx_rows && rows >= header.amx_rows) {
      one_group ? amx_product<true>(rows, a, lda, panel, at, end, sums)
                : amx_product<false>(rows, a, lda, panel, at, end, sums);
      continue;
    }
#endif
    const int tiles = (rows + kMostRows - 1) / kMostRows;
    for (int number = 0, first = 0; number < tiles; number++) {
      const int left = tiles - number, height = (rows - first + left - 1) / left;
      run(height, a + first * lda, lda, panel, at, end, sums + first * kPanel, prefetch, tiles > 1 ? number : -1);
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
// int8, e4m3 or, where there are no codes, numbers. Scales and offsets (or null) [n, groups].
struct GroupedSource {
  const uint8_t* codes;
  const int8_t* table;    // [16], null unless codes are of whole numbers in 4 bits
  const float* values;    // the same of real numbers
  const float* scales;
  const float* offsets;
  const int32_t* order;  // [k] or null: which activation each input is; it must outlive the panels
  int64_t n, k, group;   // group: 0 is all inputs
  int32_t bits, kind;    // of a CodeKind
};
TANDEM_STRUCT(GroupedSource, codes, table, values, scales, offsets, order, n, k, group, bits, kind)

namespace {

GroupedHeader header_of(const GroupedSource& source) {
  GroupedHeader header{};
  header.inputs = Grouped::inputs(source.k);
  header.group = source.group > 0 && source.group < header.inputs ? source.group : header.inputs;
  header.chain = header.group % 64 == 0 ? 64 : header.group % 32 == 0 ? 32 : 16;
  header.bits = int16_t(source.bits);
  header.has_offsets = source.offsets != nullptr;
  header.order = source.order;
  header.codes_at = kPanel * (header.has_offsets ? 8 : 4);
  header.block_bytes = header.codes_at + header.group * kPanel * source.bits / 8;
  header.panel_bytes = kHeaderBytes + (header.inputs + header.group - 1) / header.group * header.block_bytes;
  header.kind = source.kind;
  if (source.table)
    for (size_t i = 0; i < sizeof(Bytes); i++) header.table[i] = uint8_t(source.table[i % 16] + kShift);
  for (int i = 0; i < 16; i++) header.values[i] = source.values ? source.values[i] : source.table ? source.table[i] : 0.0f;
  if (source.kind == kNoCodes)
    header.panel_bytes = kHeaderBytes + (source.bits == 32 ? plain_panel_bytes<Float32>(source.k) : plain_panel_bytes<BFloat16>(source.k));
  return header;
}

template <class Base>
void copy_panel(const GroupedSource& source, long column, long columns, uint8_t* panel) {
  using Weight = typename Base::Weight;
  const Weight* from = reinterpret_cast<const Weight*>(source.codes) + column * source.k;
  Weight* to = reinterpret_cast<Weight*>(panel + kHeaderBytes);
  for (long j = 0; j < columns; j++)
    for (long k = 0; k < source.k; k++) to[Base::index(k, int(j))] = from[j * source.k + k];
}

void pack_panel(const GroupedSource& source, const GroupedHeader& header, long column, uint8_t* panel) {
  const long columns = source.n - column < kPanel ? source.n - column : kPanel;
  const long blocks = (header.inputs + header.group - 1) / header.group;
  const long groups = (source.k + header.group - 1) / header.group;
  std::memset(panel, 0, size_t(header.panel_bytes));
  std::memcpy(panel, &header, sizeof(header));
  if (source.kind == kNoCodes)
    return source.bits == 32 ? copy_panel<Float32>(source, column, columns, panel)
                             : copy_panel<BFloat16>(source, column, columns, panel);
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
          codes[(i / 4 * kPanel + j) * 4 + i % 4] = uint8_t(row[k] + (source.kind == kWholeCodes ? kShift : 0));
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
