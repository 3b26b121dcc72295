// Passes through recurrent layers, for modules that run under torch: engine/recurrent says what they compute, and is the
// reference. A state stays in the cache of one core while its records are folded and its rows run, one entry after the
// other; so a row is the same to the bit in any company, and k + 1 rows read the state from memory once.
#include <algorithm>
#include <cmath>

#include "pool.h"
#include "vector.h"

#define TANDEM_API extern "C" __attribute__((visibility("default")))

namespace tandem {
namespace {

constexpr int kBlocks = 4;  // vectors of a row of the state that one task runs

// What a pass does to the states of its sequences: engine/recurrent/plan.py.
struct StatePlan {
  const int64_t *slots, *bases, *starts, *ends, *new_bases, *first_rows;
  int64_t count, num_records;

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
  float* out;  // [T, heads, value_dim]

  static int64_t own_floats(int64_t key_dim) { return (kBlocks * kLanes + 3) * round_up(key_dim, kLanes); }

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
      float* to = out + (row * heads + head) * value_dim + first;
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
  float* out;  // [T, heads, dim]

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
      float* to = out + (row * heads + head) * dim;
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

struct Mamba {
  StatePlan plan;
  int64_t channels, size;
  const float *a, *c, *d;  // [channels, size], [T, size], [channels] or null
  float* state;            // [slots, channels, size]
  Part steps, inputs, bs;  // the rows are what is given
  float* out;              // [T, channels]

  static constexpr int64_t kChannels = 32;  // of a task
  static int64_t own_floats(int64_t size) { return (kChannels + 2) * round_up(size, kLanes); }

  // S = exp(step a) S + step b x of one channel; the sum of S c where c is given.
  float go_on(float* own, int64_t channel, float step, float x, const float* b, const float* c_row) const {
    Vec answer{};
    for (int64_t n = 0; n < size; n += kLanes) {
      const Vec decay = exp(load_part(a + channel * size + n, lanes_left(size - n)) * step);
      const Vec decayed = load(own + n) * decay;
      const Vec written = fma(load(b + n) * step, splat(x), decayed);
      store(own + n, written);
      if (c_row) answer = fma(written, load(c_row + n), answer);
    }
    return sum(answer);
  }

  // Some channels, for all entries of a sequence.
  void run(int64_t s, int64_t first, int64_t last, float* own) const {
    const int64_t width = round_up(size, kLanes);
    float *b_row = own + kChannels * width, *c_row = b_row + width;
    float* stored = state + (plan.slots[s] * channels + first) * size;
    if (plan.bases[s])
      for (int64_t i = 0; i < last - first; i++) scale_row(stored + i * size, size, 1.0f, own + i * width);
    else
      std::memset(own, 0, size_t(last - first) * width * sizeof(float));
    for (int64_t e = plan.bases[s]; e < plan.ends[s]; e++) {
      const bool is_row = e >= plan.starts[s];
      const int64_t at = is_row ? plan.row(s, e) : plan.place(s, e);
      auto part = [&](const Part& of) { return is_row ? of.of_row(at) : of.of_place(at); };
      scale_row(part(bs), size, 1.0f, b_row);
      if (is_row) scale_row(c + at * size, size, 1.0f, c_row);
      for (int64_t channel = first; channel < last; channel++) {
        const float x = part(inputs)[channel];
        float* own_row = own + (channel - first) * width;
        const float y = go_on(own_row, channel, part(steps)[channel], x, b_row, is_row ? c_row : nullptr);
        if (is_row) out[at * channels + channel] = d ? y + d[channel] * x : y;
      }
      if (e + 1 == plan.new_bases[s])
        for (int64_t i = 0; i < last - first; i++)
          std::memcpy(stored + i * size, own + i * width, size_t(size) * sizeof(float));
    }
  }
};

enum Activation { kNone = 0, kSilu = 1 };

template <class T>
struct Convolution {
  const T* input;
  int64_t row_stride, channels, taps, ring_size;
  const float *weight, *bias;  // [taps, channels], [channels] or null
  int activation;
  T* rings;  // [slots, ring_size, channels]
  T* out;    // [T, channels]

  void run(const StatePlan& plan, int64_t s, int64_t first, int64_t last) const {
    T* ring = rings + plan.slots[s] * ring_size * channels;
    const int64_t start = plan.starts[s], end = plan.ends[s];
    for (int64_t e = start; e < end; e++)
      for (int64_t c = first; c < last; c += kLanes) {
        const int lanes = lanes_left(last - c);
        Vec total{};
        for (int64_t t = 0; t < taps; t++) {
          const int64_t read = e - taps + 1 + t;
          if (read < 0) continue;
          const T* from = read < start ? ring + read % ring_size * channels : input + plan.row(s, read) * row_stride;
          total = fma(load_part(from + c, lanes), load_part(weight + t * channels + c, lanes), total);
        }
        if (bias) total += load_part(bias + c, lanes);
        T* to = out + plan.row(s, e) * channels + c;
        store_part(to, total, lanes);
        if (activation == kSilu) {
          total = load_part(to, lanes);  // as rounded
          store_part(to, total / (1.0f + exp(-total)), lanes);
        }
      }
    for (int64_t e = end - start > ring_size ? end - ring_size : start; e < end; e++)
      std::memcpy(ring + e % ring_size * channels + first, input + plan.row(s, e) * row_stride + first,
                  size_t(last - first) * sizeof(T));
  }
};

constexpr int64_t kFewProducts = 1 << 16;  // up to which one thread does the work

template <class T>
void convolve(const Convolution<T>& layer, const StatePlan& plan, int threads) {
  const int64_t step = 16 * kLanes, parts = (layer.channels + step - 1) / step;
  if (plan.num_rows() * layer.channels * layer.taps < kFewProducts) threads = 1;
  Counter counter;
  Pool::local().run(threads, [&](Team& team) {
    for (int64_t item; (item = team.next(counter)) < plan.count * parts;)
      layer.run(plan, item / parts, item % parts * step, std::min((item % parts + 1) * step, layer.channels));
  });
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// Rows [T, C] (any row stride) to out [T, C]; dtype 0 float32, 1 bfloat16, also of the rings.
TANDEM_API void tandem_convolve(int dtype, const void* input, int64_t row_stride, int64_t channels, int64_t taps,
                                const float* weight, const float* bias, int activation, void* rings, int64_t ring_size,
                                const int64_t* numbers, int64_t count, void* out, int threads) {
  const StatePlan plan(numbers, count, ring_size);
  if (dtype == 0)
    convolve(Convolution<float>{static_cast<const float*>(input), row_stride, channels, taps, ring_size, weight, bias,
                                activation, static_cast<float*>(rings), static_cast<float*>(out)},
             plan, threads);
  else
    convolve(Convolution<bf16>{static_cast<const bf16*>(input), row_stride, channels, taps, ring_size, weight, bias,
                               activation, static_cast<bf16*>(rings), static_cast<bf16*>(out)},
             plan, threads);
}

// Strides are those of rows and heads of query, key, value and log_decay, in turn. Returns 0, or -1 without memory.
TANDEM_API int tandem_delta_rule(const float* query, const float* key, const float* value, const float* log_decay,
                                 const float* beta, const int64_t* strides, int64_t key_heads, int64_t heads,
                                 int64_t key_dim, int64_t value_dim, int decays_channels, int is_normalised,
                                 float* state, float* keys, float* deltas, float* decays, const int64_t* numbers,
                                 int64_t count, int64_t num_records, float* out, int threads) {
  const StatePlan plan(numbers, count, num_records);
  const int64_t rows = plan.num_rows(), decay_width = heads * (decays_channels ? key_dim : 1);
  const int64_t own = DeltaRule::own_floats(key_dim);
  const int64_t row_floats = key_heads * key_dim + heads * value_dim + decay_width;
  Pool& pool = Pool::local();
  float* memory = static_cast<float*>(pool.scratch(size_t(threads * own + rows * row_floats) * sizeof(float)));
  if (!memory) return -1;
  float* of_rows = memory + threads * own;
  const Part key_part{of_rows, keys, key_heads * key_dim};
  const Part delta_part{of_rows + rows * key_part.width, deltas, heads * value_dim};
  const Part decay_part{of_rows + rows * (key_part.width + delta_part.width), decays, decay_width};
  const DeltaRule rule{plan,
                       key_heads,
                       heads,
                       key_dim,
                       value_dim,
                       decays_channels != 0,
                       is_normalised != 0,
                       {query, strides[0], strides[1]},
                       {key, strides[2], strides[3]},
                       {value, strides[4], strides[5]},
                       {log_decay, strides[6], strides[7]},
                       beta,
                       state,
                       key_part,
                       delta_part,
                       decay_part,
                       out};
  const bool is_narrow = value_dim <= kLanes;
  const int64_t step = is_narrow ? kLanes : kBlocks * kLanes, parts = (value_dim + step - 1) / step;
  Counter running, keeping;
  pool.run(threads, [&](Team& team) {
    for (int64_t item; (item = team.next(running)) < count * heads * parts;) {
      const int64_t s = item / parts / heads, head = item / parts % heads, first = item % parts * step;
      if (is_narrow)
        rule.run<1>(s, head, first, memory + team.id * own);
      else
        rule.run<kBlocks>(s, head, first, memory + team.id * own);
    }
    team.barrier();
    keep_records(plan, {key_part, delta_part, decay_part}, team, keeping);
  });
  return 0;
}

// Strides are those of rows and heads of input, b and c, in turn. Returns 0, or -1 without memory.
TANDEM_API int tandem_mamba2(const float* input, const float* b, const float* c, const float* steps, const float* a,
                             const float* d, const int64_t* strides, int64_t heads, int64_t dim, int64_t groups,
                             int64_t size, float* state, float* inputs, float* bs, float* decays,
                             const int64_t* numbers, int64_t count, int64_t num_records, float* out, int threads) {
  const StatePlan plan(numbers, count, num_records);
  const int64_t rows = plan.num_rows(), own = Mamba2::own_floats(dim, size);
  Pool& pool = Pool::local();
  const int64_t row_floats = heads * dim + groups * size + heads;
  float* memory = static_cast<float*>(pool.scratch(size_t(threads * own + rows * row_floats) * sizeof(float)));
  if (!memory) return -1;
  float* of_rows = memory + threads * own;
  const Part input_part{of_rows, inputs, heads * dim};
  const Part b_part{of_rows + rows * input_part.width, bs, groups * size};
  const Part decay_part{of_rows + rows * (input_part.width + b_part.width), decays, heads};
  const Mamba2 scan{plan,
                    heads,
                    dim,
                    groups,
                    size,
                    {input, strides[0], strides[1]},
                    {b, strides[2], strides[3]},
                    {c, strides[4], strides[5]},
                    steps,
                    a,
                    d,
                    state,
                    input_part,
                    b_part,
                    decay_part,
                    out};
  Counter running, keeping;
  pool.run(threads, [&](Team& team) {
    for (int64_t item; (item = team.next(running)) < count * heads;)
      scan.run(item / heads, item % heads, memory + team.id * own);
    team.barrier();
    keep_records(plan, {input_part, b_part, decay_part}, team, keeping);
  });
  return 0;
}

// Input and steps [T, channels], b and c [T, size], a [channels, size]. Returns 0, or -1 without memory.
TANDEM_API int tandem_mamba(float* input, float* steps, float* b, const float* c, const float* a, const float* d,
                            int64_t channels, int64_t size, float* state, float* kept_steps, float* inputs, float* bs,
                            const int64_t* numbers, int64_t count, int64_t num_records, float* out, int threads) {
  const StatePlan plan(numbers, count, num_records);
  const int64_t own = Mamba::own_floats(size);
  Pool& pool = Pool::local();
  float* memory = static_cast<float*>(pool.scratch(size_t(threads * own) * sizeof(float)));
  if (!memory) return -1;
  const Mamba scan{plan,
                   channels,
                   size,
                   a,
                   c,
                   d,
                   state,
                   {steps, kept_steps, channels},
                   {input, inputs, channels},
                   {b, bs, size},
                   out};
  const int64_t parts = (channels + Mamba::kChannels - 1) / Mamba::kChannels;
  Counter running, keeping;
  pool.run(threads, [&](Team& team) {
    for (int64_t item; (item = team.next(running)) < count * parts;) {
      const int64_t first = item % parts * Mamba::kChannels;
      scan.run(item / parts, first, std::min(first + Mamba::kChannels, channels), memory + team.id * own);
    }
    team.barrier();
    keep_records(plan, {scan.steps, scan.inputs, scan.bs}, team, keeping);
  });
  return 0;
}
