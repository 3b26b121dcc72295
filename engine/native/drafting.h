// Drawing chains of tokens, whatever computes their logits: for every chain that continues a token is drawn and fed, and
// nothing crosses into Python between the steps.
#pragma once

#include <algorithm>
#include <cmath>

#include "pool.h"
#include "sampling.h"

namespace tandem {

// A chain to draft.
struct Chain {
  const Sampler* sampler;
  const int32_t* blocks;    // of its sequence; null: block 0 takes all rows
  const int64_t* token_ids;  // [num_token_ids], fed first
  const void* features;      // [num_token_ids, num_features]; null: the model is no head
  int64_t num_token_ids;
  int64_t num_masks;  // of those, at their end: the rows of all tokens to draft but the first; 0: they are fed one by one
  int64_t length;       // entries in the cache
  int64_t num_dropped;  // entries that are not any more
  int64_t base;         // where the first drafted token will stand
  int64_t num_tokens;   // to draft
  int64_t sampling;     // a DraftSampling
};
TANDEM_STRUCT(Chain, sampler, blocks, token_ids, features, num_token_ids, num_masks, length, num_dropped, base, num_tokens, sampling)

// What is drafted: `depth` steps for each chain, the most any of them drafts.
struct Drafted {
  int64_t* token_ids;  // [chains, depth]
  uint8_t* q;          // [chains, depth, kMaxRowBytes]
  int32_t* q_bytes;    // [chains, depth]: 0 where a token has no q
  int64_t* lengths;    // [chains]: tokens drafted
  int64_t depth;
};
TANDEM_STRUCT(Drafted, token_ids, q, q_bytes, lengths, depth)

// The chains that continue, and where each one's logits were in the step before.
struct Active {
  int64_t count;
  int64_t* chains;
  int64_t* rows;
};

// What Steps has to offer:
//   vocab, outputs, target_ids   the tokens sampling knows, the columns of logits, and which token each of them is or null
//   take(take)                   takes memory from take(bytes), which is called twice: to count, then to hand out
//   first(active, logits)        ingests what is pending, and writes a row of logits for every active chain, then one for
//                                each of its masks
//   next(active, step, logits)   feeds the tokens drawn in `step`; never called if a chain has masks
// The last two return 0, or what the chains are to return.
template <class Steps>
class Drafting {
 public:
  Drafting(Steps& steps, const Chain* chains, int64_t num_chains, const volatile int32_t* stop, const Drafted& out, int threads)
      : steps_(steps), chains_(chains), num_chains_(num_chains), stop_(stop), out_(out), threads_(threads) {}

  int run() {
    if (!lay_out()) return -1;
    active_.count = 0;
    for (int64_t c = 0, row = 0; c < num_chains_; c++) {
      const Chain& chain = chains_[c];
      out_.lengths[c] = 0;
      if (!chain.num_tokens) continue;
      active_.chains[active_.count] = c, active_.rows[active_.count++] = row;
      row += 1 + chain.num_masks;
    }
    int status = steps_.first(active_, logits_);
    for (int64_t step = 0; status == 0 && active_.count; step++) {
      draw(step);
      leave([&](int64_t c) { return step + 1 == chains_[c].num_tokens || (stop_ && stop_[c]); });
      if (!active_.count) break;
      if (!num_masks_) status = steps_.next(active_, step, logits_);
      for (int64_t i = 0; i < active_.count; i++) active_.rows[i] = num_masks_ ? active_.rows[i] + 1 : i;
    }
    return status;
  }

 private:
  // Tokens times rows from which on a step's draws are worth waking other threads for.
  static constexpr int64_t kSharedWork = int64_t(1) << 17;

  // Takes all working memory; false if there is none.
  bool lay_out() {
    for (int64_t c = 0; c < num_chains_; c++) num_masks_ += chains_[c].num_masks;
    return take_all([&](Take& take) {
      steps_.take(take);
      active_.chains = reinterpret_cast<int64_t*>(take(num_chains_ * 8));
      active_.rows = reinterpret_cast<int64_t*>(take(num_chains_ * 8));
      logits_ = reinterpret_cast<float*>(take((num_chains_ + num_masks_) * steps_.outputs * 4));
      own_ = take(threads_ * own_bytes());
    });
  }

  // A thread's own: what sampling wants, then a row of logits for all of the vocabulary where there are fewer outputs.
  int64_t own_bytes() const { return workspace_bytes() + (steps_.target_ids ? round_up(steps_.vocab * 4, 64) : 0); }
  int64_t workspace_bytes() const { return round_up(Workspace::bytes(steps_.vocab), 64); }

  // Chains that are over leave the batch.
  template <class IsOver>
  void leave(IsOver&& is_over) {
    int64_t kept = 0;
    for (int64_t i = 0; i < active_.count; i++)
      if (!is_over(active_.chains[i])) active_.rows[kept] = active_.rows[i], active_.chains[kept++] = active_.chains[i];
    active_.count = kept;
  }

  void draw(int64_t step) {
    const int wanted = active_.count * steps_.vocab >= kSharedWork ? threads_ : 1;
    Counter counter;
    Pool::local().run(wanted, [&](Team& team) {
      char* own = own_ + team.id * own_bytes();
      const Workspace work = Workspace::at(own, steps_.vocab);
      for (int i; (i = team.next(counter)) < active_.count;) {
        float* logits = logits_ + active_.rows[i] * steps_.outputs;
        if (steps_.target_ids) logits = spread(logits, reinterpret_cast<float*>(own + workspace_bytes()));
        draw_one(active_.chains[i], logits, step, work);
      }
    });
  }

  // Outputs to the places of their tokens in a row of the whole vocabulary, where all others are -inf.
  float* spread(const float* outputs, float* logits) const {
    std::fill(logits, logits + steps_.vocab, -INFINITY);
    for (int64_t i = 0; i < steps_.outputs; i++) logits[steps_.target_ids[i]] = outputs[i];
    return logits;
  }

  void draw_one(int64_t c, float* logits, int64_t step, const Workspace& work) {
    const Chain& chain = chains_[c];
    const int64_t at = c * out_.depth + step;
    int64_t* drafted = out_.token_ids + c * out_.depth;
    const DraftPlace place{drafted, step, chain.base, out_.q + at * kMaxRowBytes, out_.q_bytes + at};
    drafted[step] = draft_token(logits, *chain.sampler, DraftSampling(chain.sampling), place, work);
    out_.lengths[c] = step + 1;
  }

  Steps& steps_;
  const Chain* chains_;
  const int64_t num_chains_;
  const volatile int32_t* stop_;  // [chains] or null; written by another thread
  const Drafted out_;
  const int threads_;
  int64_t num_masks_ = 0;  // of all chains
  Active active_{};
  float* logits_;
  char* own_;
};

}  // namespace tandem
