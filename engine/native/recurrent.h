// Recurrent layers: a state stays in the cache of one core while its records are folded and its rows run, one entry after
// the other; so a row is the same to the bit in any company, and k + 1 rows read the state from memory once.
// engine/recurrent says what they compute, and is the reference.
#pragma once

#include <algorithm>
#include <cmath>

#include "pool.h"
#include "vector.h"

namespace tandem {

constexpr int kBlocks = 4;  // vectors of a row of the state that one task runs

// What a pass does to the states of its sequences: engine/recurrent/plan.py.
struct StatePlan {
  const int64_t *slots, *bases, *starts, *ends, *new_bases, *first_rows;
  int64_t count, num_records;

  StatePlan() = default;
  StatePlan(const int64_t* numbers, int64_t count, int64_t num_records)
      : slots(numbers),
        bases(numbers + count),
        starts(numbers + 2 * count),
        ends(numbers + 3 * count),
        new_bases(numbers + 4 * count),
        first_rows(numbers + 5 * count),
        count(count),
        num_records(num_records) {}

  int64_t place(int64_t sequence, int64_t entry) const { return slots[sequence] * num_records + entry % num_records; }
  int64_t row(int64_t sequence, int64_t entry) const { return first_rows[sequence] + entry - starts[sequence]; }
  int64_t num_rows() const {
    int64_t rows = 0;
    for (int64_t s = 0; s < count; s++) rows += ends[s] - starts[s];
    return rows;
  }
};

// Rows [T, heads, D] of floats; the last dimension is dense.
struct Heads {
  const float* data;
  int64_t row_stride, head_stride;
  const float* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};

// One part of the records: of the rows of this pass, and those that are kept.
struct Part {
  float *rows, *kept;
  int64_t width;
  float* of_row(int64_t row) const { return rows + row * width; }
  const float* of_place(int64_t place) const { return kept + place * width; }
};

// Records may be overwritten once every task has folded those it needs.
template <int kParts>
void keep_records(const StatePlan& plan, const Part (&parts)[kParts], Team& team, Counter& counter) {
  for (int64_t s; (s = team.next(counter)) < plan.count;)
    for (int64_t e = plan.new_bases[s] > plan.starts[s] ? plan.new_bases[s] : plan.starts[s]; e < plan.ends[s]; e++)
      for (const Part& part : parts)
        std::memcpy(part.kept + plan.place(s, e) * part.width, part.of_row(plan.row(s, e)),
                    size_t(part.width) * sizeof(float));
}

inline int lanes_left(int64_t left) { return int(left < kLanes ? left : kLanes); }

// Rows of a prompt lie in pages of their own, where the processor does not look ahead by itself: this many are fetched.
constexpr int64_t kRowsAhead = 4;
inline void fetch(const float* from, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) __builtin_prefetch(from + i);
}

// to[0 … n) = from * scale, and zeros up to a whole vector.
inline void scale_row(const float* from, int64_t n, float scale, float* to) {
  for (int64_t i = 0; i < n; i += kLanes) store(to + i, load_part(from + i, lanes_left(n - i)) * scale);
}

inline float norm_scale(const float* x, int64_t n) {
  Vec squares{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = load_part(x + i, lanes_left(n - i));
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) + 1e-6f);
}

inline float exp_of(float x) { return exp(splat(x))[0]; }

// A matrix of floats [rows, width] in memory, and columns of it that are worked on.
template <int kWidth>
struct Tile {
  float* own;  // [rows, kWidth * kLanes]
  int64_t rows, width, first;

  void read(const float* state) const {
    for (int64_t r = 0; r < rows; r++)
      for (int b = 0; b < kWidth; b++) {
        const int64_t left = width - first - b * kLanes;
        const float* from = state + r * width + first + b * kLanes;
        store(at(r, b), left > 0 ? load_part(from, lanes_left(left)) : Vec{});
      }
  }
  void clear() const { std::memset(own, 0, size_t(rows) * kWidth * kLanes * sizeof(float)); }
  void write(float* state) const {
    for (int64_t r = 0; r < rows; r++)
      for (int b = 0; b < kWidth; b++) {
        const int64_t left = width - first - b * kLanes;
        if (left > 0) store_part(state + r * width + first + b * kLanes, load(at(r, b)), lanes_left(left));
      }
  }
  float* at(int64_t row, int block) const { return own + (row * kWidth + block) * kLanes; }
};

struct DeltaRule {
  StatePlan plan;
  int64_t key_heads, heads, key_dim, value_dim;
  bool decays_channels, is_normalised;
  Heads query, key, value, log_decay;
  const float* beta;  // [T, heads]
  float* state;       // [slots, heads, key_dim, value_dim]
  Part keys, deltas, decays;
  float* out;  // rows of [heads, value_dim]
  int64_t out_stride;

  // A tile of the state, and keys, queries and decays of two rows.
  static int64_t own_floats(int64_t key_dim) { return (kBlocks * kLanes + 6) * round_up(key_dim, kLanes); }
  int64_t step() const { return value_dim <= kLanes ? kLanes : kBlocks * kLanes; }
  int64_t num_parts() const { return (value_dim + step() - 1) / step(); }
  void run_part(int64_t s, int64_t head, int64_t part, float* own) const {
    step() == kLanes ? run<1>(s, head, part * kLanes, own) : run<kBlocks>(s, head, part * step(), own);
  }

 private:
  // A row as its head reads it.
  struct Row {
    float *key, *query, *decay;
  };

  template <int kWidth>
  void fold(const Tile<kWidth>& tile, const float* k, const float* decay, const Vec (&delta)[kWidth]) const {
    for (int64_t r = 0; r < key_dim; r++) {
      const Vec e = splat(decay[decays_channels ? r : 0]), kr = splat(k[r]);
      for (int b = 0; b < kWidth; b++) {
        const Vec decayed = load(tile.at(r, b)) * e;
        store(tile.at(r, b), fma(kr, delta[b], decayed));
      }
    }
  }

  // One pass over the state: what a row writes and asks (`now`), then what the next one decays and knows.
  template <bool kWrites, bool kReads, int kWidth>
  void go_on(const Tile<kWidth>& tile, const Row& now, const Vec (&delta)[kWidth], Vec (&answer)[kWidth], const Row& next,
             Vec (&known)[kWidth]) const {
    for (int b = 0; b < kWidth; b++) answer[b] = known[b] = Vec{};
    for (int64_t r = 0; r < key_dim; r++)
      for (int b = 0; b < kWidth; b++) {
        Vec state = load(tile.at(r, b));
        if (kWrites) {
          state = fma(splat(now.key[r]), delta[b], state);
          answer[b] = fma(state, splat(now.query[r]), answer[b]);
        }
        if (kReads) {
          state *= next.decay[decays_channels ? r : 0];
          known[b] = fma(state, splat(next.key[r]), known[b]);
        }
        store(tile.at(r, b), state);
      }
  }

  // Prepares a row. Every task of a head needs its decays, and every head of a key that key: one of them `keeps` both.
  void prepare(int64_t row, int64_t head, bool keeps, const Row& to) const {
    const int64_t group = heads / key_heads, key_head = head / group, decay_width = decays_channels ? key_dim : 1;
    const float root = std::sqrt(float(key_dim));
    const float *row_key = key.at(row, key_head), *row_query = query.at(row, key_head), *g = log_decay.at(row, head);
    scale_row(row_key, key_dim, is_normalised ? 1.0f : norm_scale(row_key, key_dim), to.key);
    scale_row(row_query, key_dim, is_normalised ? 1.0f : norm_scale(row_query, key_dim), to.query);
    for (int64_t i = 0; i < key_dim; i += kLanes) store(to.query + i, load(to.query + i) / root);
    for (int64_t i = 0; i < decay_width; i += kLanes)
      store(to.decay + i, exp(load_part(g + i, lanes_left(decay_width - i))));
    if (!keeps) return;
    std::memcpy(decays.of_row(row) + head * decay_width, to.decay, size_t(decay_width) * sizeof(float));
    if (head % group == 0) std::memcpy(keys.of_row(row) + key_head * key_dim, to.key, size_t(key_dim) * sizeof(float));
  }

  // Some columns of one head's state, for all entries of a sequence.
  template <int kWidth>
  void run(int64_t s, int64_t head, int64_t first, float* own) const {
    const Tile<kWidth> tile{own, key_dim, value_dim, first};
    float* at = own + key_dim * kWidth * kLanes;
    const int64_t padded = round_up(key_dim, kLanes);
    Row now{at, at + padded, at + 2 * padded}, next{at + 3 * padded, at + 4 * padded, at + 5 * padded};
    const int64_t key_head = head / (heads / key_heads), decay_width = decays_channels ? key_dim : 1;
    const int64_t start = plan.starts[s], end = plan.ends[s], kept = plan.new_bases[s];
    float* stored = state + (plan.slots[s] * heads + head) * key_dim * value_dim;
    plan.bases[s] ? tile.read(stored) : tile.clear();
    Vec delta[kWidth], answer[kWidth], known[kWidth];
    for (int64_t e = plan.bases[s]; e < start; e++) {
      const int64_t place = plan.place(s, e);
      const float* record = deltas.of_place(place) + head * value_dim + first;
      for (int b = 0; b < kWidth; b++) {
        const int64_t left = value_dim - first - b * kLanes;
        delta[b] = left > 0 ? load_part(record + b * kLanes, lanes_left(left)) : Vec{};
      }
      fold<kWidth>(tile, keys.of_place(place) + key_head * key_dim, decays.of_place(place) + head * decay_width, delta);
      if (e + 1 == kept) tile.write(stored);
    }
    bool is_read = false;  // whether the row's pass has begun with that of the row before
    for (int64_t e = start; e < end; e++) {
      const int64_t row = plan.row(s, e);
      if (!is_read) {
        prepare(row, head, first == 0 && e >= kept, now);
        go_on<false, true>(tile, now, delta, answer, now, known);
      }
      if (e + kRowsAhead < end) {
        fetch(query.at(row + kRowsAhead, key_head), key_dim);
        fetch(key.at(row + kRowsAhead, key_head), key_dim);
        fetch(value.at(row + kRowsAhead, head) + first, kWidth * kLanes);
      }
      const float* v = value.at(row, head) + first;
      const Vec rate = splat(beta[row * heads + head]);
      for (int b = 0; b < kWidth; b++) {
        const int64_t left = value_dim - first - b * kLanes;
        delta[b] = left > 0 ? (load_part(v + b * kLanes, lanes_left(left)) - known[b]) * rate : Vec{};
        if (left > 0 && e >= kept)
          store_part(deltas.of_row(row) + head * value_dim + first + b * kLanes, delta[b], lanes_left(left));
      }
      if ((is_read = e + 1 < end && e + 1 != kept)) {
        prepare(row + 1, head, first == 0 && e + 1 >= kept, next);
        go_on<true, true>(tile, now, delta, answer, next, known);
        std::swap(now, next);
      } else {
        go_on<true, false>(tile, now, delta, answer, now, known);
      }
      float* to = out + row * out_stride + head * value_dim + first;
      for (int b = 0; b < kWidth; b++) {
        const int64_t left = value_dim - first - b * kLanes;
        if (left > 0) store_part(to + b * kLanes, answer[b], lanes_left(left));
      }
      if (e + 1 == kept) tile.write(stored);
    }
  }
};

struct Mamba2 {
  StatePlan plan;
  int64_t heads, dim, groups, size;
  Heads input, b, c;
  const float *steps, *a, *d;  // [T, heads], [heads], [heads] or null
  float* state;                // [slots, heads, dim, size]
  Part inputs, bs, decays;
  float* out;  // rows of [heads, dim]
  int64_t out_stride;

  // Entries that one pass over the state runs, and rows of the state that it runs side by side.
  static constexpr int kEntries = 4, kDims = 4;

  // The state; of each entry what it writes, asks and adds, and what it answers.
  static int64_t own_floats(int64_t dim, int64_t size) {
    return round_up(dim, kDims) * round_up(size, kLanes) + kEntries * 2 * (round_up(size, kLanes) + round_up(dim, kLanes));
  }

  // The state of one head, for all entries of a sequence.
  void run(int64_t s, int64_t head, float* own) const {
    const int64_t width = round_up(size, kLanes), padded = round_up(dim, kLanes), group = head / (heads / groups);
    const int64_t start = plan.starts[s], kept = plan.new_bases[s];
    float* stored = state + (plan.slots[s] * heads + head) * dim * size;
    std::memset(own, 0, size_t(own_floats(dim, size)) * sizeof(float));
    for (int64_t p = 0; plan.bases[s] && p < dim; p++) scale_row(stored + p * size, size, 1.0f, own + p * width);
    Entry entries[kEntries];
    float* at = own + round_up(dim, kDims) * width;
    for (Entry& entry : entries) {
      entry.b = at, entry.c = at + width, entry.x = at + 2 * width, entry.y = entry.x + padded;
      at = entry.y + padded;
    }
    for (int64_t e = plan.bases[s], count; e < plan.ends[s]; e += count) {
      // What is stored, and where rows begin, lies between two passes.
      const int64_t next = e < kept ? kept : plan.ends[s], left = (e < start ? std::min(start, next) : next) - e;
      count = left < kEntries ? 1 : kEntries;
      for (int64_t i = 0; i < count; i++) {
        Entry& entry = entries[i];
        e < start ? recall(s, e + i, head, group, entry) : prepare(s, e + i, head, group, entry);
      }
      if (e < start)
        count == 1 ? go_on<1, false>(own, width, entries) : go_on<kEntries, false>(own, width, entries);
      else
        count == 1 ? go_on<1, true>(own, width, entries) : go_on<kEntries, true>(own, width, entries);
      for (int64_t i = 0; e >= start && i < count; i++) answer(plan.row(s, e + i), head, entries[i]);
      if (e + count == kept)
        for (int64_t p = 0; p < dim; p++) std::memcpy(stored + p * size, own + p * width, size_t(size) * sizeof(float));
    }
  }

 private:
  struct Entry {
    float *b, *c, *x, *y;  // [size], [size], [dim], [dim], each with zeros up to a whole vector
    float decay;
  };

  // An entry whose record is kept.
  void recall(int64_t s, int64_t e, int64_t head, int64_t group, Entry& to) const {
    const int64_t place = plan.place(s, e);
    scale_row(bs.of_place(place) + group * size, size, 1.0f, to.b);
    scale_row(inputs.of_place(place) + head * dim, dim, 1.0f, to.x);
    to.decay = decays.of_place(place)[head];
  }

  // A row, and its record where that will be kept.
  void prepare(int64_t s, int64_t e, int64_t head, int64_t group, Entry& to) const {
    const int64_t row = plan.row(s, e);
    const float step = steps[row * heads + head];
    if (e + kRowsAhead < plan.ends[s]) {
      fetch(b.at(row + kRowsAhead, group), size);
      fetch(c.at(row + kRowsAhead, group), size);
      fetch(input.at(row + kRowsAhead, head), dim);
    }
    to.decay = exp_of(a[head] * step);
    scale_row(b.at(row, group), size, 1.0f, to.b);
    scale_row(c.at(row, group), size, 1.0f, to.c);
    scale_row(input.at(row, head), dim, step, to.x);
    if (e < plan.new_bases[s]) return;
    decays.of_row(row)[head] = to.decay;
    std::memcpy(inputs.of_row(row) + head * dim, to.x, size_t(dim) * sizeof(float));
    if (head % (heads / groups) == 0)
      std::memcpy(bs.of_row(row) + group * size, to.b, size_t(size) * sizeof(float));
  }

  // Some entries in turn. Each element of the state meets them in the order in which it would meet them one by one.
  template <int kCount, bool kAnswers>
  void go_on(float* own, int64_t width, const Entry (&entries)[kEntries]) const {
    for (int64_t p = 0; p < dim; p += kDims) {
      Vec answers[kCount * kDims] = {};
      for (int64_t n = 0; n < width; n += kLanes) {
        Vec states[kDims];
        for (int i = 0; i < kDims; i++) states[i] = load(own + (p + i) * width + n);
        for (int t = 0; t < kCount; t++) {
          const Vec written = load(entries[t].b + n), asked = load(entries[t].c + n);
          for (int i = 0; i < kDims; i++) {
            states[i] = fma(splat(entries[t].x[p + i]), written, states[i] * entries[t].decay);
            if (kAnswers) answers[t * kDims + i] = fma(states[i], asked, answers[t * kDims + i]);
          }
        }
        for (int i = 0; i < kDims; i++) store(own + (p + i) * width + n, states[i]);
      }
      if (!kAnswers) continue;
      float total[kCount * kDims];
      sums(answers, total);
      for (int t = 0; t < kCount; t++) std::memcpy(entries[t].y + p, total + t * kDims, kDims * sizeof(float));
    }
  }

  void answer(int64_t row, int64_t head, const Entry& entry) const {
    const float* plain = input.at(row, head);
    float* to = out + row * out_stride + head * dim;
    for (int64_t p = 0; p < dim; p += kLanes) {
      const int lanes = lanes_left(dim - p);
      const Vec y = load(entry.y + p);
      store_part(to + p, d ? y + d[head] * load_part(plain + p, lanes) : y, lanes);
    }
  }
};

// A vector as an array of T holds it.
template <class T>
inline Vec as_stored(Vec v) {
  T held[kLanes];
  store(held, v);
  return load(held);
}

// A causal convolution, channel by channel. Inputs are read as the rings hold them, wherever they lie.
template <class In, class T, class Out>
struct Convolution {
  const In *input, *factor;  // factor: of the inputs, beside them, or null
  int64_t row_stride, channels, taps, ring_size;
  const float *weight, *bias;  // [taps, channels], [channels] or null
  bool has_silu;
  const In* gate;  // of the outputs, in rows as the inputs, or null
  T* rings;        // [slots, ring_size, channels]
  Out* out;
  int64_t out_stride;

  static constexpr int64_t kStep = 16 * kLanes;  // channels of a task
  int64_t num_parts() const { return (channels + kStep - 1) / kStep; }

  Vec input_of(int64_t row, int64_t channel, int lanes) const {
    const Vec x = load_part(input + row * row_stride + channel, lanes);
    return as_stored<T>(factor ? x * load_part(factor + row * row_stride + channel, lanes) : x);
  }

  void fetch_row(int64_t row, int64_t channel) const {
    __builtin_prefetch(input + row * row_stride + channel);
    __builtin_prefetch(out + row * out_stride + channel, 1);
  }

  // Some channels, for all rows of a sequence.
  void run(const StatePlan& plan, int64_t s, int64_t part) const {
    const int64_t first = part * kStep, last = std::min(first + kStep, channels);
    T* ring = rings + plan.slots[s] * ring_size * channels;
    const int64_t start = plan.starts[s], end = plan.ends[s];
    for (int64_t e = start; e < end; e++)
      for (int64_t c = first; c < last; c += kLanes) {
        const int lanes = lanes_left(last - c);
        Vec total{};
        for (int64_t t = 0; t < taps; t++) {
          const int64_t read = e - taps + 1 + t;
          if (read < 0) continue;
          const Vec x = read < start ? load_part(ring + read % ring_size * channels + c, lanes)
                                     : input_of(plan.row(s, read), c, lanes);
          total = fma(x, load_part(weight + t * channels + c, lanes), total);
        }
        if (bias) total += load_part(bias + c, lanes);
        if (has_silu) {
          total = as_stored<Out>(total);
          total = total / (1.0f + exp(-total));
        }
        const int64_t row = plan.row(s, e);
        if (e + kRowsAhead < end) fetch_row(row + kRowsAhead, c);
        if (gate) total *= load_part(gate + row * row_stride + c, lanes);
        store_part(out + row * out_stride + c, total, lanes);
      }
    for (int64_t e = end - start > ring_size ? end - ring_size : start; e < end; e++)
      for (int64_t c = first; c < last; c += kLanes) {
        const int lanes = lanes_left(last - c);
        store_part(ring + e % ring_size * channels + c, input_of(plan.row(s, e), c, lanes), lanes);
      }
  }
};

}  // namespace tandem
