#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>

#include "vector.h"

namespace tandem {
namespace {

// SplitMix64, as in noise.py.
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u, kMul1 = 0xBF58476D1CE4E5B9u, kMul2 = 0x94D049BB133111EBu;

template <class Word>
inline Word mix64(Word x) {
  x = (x ^ (x >> 30)) * kMul1;
  x = (x ^ (x >> 27)) * kMul2;
  return x ^ (x >> 31);
}
inline uint64_t position_key(uint64_t stream, int64_t position) { return mix64(stream + uint64_t(position) * kGolden); }
inline uint64_t noise_bits(uint64_t key, int64_t index) { return mix64(key + uint64_t(index + 1) * kGolden) >> 12; }
inline double uniform(uint64_t bits) { return (double(bits) + 0.5) * 0x1p-52; }

constexpr int kWide = 8;  // hashes at a time
typedef uint64_t Hashes __attribute__((vector_size(kWide * 8)));
typedef float Floats __attribute__((vector_size(kWide * 4)));
typedef int32_t Flags __attribute__((vector_size(kWide * 4)));

inline bool any(Flags flags) {
  uint64_t words[kWide / 2];
  std::memcpy(words, &flags, sizeof(words));
  return (words[0] | words[1]) | (words[2] | words[3]);
}

inline float largest_logit(const float* logits, int64_t n) {
  Vec top = splat(-std::numeric_limits<float>::infinity());
  int64_t v = 0;
  for (; v + kLanes <= n; v += kLanes) top = max(load(logits + v), top);
  float found = largest(top);
  for (; v < n; v++) found = logits[v] > found ? logits[v] : found;
  return found;
}

// The `count` smallest scores met so far, smallest first.
class Best {
 public:
  Best(int64_t* ids, int count) : ids_(ids), count_(count) {}
  double bound() const { return filled_ < count_ ? std::numeric_limits<double>::infinity() : scores_[count_ - 1]; }
  void offer(double score, int64_t id) {
    if (!(score < bound())) return;
    int at = filled_ < count_ ? filled_++ : count_ - 1;
    for (; at > 0 && score < scores_[at - 1]; at--) scores_[at] = scores_[at - 1], ids_[at] = ids_[at - 1];
    scores_[at] = score, ids_[at] = id;
  }
  // Fewer than asked for were met: the best stands in their place.
  void fill() {
    for (int i = filled_; i < count_; i++) ids_[i] = filled_ ? ids_[0] : 0;
  }

 private:
  static constexpr int kMost = 64;
  int64_t* ids_;
  double scores_[kMost];
  int count_, filled_ = 0;
};

void best_logits(const float* logits, int64_t n, int64_t* ids, int count) {
  if (!count) return;
  Best best(ids, count);
  int64_t v = 0;
  for (; v + kLanes <= n; v += kLanes) {
    if (!(double(-largest(load(logits + v))) < best.bound())) continue;
    for (int i = 0; i < kLanes; i++) best.offer(-double(logits[v + i]), v + i);
  }
  for (; v < n; v++) best.offer(-double(logits[v]), v);
  best.fill();
}

// Bits are counted from the lowest of each byte.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* to) : to_(to) {}
  void write(uint32_t value, int width) {
    for (int i = 0; i < width; i++, at_++) to_[at_ >> 3] |= uint8_t((value >> i & 1) << (at_ & 7));
  }
  int bytes() const { return int((at_ + 7) / 8); }

 private:
  uint8_t* to_;
  int64_t at_ = 0;
};

constexpr int kLevels = 64, kLevelBits = 6, kHeaderBytes = 3;  // of a q row: sparse.py

// Ascending ids and their roots, 1 to kLevels, in the form of sparse.py; the size in bytes.
int pack(const int32_t* ids, const int32_t* roots, int64_t count, uint8_t* row) {
  int low_bits = 0;
  while ((int64_t(ids[count - 1]) + 1) / count >> (low_bits + 1)) low_bits++;
  const int level_bytes = int((kLevelBits * count + 7) / 8), low_bytes = int((low_bits * count + 7) / 8);
  const int64_t high_bits = (int64_t(ids[count - 1]) >> low_bits) + count;
  const int size = kHeaderBytes + level_bytes + low_bytes + int((high_bits + 7) / 8);
  std::memset(row, 0, size_t(size));
  row[0] = uint8_t(low_bits), row[1] = uint8_t(count), row[2] = uint8_t(count >> 8);
  BitWriter levels(row + kHeaderBytes), lows(row + kHeaderBytes + level_bytes);
  uint8_t* high = row + kHeaderBytes + level_bytes + low_bytes;
  for (int64_t i = 0; i < count; i++) {
    levels.write(uint32_t(roots[i] - 1), kLevelBits);
    lows.write(uint32_t(ids[i]), low_bits);
    const int64_t at = (int64_t(ids[i]) >> low_bits) + i;
    high[at >> 3] |= uint8_t(1 << (at & 7));
  }
  return size;
}

// A weight (never negative) and a token id as one number: the heavier, of equal ones the lower id, is the larger.
uint64_t survivor(float weight, int64_t id) {
  uint32_t bits;
  std::memcpy(&bits, &weight, 4);
  return uint64_t(bits) << 32 | uint32_t(~id);
}
int32_t id_of(uint64_t survivor) { return int32_t(~uint32_t(survivor)); }
double weight_of(uint64_t survivor) {
  const uint32_t bits = uint32_t(survivor >> 32);
  float weight;
  std::memcpy(&weight, &bits, 4);
  return double(weight);
}

}  // namespace

Sampler::Sampler(int64_t vocab)
    : weights_(static_cast<float*>(std::malloc(size_t(2 * vocab + kLanes) * sizeof(float)))),
      survivors_(static_cast<uint64_t*>(std::malloc(size_t(vocab) * sizeof(uint64_t)))) {}

Sampler::~Sampler() {
  std::free(weights_);
  std::free(survivors_);
}

// Weights exp((logit - largest) / T) of all tokens; how many survive truncation, or -1 where none is asked for.
int64_t Sampler::weigh(const float* logits, const DrawSettings& settings) {
  const int64_t n = settings.num_tokens;
  const Vec top = splat(top_), inverse = splat(float(1.0 / settings.temperature));
  int64_t v = 0;
  for (; v + kLanes <= n; v += kLanes) store(weights_ + v, exp((load(logits + v) - top) * inverse));
  if (v < n) store(weights_ + v, exp((load_part(logits + v, int(n - v)) - top) * inverse));
  const bool truncates = settings.min_p > 0 || settings.top_p < 1 || (settings.top_k > 0 && settings.top_k < n);
  if (!truncates && settings.kind != DrawKind::ratio) return -1;
  const float least = std::max(float(settings.min_p), 1e-30f);  // below it exp is not exact, and nothing is ever drawn
  int64_t count = 0;
  for (v = 0; v < n; v++) {
    survivors_[count] = survivor(weights_[v], v);
    count += weights_[v] >= least;
  }
  return truncates ? truncate(settings, count) : count;
}

// top-k, then top-p, on the survivors of min-p; how many are left.
int64_t Sampler::truncate(const DrawSettings& settings, int64_t count) {
  if (settings.top_k > 0 && settings.top_k < count) {
    std::nth_element(survivors_, survivors_ + settings.top_k, survivors_ + count, std::greater<uint64_t>());
    count = settings.top_k;
  }
  return settings.top_p < 1 ? hold_share(settings.top_p, mass(count), count, count) : count;
}

double Sampler::mass(int64_t count) const {
  double total = 0;
  for (int64_t i = 0; i < count; i++) total += weight_of(survivors_[i]);
  return total;
}

// Brings the fewest survivors that hold this share of `total` to the front, heaviest first: at most `most` of them.
int64_t Sampler::hold_share(double share, double total, int64_t count, int64_t most) {
  double before = 0;
  int64_t kept = 0;
  for (int64_t sorted = 0, next = 128; kept < most; next *= 4) {
    const int64_t end = std::min(next, most);
    if (end < count)
      std::nth_element(survivors_ + sorted, survivors_ + end, survivors_ + count, std::greater<uint64_t>());
    std::sort(survivors_ + sorted, survivors_ + end, std::greater<uint64_t>());
    for (sorted = end; kept < end; kept++) {
      if (!(before < share * total)) return kept;
      before += weight_of(survivors_[kept]);
    }
  }
  return kept;
}

// The tokens whose clocks E_v / w_v ring first. -ln u >= 1 - u shows for most that they are too late.
void Sampler::race(const DrawSettings& settings, const float* logits, uint64_t key, int64_t count, int64_t* ids,
                   int num_best) {
  Best best(ids, num_best);
  auto offer = [&](int64_t id) {
    const double weight = std::exp((double(logits[id]) - double(top_)) / settings.temperature);
    best.offer(-std::log(uniform(noise_bits(key, id))) / weight, id);
  };
  if (count >= 0) {
    for (int64_t i = 0; i < count; i++) offer(id_of(survivors_[i]));
    return best.fill();
  }
  const int64_t n = settings.num_tokens;
  Hashes counter;
  for (int i = 0; i < kWide; i++) counter[i] = key + uint64_t(i + 1) * kGolden;
  int64_t v = 0;
  for (; v + kWide <= n; v += kWide, counter += kWide * kGolden) {
    const Floats late = __builtin_convertvector(~mix64(counter) >> 12, Floats);  // (1 - u) 2^52
    const float bound = float(std::min(best.bound() * (1.0001 * 0x1p52), 3e38));
    if (!any(late <= load_as<Floats>(weights_ + v) * bound)) continue;
    for (int i = 0; i < kWide; i++)
      if (late[i] <= weights_[v + i] * bound) offer(v + i);
  }
  for (; v < n; v++) offer(v);
  best.fill();
}

int Sampler::draw_quantized(const DrawSettings& settings, int64_t offset, int64_t count, int64_t* token, uint8_t* row) {
  const int64_t most = std::min(count, settings.q_tokens);
  if (most < count) std::nth_element(survivors_, survivors_ + most, survivors_ + count, std::greater<uint64_t>());
  const int64_t n = hold_share(settings.q_share, mass(most), most, most);
  int32_t* ids = reinterpret_cast<int32_t*>(weights_);  // the weights by id are not needed any more
  int32_t* roots = ids + n;
  for (int64_t i = 0; i < n; i++)  // ascending ids and, in the other half, the weights
    survivors_[i] = uint64_t(id_of(survivors_[i])) << 32 | (survivors_[i] >> 32);
  std::sort(survivors_, survivors_ + n);
  int64_t sum = 0;
  for (int64_t i = 0; i < n; i++) {
    const double weight = weight_of(survivors_[i] << 32);
    const int64_t root = std::max(1L, std::lrint(std::cbrt(weight) * kLevels));
    ids[i] = int32_t(survivors_[i] >> 32), roots[i] = int32_t(root);
    sum += root * root * root;
  }
  const double u = uniform(noise_bits(position_key(settings.stream, settings.base), offset));
  const int64_t ticket = int64_t(u * double(sum));
  int64_t at = 0;
  for (int64_t reached = 0; at < n - 1; at++) {
    reached += int64_t(roots[at]) * roots[at] * roots[at];
    if (reached > ticket) break;
  }
  *token = ids[at];
  return pack(ids, roots, n, row);
}

int Sampler::draw(const float* logits, const DrawSettings& settings, int64_t offset, int64_t* token,
                  int64_t* candidates, uint8_t* row) {
  const int64_t n = settings.num_tokens;
  if (settings.kind == DrawKind::greedy) {
    best_logits(logits, n, candidates, settings.num_candidates);
    if (settings.num_candidates) *token = candidates[0];
    else best_logits(logits, n, token, 1);
    return 0;
  }
  top_ = largest_logit(logits, n);
  if (!(std::fabs(top_) < std::numeric_limits<float>::infinity())) {
    // Nothing can be drawn: any token will do, the target refuses it.
    *token = 0;
    for (int i = 0; i < settings.num_candidates; i++) candidates[i] = 0;
    const int32_t id = 0, root = kLevels;
    return settings.kind == DrawKind::ratio ? pack(&id, &root, 1, row) : 0;
  }
  const int64_t count = weigh(logits, settings);
  if (settings.kind == DrawKind::ratio) {
    best_logits(logits, n, candidates, settings.num_candidates);
    return draw_quantized(settings, offset, count, token, row);
  }
  const uint64_t key = position_key(settings.stream, settings.base + offset);
  if (!settings.num_candidates) {
    race(settings, logits, key, count, token, 1);
    return 0;
  }
  race(settings, logits, key, count, candidates, settings.num_candidates);
  *token = candidates[0];
  return 0;
}

}  // namespace tandem
