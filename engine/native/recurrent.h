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

  static int64_t own_floats(int64_t key_dim) { return (kBlocks * kLanes + 3) * round_up(key_dim, kLanes); }
  int64_t step() const { return value_dim <= kLanes ? kLanes : kBlocks * kLanes; }
  int64_t num_parts() const { return (value_dim + step() - 1) / step(); }
  void run_part(int64_t s, int64_t head, int64_t part, float* own) const {
    step() == kLanes ? run<1>(s, head, part * kLanes, own) : run<kBlocks>(s, head, part * step(), own);
  }

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

  // Some columns of one head's state, for all entries of a sequence.
  template <int kWidth>
  void run(int64_t s, int64_t head, int64_t first, float* own) const {
    const Tile<kWidth> tile{own, key_dim, value_dim, first};
    float* k = own + key_dim * kWidth * kLanes;
    float *q = k + round_up(key_dim, kLanes), *decay = q + round_up(key_dim, kLanes);
    const int64_t key_head = head / (heads / key_heads);
    const float root = std::sqrt(float(key_dim));
    float* stored = state + (plan.slots[s] * heads + head) * key_dim * value_dim;
    plan.bases[s] ? tile.read(stored) : tile.clear();
    const int64_t decay_width = decays_channels ? key_dim : 1;
    Vec delta[kWidth];
    for (int64_t e = plan.bases[s]; e < plan.starts[s]; e++) {
      const int64_t place = plan.place(s, e);
      const float* kept = deltas.of_place(place) + head * value_dim + first;
      for (int b = 0; b < kWidth; b++) {
        const int64_t left = value_dim - first - b * kLanes;
        delta[b] = left > 0 ? load_part(kept + b * kLanes, lanes_left(left)) : Vec{};
      }
      fold<kWidth>(tile, keys.of_place(place) + key_head * key_dim, decays.of_place(place) + head * decay_width, delta);
      if (e + 1 == plan.new_bases[s]) tile.write(stored);
    }
    for (int64_t e = plan.starts[s]; e < plan.ends[s]; e++) {
      const int64_t row = plan.row(s, e);
      const float *row_key = key.at(row, key_head), *row_query = query.at(row, key_head);
      scale_row(row_key, key_dim, is_normalised ? 1.0f : norm_scale(row_key, key_dim), k);
      scale_row(row_query, key_dim, is_normalised ? 1.0f : norm_scale(row_query, key_dim), q);
      for (int64_t i = 0; i < key_dim; i += kLanes) store(q + i, load(q + i) / root);
      const float* g = log_decay.at(row, head);
      for (int64_t i = 0; i < decay_width; i += kLanes)
        store(decay + i, exp(load_part(g + i, lanes_left(decay_width - i))));
      // Every task of a head needs its decays, and every head of a key that key; one of them keeps it.
      if (first == 0) {
        std::memcpy(decays.of_row(row) + head * decay_width, decay, size_t(decay_width) * sizeof(float));
        if (head % (heads / key_heads) == 0)
          std::memcpy(keys.of_row(row) + key_head * key_dim, k, size_t(key_dim) * sizeof(float));
      }
      Vec known[kWidth] = {}, answer[kWidth] = {};
      for (int64_t r = 0; r < key_dim; r++) {
        const Vec er = splat(decay[decays_channels ? r : 0]), kr = splat(k[r]);
        for (int b = 0; b < kWidth; b++) {
          const Vec decayed = load(tile.at(r, b)) * er;
          store(tile.at(r, b), decayed);
          known[b] = fma(decayed, kr, known[b]);
        }
      }
      const float* v = value.at(row, head) + first;
      const Vec rate = splat(beta[row * heads + head]);
      for (int b = 0; b < kWidth; b++) {
        const int64_t left = value_dim - first - b * kLanes;
        if (left <= 0) {
          delta[b] = Vec{};
          continue;
        }
        delta[b] = (load_part(v + b * kLanes, lanes_left(left)) - known[b]) * rate;
        store_part(deltas.of_row(row) + head * value_dim + first + b * kLanes, delta[b], lanes_left(left));
      }
      for (int64_t r = 0; r < key_dim; r++) {
        const Vec kr = splat(k[r]), qr = splat(q[r]);
        for (int b = 0; b < kWidth; b++) {
          const Vec written = fma(kr, delta[b], load(tile.at(r, b)));
          store(tile.at(r, b), written);
          answer[b] = fma(written, qr, answer[b]);
        }
      }
      float* to = out + row * out_stride + head * value_dim + first;
      for (int b = 0; b < kWidth; b++) {
        const int64_t left = value_dim - first - b * kLanes;
        if (left > 0) store_part(to + b * kLanes, answer[b], lanes_left(left));
      }
      if (e + 1 == plan.new_bases[s]) tile.write(stored);
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

  static int64_t own_floats(int64_t dim, int64_t size) {
    return (dim + 2) * round_up(size, kLanes) + round_up(dim, kLanes);
  }

  // The state of one head, for all entries of a sequence.
  void run(int64_t s, int64_t head, float* own) const {
    const int64_t width = round_up(size, kLanes), group = head / (heads / groups);
    float *b_row = own + dim * width, *c_row = b_row + width, *x = c_row + width;
    float* stored = state + (plan.slots[s] * heads + head) * dim * size;
    if (plan.bases[s])
      for (int64_t p = 0; p < dim; p++) scale_row(stored + p * size, size, 1.0f, own + p * width);
    else
      std::memset(own, 0, size_t(dim) * width * sizeof(float));
    auto keep = [&](int64_t end) {
      if (end != plan.new_bases[s]) return;
      for (int64_t p = 0; p < dim; p++) std::memcpy(stored + p * size, own + p * width, size_t(size) * sizeof(float));
    };
    for (int64_t e = plan.bases[s]; e < plan.starts[s]; e++) {
      const int64_t place = plan.place(s, e);
      scale_row(bs.of_place(place) + group * size, size, 1.0f, b_row);
      const float* kept = inputs.of_place(place) + head * dim;
      const Vec decay = splat(decays.of_place(place)[head]);
      for (int64_t p = 0; p < dim; p++)
        for (int64_t n = 0; n < width; n += kLanes) {
          const Vec decayed = load(own + p * width + n) * decay;
          store(own + p * width + n, fma(splat(kept[p]), load(b_row + n), decayed));
        }
      keep(e + 1);
    }
    for (int64_t e = plan.starts[s]; e < plan.ends[s]; e++) {
      const int64_t row = plan.row(s, e);
      const float step = steps[row * heads + head], decay_of = exp_of(a[head] * step);
      scale_row(b.at(row, group), size, 1.0f, b_row);
      scale_row(c.at(row, group), size, 1.0f, c_row);
      scale_row(input.at(row, head), dim, step, x);
      decays.of_row(row)[head] = decay_of;
      std::memcpy(inputs.of_row(row) + head * dim, x, size_t(dim) * sizeof(float));
      if (head % (heads / groups) == 0)
        std::memcpy(bs.of_row(row) + group * size, b_row, size_t(size) * sizeof(float));
      const Vec decay = splat(decay_of);
      const float* plain = input.at(row, head);
      float* to = out + row * out_stride + head * dim;
      for (int64_t p = 0; p < dim; p++) {
        Vec answer{};
        for (int64_t n = 0; n < width; n += kLanes) {
          const Vec decayed = load(own + p * width + n) * decay;
          const Vec written = fma(splat(x[p]), load(b_row + n), decayed);
          store(own + p * width + n, written);
          answer = fma(written, load(c_row + n), answer);
        }
        const float y = sum(answer);
        to[p] = d ? y + d[head] * plain[p] : y;
      }
      keep(e + 1);
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
