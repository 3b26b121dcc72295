// Weights of 4 or 8 bits with a scale, and where wanted an offset, for every group of a column's inputs:
//
//   w[k][n] = scale[g][n] * code - offset[g][n],  g = k / group
//
// where a code of 4 bits is looked up in a table of 16 numbers. Two formats multiply them: Decoded (gemm.h) as the real
// numbers that they stand for, and Grouped, where the table holds whole numbers. It rounds activations to 8 bits: of every
// kRun inputs of a row the largest becomes 127. Products within a group's chain (a part of it, or all) are a whole number,
// exact in 32 bits; the chains of a column are then added up in float32 in the order of k.
#pragma once

#include "vector.h"

namespace tandem {

constexpr int kRun = 64;  // activations that share a scale; the longest chain

// Weights are kShift above what they mean where the instruction wants no sign; then the products of a chain begin with
// -kShift times the sum of its activations.
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__) && defined(__AVXVNNI__))
constexpr int kShift = 128;
#else
constexpr int kShift = 0;
#endif
constexpr int kTotalUnit = kShift ? -kShift : 1;  // in which sums of activations are stored

// A row of activations is its runs, one after another: of each the scale, sums of its 64, of 32 and of 16 times kTotalUnit,
// 4 bytes each, then its activations.
constexpr int kRunHead = 32, kRunSize = kRunHead + kRun;

typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));  // of each column four neighbouring inputs

// Before the codes of a panel. Behind it lie blocks, one for each group: scales [kPanel], offsets [kPanel] if any, codes.
// Codes of 4 bits: [group / 8][kPanel][4] bytes, inputs 0 to 3 of 8 in the low halves; of 8 bits: [group / 4][kPanel][4].
enum CodeKind : int32_t {
  kWholeCodes,  // int8, or a table of them
  kRealCodes,   // a table of real numbers
  kFloat8Codes, // e4m3
  kNoCodes,     // the weights themselves, as a panel of the model's dtype
};

struct GroupedHeader {
  Bytes table;  // 16 entries, repeated; as are 8-bit codes, kShift above what they mean
  float values[16];  // the same as real numbers
  int64_t inputs;  // padded
  int64_t group, block_bytes, codes_at, panel_bytes;
  int16_t bits, chain;  // chain: inputs whose products are one whole number: 16, 32 or 64
  int32_t amx_rows;     // rows from which AMX multiplies it (amx.h); 0: never
  int32_t has_offsets, kind;
  const int32_t* order;  // [inputs before padding]: which activation each input is; null: itself
};
constexpr long kHeaderBytes = 192;
static_assert(sizeof(GroupedHeader) <= kHeaderBytes, "the header of a panel");

struct Grouped {
  using Weight = const uint8_t*;
  using Panel = const uint8_t*;
  using Activation = int8_t;
  static constexpr int kStep = kRun, kScales = 0;
  static constexpr bool kRounds = true;

  static long inputs(long k) { return (k + kRun - 1) / kRun * kRun; }
  static const int32_t* order(const Weight* weight) { return header(weight[0]).order; }
  static const GroupedHeader& header(Panel panel) { return *reinterpret_cast<const GroupedHeader*>(panel); }

  // Where in a run the sum of the chain is that begins with its input `from`.
  static int total_at(int from, int chain) { return (kRun / chain + from / chain) * 4; }
};

}  // namespace tandem
