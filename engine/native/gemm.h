// y = x W^T for packed W, every output element by one fixed chain of multiply-adds.
//
// W's rows (output columns) lie in panels of kPanel: panel p holds [K][kPanel], so a thread reads memory in one run.
// Batch invariance: y[r][n] adds its K products in the order of k, in sub-sums of kDepth and chunks of kChunk, in a lane
// of its own accumulator. How many rows share a register tile only decides how often a loaded weight is used, and how
// many threads share a panel only who computes which chunk, never an order.
#pragma once

#include <type_traits>

#include "grouped.h"
#include "pool.h"
#include "vector.h"

namespace tandem {

constexpr int kDepth = 512;   // products of a sub-sum: a panel's share of it stays in the L2 cache
constexpr int kChunk = 2048;  // products of a chunk, whole sub-sums

// A Format says how weights lie in a panel and how they are multiplied. Weight, Activation: as they lie in memory;
// Factor: kLanes columns of weights; Sum: of kLanes columns' products, and value() what it is in float32; kStep: inputs
// per row of a panel; kScales: weights that take the place of a column's scale, behind the panel's last row; kRounds:
// activations are rounded to whole numbers, for which a row must be complete. Panels lie one after another, but those of
// Grouped (grouped.h), whose `weight` is a list of them.

// float32 weights and activations.
struct Float32 {
  using Weight = float;
  using Panel = const float*;
  using Activation = float;
  using Sum = Vec;
  using Factor = Vec;
  static constexpr int kStep = 1, kScales = 0;
  static constexpr bool kRounds = false;
  static long index(long k, int column) { return k * kPanel + column; }  // of a weight in its panel
  static inline Factor weights(const float* p, int vector) { return load(p + vector * kLanes); }
  static inline Vec spread(const float* a) { return splat(*a); }
  static inline Vec add(Vec a, Factor w, Vec sum) { return fma(a, w, sum); }
  static inline Vec value(Vec sum) { return sum; }
};

#if defined(__AVX512BF16__)
// bfloat16 weights and activations, float32 sums: two products per instruction. A panel row holds w[k], w[k+1] side by
// side for each column; products of bfloat16 are exact.
struct BFloat16 {
  using Weight = bf16;
  using Panel = const bf16*;
  using Activation = bf16;
  using Sum = Vec;
  using Factor = __m512bh;
  static constexpr int kStep = 2, kScales = 0;
  static constexpr bool kRounds = false;
  static long index(long k, int column) { return k / 2 * (2 * kPanel) + 2 * column + k % 2; }
  static inline Factor weights(const bf16* p, int vector) {
    return (__m512bh)_mm512_loadu_si512(p + vector * 2 * kLanes);
  }
  static inline __m512bh spread(const bf16* a) {
    int32_t two;
    std::memcpy(&two, a, 4);
    return (__m512bh)_mm512_set1_epi32(two);
  }
  static inline Vec add(__m512bh a, Factor w, Vec sum) { return (Vec)_mm512_dpbf16_ps((__m512)sum, w, a); }
  static inline Vec value(Vec sum) { return sum; }
};
#else
// bfloat16 weights widened in registers, float32 activations. Word j of a pair of vectors holds column j in its low and
// column j + kLanes in its high half.
struct BFloat16 {
  using Weight = bf16;
  using Panel = const bf16*;
  using Activation = float;
  using Sum = Vec;
  using Factor = Vec;
  static constexpr int kStep = 1, kScales = 0;
  static constexpr bool kRounds = false;
  static long index(long k, int column) {
    return k * kPanel + column / (2 * kLanes) * (2 * kLanes) + 2 * (column % kLanes) + column / kLanes % 2;
  }
  static inline Factor weights(const bf16* p, int vector) {
    UVec word = load_as<UVec>(p + vector / 2 * (2 * kLanes));
    return vector % 2 ? (Vec)(word & 0xffff0000u) : (Vec)(word << 16);
  }
  static inline Vec spread(const float* a) { return splat(*a); }
  static inline Vec add(Vec a, Factor w, Vec sum) { return fma(a, w, sum); }
  static inline Vec value(Vec sum) { return sum; }
};
#endif

// int8 weights with a scale for each output column, int16 activations with a scale for each row: two products per
// instruction, as for bfloat16. A sub-sum is a whole number below kDepth x 127 x 32767 < 2^31, so it is exact; rounding
// activations to 16 bits costs at most a few ten-thousandths of a row's norm, far less than 8 bits cost the weights.
struct Int8 {
  using Weight = int8_t;
  using Panel = const int8_t*;
  using Activation = int16_t;
  using Sum = IVec;
  static constexpr int kStep = 2, kScales = sizeof(float);
  static constexpr bool kRounds = true;
  static constexpr float kLargest = 32767.0f;
  static long index(long k, int column) { return k / 2 * (2 * kPanel) + 2 * column + k % 2; }
#if defined(__AVX512BW__)
  using Factor = __m512i;
  static inline Factor weights(const int8_t* p, int vector) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + vector * 2 * kLanes)));
  }
  static inline Factor spread(const int16_t* a) { return _mm512_set1_epi32(load_as<int32_t>(a)); }
  static inline IVec add(Factor a, Factor w, IVec sum) {
#if defined(__AVX512VNNI__)
    return (IVec)_mm512_dpwssd_epi32((__m512i)sum, a, w);
#else
    return sum + (IVec)_mm512_madd_epi16(a, w);
#endif
  }
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  using Factor = __m256i;
  static inline Factor weights(const int8_t* p, int vector) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + vector * 2 * kLanes)));
  }
  static inline Factor spread(const int16_t* a) { return _mm256_set1_epi32(load_as<int32_t>(a)); }
  static inline IVec add(Factor a, Factor w, IVec sum) { return sum + (IVec)_mm256_madd_epi16(a, w); }
#else
  // A lane holds two neighbours: the first comes down by a shift up and down again, the second by a shift down.
  typedef int8_t Bytes __attribute__((vector_size(2 * kLanes)));
  typedef int16_t Words __attribute__((vector_size(4 * kLanes)));
  using Factor = Words;
  static inline Factor weights(const int8_t* p, int vector) {
    return __builtin_convertvector(load_as<Bytes>(p + vector * 2 * kLanes), Words);
  }
  static inline Factor spread(const int16_t* a) { return (Words)(load_as<int32_t>(a) - IVec{}); }
  static inline IVec add(Factor a, Factor w, IVec sum) {
    const IVec x = (IVec)a, y = (IVec)w;
    return sum + ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
  }
#endif
  static inline Vec value(IVec sum) { return __builtin_convertvector(sum, Vec); }
};

// Grouped weights multiplied as the numbers they stand for: each is scale * value - offset in float32, rounded to Base's
// dtype. Products are to the bit those of Base with such weights. Defined in decoded.cpp.
template <class Base>
struct Decoded : Base {
  using Weight = const uint8_t*;
  using Panel = const uint8_t*;
  static constexpr int kStep = kRun, kScales = 0;
  static constexpr bool kRounds = true;  // inputs may have an order
};

// Whether a weight is a list of panels with a GroupedHeader each.
template <class Format>
constexpr bool kIsGrouped = std::is_same_v<typename Format::Panel, Grouped::Panel>;

// Elements of one panel: K rounded up to whole steps, and scales. Activations are padded with zeros to the same K.
template <class Format>
inline long panel_size(long k) {
  return (round_up(k, Format::kStep) + Format::kScales) * kPanel;
}

// The n-th panel of a weight with k inputs, and the bytes of one.
template <class Format>
inline typename Format::Panel panel_at(const typename Format::Weight* weight, long n, long k) {
  if constexpr (kIsGrouped<Format>)
    return weight[n];
  else
    return weight + n * panel_size<Format>(k);
}
template <class Format>
inline long panel_bytes(const typename Format::Weight* weight, long k) {
  if constexpr (kIsGrouped<Format>)
    return Grouped::header(weight[0]).panel_bytes;
  else
    return panel_size<Format>(k) * long(sizeof(typename Format::Weight));
}

// Elements of a row of k activations as a product takes it.
template <class Format>
inline long prepared_size(long k) {
  return std::is_same_v<Format, Grouped> ? Grouped::inputs(k) / kRun * kRunSize : k;
}

// Activations as a product takes them: rows `stride` apart, and where the format scales rows, a scale for each.
template <class Format>
struct Rows {
  const typename Format::Activation* at;
  long stride;
  const float* scales;
};

// kLanes numbers at most, x[order[0]] and so on.
template <class T>
inline Vec gather(const T* x, const int32_t* order, long n) {
  float found[kLanes] = {};
  for (long i = 0; i < n && i < kLanes; i++) found[i] = to_float(x[order[i]]);
  return load(found);
}

// to[0 … n) = a row as a product takes it, zeros up to `padded`. Returns its scale, 1 where the format has none. `order`: of
// the activations, or null.
template <class T, class To>
inline float prepare_row(const T* x, long n, long padded, To* to, const int32_t* order = nullptr) {
  long i = 0;
  for (; order && i < n; i += kLanes) store_part(to + i, gather(x, order + i, n - i), int(n - i));
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(x + i));
  if (i < n) store_part(to + i, load_part(x + i, int(n - i)), int(n - i));
  for (i = n; i < padded; i++) store_one(to + i, 0.0f);
  return 1.0f;
}

// The largest becomes kLargest.
template <class T>
inline float prepare_row(const T* x, long n, long padded, int16_t* to, const int32_t* = nullptr) {
  Vec most{};
  for (long i = 0; i < n; i += kLanes) {
    const Vec v = load_part(x + i, int(n - i < kLanes ? n - i : kLanes));
    most = max(most, max(v, -v));
  }
  const float peak = largest(most);
  const Vec inverse = splat(peak > 0.0f ? Int8::kLargest / peak : 0.0f);
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
  for (long i = 0; i < n; i += kLanes) {
    const int count = int(n - i < kLanes ? n - i : kLanes);
    const UVec bits = (UVec)(load_part(x + i, count) * inverse + magic);
    const HVec low = __builtin_convertvector(bits, HVec);
    std::memcpy(to + i, &low, size_t(count) * sizeof(*to));
  }
  for (long i = n; i < padded; i++) to[i] = 0;
  return peak / Int8::kLargest;
}

// The order in which a product takes activations, or null.
template <class Format>
inline const int32_t* order_of(const void* weight) {
  if constexpr (kIsGrouped<Format>)
    return Grouped::order(static_cast<const Grouped::Weight*>(weight));
  else
    return nullptr;
}

// to = kRun numbers of at most 127, rounded; sums = those of every 16, times kTotalUnit.
inline void round_run(const Vec* x, int8_t* to, int32_t* sums) {
#if defined(__AVX512VNNI__)
  __m512i whole[4];
  for (int v = 0; v < 4; v++) whole[v] = _mm512_cvtps_epi32((__m512)x[v]);
  // Packing takes the quarters of the vectors in turn.
  const __m512i turns = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_permutexvar_epi32(
      turns, _mm512_packs_epi16(_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3])));
  _mm512_storeu_si512(to, bytes);
  __m512i four = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
  four = _mm512_add_epi32(four, _mm512_shuffle_epi32(four, _MM_PERM_CDAB));
  four = _mm512_add_epi32(four, _mm512_shuffle_epi32(four, _MM_PERM_BADC));
  const __m128i totals = _mm512_castsi512_si128(_mm512_permutexvar_epi32(turns, four));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(totals, 7)));
#else
  for (int v = 0; v < kRun / kLanes; v++) {
    const SVec low = __builtin_convertvector((UVec)(x[v] + 12582912.0f), SVec);  // as above
    std::memcpy(to + v * kLanes, &low, sizeof(low));
  }
  for (int i = 0; i < kRun / 16; i++) {
    sums[i] = 0;
    for (int j = 0; j < 16; j++) sums[i] += kTotalUnit * to[i * 16 + j];
  }
#endif
}

// A run of activations: the largest becomes 127.
inline void prepare_run(const Vec* x, int8_t* to) {
  UVec most{};
  for (int v = 0; v < kRun / kLanes; v++) {
    const UVec size = (UVec)x[v] & 0x7fffffffu;  // floats without sign are in the order of their bits
    most = size > most ? size : most;
  }
  const float peak = largest((Vec)most);
  const Vec inverse = splat(peak > 0.0f ? 127.0f / peak : 0.0f);
  Vec scaled[kRun / kLanes];
  for (int v = 0; v < kRun / kLanes; v++) scaled[v] = x[v] * inverse;
  int32_t totals[8];  // a binary tree from 1 on
  round_run(scaled, to + kRunHead, totals + 4);
  for (int i = 3; i > 0; i--) totals[i] = totals[2 * i] + totals[2 * i + 1];
  const float scale = peak / 127.0f;
  std::memcpy(totals, &scale, sizeof(scale));
  std::memcpy(to, totals, kRunHead);
}

// Run by run. Returns 1. `order`: of the activations, or null.
template <class T>
inline float prepare_row(const T* x, long n, long padded, int8_t* to, const int32_t* order = nullptr) {
  for (long at = 0; at < padded; at += kRun, to += kRunSize) {
    Vec values[kRun / kLanes];
    for (int v = 0; v < kRun / kLanes; v++) {
      const long left = n - at - v * kLanes;
      const long first = at + v * kLanes;
      if (order)
        values[v] = gather(x, order + first, left);
      else
        values[v] = left >= kLanes ? load(x + first) : left > 0 ? load_part(x + first, int(left)) : Vec{};
    }
    prepare_run(values, to);
  }
  return 1.0f;
}

// sums[r][0..n) (+)= a[r][0..k) · w[0..k)[0..n) for any number of rows, where n is `vectors` (2 or kVectors) x kLanes and
// `ldw` the distance between two rows of w. Defined in gemm.cpp, where the register tiles are compiled once.
void float_tiles(int rows, const float* a, long lda, const float* w, long ldw, int k, int vectors, float* sums,
                 long lds, bool add);

// scores[r][0..2 kLanes) (+)= q[r][0..depth) · keys[0..depth)[0..2 kLanes), in sub-sums of kScoreDepth.
constexpr int kScoreDepth = 8;
void score_tiles(int rows, const float* q, long ldq, const float* keys, long ldk, int depth, float* scores, bool add);

// sums[rows][kPanel] = a[.., from..to) · the same rows, at most a chunk, of one panel, whose weights are fetched into
// the L2 cache `prefetch` bytes ahead; 0 leaves that to the hardware. Which is faster depends on the processor.
template <class Format>
void chunk_product(int rows, const typename Format::Activation* a, long lda, typename Format::Panel panel, long from, long to,
                   long prefetch, float* sums);

// The bytes of a panel without codes, a Base's.
template <class Base>
inline long plain_panel_bytes(long k) {
  return panel_size<Base>(round_up(k, kRun)) * long(sizeof(typename Base::Weight));
}

// Activation rows lie this far apart: whole panels, zero padded, plus a cache line so that rows a power of two long do
// not all fall into the same cache sets.
inline long row_stride(long n) { return round_up(n, 64) + 32; }

constexpr int kRowBlock = 96;     // rows a thread takes at a time: their sums stay in the L1 cache
constexpr int kSplitRows = 16;    // rows up to which threads share panels,
constexpr int kSplitGroups = 8;   // where there are fewer than so many groups for each of them
constexpr int kSplitRuns = 16;    // runs of groups for each of them at least,
constexpr long kRunBytes = 512 << 10;  // of so many weights at most: what a thread prefetches is mostly its own

inline int chunks_of(long k) { return int((k + kChunk - 1) / kChunk); }

// Whether the chunks of a group of panels are shared out, for want of groups.
inline bool shares_chunks(int rows, long k, int groups, int threads) {
  return k > kChunk && threads > 1 && rows <= kSplitRows && groups < kSplitGroups * threads;
}

// Memory for the products of one pass, one after another.
struct ProductScratch {
  float* sums;    // each thread's own, own_floats()
  float* shared;  // the team's, shared_floats(): sums of chunks
  Counter* done;  // the team's, kSplitGroups for each thread, all zero: chunks of a group that are done

  static long own_floats(int rows, int group) { return 2L * (rows < kRowBlock ? rows : kRowBlock) * kPanel * group; }
  static long shared_floats(int rows, long k, int groups, int group, int threads) {
    return shares_chunks(rows, k, groups, threads) ? long(groups) * group * chunks_of(k) * rows * kPanel : 0;
  }
};

// sums[n] += chunk[n]
inline void add_chunk(const float* chunk, long n, float* sums) {
  for (long i = 0; i < n; i += kLanes) store(sums + i, load(sums + i) + load(chunk + i));
}

// What the sums of a panel's columns mean, for formats with scales.
template <class Format>
inline void scale_sums(typename Format::Panel panel, long k, const Rows<Format>& a, int first, int rows,
                       float* sums) {
  if constexpr (Format::kScales > 0) {
    const auto* scales = panel + round_up(k, Format::kStep) * kPanel;
    for (int v = 0; v < kPanel; v += kLanes) {
      const Vec column = load_as<Vec>(scales + v * Format::kScales);
      for (int r = 0; r < rows; r++) {
        float* s = sums + r * kPanel + v;
        store(s, load(s) * column * a.scales[first + r]);
      }
    }
  }
}

// Items handed out to a team: three quarters in runs of neighbours, then one by one, so that all threads end together.
// What a thread prefetches behind a run belongs to another thread. Handed out one by one, 760 MB of weights take 1.04 to
// 1.11 times as long (1 and 5 rows, prefetching 0 to 16 KB ahead); with 40 MB and less there is no difference (medians of
// alternating sweeps, two threads of an Intel Xeon).
struct Runs {
  int items, length, count;  // count: of runs

  Runs(int items, long longest, int threads) : items(items), length(items * 3 / 4 / (kSplitRuns * threads)) {
    if (length > longest) length = int(longest);
    count = length > 1 ? items * 3 / 4 / length : 0;
  }
  int size() const { return items - count * (length - 1); }  // entries of the list: entry i is first(i) … first(i + 1)
  int first(int i) const { return i < count ? i * length : count * length + i - count; }
};

// All groups of `group` neighbouring panels times all rows, shared out over the team; from a group to the next it is
// `step` panels. done(first_row, rows, index of the group, sums) sees sums[panel of the group][row][kPanel].
template <class Format, class Done>
inline void product(Team& team, Counter& counter, int rows, const Rows<Format>& a,
                    const typename Format::Weight* weight, long k, int groups, int group, long step, long prefetch,
                    const ProductScratch& scratch, Done&& done) {
  const int chunks = chunks_of(k);
  auto panel = [&](int index, int i) { return panel_at<Format>(weight, index * step + i, k); };
  if (shares_chunks(rows, k, groups, team.size)) {
    const long floats = long(group) * rows * kPanel;  // of a chunk
    for (int item; (item = team.next(counter)) < groups * chunks;) {
      const int index = item / chunks, chunk = item % chunks;
      const long from = long(chunk) * kChunk, to = from + kChunk < k ? from + kChunk : k;
      float* parts = scratch.shared + index * chunks * floats;
      for (int i = 0; i < group; i++)
        chunk_product<Format>(rows, a.at, a.stride, panel(index, i), from, to, prefetch,
                              parts + chunk * floats + long(i) * rows * kPanel);
      std::atomic<int>& finished = scratch.done[index].taken;
      if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < chunks) continue;
      finished.store(0, std::memory_order_relaxed);
      for (int c = 1; c < chunks; c++) add_chunk(parts + c * floats, floats, parts);
      for (int i = 0; i < group; i++)
        scale_sums<Format>(panel(index, i), k, a, 0, rows, parts + long(i) * rows * kPanel);
      done(0, rows, index, static_cast<const float*>(parts));
    }
    return;
  }
  const int blocks = (rows + kRowBlock - 1) / kRowBlock;
  const int height = (rows + blocks - 1) / blocks;
  auto multiply = [&](int item) {
    const int index = item / blocks, first = item % blocks * height;
    const int count = rows - first < height ? rows - first : height;
    const long floats = long(count) * kPanel;
    float* extra = scratch.sums + group * floats;
    for (int i = 0; i < group; i++) {
      float* sums = scratch.sums + i * floats;
      for (int chunk = 0; chunk < chunks; chunk++) {
        const long from = long(chunk) * kChunk, to = from + kChunk < k ? from + kChunk : k;
        chunk_product<Format>(count, a.at + first * a.stride, a.stride, panel(index, i), from, to, prefetch,
                              chunk ? extra : sums);
        if (chunk) add_chunk(extra, floats, sums);
      }
      scale_sums<Format>(panel(index, i), k, a, first, count, sums);
    }
    done(first, count, index, static_cast<const float*>(scratch.sums));
  };
  const long group_bytes = group * panel_bytes<Format>(weight, k);
  const Runs runs(groups * blocks, blocks > 1 ? 1 : kRunBytes / group_bytes, team.size);
  for (int i; (i = team.next(counter)) < runs.size();)
    for (int item = runs.first(i); item < runs.first(i + 1); item++) multiply(item);
}

}  // namespace tandem
