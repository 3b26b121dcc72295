// Weights of 4 or 8 bits with a scale, and where wanted an offset, for every group of a column's inputs:
//
//   w[k][n] = scale[g][n] * code - offset[g][n],  g = k / group
//
// where a code of 4 bits is looked up in a table of 16 whole numbers. Activations are rounded to 8 bits: of every kRun
// inputs of a row the largest becomes 127. Products within a group's chain (a part of it, or all) are a whole number,
// exact in 32 bits; the chains of a column are then added up in float32 in the order of k.
#pragma once

#include "vector.h"

namespace tandem {

constexpr int kRun = 64;  // activations that share a scale; the longest chain

typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));  // of each column four neighbouring inputs

// Before the codes of a panel. Behind it lie blocks, one for each group: scales [kPanel], offsets [kPanel] if any, codes.
// Codes of 4 bits: [group / 8][kPanel][4] bytes, inputs 0 to 3 of 8 in the low halves; of 8 bits: [group / 4][kPanel][4].
struct GroupedHeader {
  Bytes table;  // 16 entries, repeated; as are 8-bit codes, kShift above what they mean
  int64_t inputs;  // padded
  int64_t group, block_bytes, codes_at, panel_bytes;
  int32_t bits, chain;  // chain: inputs whose products are one whole number: 16, 32 or 64
  int32_t has_offsets;
  const int32_t* order;  // [inputs before padding]: which activation each input is; null: itself
};
constexpr long kHeaderBytes = 128;
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

  // Behind a row's padded activations: the scale of every run; sums of the activations of every 64, 32 and 16.
  static long scales_at(long inputs) { return inputs; }
  static long sums_at(long inputs, int chain) {
    const long runs = inputs / kRun * 4;
    return inputs + runs + (chain == 64 ? 0 : chain == 32 ? runs : 3 * runs);
  }
};

}  // namespace tandem
