// Chains of drafted tokens in one call: a pass over what is pending, then a token drawn and fed for every chain that goes
// on. Nothing crosses into Python between the steps.
#include <algorithm>
#include <cmath>

#include "decoder.h"
#include "layout.h"
#include "sampling.h"

namespace tandem {

namespace {

// Tokens times rows from which on a step's draws are worth waking other threads for.
constexpr int64_t kSharedWork = int64_t(1) << 17;

}  // namespace

// Mirrors the ctypes structures of chains.py.
struct Chain {
  const Sampler* sampler;
  const int32_t* blocks;    // of its sequence; null: block 0 takes all rows
  const int64_t* token_ids;  // [num_token_ids], fed first
  const int64_t* assumed;    // [num_assumed]: follow the committed tokens
  const void* features;      // [num_token_ids, num_features]; null: the model is no head
  int64_t num_token_ids, num_assumed;
  int64_t length;          // entries in the cache
  int64_t base;            // where the first drafted token will stand
  int64_t num_tokens;      // to draft
  int64_t num_candidates;  // of the target's token, at each
  int64_t rule;            // a Rule
};

// One stretch of `depth` steps for each chain; `depth` is the most any of them drafts.
struct Drafted {
  int64_t* token_ids;    // [chains, depth]
  int64_t* candidates;   // [chains, depth, width]
  int64_t width;         // the most candidates any chain asks for
  uint8_t* q;            // [chains, depth, kMaxRowBytes]
  int32_t* q_bytes;      // [chains, depth]: 0 where a token has no q
  int64_t* lengths;      // [chains]: tokens drafted
  int64_t depth;
};

namespace {

class Drafting {
 public:
  Drafting(const Model& model, const Batch& caches, const Chain* chains, int64_t num_chains, const volatile int32_t* stop,
           const Drafted& out, int threads)
      : model_(model), batch_(caches), chains_(chains), num_chains_(num_chains), stop_(stop), out_(out), threads_(threads) {}

  int run() {
    if (!lay_out()) return -1;
    for (int64_t c = 0; c < num_chains_; c++) out_.lengths[c] = 0;
    int status = feed_pending();
    for (int64_t step = 0; status == 0; step++) {
      if (num_active_ == 0) break;
      draw(step);
      leave([&](int64_t c) { return step + 1 == chains_[c].num_tokens || (stop_ && stop_[c]); });
      if (num_active_) status = feed_drawn(step);
    }
    return status;
  }

 private:
  // Takes all working memory; false if there is none.
  bool lay_out() {
    num_rows_ = 0;
    layout_.block_size = batch_.plan.block_size;
    for (int64_t c = 0; c < num_chains_; c++) {
      const Chain& chain = chains_[c];
      num_rows_ += chain.num_token_ids;
      const int64_t longest = chain.length + chain.num_token_ids + chain.num_tokens;
      layout_.width = std::max(layout_.width, layout_.blocks_of(longest));
      prefix_ = std::max(prefix_, chain.num_assumed + out_.depth);
    }
    char* memory = nullptr;
    int64_t end = 0;
    auto take = [&](int64_t bytes) {
      char* at = memory ? memory + end : nullptr;
      end += round_up(bytes, 64);
      return at;
    };
    for (int pass = 0; pass < 2; pass++) {
      end = 0;
      layout_.take(take, num_rows_, num_chains_);
      ids_ = reinterpret_cast<int64_t*>(take(num_rows_ * 8));
      logit_rows_ = reinterpret_cast<int64_t*>(take(num_chains_ * 8));
      active_ = reinterpret_cast<int64_t*>(take(num_chains_ * 8));
      row_of_ = reinterpret_cast<int64_t*>(take(num_chains_ * 8));
      prefixes_ = reinterpret_cast<int64_t*>(take(num_chains_ * prefix_ * 8));
      logits_ = reinterpret_cast<float*>(take(num_chains_ * model_.outputs * 4));
      if (model_.head) {
        features_ = reinterpret_cast<const void**>(take(num_rows_ * int64_t(sizeof(void*))));
        batch_.stream = reinterpret_cast<float*>(take(num_chains_ * state_stride() * 4));
      }
      own_ = take(threads_ * own_bytes());
      if (pass == 0 && !(memory = working_memory(size_t(end)))) return false;
    }
    return true;
  }

  // A thread's own: what sampling wants, then a row of logits for all of the vocabulary where the model has fewer.
  int64_t own_bytes() const { return workspace_bytes() + (model_.target_ids ? round_up(model_.vocab * 4, 64) : 0); }
  int64_t workspace_bytes() const { return round_up(Workspace::bytes(model_.vocab), 64); }
  int64_t state_stride() const { return row_stride(model_.hidden); }

  void place(int64_t sequence, int64_t c, int64_t from, int64_t count, int64_t row) {
    layout_.place(sequence, chains_[c].blocks, from, count, row);
  }

  int pass(int64_t num_sequences, int64_t num_rows, int64_t num_logits) {
    batch_.plan = layout_.plan(num_sequences, num_rows);
    batch_.token_ids = ids_;
    batch_.logit_rows = logit_rows_;
    batch_.num_logits = num_logits;
    batch_.logits = logits_;
    return forward(model_, batch_, threads_);
  }

  int feed_pending() {
    num_active_ = 0;
    int64_t row = 0;
    for (int64_t c = 0; c < num_chains_; c++) {
      const Chain& chain = chains_[c];
      place(c, c, chain.length, chain.num_token_ids, row);
      std::memcpy(ids_ + row, chain.token_ids, size_t(chain.num_token_ids) * 8);
      if (model_.head) name_features(chain, row);
      if (chain.num_assumed) std::memcpy(prefixes_ + c * prefix_, chain.assumed, size_t(chain.num_assumed) * 8);
      row += chain.num_token_ids;
      if (chain.num_tokens) {
        row_of_[num_active_] = num_active_;
        logit_rows_[num_active_] = row - 1;
        active_[num_active_++] = c;
      }
    }
    batch_.features = features_;
    return pass(num_chains_, row, num_active_);
  }

  void name_features(const Chain& chain, int64_t row) {
    const int64_t bytes = model_.head->num_features * (batch_.features_dtype == 0 ? 4 : 2);
    for (int64_t i = 0; i < chain.num_token_ids; i++) features_[row + i] = static_cast<const char*>(chain.features) + i * bytes;
  }

  int feed_drawn(int64_t step) {
    batch_.features = nullptr;
    for (int64_t i = 0; i < num_active_; i++) {
      const int64_t c = active_[i];
      if (model_.head && row_of_[i] != i)  // states move down to where their rows are now
        std::memcpy(batch_.stream + i * state_stride(), batch_.stream + row_of_[i] * state_stride(), size_t(state_stride()) * 4);
      place(i, c, chains_[c].length + chains_[c].num_token_ids + step, 1, i);
      ids_[i] = out_.token_ids[c * out_.depth + step];
      logit_rows_[i] = row_of_[i] = i;
    }
    return pass(num_active_, num_active_, num_active_);
  }

  // Chains that are over leave the batch.
  template <class IsOver>
  void leave(IsOver&& is_over) {
    int64_t kept = 0;
    for (int64_t i = 0; i < num_active_; i++)
      if (!is_over(active_[i])) row_of_[kept] = row_of_[i], active_[kept++] = active_[i];
    num_active_ = kept;
  }

  void draw(int64_t step) {
    const int wanted = num_active_ * model_.vocab >= kSharedWork ? threads_ : 1;
    Counter counter;
    Pool::local().run(wanted, [&](Team& team) {
      char* own = own_ + team.id * own_bytes();
      const Workspace work = Workspace::at(own, model_.vocab);
      for (int i; (i = team.next(counter)) < num_active_;) {
        float* logits = logits_ + row_of_[i] * model_.outputs;
        if (model_.target_ids) logits = spread(logits, reinterpret_cast<float*>(own + workspace_bytes()));
        draw_one(active_[i], logits, step, work);
      }
    });
  }

  // Outputs to the places of their tokens in a row of the whole vocabulary, where all others are -inf.
  float* spread(const float* outputs, float* logits) const {
    std::fill(logits, logits + model_.vocab, -INFINITY);
    for (int64_t i = 0; i < model_.outputs; i++) logits[model_.target_ids[i]] = outputs[i];
    return logits;
  }

  void draw_one(int64_t c, float* logits, int64_t step, const Workspace& work) {
    const Chain& chain = chains_[c];
    const int64_t at = c * out_.depth + step;
    int64_t* prefix = prefixes_ + c * prefix_;
    int64_t& token = out_.token_ids[at];
    const DraftPlace place{prefix, chain.num_assumed + step, chain.base, step, chain.num_candidates,
                           out_.candidates + at * out_.width, out_.q + at * kMaxRowBytes, out_.q_bytes + at};
    token = draft_token(logits, *chain.sampler, Rule(chain.rule), place, work);
    prefix[chain.num_assumed + step] = token;
    out_.lengths[c] = step + 1;
  }

  const Model& model_;
  Batch batch_;
  const Chain* chains_;
  const int64_t num_chains_;
  const volatile int32_t* stop_;  // [chains] or null; written by another thread
  const Drafted out_;
  const int threads_;
  int64_t num_rows_ = 0, prefix_ = 0, num_active_ = 0;
  Layout layout_{};
  int64_t *ids_, *logit_rows_;
  int64_t* active_;  // chains that go on
  int64_t* row_of_;  // and where their logits are
  int64_t* prefixes_;
  float* logits_;
  const void** features_ = nullptr;  // of the rows fed first
  char* own_;
};

}  // namespace

}  // namespace tandem

// Drafts every chain. `caches` names caches, rotary tables and block size; the rest of it is not read. Returns what
// forward() returns.
extern "C" __attribute__((visibility("default"))) int tandem_draft_chains(
    const tandem::Model* model, const tandem::Batch* caches, const tandem::Chain* chains, int64_t num_chains,
    const int32_t* stop, const tandem::Drafted* out, int threads) {
  return tandem::Drafting(*model, *caches, chains, num_chains, stop, *out, threads).run();
}
