// Products of grouped weights that are decoded first, a part of a panel at a time.
#include "gemm.h"

namespace tandem {

namespace {

// 16 numbers by codes from 0 to 15.
inline Vec look_up(const float* values, UVec codes) {
#if defined(__AVX512F__)
  return (Vec)_mm512_permutexvar_ps((__m512i)codes, (__m512)load(values));
#elif defined(__AVX2__) && defined(__FMA__)
  const __m256 low = _mm256_permutevar8x32_ps((__m256)load(values), (__m256i)codes);
  const __m256 high = _mm256_permutevar8x32_ps((__m256)load(values + 8), (__m256i)codes);
  return (Vec)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#else
  Vec found;
  for (int i = 0; i < kLanes; i++) found[i] = values[codes[i]];
  return found;
#endif
}

// e4m3: sign, 4 bits of an exponent that is 7 too large, 3 of a mantissa.
inline Vec float8(UVec codes) {
  const UVec size = codes & 0x7f;
  const UVec normal = (size << 20) + (120u << 23);
  const UVec small = (UVec)(__builtin_convertvector((IVec)size, Vec) * 0x1p-9f);
  return (Vec)(((size < 8) ? small : normal) | (codes & 0x80) << 24);
}

// The numbers that the codes in byte `byte` (or its upper half) of every word stand for.
template <int Bits, bool Float8>
inline Vec meaning(const GroupedHeader& header, UVec words, int byte, bool upper) {
  const UVec codes = words >> (8 * byte) & 255;
  if constexpr (Bits == 4) return look_up(header.values, upper ? codes >> 4 : codes & 15);
  if constexpr (Float8) return float8(codes);
  return __builtin_convertvector(kShift ? (IVec)codes - kShift : (IVec)(codes << 24) >> 24, Vec);
}

// Numbers of inputs k, k + 1, … of kLanes columns go to their place in a panel.
inline void put(float* panel, long k, int vector, const Vec* numbers, int count) {
  for (int i = 0; i < count; i++) store(panel + (k + i) * kPanel + vector * kLanes, numbers[i]);
}
inline void put(bf16* panel, long k, int vector, const Vec* numbers, int count) {
#if defined(__AVX512BF16__)
  for (int i = 0; i < count; i += 2) {
    HVec low, high;
    store(reinterpret_cast<bf16*>(&low), numbers[i]);
    store(reinterpret_cast<bf16*>(&high), numbers[i + 1]);
    const UVec pairs = __builtin_convertvector(low, UVec) | __builtin_convertvector(high, UVec) << 16;
    std::memcpy(panel + BFloat16::index(k + i, vector * kLanes), &pairs, sizeof(pairs));
  }
#else
  for (int i = 0; i < count; i++)
    for (int j = 0; j < kLanes; j++) panel[BFloat16::index(k + i, vector * kLanes + j)] = to_bf16(numbers[i][j]);
#endif
}

// Inputs from … to of a panel, `from` first, in whole steps.
template <int Bits, bool Float8, class Weight>
void decode(Grouped::Panel panel, long from, long to, long prefetch, Weight* out) {
  const GroupedHeader& header = Grouped::header(panel);
  constexpr int kInputs = Bits == 4 ? 8 : 4;  // of a step
  for (long at = from; at < to;) {
    const uint8_t* block = panel + kHeaderBytes + at / header.group * header.block_bytes;
    const long inside = at % header.group, end = to - at < header.group - inside ? to : at - inside + header.group;
    const float *scales = reinterpret_cast<const float*>(block), *offsets = scales + kPanel;
    const uint8_t* codes = block + header.codes_at + inside * Bits / 8 * kPanel;
    for (; at < end; at += kInputs, codes += kPanel * 4) {
      for (int line = 0; line < kPanel * 4; line += 64) __builtin_prefetch(codes + prefetch + line, 0, 2);
      for (int v = 0; v < kVectors; v++) {
        const UVec words = load_as<UVec>(codes + v * kLanes * 4);
        const Vec scale = load(scales + v * kLanes);
        Vec numbers[8];
#pragma GCC unroll 8
        for (int i = 0; i < kInputs; i++) {
          numbers[i] = meaning<Bits, Float8>(header, words, i % 4, i >= 4) * scale;
          if (header.has_offsets) numbers[i] -= load(offsets + v * kLanes);
        }
        put(out, at - from, v, numbers, kInputs);
      }
    }
  }
}

template <class Base>
void decoded_product(int rows, const typename Base::Activation* a, long lda, Grouped::Panel panel, long from, long to,
                     long prefetch, float* sums) {
  using Weight = typename Base::Weight;
  const GroupedHeader& header = Grouped::header(panel);
  if (header.kind == kNoCodes)
    return chunk_product<Base>(rows, a, lda, reinterpret_cast<const Weight*>(panel + kHeaderBytes), from, to, prefetch, sums);
  alignas(64) static thread_local Weight weights[kDepth * kPanel];
  alignas(64) static thread_local float part[kRowBlock * kPanel];
  for (long at = from; at < to; at += kDepth) {
    const long depth = to - at < kDepth ? to - at : kDepth;
    const long end = at + round_up(depth, kRun);
    if (header.bits == 4)
      decode<4, false>(panel, at, end, prefetch, weights);
    else
      header.kind == kFloat8Codes ? decode<8, true>(panel, at, end, prefetch, weights)
                                  : decode<8, false>(panel, at, end, prefetch, weights);
    chunk_product<Base>(rows, a + at, lda, weights, 0, depth, 0, at > from ? part : sums);
    if (at > from) add_chunk(part, long(rows) * kPanel, sums);
  }
}

}  // namespace

#define TANDEM_DECODED(Base)                                                                                               \
  template <>                                                                                                              \
  void chunk_product<Decoded<Base>>(int rows, const Base::Activation* a, long lda, Grouped::Panel panel, long from,       \
                                    long to, long prefetch, float* sums) {                                                 \
    decoded_product<Base>(rows, a, lda, panel, from, to, prefetch, sums);                                                  \
  }
TANDEM_DECODED(Float32)
TANDEM_DECODED(BFloat16)
#undef TANDEM_DECODED

}  // namespace tandem
