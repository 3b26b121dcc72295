// Passes through recurrent layers, for modules that run under torch.
#include "recurrent.h"

#define TANDEM_API extern "C" __attribute__((visibility("default")))

namespace tandem {
namespace {

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

constexpr int64_t kFewProducts = 1 << 16;  // up to which one thread does the work

template <class T>
void convolve(const Convolution<T, T, T>& layer, const StatePlan& plan, int threads) {
  if (plan.num_rows() * layer.channels * layer.taps < kFewProducts) threads = 1;
  Counter counter;
  Pool::local().run(threads, [&](Team& team) {
    for (int64_t item; (item = team.next(counter)) < plan.count * layer.num_parts();)
      layer.run(plan, item / layer.num_parts(), item % layer.num_parts());
  });
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// Rows [T, C] (any row stride) to out [T, C], through SiLU or not; dtype 0 float32, 1 bfloat16, also of the rings.
TANDEM_API void tandem_convolve(int dtype, const void* input, int64_t row_stride, int64_t channels, int64_t taps,
                                const float* weight, const float* bias, int has_silu, void* rings, int64_t ring_size,
                                const int64_t* numbers, int64_t count, void* out, int threads) {
  auto run = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    const Convolution<T, T, T> layer{static_cast<const T*>(input), nullptr, row_stride, channels, taps,
                                     ring_size, weight, bias, has_silu != 0, nullptr,
                                     static_cast<T*>(rings), to, channels};
    convolve(layer, {numbers, count, ring_size}, threads);
  };
  dtype == 0 ? run(static_cast<float*>(out)) : run(static_cast<bf16*>(out));
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
                       out,
                       heads * value_dim};
  const int64_t parts = rule.num_parts();
  Counter running, keeping;
  pool.run(threads, [&](Team& team) {
    for (int64_t item; (item = team.next(running)) < count * heads * parts;)
      rule.run_part(item / parts / heads, item / parts % heads, item % parts, memory + team.id * own);
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
                    out,
                    heads * dim};
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
