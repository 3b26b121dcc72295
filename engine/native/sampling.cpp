#include "sampling.h"

#include <algorithm>
#include <cfloat>

#include "sampling_wide.h"

namespace tandem {

namespace {

// Of logits, where top-p looks for its end.
constexpr int64_t kBuckets = 1024;

// Floats sort like these integers; -0.0 counts as 0.0.
uint32_t order_of(float logit) {
  logit += 0.0f;
  uint32_t word;
  std::memcpy(&word, &logit, 4);
  return word & 0x80000000u ? ~word : word | 0x80000000u;
}

float logit_of(uint32_t order) {
  const uint32_t word = order & 0x80000000u ? order & 0x7fffffffu : ~order;
  float logit;
  std::memcpy(&logit, &word, 4);
  return logit;
}

uint64_t key_of(float logit, int64_t id) { return uint64_t(order_of(logit)) << 32 | uint32_t(~uint32_t(id)); }

// Moves the entries that weigh at least `least` to the front; returns how many.
int64_t heavy_ones(Entry* entries, int64_t count, double least) {
  return std::partition(entries, entries + count, [&](const Entry& e) { return e.weight >= least; }) - entries;
}

double sum_of(const Entry* entries, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += entries[i].weight;
  return sum;
}

}  // namespace

double Row::weight(int64_t id) const {
  if (!valid || !survives(logit(id), id)) return 0;
  return weights(*this, HalfVec{} + logit(id))[0];
}

int64_t Workspace::bytes(int64_t size) { return size * int64_t(sizeof(Entry)) + 2 * round_up(size * 4 + 64, 64); }

Workspace Workspace::at(char* memory, int64_t size) {
  Workspace work;
  work.entries = reinterpret_cast<Entry*>(memory);
  work.ids = reinterpret_cast<int32_t*>(work.entries + size);
  work.maxima = reinterpret_cast<float*>(reinterpret_cast<char*>(work.ids) + round_up(size * 4 + 64, 64));
  return work;
}

Row look_at(const float* logits, int64_t size, const uint32_t* mask) {
  Row row;
  row.logits = logits;
  row.size = size;
  row.mask = mask;
  row.cut = -INFINITY;
  row.cut_id = mask ? -1 : size;  // what weighs nothing does not survive a mask, and costs nothing
  Vec peak = splat(-INFINITY);
  IVec broken{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec v = load_logits(row, i);
    peak = (v > peak) ? v : peak;
    broken |= v != v;
  }
  row.top = largest(peak);
  row.valid = bits(broken) == 0 && std::fabs(row.top) < INFINITY;
  for (int64_t i = 0; i < size; i += kLanes)
    if (const uint32_t equal = bits(load_logits(row, i) == row.top)) {
      row.best = i + __builtin_ctz(equal);
      break;
    }
  if (row.best >= size) row.best = 0;
  return row;
}

void cut_after(Row& row, const Entry* entries, int64_t count) {
  uint64_t last = entries[0].key;
  for (int64_t i = 1; i < count; i++) last = entries[i].key < last ? entries[i].key : last;
  row.cut = logit_of(uint32_t(last >> 32));
  row.cut_id = int64_t(uint32_t(~uint32_t(last)));
}

float reached_by(const Row& row, int64_t count, float* maxima) {
  const int64_t groups = (3 * count + kLanes - 1) / kLanes, height = row.size / kLanes / groups;  // in vectors
  if (height < 2) return -INFINITY;
  for (int64_t g = 0; g < groups; g++) {
    Vec most = splat(-INFINITY);
    for (int64_t i = g * height; i < (g + 1) * height; i++) most = max(load_logits(row, i * kLanes), most);
    store(maxima + g * kLanes, most);
  }
  std::nth_element(maxima, maxima + count - 1, maxima + groups * kLanes, [](float a, float b) { return a > b; });
  return maxima[count - 1];
}

int64_t gather(const Row& row, float from, int32_t* ids) {
  int64_t count = 0;
  for (int64_t i = 0; i < row.size; i += kLanes) {
    const Vec v = load_logits(row, i);
    uint32_t wanted = bits(v >= from);
    if (wanted) wanted &= bits(survivors(row, v, i));
    each(wanted, i, [&](int64_t id) {
      if (id < row.size) ids[count++] = int32_t(id);
    });
  }
  return count;
}

void weigh(const Row& row, const int32_t* ids, int64_t count, Entry* entries) {
  for (int64_t i = 0; i < count; i += kWide) {
    const int part = count - i < kWide ? int(count - i) : kWide;
    HalfVec logits{};
    for (int j = 0; j < part; j++) logits[j] = row.logit(ids[i + j]);
    const DVec weight = weights(row, logits);
    for (int j = 0; j < part; j++) entries[i + j] = {key_of(logits[j], ids[i + j]), weight[j]};
  }
}

int64_t most_likely(Entry* entries, int64_t count, int64_t wanted) {
  if (count <= wanted) return count;
  std::nth_element(entries, entries + wanted - 1, entries + count,
                   [](const Entry& a, const Entry& b) { return a.key > b.key; });
  return wanted;
}

int64_t heaviest(Entry* entries, int64_t count, double mass) {
  const auto more_likely = [](const Entry& a, const Entry& b) { return a.key > b.key; };
  int64_t begin = 0, end = count;  // those before `begin` are kept, those from `end` on are not
  double before = 0;
  while (end - begin > 16) {
    uint64_t a = entries[begin].key, b = entries[begin + (end - begin) / 2].key, c = entries[end - 1].key;
    const uint64_t pivot = a < b ? (b < c ? b : (a < c ? c : a)) : (a < c ? a : (b < c ? c : b));
    Entry* middle = std::partition(entries + begin, entries + end, [&](const Entry& e) { return e.key >= pivot; });
    const double upper = sum_of(entries + begin, middle - entries - begin);
    if (before + upper < mass) {
      before += upper;
      begin = middle - entries;
    } else {
      end = middle - entries;
    }
  }
  std::sort(entries + begin, entries + end, more_likely);
  while (begin < end && before < mass) before += entries[begin++].weight;
  return begin;
}

// Top-p of all that min-p leaves: the weights are summed up in buckets of nearly equal logits, the most likely first, and
// only the bucket in which the share is reached is sorted.
void cut_to_share(Row& row, const Sampler& sampler, const Workspace& work) {
  // The last bucket starts where weights are e^-40.
  const Vec scale = splat(float(std::min(row.inverse * (kBuckets / 40.0), 1e38))), most = splat(float(kBuckets - 1));
  auto buckets = [&](int64_t at) { return __builtin_convertvector(min((row.top - load_logits(row, at)) * scale, most), IVec); };
  double mass[kBuckets] = {};
  for (int64_t i = 0; i < row.size; i += kLanes) {
    const Weights found = weights_from(row, i);
    const DVec kept[2] = {(DVec)((LVec)found.low & (found.low >= sampler.min_p)),
                          (DVec)((LVec)found.high & (found.high >= sampler.min_p))};
    const IVec bucket = buckets(i);
    double weight[kLanes];
    int32_t at[kLanes];
    std::memcpy(weight, kept, sizeof(kept));
    std::memcpy(at, &bucket, sizeof(bucket));
    for (int j = 0; j < kLanes; j++) mass[at[j]] += weight[j];
  }
  double all = 0, before = 0;
  for (int64_t b = 0; b < kBuckets; b++) all += mass[b];
  int32_t chosen = 0;
  for (int32_t b = 0; b < kBuckets && before + mass[chosen] < sampler.top_p * all; b++) {
    if (mass[b] == 0) continue;
    if (b > chosen) before += mass[chosen];
    chosen = b;
  }
  int64_t count = 0;
  for (int64_t i = 0; i < row.size; i += kLanes)
    each(bits(buckets(i) == chosen), i, [&](int64_t id) {
      if (id < row.size) work.ids[count++] = int32_t(id);
    });
  weigh(row, work.ids, count, work.entries);
  count = heavy_ones(work.entries, count, sampler.min_p);
  cut_after(row, work.entries, heaviest(work.entries, count, sampler.top_p * all - before));
}

void truncate(Row& row, const Sampler& sampler, const Workspace& work) {
  row.inverse = sampler.temperature > 1 / DBL_MAX ? 1 / sampler.temperature : DBL_MAX;
  const bool counted = sampler.top_k > 0 && sampler.top_k < row.size, weighed = sampler.top_p < 1;
  const bool bounded = sampler.min_p > 0;
  if (weighed && !counted) return cut_to_share(row, sampler, work);
  if (!counted && !bounded) return;
  float from = counted ? reached_by(row, sampler.top_k, work.maxima) : -INFINITY;
  if (bounded) {  // a little below the smallest logit that min-p may keep
    const double floor = double(row.top) + (std::log(sampler.min_p) - 1e-9) / row.inverse;
    from = std::max(from, std::nextafter(float(floor), -INFINITY));
  }
  int64_t count = gather(row, from, work.ids);
  weigh(row, work.ids, count, work.entries);
  count = heavy_ones(work.entries, count, sampler.min_p);
  if (counted) count = most_likely(work.entries, count, sampler.top_k);
  if (weighed) count = heaviest(work.entries, count, sampler.top_p * sum_of(work.entries, count));
  cut_after(row, work.entries, count);
}

double weight_between(const Row& row, int64_t begin, int64_t end) {
  DVec low{}, high{};
  int64_t i = begin;
  if (row.cut == -INFINITY && !row.mask)
    for (; i + kLanes <= end; i += kLanes) {
      low += weights(row, load_as<HalfVec>(row.logits + i));
      high += weights(row, load_as<HalfVec>(row.logits + i + kWide));
    }
  for (; i < end; i += kLanes) {
    const Weights found = weights_from(row, i);
    low += found.low;
    high += found.high;
  }
  return sum(low) + sum(high);
}

double total_weight(const Row& row) {
  double total = 0;
  for (int64_t i = 0; i < row.size; i += kSpan) total += weight_between(row, i, std::min(i + kSpan, row.size));
  return total;
}

// The exponential clock of token v rings first where p_v / E_v is largest, E_v = -ln u_v. As E_v >= 1 - u_v, a token can
// only beat the score s if 1 - u_v <= p_v / s. Both sides are compared by their logarithms: that of 1 - u, a number of 31
// bits, is bounded from below by the bits of its float read as an integer (log2(1 + m) >= m for a mantissa m), so a lane
// costs its hash and a handful of instructions. The few tokens that pass are looked at exactly.
void race(const Row& row, uint64_t key, int64_t count, int64_t* winners) {
  struct Runner {
    double score;
    int64_t id;
  } first[kMaxCandidates];
  int64_t found = 0;
  auto enter = [&](int64_t id) {
    const Runner runner{row.weight(id) / -std::log(uniform(key, id)), id};
    if (!(runner.score > 0)) return false;
    auto beats = [](const Runner& a, const Runner& b) { return a.score > b.score || (a.score == b.score && a.id < b.id); };
    if (found == count && !beats(runner, first[count - 1])) return false;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && beats(runner, first[at - 1]); at--) first[at] = first[at - 1];
    first[at] = runner;
    return true;
  };

  constexpr float kOctave = 8388608.0f;  // of a float read as an integer
  const float slope = float(std::min(row.inverse * 1.4426950408889634, 1e30)) * kOctave;
  float offset;
  auto set_offset = [&] {
    // 31 bits, the bias of the exponent, and more slack than all rounding here can use up.
    offset = found < count ? INFINITY : float(127.0 + 31.0 + 1e-3 - std::log2(first[count - 1].score)) * kOctave;
  };
  winners[0] = row.best;
  if (row.valid) enter(row.best);
  set_offset();
  ULVec lane_low, lane_high;
  for (int i = 0; i < kWide; i++) {
    lane_low[i] = uint64_t(i + 1) * kGolden;
    lane_high[i] = uint64_t(i + 1 + kWide) * kGolden;
  }
  for (int64_t i = 0; row.valid && i < row.size; i += kLanes) {
    const Vec v = load_logits(row, i);
    const IVec alive = survivors(row, v, i);
    if ((row.cut > -INFINITY || row.mask) && bits(alive) == 0) continue;
    const uint64_t start = key + uint64_t(i) * kGolden;
    HalfUVec half[2];
    half[0] = __builtin_convertvector(~mix64(lane_low + start) >> 33, HalfUVec);
    half[1] = __builtin_convertvector(~mix64(lane_high + start) >> 33, HalfUVec);
    IVec complement;  // 2^31 (1 - u), rounded down
    std::memcpy(&complement, half, sizeof(complement));
    const Vec measured = __builtin_convertvector((IVec)__builtin_convertvector(complement, Vec), Vec);
    const Vec allowed = fma(v - row.top, splat(slope), splat(offset));
    each(bits((measured <= allowed) & alive), i, [&](int64_t id) {
      if (id < row.size && id != row.best && enter(id)) set_offset();
    });
  }
  for (int64_t i = 0; i < count; i++) winners[i] = found ? first[i < found ? i : 0].id : row.best;
}

void largest(const Row& row, int64_t count, int64_t* ids) {
  if (count == 0) return;
  float logits[kMaxCandidates];
  int64_t found = 0;
  float smallest = -INFINITY;
  for (int64_t i = 0; i < row.size; i += kLanes)
    each(bits(load_logits(row, i) > smallest), i, [&](int64_t id) {
      const float logit = row.logit(id);
      if (found == count && !(logit > logits[count - 1])) return;
      int64_t at = found < count ? found++ : count - 1;
      for (; at > 0 && logit > logits[at - 1]; at--) logits[at] = logits[at - 1], ids[at] = ids[at - 1];
      logits[at] = logit, ids[at] = id;
      if (found == count) smallest = logits[count - 1];
    });
  for (int64_t i = found; i < count; i++) ids[i] = found ? ids[0] : row.best;
}

int64_t draft_token(float* logits, const Sampler& sampler, DraftSampling sampling, const DraftPlace& place,
                    const Workspace& work) {
  if (sampler.edits) edit(logits, sampler, place.prefix, place.num_prefix);
  Row row = look_at(logits, sampler.num_tokens);
  *place.q_bytes = 0;
  if (sampling == kArgmax) return row.best;
  if (row.valid) truncate(row, sampler, work);
  if (sampling == kSharedNoise) {
    int64_t winner;
    race(row, position_key(sampler.stream_keys[kCoupling], place.base + place.num_prefix), 1, &winner);
    return winner;
  }
  const double u = uniform(position_key(sampler.stream_keys[kDraftDraw], place.base), place.num_prefix);
  return draw_quantized(row, sampler, u, work, place.q, place.q_bytes);
}

}  // namespace tandem

namespace tandem {

void likeliest(float* logits, const Sampler& sampler, DraftSampling sampling, const TreePlace& place, int64_t count,
               int64_t* ids, double* logprobs, const Workspace& work) {
  if (sampler.edits) edit(logits, sampler, place.prefix, place.num_prefix);
  Row row = look_at(logits, sampler.num_tokens);
  int64_t found[kMaxCandidates];
  double weights[kMaxCandidates], total = 0;
  int64_t looked_at = count;
  if (row.valid && sampler.temperature == 0) {
    row.inverse = 1, row.cut = -INFINITY, row.cut_id = row.size;
  } else if (row.valid) {
    truncate(row, sampler, work);
  }
  if (row.valid && sampling == kSharedNoise) {
    looked_at = std::min({count * kRaced, kMaxCandidates, row.size});
    const uint64_t key = position_key(sampler.stream_keys[kCoupling], place.position);
    race(row, key, looked_at, found);
    for (int64_t i = 0; i < looked_at; i++) {
      weights[i] = i && found[i] == found[0] ? 0 : row.weight(found[i]) / -std::log(uniform(key, found[i]));
      total += weights[i];
    }
  } else if (row.valid) {
    largest(row, count, found);
    for (int64_t i = 0; i < count; i++) weights[i] = i && found[i] == found[0] ? 0 : row.weight(found[i]);
    total = total_weight(row);
  }
  for (int64_t i = 0; i < count; i++) {
    const bool there = row.valid && i < looked_at && weights[i] > 0;
    ids[i] = there ? found[i] : 0;
    logprobs[i] = there ? std::log(weights[i] / total) : -INFINITY;
  }
}

}  // namespace tandem

using namespace tandem;

// likeliest() of every row: logits [rows, stride] (edited in place), ids and logprobs [rows, count].
extern "C" __attribute__((visibility("default"))) int tandem_likeliest(float* logits, int64_t stride, int64_t rows,
                                                                       const Sampler* const* samplers,
                                                                       const int32_t* samplings,
                                                                       const TreePlace* places, int64_t count, int64_t* ids,
                                                                       double* logprobs) {
  char* memory = working_memory(size_t(Workspace::bytes(stride)));
  if (!memory) return -1;
  const Workspace work = Workspace::at(memory, stride);
  for (int64_t r = 0; r < rows; r++)
    likeliest(logits + r * stride, *samplers[r], DraftSampling(samplings[r]), places[r], count, ids + r * count,
              logprobs + r * count, work);
  return 0;
}

// Draws a token from every row, for tests: logits [rows, stride] (edited in place), tokens [rows].
extern "C" __attribute__((visibility("default"))) int tandem_draft_rows(float* logits, int64_t stride, int64_t rows,
                                                                        const Sampler* const* samplers,
                                                                       const int32_t* samplings,
                                                                        const DraftPlace* places, int64_t* tokens) {
  char* memory = working_memory(size_t(Workspace::bytes(stride)));
  if (!memory) return -1;
  const Workspace work = Workspace::at(memory, stride);
  for (int64_t r = 0; r < rows; r++)
    tokens[r] = draft_token(logits + r * stride, *samplers[r], DraftSampling(samplings[r]), places[r], work);
  return 0;
}
