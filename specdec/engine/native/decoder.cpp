// The forward pass of a Llama-shaped decoder in one call: one parallel region, barriers between its stages.
//
// The residual stream, attention and every sum are float32. What enters a linear layer has the type its kernel wants
// (Format::Activation): float32, or bfloat16 where weights are bfloat16 and the machine multiplies those directly.
#include "decoder.h"

namespace tandem {

namespace {

// out = weight * (x / sqrt(mean(x^2) + eps)), as transformers' RMSNorm orders it; zeros up to whole vectors.
template <class Out>
inline void rms_norm(const float* x, const float* weight, int64_t n, float eps, Out* out) {
  Vec squares{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Vec v = load(x + i);
    squares = fma(v, v, squares);
  }
  if (i < n) {
    Vec v = load_part(x + i, int(n - i));
    squares = fma(v, v, squares);
  }
  const float inverse = 1.0f / __builtin_sqrtf(sum(squares) / float(n) + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * inverse * load(weight + i));
  if (i < n) store(out + i, load_part(x + i, int(n - i)) * inverse * load_part(weight + i, int(n - i)));
}

// The same for one head, in place.
inline void head_norm(float* x, const float* weight, int n, float eps) {
  Vec squares{};
  for (int i = 0; i < n; i += kLanes) {
    Vec v = load_part(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const float inverse = 1.0f / __builtin_sqrtf(sum(squares) / float(n) + eps);
  for (int i = 0; i < n; i++) x[i] = x[i] * inverse * weight[i];
}

// x cos + rotate_half(x) sin, in place.
inline void rotate(float* x, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

template <class Cache>
inline void store_row(const float* x, int n, Cache* to) {
  for (int i = 0; i < n; i += kLanes) store_part(to + i, load_part(x + i, n - i), n - i < kLanes ? n - i : kLanes);
}

template <class T>
inline void copy_row(const T* from, int64_t n, T* to) {
  std::memcpy(to, from, size_t(n) * sizeof(T));
}

template <class Format, class Cache>
int run(const Model& m, const Batch& batch, int threads) {
  using Weight = typename Format::Weight;
  using Activation = typename Format::Activation;
  const Plan& plan = batch.plan;
  const int rows = int(plan.num_rows), num_logits = int(batch.num_logits);
  const int dim = int(m.head_dim), group = int(m.heads / m.kv_heads);
  const int64_t hidden = m.hidden, query_width = m.heads * dim, kv_width = m.kv_heads * dim;
  const int64_t key_at = round_up(query_width, kPanel), value_at = key_at + round_up(kv_width, kPanel);
  const int64_t qkv_width = value_at + round_up(kv_width, kPanel);
  const int64_t hidden_stride = row_stride(hidden), qkv_stride = row_stride(qkv_width);
  const int64_t mid_stride = row_stride(m.intermediate), out_stride = row_stride(query_width);
  const int64_t block_stride = m.kv_heads * plan.block_size * dim;
  AttentionShape shape{int(m.heads), int(m.kv_heads), dim, dim, block_stride, block_stride, m.scale, 0.0f, 0};

  for (int r = 0; r < rows; r++)
    if (batch.token_ids[r] < 0 || batch.token_ids[r] >= m.vocab) return -2;

  // One allocation: stages' counters, attention tasks, activations, then each thread's own memory.
  Pool& pool = Pool::local();
  const int64_t num_counters = m.num_layers * 8 + 3;  // a stage each
  const int64_t attention_floats = AttentionScratch::floats(shape), sums_floats = product_scratch(rows, 2);
  const int64_t own_floats = round_up(attention_floats > sums_floats ? attention_floats : sums_floats, 16);
  char* memory = nullptr;
  int64_t end = 0;
  auto take = [&](int64_t bytes) {
    char* at = memory ? memory + end : nullptr;
    end += round_up(bytes, 64);
    return at;
  };
  Counter* counters;
  AttentionTask* tasks;
  float *stream, *wanted_stream, *qkv, *own;
  Activation *normed, *attended, *wanted_attended, *mid;
  for (int pass = 0; pass < 2; pass++) {
    end = 0;
    counters = reinterpret_cast<Counter*>(take(num_counters * int64_t(sizeof(Counter))));
    tasks = reinterpret_cast<AttentionTask*>(take(max_attention_tasks(plan, shape) * int64_t(sizeof(AttentionTask))));
    stream = reinterpret_cast<float*>(take(rows * hidden_stride * 4));
    wanted_stream = reinterpret_cast<float*>(take(num_logits * hidden_stride * 4));
    qkv = reinterpret_cast<float*>(take(rows * qkv_stride * 4));
    normed = reinterpret_cast<Activation*>(take((rows > num_logits ? rows : num_logits) * hidden_stride * 4));
    attended = reinterpret_cast<Activation*>(take(rows * out_stride * 4));
    wanted_attended = reinterpret_cast<Activation*>(take(num_logits * out_stride * 4));
    mid = reinterpret_cast<Activation*>(take((rows > num_logits ? rows : num_logits) * mid_stride * 4));
    own = reinterpret_cast<float*>(take(threads * own_floats * 4));
    if (pass == 0 && !(memory = static_cast<char*>(pool.scratch(size_t(end))))) return -1;
  }
  for (int64_t i = 0; i < num_counters; i++) counters[i].taken.store(0, std::memory_order_relaxed);
  const int num_tasks = list_attention_tasks(plan, shape, tasks) * shape.kv_heads;

  pool.run(threads, [&](Team& team) {
    float* sums = own + team.id * own_floats;
    AttentionScratch attention_scratch(shape, sums);
    Counter* counter = counters;
    float* x = stream;  // the residual stream of the rows that are still of interest
    const Activation* heads_out = attended;
    int n = rows;

    const Weight* embedding = static_cast<const Weight*>(m.embedding);
    for (int r; (r = team.next(*counter)) < n;) {
      float* to = x + r * hidden_stride;
      const Weight* from = embedding + batch.token_ids[r] * hidden;
      int64_t i = 0;
      for (; i + kLanes <= hidden; i += kLanes) store(to + i, load(from + i));
      if (i < hidden) store(to + i, load_part(from + i, int(hidden - i))), i += kLanes;
      for (; i < round_up(hidden, kPanel); i += kLanes) store(to + i, Vec{});
      if (m.num_layers) rms_norm(to, m.layers[0].input_norm, hidden, m.eps, normed + r * hidden_stride);
    }
    counter++;
    team.barrier();

    auto project_to_stream = [&](const Activation* a, int64_t lda, const void* weight, int64_t k, const float* bias) {
      product<Format>(team, *counter++, n, a, lda, static_cast<const Weight*>(weight), k, int(round_up(hidden, kPanel) / kPanel),
                      1, panel_size<Format>(k), sums, [&](int first, int count, int panel, const float* s) {
                        for (int half = 0; half < kPanel; half += kLanes) {
                          const int64_t column = int64_t(panel) * kPanel + half;
                          const Vec b = bias ? load(bias + column) : Vec{};
                          for (int r = 0; r < count; r++) {
                            float* to = x + (first + r) * hidden_stride + column;
                            store(to, load(to) + (load(s + r * kPanel + half) + b));
                          }
                        }
                      });
      team.barrier();
    };
    auto norm_rows = [&](const float* weight) {
      for (int r; (r = team.next(*counter)) < n;)
        rms_norm(x + r * hidden_stride, weight, hidden, m.eps, normed + r * hidden_stride);
      counter++;
      team.barrier();
    };

    for (int64_t l = 0; l < m.num_layers; l++) {
      const Layer& layer = m.layers[l];
      const bool last = l + 1 == m.num_layers;
      if (l) norm_rows(layer.input_norm);
      product<Format>(team, *counter++, n, normed, hidden_stride, static_cast<const Weight*>(layer.qkv), hidden,
                      int(qkv_width / kPanel), 1, panel_size<Format>(hidden), sums, [&](int first, int count, int panel, const float* s) {
                        for (int half = 0; half < kPanel; half += kLanes) {
                          const int64_t column = int64_t(panel) * kPanel + half;
                          const Vec b = layer.qkv_bias ? load(layer.qkv_bias + column) : Vec{};
                          for (int r = 0; r < count; r++)
                            store(qkv + (first + r) * qkv_stride + column, load(s + r * kPanel + half) + b);
                        }
                      });
      team.barrier();

      Cache* k_cache = static_cast<Cache*>(batch.k_caches[l]);
      Cache* v_cache = static_cast<Cache*>(batch.v_caches[l]);
      for (int64_t item; (item = team.next(*counter)) < n * m.kv_heads;) {
        const int64_t r = item / m.kv_heads, h = item % m.kv_heads;
        float* row = qkv + r * qkv_stride;
        const float* cosine = batch.cosines + plan.positions[r] * (dim / 2);
        const float* sine = batch.sines + plan.positions[r] * (dim / 2);
        for (int g = 0; g < group; g++) {
          float* q = row + (h * group + g) * dim;
          if (layer.query_norm) head_norm(q, layer.query_norm, dim, m.eps);
          rotate(q, cosine, sine, dim / 2);
        }
        float* k = row + key_at + h * dim;
        if (layer.key_norm) head_norm(k, layer.key_norm, dim, m.eps);
        rotate(k, cosine, sine, dim / 2);
        const int64_t block = plan.slots[r] / plan.block_size, offset = plan.slots[r] % plan.block_size;
        const int64_t at = block * block_stride + (h * plan.block_size + offset) * dim;
        store_row(k, dim, k_cache + at);
        store_row(row + value_at + h * dim, dim, v_cache + at);
      }
      counter++;
      team.barrier();
      if (last && num_logits == 0) return;

      AttentionShape windowed = shape;
      windowed.window = layer.window;
      for (int item; (item = team.next(*counter)) < num_tasks;)
        attend(plan, windowed, tasks[item / shape.kv_heads], item % shape.kv_heads, qkv, qkv_stride, int64_t(dim),
               static_cast<const Cache*>(k_cache), static_cast<const Cache*>(v_cache), attended, out_stride,
               int64_t(dim), attention_scratch);
      counter++;
      team.barrier();

      if (last) {  // from here on rows no longer meet: only those whose logits are wanted go on
        for (int r; (r = team.next(*counter)) < num_logits;) {
          copy_row(x + batch.logit_rows[r] * hidden_stride, round_up(hidden, kPanel), wanted_stream + r * hidden_stride);
          copy_row(attended + batch.logit_rows[r] * out_stride, query_width, wanted_attended + r * out_stride);
        }
        counter++;
        team.barrier();
        x = wanted_stream, heads_out = wanted_attended, n = num_logits;
      }
      project_to_stream(heads_out, out_stride, layer.output, query_width, layer.output_bias);
      norm_rows(layer.post_norm);
      product<Format>(team, *counter++, n, normed, hidden_stride, static_cast<const Weight*>(layer.gate_up), hidden,
                      int(round_up(m.intermediate, kPanel) / kPanel), 2, 2 * panel_size<Format>(hidden), sums,
                      [&](int first, int count, int panel, const float* s) {
                        const float* bias = layer.gate_up_bias ? layer.gate_up_bias + int64_t(panel) * 2 * kPanel : nullptr;
                        for (int half = 0; half < kPanel; half += kLanes) {
                          const Vec gate_bias = bias ? load(bias + half) : Vec{};
                          const Vec up_bias = bias ? load(bias + kPanel + half) : Vec{};
                          for (int r = 0; r < count; r++) {
                            const Vec gate = load(s + r * kPanel + half) + gate_bias;
                            const Vec up = load(s + (count + r) * kPanel + half) + up_bias;
                            store(mid + (first + r) * mid_stride + int64_t(panel) * kPanel + half,
                                  gate / (1.0f + exp(-gate)) * up);
                          }
                        }
                      });
      team.barrier();
      project_to_stream(mid, mid_stride, layer.down, m.intermediate, layer.down_bias);
    }

    norm_rows(m.final_norm);
    product<Format>(team, *counter++, n, normed, hidden_stride, static_cast<const Weight*>(m.lm_head), hidden,
                    int(round_up(m.vocab, kPanel) / kPanel), 1, panel_size<Format>(hidden), sums, [&](int first, int count, int panel, const float* s) {
                      for (int half = 0; half < kPanel; half += kLanes) {
                        const int64_t column = int64_t(panel) * kPanel + half, left = m.vocab - column;
                        if (left <= 0) return;
                        const Vec b = m.lm_head_bias ? load(m.lm_head_bias + column) : Vec{};
                        for (int r = 0; r < count; r++)
                          store_part(batch.logits + (first + r) * m.vocab + column, load(s + r * kPanel + half) + b,
                                     int(left < kLanes ? left : kLanes));
                      }
                    });
  });
  return 0;
}

}  // namespace

int forward(const Model& model, const Batch& batch, int threads) {
  if (model.weight_dtype == 0)
    return model.cache_dtype == 0 ? run<Float32, float>(model, batch, threads)
                                  : run<Float32, bf16>(model, batch, threads);
  return model.cache_dtype == 0 ? run<BFloat16, float>(model, batch, threads)
                                : run<BFloat16, bf16>(model, batch, threads);
}

}  // namespace tandem

extern "C" __attribute__((visibility("default"))) int tandem_decoder_forward(const tandem::Model* model,
                                                                              const tandem::Batch* batch, int threads) {
  return tandem::forward(*model, *batch, threads);
}
