#include "amx.h"

#include "gemm.h"

#if defined(TANDEM_AMX)
#include <cpuid.h>
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tandem {

#if defined(TANDEM_AMX)

namespace {

constexpr int kAmxRows = 16;            // of a tile register
constexpr int kIntoL2 = 2;             // of __builtin_prefetch
constexpr int kStepBytes = kPanel * 4;  // of four inputs in a panel, where weights have 8 bits

// What ldtilecfg reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int height, int bytes) {
    rows[tile] = uint8_t(height);
    row_bytes[tile] = uint16_t(height ? bytes : 0);
  }
};

thread_local int configured = 0;  // for which rest and chain; 0: not at all

// Tiles 0 and 1: activations and sums of 16 rows; 2 and 3: of the `rest` of fewer; 4: weights of 16 columns.
void configure(int rest, int chain) {
  const int wanted = rest << 8 | chain;
  if (configured == wanted) return;
  TileConfig config;
  for (int tile = 0; tile < 4; tile++) config.set(tile, tile < 2 ? kAmxRows : rest, tile % 2 ? 64 : chain);
  config.set(4, chain / 4, 64);
  asm volatile("ldtilecfg %0" ::"m"(config));
  configured = wanted;
}

// whole[rows][16] = activations of a chain · weights of 16 columns; weights have no sign.
template <bool Full>
inline void multiply(const int8_t* a, long lda, const uint8_t* weights, int32_t* whole) {
#define TANDEM_TILES(A, SUMS)                                                             \
  asm volatile("tileloadd (%0,%1,1), %%tmm" A "\n\ttileloadd (%2,%3,1), %%tmm4\n\t"       \
               "tilezero %%tmm" SUMS "\n\ttdpbsud %%tmm4, %%tmm" A ", %%tmm" SUMS "\n\t"  \
               "tilestored %%tmm" SUMS ", (%4,%5,1)" ::"r"(a), "r"(lda), "r"(weights),    \
               "r"(long(kStepBytes)), "r"(whole), "r"(64L)                                \
               : "memory")
  if constexpr (Full)
    TANDEM_TILES("0", "1");
  else
    TANDEM_TILES("2", "3");
#undef TANDEM_TILES
}

// The chains of a panel from input `from` on.
struct Chains {
  const uint8_t* block;  // of the chain's group
  long before, group, block_bytes, chain;  // before: inputs of the group before the chain

  Chains(Grouped::Panel panel, const GroupedHeader& header, long from)
      : block(panel + kHeaderBytes + from / header.group * header.block_bytes), before(from % header.group),
        group(header.group), block_bytes(header.block_bytes), chain(header.chain) {}
  void next() {
    before += chain;
    if (before == group) block += block_bytes, before = 0;
  }
};

// Codes of 4 bits become weights of 8, in the order of codes of 8 bits. The next codes are fetched meanwhile.
void expand(Grouped::Panel panel, long from, long to, uint8_t* weights) {
  const GroupedHeader& header = Grouped::header(panel);
  const __m512i table = (__m512i)header.table, low_half = _mm512_set1_epi8(15);
  const long fetch = (to - from) / 2 * kPanel;
  Chains chains(panel, header, from);
  for (long at = from; at < to; at += chains.chain, chains.next()) {
    const uint8_t* codes = chains.block + header.codes_at + chains.before / 2 * kPanel;
    for (long i = 0; i < chains.chain; i += 8, codes += kStepBytes, weights += 2 * kStepBytes)
      for (int line = 0; line < kStepBytes; line += 64) {
        __builtin_prefetch(codes + fetch + line, 0, kIntoL2);
        const __m512i both = _mm512_loadu_si512(codes + line);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
        _mm512_store_si512(weights + line, _mm512_shuffle_epi8(table, _mm512_and_si512(both, low_half)));
        _mm512_store_si512(weights + kStepBytes + line, _mm512_shuffle_epi8(table, high));
      }
  }
}

// Up to 16 rows (`Full`: all of them) x one vector of columns. `expanded`: the weights, or null: the panel's codes are.
// `fetch`: asks for weights so many bytes behind these; 0: does not.
template <bool OneGroup, bool Full>
void block_product(int rows, const int8_t* a, long lda, Grouped::Panel panel, const uint8_t* expanded, long from, long to,
                   int vector, long fetch, float* sums) {
  const GroupedHeader& header = Grouped::header(panel);
  const int count = Full ? kAmxRows : rows;
  const bool has_offsets = !OneGroup && header.has_offsets;
  const long codes_at = header.codes_at;
  alignas(64) int32_t whole[kAmxRows * kLanes];
  Vec held[kAmxRows] = {};
#pragma GCC unroll 16
  for (int r = 0; r < count; r++) held[r] = load(sums + r * kPanel);
  Chains chains(panel, header, from);
  for (long at = from; at < to; at += chains.chain, chains.next()) {
    const uint8_t* codes = chains.block + codes_at + chains.before * kPanel;
    const uint8_t* weights = (expanded ? expanded + (at - from) * kPanel : codes) + vector * 64;
    for (long i = 0; fetch && i < chains.chain / 4; i++) __builtin_prefetch(weights + fetch + i * kStepBytes, 0, kIntoL2);
    const int8_t* run = a + at / kRun * kRunSize;
    multiply<Full>(run + kRunHead + at % kRun, lda, weights, whole);
    const int total_at = OneGroup ? 4 : Grouped::total_at(int(at % kRun), int(chains.chain));
    const float* scales = reinterpret_cast<const float*>(chains.block) + vector * kLanes;
    const Vec scale = OneGroup ? Vec{} : load(scales);
    const Vec offset = has_offsets ? load(scales + kPanel) : Vec{};
#pragma GCC unroll 16
    for (int r = 0; r < count; r++) {
      const int8_t* head = run + r * lda;
      const float unit = load_as<float>(head);
      const int32_t total = load_as<int32_t>(head + total_at);
      const Vec product = __builtin_convertvector(load_as<IVec>(whole + r * kLanes) + total, Vec);
      held[r] = fma(OneGroup ? splat(unit) : scale * unit, product, held[r]);
      if (has_offsets) held[r] = fma(offset, splat(unit * (float(total) / -float(kTotalUnit))), held[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < count; r++) store(sums + r * kPanel, held[r]);
}

}  // namespace

template <bool OneGroup>
void amx_product(int rows, const int8_t* a, long lda, Grouped::Panel panel, long from, long to, float* sums) {
  const GroupedHeader& header = Grouped::header(panel);
  alignas(64) uint8_t expanded[kDepth * kPanel];
  const bool expands = header.bits == 4;
  if (expands) expand(panel, from, to, expanded);
  configure(rows % kAmxRows, header.chain);
  for (int vector = 0; vector < kVectors; vector++)
    for (int first = 0; first < rows; first += kAmxRows) {
      const long fetch = first == 0 && !expands ? (to - from) * kPanel : 0;
      auto block = rows - first < kAmxRows ? block_product<OneGroup, false> : block_product<OneGroup, true>;
      block(rows - first, a + first * lda, lda, panel, expands ? expanded : nullptr, from, to, vector, fetch,
            sums + first * kPanel + vector * kLanes);
    }
}
template void amx_product<false>(int, const int8_t*, long, Grouped::Panel, long, long, float*);
template void amx_product<true>(int, const int8_t*, long, Grouped::Panel, long, long, float*);

void release_amx() {
  if (!configured) return;
  asm volatile("tilerelease");
  configured = 0;
}

#endif

}  // namespace tandem

using namespace tandem;

#define TANDEM_API extern "C" __attribute__((visibility("default")))

// Asks the system, for all threads of the process, to let them use AMX. Returns 0, the system's error number, -1 if the
// processor has no AMX for int8, or -2 if these kernels do not use it.
TANDEM_API int tandem_ask_for_amx() {
#if defined(TANDEM_AMX)
  constexpr unsigned kTileAndInt8 = 3u << 24;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTileAndInt8) != kTileAndInt8) return -1;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) ? errno : 0;
#else
  return -2;
#endif
}

// AMX multiplies the panels of a list from so many rows on; 0: never.
TANDEM_API void tandem_use_amx(uint8_t* const* list, int64_t panels, int rows) {
  for (int64_t p = 0; p < panels; p++) reinterpret_cast<GroupedHeader*>(list[p])->amx_rows = rows;
}
