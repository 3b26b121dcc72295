// Chains along blocks that one pass has drafted: rows of logits are there, and the token drawn at one row may give a bias
// to those of the next (DSpark; formula and source: engine/heads/dspark.py). Everything is float32 but the tables.
#include "drafting.h"
#include "gemm.h"

namespace tandem {

enum class WalkKind : int64_t { kNone, kVanilla, kGated, kRecurrent, kProduct };

// The blocks of a batch. r is the rank of the bias; without one, candidates and what follows mean nothing.
struct Walk {
  const float* logits;        // [rows, outputs]
  const int64_t* rows;        // [chains]: the row of each chain's first token; the others follow
  const int32_t* target_ids;  // [outputs], or null: outputs are tokens
  const int64_t* candidates;  // [rows, num_candidates]: the outputs that can be drawn
  const float* inner;         // [rows, r or 3 r]: the row's part of gate, joint or product; null: vanilla
  const float* weights;       // the token's part [r, r], or the state's and the token's [3 r, 2 r]
  const void* before;         // W1 [vocab, r]
  const void* after;          // W2 [outputs, r]
  const float* sure;          // [rows]: the row's part of the confidence, bias included; null: there is none
  const float* sure_weights;  // [r]: the token's part; null: there is none
  float* confidences;         // [chains, depth], logits
  int64_t vocab, outputs, num_candidates, rank, kind, table_dtype;
};
TANDEM_STRUCT(Walk, logits, rows, target_ids, candidates, inner, weights, before, after, sure, sure_weights, confidences,
              vocab, outputs, num_candidates, rank, kind, table_dtype)

namespace {

template <class T>
float dot(const T* a, const float* b, int64_t n) {
  Vec sums{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = int(n - i < kLanes ? n - i : kLanes);
    sums = fma(load_part(a + i, count), load_part(b + i, count), sums);
  }
  return sum(sums);
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

template <class Table>
class WalkSteps {
 public:
  const int64_t vocab, outputs;
  const int32_t* const target_ids;

  WalkSteps(const Walk& walk, const Chain* chains, int64_t num_chains, const Drafted& out, int threads)
      : vocab(walk.vocab), outputs(walk.outputs), target_ids(walk.target_ids), w(walk), chains_(chains),
        num_chains_(num_chains), out_(out), threads_(threads) {}

  void take(Take& take) {
    states_ = reinterpret_cast<float*>(take(num_chains_ * w.rank * 4));
    own_ = reinterpret_cast<float*>(take(threads_ * own_floats() * 4));
  }

  int first(const Active& active, float* logits) {
    std::fill(states_, states_ + num_chains_ * w.rank, 0.0f);
    for (int64_t i = 0; i < active.count; i++) {
      const Chain& chain = chains_[active.chains[i]];
      const int64_t token = chain.token_ids[chain.num_token_ids - 1];
      if (token < 0 || token >= vocab) return -2;
    }
    return write(active, 0, logits);
  }

  int next(const Active& active, int64_t step, float* logits) { return write(active, step + 1, logits); }

 private:
  int64_t own_floats() const { return 6 * round_up(w.rank, 16); }

  int write(const Active& active, int64_t step, float* logits) {
    Counter counter;
    Pool::local().run(active.count > 1 ? threads_ : 1, [&](Team& team) {
      for (int i; (i = team.next(counter)) < active.count;)
        write_one(active.chains[i], step, logits + i * outputs, own_ + team.id * own_floats());
    });
    return 0;
  }

  // The logits of one chain's token `step`.
  void write_one(int64_t c, int64_t step, float* logits, float* own) const {
    const Chain& chain = chains_[c];
    const int64_t row = w.rows[c] + step, r = w.rank, stride = round_up(r, 16);
    const int64_t token = step ? out_.token_ids[c * out_.depth + step - 1] : chain.token_ids[chain.num_token_ids - 1];
    const float* base = w.logits + row * outputs;
    const Table* embedded = r ? static_cast<const Table*>(w.before) + token * r : nullptr;
    float *e = own + 3 * stride, *bias = own + 4 * stride;
    for (int64_t i = 0; i < r; i++) e[i] = to_float(embedded[i]);
    if (w.sure) w.confidences[c * out_.depth + step] = w.sure[row] + (w.sure_weights ? dot(w.sure_weights, e, r) : 0.0f);
    if (!r) {
      std::memcpy(logits, base, size_t(outputs) * 4);
      return;
    }
    make_bias(e, row, states_ + c * r, own, bias);
    std::fill(logits, logits + outputs, -INFINITY);
    const int64_t* candidates = w.candidates + row * w.num_candidates;
    for (int64_t i = 0; i < w.num_candidates; i++) {
      const int64_t at = candidates[i];
      logits[at] = base[at] + dot(static_cast<const Table*>(w.after) + at * r, bias, r);
    }
  }

  // What W2 is multiplied by; a recurrent state moves on. `scratch` has room for 3 r and, behind the bias, for r more.
  void make_bias(const float* e, int64_t row, float* state, float* scratch, float* bias) const {
    const int64_t r = w.rank;
    switch (WalkKind(w.kind)) {
      case WalkKind::kGated:
        for (int64_t i = 0; i < r; i++) bias[i] = sigmoid(w.inner[row * r + i] + dot(w.weights + i * r, e, r)) * e[i];
        return;
      case WalkKind::kRecurrent:
        for (int64_t i = 0; i < 3 * r; i++)
          scratch[i] = w.inner[row * 3 * r + i] + dot(w.weights + i * 2 * r, state, r) + dot(w.weights + (2 * i + 1) * r, e, r);
        for (int64_t i = 0; i < r; i++) {
          const float gate = sigmoid(scratch[i]);
          state[i] = gate * state[i] + (1.0f - gate) * std::tanh(scratch[r + i]);
          bias[i] = std::tanh(scratch[2 * r + i]);
        }
        return;
      case WalkKind::kProduct:
        for (int64_t i = 0; i < r; i++) bias[i] = w.inner[row * r + i] * e[i];
        return;
      default:
        std::memcpy(bias, e, size_t(r) * 4);
    }
  }

  const Walk& w;
  const Chain* chains_;
  const int64_t num_chains_;
  const Drafted& out_;
  const int threads_;
  float* states_;  // [chains, r]
  float* own_;     // each thread's
};

}  // namespace

}  // namespace tandem

// Draws every chain along its block; a chain's blocks, features and length mean nothing. Returns 0, -1 without memory, -2
// for a token id outside the vocabulary.
extern "C" __attribute__((visibility("default"))) int tandem_draft_walk(const tandem::Walk* walk, const tandem::Chain* chains,
                                                                        int64_t num_chains, const int32_t* stop,
                                                                        const tandem::Drafted* out, int threads) {
  auto run = [&](auto table) {
    tandem::WalkSteps<decltype(table)> steps(*walk, chains, num_chains, *out, threads);
    return tandem::Drafting<decltype(steps)>(steps, chains, num_chains, stop, *out, threads).run();
  };
  return walk->table_dtype == 0 ? run(float{}) : run(tandem::bf16{});
}
