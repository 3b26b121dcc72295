// Drawing one drafted token from a row of logits, as specdec/sampling/drafting.py draws it.
//
// Weights are float32 here and float64 there: a draft may be drawn from any distribution as long as the one that is
// sent is the one that was drawn from, and under the coupled rule the target takes no notice of how it was drawn.
// The noise is the same to the bit (specdec/sampling/noise.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

enum class DrawKind : int32_t { greedy = 0, coupled = 1, ratio = 2 };

// How the tokens of one chain are drawn. Mirrors a part of the record of chains.py.
struct DrawSettings {
  DrawKind kind;
  int32_t num_candidates;  // guesses of the target's token wanted at each position
  double temperature, top_p, min_p;
  int64_t top_k;       // 0: all
  uint64_t stream;     // key of the session's noise: of the coupling stream, or of the draft stream
  int64_t base;        // where the chain's first token will stand
  int64_t num_tokens;  // ids from here on are padding and never drawn
  int64_t q_tokens;    // tokens of a q row at most,
  double q_share;      // or the fewest that hold this share of their mass
};

// Memory for rows of `vocab` logits; null where there is none.
class Sampler {
 public:
  explicit Sampler(int64_t vocab);
  ~Sampler();
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;
  bool ok() const { return weights_ && survivors_; }

  // Draws token number `offset` of the chain: its id, the candidates, best first, and for a ratio rule the packed q row
  // (specdec/sampling/sparse.py), whose size in bytes is returned (0 for other rules).
  int draw(const float* logits, const DrawSettings& settings, int64_t offset, int64_t* token, int64_t* candidates,
           uint8_t* row);

 private:
  int64_t weigh(const float* logits, const DrawSettings& settings);
  int64_t truncate(const DrawSettings& settings, int64_t count);
  int64_t hold_share(double share, double total, int64_t count, int64_t most);
  double mass(int64_t count) const;
  void race(const DrawSettings& settings, const float* logits, uint64_t key, int64_t count, int64_t* ids, int num_best);
  int draw_quantized(const DrawSettings& settings, int64_t offset, int64_t count, int64_t* token, uint8_t* row);

  float* weights_;       // [V], by token id; twice the room, for what a q row is made of
  uint64_t* survivors_;  // [V], tokens left by truncation: weight and id in one number that sorts as they should
  float top_ = 0;        // the largest logit
};

}  // namespace tandem
