// The recurrent part of a decoder's layer, between its two linear layers.
#pragma once

#include "decoder.h"
#include "norms.h"
#include "recurrent.h"

namespace tandem {

// Rows `stride` apart.
struct FloatRows {
  float* at;
  int64_t stride;
  float* row(int64_t r) const { return at + r * stride; }
};

inline float softplus(float x) { return x <= 20.0f ? std::log1p(std::exp(x)) : x; }

// The rows of a pass through one mixer. Its stages, each of which needs all of the one before: prepare(), run(), keep().
template <class Cache>
class MixerRows {
 public:
  MixerRows(const Mixer& mixer, const StatePlan& plan, float eps, FloatRows projected, FloatRows convolved, float* numbers,
            FloatRows answers)
      : m(mixer),
        plan_(plan),
        num_rows_(plan.num_rows()),
        eps_(eps),
        projected_(projected),
        answers_(answers),
        steps_(numbers),
        betas_(steps_ + num_rows_ * m.heads),
        parts_{{betas_ + num_rows_ * m.heads, m.keys, m.key_heads * m.key_dim},
               {parts_[0].rows + num_rows_ * parts_[0].width, m.values, m.heads * m.value_dim},
               {parts_[1].rows + num_rows_ * parts_[1].width, m.decays, m.heads}},
        conv_{projected.at + m.conv_at,
              is(kShortConvolution) ? projected.at + m.factor_at : nullptr,
              projected.stride,
              m.channels,
              m.num_taps,
              m.ring_size,
              m.taps,
              m.taps_bias,
              !is(kShortConvolution),
              is(kShortConvolution) ? projected.at + m.gate_at : nullptr,
              static_cast<Cache*>(m.rings),
              is(kShortConvolution) ? answers.at : convolved.at,
              is(kShortConvolution) ? answers.stride : convolved.stride},
        convolved_(convolved) {}

  // Of what enters the last linear layer.
  static int64_t width(const Mixer& m) { return m.kind == kShortConvolution ? m.channels : m.heads * m.value_dim; }
  // Numbers of a row that the stages leave for each other.
  static int64_t row_floats(const Mixer& m) { return m.key_heads * m.key_dim + m.heads * (m.value_dim + 3); }
  static int64_t own_floats(const Mixer& m) {
    return m.kind == kDeltaNet ? DeltaRule::own_floats(m.key_dim) : Mamba2::own_floats(m.value_dim, m.key_dim);
  }

  // Convolves, and makes time steps (of the delta rule: logarithms of decays) and betas of what was projected.
  int64_t num_prepared() const { return plan_.count * conv_.num_parts() + (m.heads ? num_rows_ : 0); }
  void prepare(int64_t item) const {
    const int64_t convolving = plan_.count * conv_.num_parts();
    if (item < convolving) return conv_.run(plan_, item / conv_.num_parts(), item % conv_.num_parts());
    const int64_t r = item - convolving;
    const float *time = projected_.row(r) + m.time_at, *beta = projected_.row(r) + m.factor_at;
    for (int64_t h = 0; h < m.heads; h++) {
      const float step = softplus(time[h] + m.time_bias[h]);
      if (is(kMamba2))
        steps_[r * m.heads + h] = std::min(std::max(step, m.shortest), m.longest);
      else
        steps_[r * m.heads + h] = m.rates[h] * step, betas_[r * m.heads + h] = sigmoid(splat(beta[h]))[0];
    }
  }

  // A head of a sequence, with its gate.
  int64_t num_run() const { return plan_.count * m.heads; }
  void run(int64_t item, float* own) const {
    const int64_t s = item / m.heads, h = item % m.heads, at = h * m.value_dim, row_heads = m.key_heads * m.key_dim;
    const int64_t size = m.key_dim, stride = convolved_.stride;
    float* mixed = convolved_.at;
    if (is(kDeltaNet)) {
      const DeltaRule rule{plan_, m.key_heads, m.heads, size, m.value_dim, false, false,
                           {mixed, stride, size}, {mixed + row_heads, stride, size},
                           {mixed + 2 * row_heads, stride, m.value_dim}, {steps_, m.heads, 1},
                           betas_, m.state, parts_[0], parts_[1], parts_[2], answers_.at, answers_.stride};
      for (int64_t part = 0; part < rule.num_parts(); part++) rule.run_part(s, h, part, own);
    } else {
      const int64_t inputs = m.heads * m.value_dim;
      const Mamba2 scan{plan_, m.heads, m.value_dim, m.key_heads, size, {mixed, stride, m.value_dim},
                        {mixed + inputs, stride, size}, {mixed + inputs + row_heads, stride, size},
                        steps_, m.rates, m.skip, m.state, parts_[1], parts_[0], parts_[2], answers_.at, answers_.stride};
      scan.run(s, h, own);
    }
    for (int64_t e = plan_.starts[s]; e < plan_.ends[s]; e++) {
      const int64_t r = plan_.row(s, e);
      float* answer = answers_.row(r) + at;
      if (is(kDeltaNet)) part_norm(answer, m.norm, m.value_dim, eps_, answer);
      for (int64_t i = 0; i < m.value_dim; i += kLanes) {
        const int lanes = lanes_left(m.value_dim - i);
        store_part(answer + i, load_part(answer + i, lanes) * silu(load_part(projected_.row(r) + m.gate_at + at + i, lanes)),
                   lanes);
      }
    }
  }

  // Keeps the records of the rows.
  void keep(Team& team, Counter& counter) const {
    if (m.heads) keep_records(plan_, parts_, team, counter);
  }

 private:
  bool is(MixerKind kind) const { return m.kind == kind; }

  const Mixer& m;
  const StatePlan& plan_;
  const int64_t num_rows_;
  const float eps_;
  const FloatRows projected_, answers_;
  float *steps_, *betas_;  // [T, heads]
  const Part parts_[3];    // keys, values, decays
  const Convolution<float, Cache, float> conv_;
  const FloatRows convolved_;
};

// A row of answers as the last linear layer reads it.
template <class Out>
inline void finish_answers(const Mixer& m, const float* answers, int64_t width, float eps, Out* out) {
  if (m.kind != kMamba2 || !m.norm) return void(prepare_row(answers, width, width, out));
  const int64_t size = width / m.norm_groups;
  for (int64_t at = 0; at < width; at += size) part_norm(answers + at, m.norm + at, size, eps, out + at);
}

}  // namespace tandem
