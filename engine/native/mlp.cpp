// Chains of an MLP speculator in one call: a state that ingests one drafted token after the other, without attention.
//
//   s = proj_i(s) + scale · emb_i(token);  s = GELU(r(s) · weight_i + bias_i);  logits = head_i(s)
//
// with r(x) = x / sqrt(mean(x^2) + 1e-6); formula and source: engine/heads/mlp_speculator.py. Everything is float32 but
// what enters a linear layer, which has the type its kernel wants (Format::Activation).
#include "drafting.h"
#include "gemm.h"

namespace tandem {

// The weights of one step.
struct MlpStep {
  const void* proj;  // packed, as is head
  const void* embedding;  // [V, inner] row-major
  const float* weight;  // [inner]
  const float* bias;
  const void* head;
};
TANDEM_STRUCT(MlpStep, proj, embedding, weight, bias, head)

struct Mlp {
  const MlpStep* steps;
  int64_t num_steps, features, inner, vocab;  // features: width of the target's state
  float scale;  // of an embedding
  int32_t scales_input;  // the target's state is normed and halved in power
  int32_t weight_dtype, embedding_dtype;  // 0 float32, 1 bfloat16, 2 int8 (weights only)
  int32_t features_dtype;
  int64_t prefetch_one, prefetch_several;  // of weights, for one row and for several: gemm.h
};
TANDEM_STRUCT(Mlp, steps, num_steps, features, inner, vocab, scale, scales_input, weight_dtype, embedding_dtype,
              features_dtype, prefetch_one, prefetch_several)

namespace {

// 1 / sqrt(mean(x^2) + 1e-6)
template <class T>
float inverse_norm(const T* x, int64_t n) {
  Vec squares{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = load_part(x + i, int(n - i < kLanes ? n - i : kLanes));
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / float(n) + 1e-6f);
}

float gelu(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678f)); }

template <class Format>
class MlpSteps {
 public:
  const int64_t vocab, outputs;
  const int32_t* const target_ids = nullptr;

  MlpSteps(const Mlp& mlp, const Chain* chains, int64_t num_chains, const Drafted& out, int threads)
      : vocab(mlp.vocab), outputs(mlp.vocab), m(mlp), chains_(chains), num_chains_(int(num_chains)), out_(out),
        threads_(threads), widest_(std::max(mlp.features, mlp.inner)), stride_(row_stride(widest_)),
        sums_stride_(row_stride(mlp.inner)) {}

  void take(Take& take) {
    auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
    tokens_ = reinterpret_cast<int64_t*>(take(num_chains_ * 8));
    inputs_ = reinterpret_cast<Activation*>(take(num_chains_ * stride_ * int64_t(sizeof(Activation))));
    scales_ = floats(num_chains_);
    sums_ = floats(num_chains_ * sums_stride_);
    rows_ = floats(threads_ * stride_);
    own_floats_ = round_up(ProductScratch::own_floats(num_chains_, 1), 16);
    own_ = floats(threads_ * own_floats_);
    shared_ = floats(std::max(shared_floats(m.features, m.inner), shared_floats(m.inner, m.vocab)));
    done_ = reinterpret_cast<Counter*>(take(kSplitGroups * threads_ * int64_t(sizeof(Counter))));
  }

  // The token drafted after, and the state it was predicted from: a chain's last ones.
  int first(const Active& active, float* logits) {
    for (int64_t i = 0; i < active.count; i++) {
      const Chain& chain = chains_[active.chains[i]];
      tokens_[i] = chain.token_ids[chain.num_token_ids - 1];
      if (tokens_[i] < 0 || tokens_[i] >= m.vocab) return -2;
    }
    for (int64_t i = 0; i < kSplitGroups * threads_; i++) done_[i].taken.store(0, std::memory_order_relaxed);
    pass(int(active.count), 0, logits, [&](int64_t i, float* row) {
      const Chain& chain = chains_[active.chains[i]];
      const int64_t at = (chain.num_token_ids - 1) * m.features;
      m.features_dtype == 0 ? begin(static_cast<const float*>(chain.features) + at, row)
                            : begin(static_cast<const bf16*>(chain.features) + at, row);
    });
    return 0;
  }

  int next(const Active& active, int64_t step, float* logits) {
    for (int64_t i = 0; i < active.count; i++) {
      tokens_[i] = out_.token_ids[active.chains[i] * out_.depth + step];
      if (active.rows[i] == i) continue;  // states move down to where their rows are now
      std::memcpy(inputs_ + i * stride_, inputs_ + active.rows[i] * stride_, size_t(stride_) * sizeof(Activation));
      scales_[i] = scales_[active.rows[i]];
    }
    pass(int(active.count), step + 1, logits, nullptr);
    return 0;
  }

 private:
  using Activation = typename Format::Activation;
  using Weight = typename Format::Weight;

  static int panels(int64_t columns) { return int(round_up(columns, kPanel) / kPanel); }

  int64_t shared_floats(int64_t k, int64_t columns) const {
    const int rows = num_chains_ < kSplitRows ? num_chains_ : kSplitRows;
    return ProductScratch::shared_floats(rows, k, panels(columns), 1, threads_);
  }

  template <class T>
  void begin(const T* features, float* row) const {
    const Vec scale = splat(m.scales_input ? inverse_norm(features, m.features) * 0.70710678f : 1.0f);
    for (int64_t i = 0; i < m.features; i += kLanes) {
      const int count = int(m.features - i < kLanes ? m.features - i : kLanes);
      store_part(row + i, load_part(features + i, count) * scale, count);
    }
  }

  // What was summed up for a row, normed and activated.
  void activate(const MlpStep& step, const float* sums, float* row) const {
    const float inverse = inverse_norm(sums, m.inner);
    for (int64_t i = 0; i < m.inner; i++) row[i] = gelu(sums[i] * inverse * step.weight[i] + step.bias[i]);
  }

  // One step of `rows` rows, whose inputs lie there unless make(row, to) writes them.
  template <class Make>
  void pass(int rows, int64_t number, float* logits, Make&& make) {
    const MlpStep& step = m.steps[number];
    const int64_t width = number == 0 ? m.features : m.inner;
    const int64_t prefetch = rows == 1 ? m.prefetch_one : m.prefetch_several;
    Counter making, projecting, activating, answering;
    Pool::local().run(threads_, [&](Team& team) {
      const ProductScratch scratch{own_ + team.id * own_floats_, shared_, done_};
      float* row = rows_ + team.id * stride_;
      auto prepare = [&](int r, int64_t n) {
        scales_[r] = prepare_row(row, n, round_up(n, Format::kStep), inputs_ + r * stride_);
      };
      if constexpr (!std::is_null_pointer_v<std::decay_t<Make>>) {
        for (int r; (r = team.next(making)) < rows;) make(r, row), prepare(r, width);
        team.barrier();
      }
      const Rows<Format> inputs{inputs_, stride_, scales_};
      product<Format>(team, projecting, rows, inputs, static_cast<const Weight*>(step.proj), width, panels(m.inner), 1,
                      1, prefetch, scratch, [&](int first, int count, int panel, const float* s) {
                        for (int r = 0; r < count; r++) add_token(step, first + r, panel, s + r * kPanel);
                      });
      team.barrier();
      for (int r; (r = team.next(activating)) < rows;) {
        activate(step, sums_ + r * sums_stride_, row);
        prepare(r, m.inner);
      }
      team.barrier();
      product<Format>(team, answering, rows, inputs, static_cast<const Weight*>(step.head), m.inner, panels(m.vocab), 1,
                      1, prefetch, scratch, [&](int first, int count, int panel, const float* s) {
                        for (int v = 0; v < kPanel; v += kLanes) {
                          const int64_t column = int64_t(panel) * kPanel + v, left = m.vocab - column;
                          if (left <= 0) return;
                          for (int r = 0; r < count; r++)
                            store_part(logits + (first + r) * m.vocab + column, load(s + r * kPanel + v),
                                       int(left < kLanes ? left : kLanes));
                        }
                      });
    });
  }

  // One panel of a row's projection, and its token's embedding.
  void add_token(const MlpStep& step, int r, int panel, const float* projected) const {
    auto add = [&](const auto* embedding) {
      for (int v = 0; v < kPanel; v += kLanes) {
        const int64_t column = int64_t(panel) * kPanel + v, left = m.inner - column;
        if (left <= 0) return;
        const int count = int(left < kLanes ? left : kLanes);
        const Vec token = load_part(embedding + tokens_[r] * m.inner + column, count);
        store_part(sums_ + r * sums_stride_ + column, fma(token, splat(m.scale), load(projected + v)), count);
      }
    };
    m.embedding_dtype == 0 ? add(static_cast<const float*>(step.embedding)) : add(static_cast<const bf16*>(step.embedding));
  }

  const Mlp& m;
  const Chain* chains_;
  const int num_chains_;
  const Drafted& out_;
  const int threads_;
  const int64_t widest_, stride_, sums_stride_;
  int64_t own_floats_ = 0;
  int64_t* tokens_;
  Activation* inputs_;  // [chains, stride]: what enters the next product
  float* scales_;
  float* sums_;   // [chains, sums_stride]
  float* rows_;   // each thread's own
  float *own_, *shared_;
  Counter* done_;
};

template <class Format>
int draft(const Mlp& mlp, const Chain* chains, int64_t num_chains, const int32_t* stop, const Drafted& out, int threads) {
  MlpSteps<Format> steps(mlp, chains, num_chains, out, threads);
  return Drafting<MlpSteps<Format>>(steps, chains, num_chains, stop, out, threads).run();
}

}  // namespace

}  // namespace tandem

// Drafts every chain, num_steps tokens at most; a chain's blocks and length mean nothing. Returns 0, -1 without memory, -2
// for a token id outside the vocabulary.
extern "C" __attribute__((visibility("default"))) int tandem_draft_mlp(const tandem::Mlp* mlp, const tandem::Chain* chains,
                                                                       int64_t num_chains, const int32_t* stop,
                                                                       const tandem::Drafted* out, int threads) {
  auto run = [&](auto format) { return tandem::draft<decltype(format)>(*mlp, chains, num_chains, stop, *out, threads); };
  if (mlp->weight_dtype == 0) return run(tandem::Float32{});
  return mlp->weight_dtype == 1 ? run(tandem::BFloat16{}) : run(tandem::Int8{});
}
