// The quantised top of q: what a ratio rule's draft is drawn from and sends. Layout: specdec/sampling/sparse.py.
#include <algorithm>

#include "sampling_wide.h"

namespace tandem {

namespace {

constexpr int64_t kLevels = 64, kLevelBits = 6;

// Appends numbers of a few bits to zeroed bytes, from the lowest bit up.
struct BitWriter {
  uint8_t* bytes;
  int64_t at = 0;  // bits
  void put(uint64_t value, int64_t width) {
    for (int64_t done = 0; done < width;) {
      const int64_t room = 8 - at % 8, part = width - done < room ? width - done : room;
      bytes[at / 8] |= uint8_t((value >> done & ((1u << part) - 1)) << at % 8);
      at += part, done += part;
    }
  }
  int64_t end() const { return (at + 7) / 8; }
};

int64_t low_bits_of(int64_t count, int64_t num_tokens) {
  int64_t bits = 0;
  while ((num_tokens / count) >> (bits + 1)) bits++;
  return bits;
}

int32_t pack(const int32_t* ids, const int32_t* roots, int64_t count, uint8_t* packed) {
  const int64_t low_bits = low_bits_of(count, ids[count - 1] + 1);
  const int64_t levels_at = 3, low_at = levels_at + (kLevelBits * count + 7) / 8;
  const int64_t high_at = low_at + (low_bits * count + 7) / 8;
  const int64_t end = high_at + ((ids[count - 1] >> low_bits) + count + 7) / 8;
  std::memset(packed, 0, size_t(end));
  packed[0] = uint8_t(low_bits);
  packed[1] = uint8_t(count);
  packed[2] = uint8_t(count >> 8);
  BitWriter levels{packed + levels_at}, low{packed + low_at};
  for (int64_t i = 0; i < count; i++) {
    levels.put(uint64_t(roots[i] - 1), kLevelBits);
    low.put(uint64_t(ids[i]) & ((uint64_t(1) << low_bits) - 1), low_bits);
    const int64_t place = (ids[i] >> low_bits) + i;
    packed[high_at + place / 8] |= uint8_t(1 << place % 8);
  }
  return int32_t(end);
}

}  // namespace

int64_t draw_quantized(const Row& row, const Sampler& sampler, double u, const Workspace& work, uint8_t* packed,
                       int32_t* num_bytes) {
  int32_t ids[kMaxRowTokens], roots[kMaxRowTokens];
  int64_t count = 0;
  if (!row.valid) {  // nothing to draw: any token will do, the target refuses it
    ids[0] = int32_t(row.best), roots[0] = kLevels, count = 1;
  } else {
    const int64_t most = sampler.q_tokens < kMaxRowTokens ? sampler.q_tokens : kMaxRowTokens;
    const int64_t gathered = gather(row, std::max(row.cut, reached_by(row, most, work.maxima)), work.ids);
    weigh(row, work.ids, gathered, work.entries);
    int64_t kept = most_likely(work.entries, gathered, most);
    double mass = 0;
    for (int64_t i = 0; i < kept; i++) mass += work.entries[i].weight;
    kept = heaviest(work.entries, kept, sampler.q_share * mass);
    Row top = row;
    cut_after(top, work.entries, kept);
    for (int64_t i = 0; i < gathered; i++)
      if (top.survives(row.logits[work.ids[i]], work.ids[i])) ids[count++] = work.ids[i];
    for (int64_t i = 0; i < count; i += kWide) {
      const int part = count - i < kWide ? int(count - i) : kWide;
      HalfVec logits{};
      for (int j = 0; j < part; j++) logits[j] = row.logits[ids[i + j]];
      Row third = row;
      third.inverse = row.inverse / 3;
      const DVec root = weights(third, logits);
      for (int j = 0; j < part; j++) roots[i + j] = std::max(1, int32_t(std::nearbyint(root[j] * kLevels)));
    }
  }
  *num_bytes = pack(ids, roots, count, packed);

  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) total += int64_t(roots[i]) * roots[i] * roots[i];
  const int64_t ticket = int64_t(u * double(total));
  int64_t at = 0;
  for (int64_t sum = 0; at < count - 1; at++) {
    sum += int64_t(roots[at]) * roots[at] * roots[at];
    if (sum > ticket) break;
  }
  return ids[at];
}

}  // namespace tandem
