// From a row of logits to a token on a CPU: what engine/sampling computes with tensors, row by row and without them.
//
// From the temperature on everything is float64. float32 only bounds which tokens are worth a look, so no result depends
// on it, nor on anything but the row, its session and its position: not on the batch and not on the threads.
#pragma once

#include <cmath>

#include "memory.h"
#include "struct_table.h"
#include "vector.h"

namespace tandem {

// The streams of engine/sampling/noise.py, in its order.
enum Stream { kCoupling, kDraftDraw, kAccept, kResidual, kBonus, kNumStreams };

// How a draft chooses its tokens: DraftSampling of specdec/rules.py.
enum DraftSampling : int32_t { kArgmax, kSharedNoise, kFromQ };

// What changes the logits of a session before the temperature; what is not in use is null or 0.
struct Edits {
  const uint8_t* forbidden;  // [V] bool
  const int64_t* bad_tokens;
  const int64_t* bad_heads;  // [num_bad_sequences, head_width], aligned right, -1 fits all
  const int64_t* bad_ends;   // the token each sequence must not end in
  const int64_t* stop_tokens;
  const int64_t* biased_tokens;
  const float* biases;
  const float* counts;  // [V]: how often each token was generated; null without penalties
  const uint8_t* seen;  // [V] bool: tokens of the prompt; null without a repetition penalty
  const int64_t* tail;  // the last head_width committed tokens, -2 before the first
  int64_t num_bad_tokens, num_bad_sequences, head_width, num_stop_tokens, num_biased;
  int64_t missing;  // output tokens before stop tokens are allowed
  float repetition, frequency, presence;
};
TANDEM_STRUCT(Edits, forbidden, bad_tokens, bad_heads, bad_ends, stop_tokens, biased_tokens, biases, counts, seen, tail,
              num_bad_tokens, num_bad_sequences, head_width, num_stop_tokens, num_biased, missing, repetition, frequency,
              presence)

// What sampling knows of one session.
struct Sampler {
  double temperature;  // 0: greedy
  double top_p, min_p;
  int64_t top_k;       // 0: all
  int64_t num_tokens;  // ids from here on are never drawn
  int64_t q_tokens;    // tokens of a q row at most
  double q_share;      // of the mass of those, held by the ones that are kept
  uint64_t stream_keys[kNumStreams];
  const Edits* edits;  // null: none
};
TANDEM_STRUCT(Sampler, temperature, top_p, min_p, top_k, num_tokens, q_tokens, q_share, stream_keys, edits)

// --- noise (engine/sampling/noise.py) ---

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u, kMul1 = 0xBF58476D1CE4E5B9u, kMul2 = 0x94D049BB133111EBu;

template <class U>
inline U mix64(U x) {
  x = (x ^ (x >> 30)) * kMul1;
  x = (x ^ (x >> 27)) * kMul2;
  return x ^ (x >> 31);
}

inline uint64_t position_key(uint64_t stream_key, int64_t position) {
  return mix64(stream_key + uint64_t(position) * kGolden);
}

// Number `index` of a key, in (0, 1).
inline double uniform(uint64_t key, int64_t index) {
  return (double(mix64(key + uint64_t(index + 1) * kGolden) >> 12) + 0.5) * 0x1p-52;
}

// --- rows ---

constexpr int64_t kMaxCandidates = 64;
// Of a race so many times the tokens wanted are looked at to tell how likely each is: RACED of candidates.py.
constexpr int64_t kRaced = 4;
constexpr int64_t kSpan = 256;

// One token of a row; keys order tokens by logit, of equal logits the lower id first.
struct Entry {
  uint64_t key;
  double weight;
};

// The distribution of one row: weight e^((logit - top) / temperature) where it survives, else 0.
struct Row {
  const float* logits;
  int64_t size;
  const uint32_t* mask = nullptr;  // bit v % 32 of word v / 32: whether token v may be drawn; null: all may
  float top = 0;        // the largest logit
  int64_t best = 0;     // the lowest id that has it
  bool valid = false;   // top is finite and no logit is NaN: only then the rest means anything
  double inverse = 0;   // 1 / temperature
  float cut;            // a token survives if its logit is larger, or equal and its id at most cut_id
  int64_t cut_id;
  double total = 0;  // of the weights; see total_weight()

  // Of a token that the mask forbids -inf, whatever the model says.
  float logit(int64_t id) const { return !mask || mask[id / 32] >> (id % 32) & 1 ? logits[id] : -INFINITY; }
  bool survives(float logit, int64_t id) const { return logit > cut || (logit == cut && id <= cut_id); }
  double weight(int64_t id) const;
};

// Working memory of one thread for rows of V tokens.
struct Workspace {
  Entry* entries;   // [V]
  int32_t* ids;     // [V]
  float* maxima;    // [V]
  static int64_t bytes(int64_t size);
  static Workspace at(char* memory, int64_t size);
};

// Changes the logits [V] of a row in place: edits.py, in its order. `prefix` are the tokens after the committed ones.
void edit(float* logits, const Sampler& sampler, const int64_t* prefix, int64_t num_prefix);

// Finds the top of a row, of the tokens that `mask` (or null) allows.
Row look_at(const float* logits, int64_t size, const uint32_t* mask = nullptr);

// Applies the temperature, min-p, top-k and top-p of a session to a valid row: sets `inverse` and the cut.
void truncate(Row& row, const Sampler& sampler, const Workspace& work);

// The sum of the survivors' weights, of all or of the ids from `begin` to `end` (exclusive; a multiple of kSpan or the
// size). The whole is the sum of its spans of kSpan ids, in order.
double total_weight(const Row& row);
double weight_between(const Row& row, int64_t begin, int64_t end);

// A logit that at least `count` tokens reach and not many more; -inf where looking for one does not pay.
float reached_by(const Row& row, int64_t count, float* maxima);

// Survivors with a logit of at least `from`, in ascending order of ids; returns how many.
int64_t gather(const Row& row, float from, int32_t* ids);

// Their keys and weights, in the same order.
void weigh(const Row& row, const int32_t* ids, int64_t count, Entry* entries);

// Moves the `wanted` largest keys to the front, in any order; returns how many are there.
int64_t most_likely(Entry* entries, int64_t count, int64_t wanted);

// Cuts a row behind its entries.
void cut_after(Row& row, const Entry* entries, int64_t count);

// Moves the fewest most likely entries that weigh `mass` together to the front, in any order; returns how many.
int64_t heaviest(Entry* entries, int64_t count, double mass);

// The `count` tokens that win the race p_v / E_v of the coupled rule, the first winner first; the best again where fewer
// survive. `key` is that of the row's noise.
void race(const Row& row, uint64_t key, int64_t count, int64_t* winners);

// The `count` tokens with the largest logits, largest first, of equal ones the lower id first.
void largest(const Row& row, int64_t count, int64_t* ids);

// --- q rows (engine/sampling/sparse.py) ---

constexpr int64_t kMaxRowTokens = 1024, kMaxRowBytes = 1024;

// How many tokens a row names, 0 where it cannot be one.
int64_t named_tokens(const uint8_t* packed, int64_t num_bytes);

// Reads a row: its ids, ascending, and integer weights; false where it is malformed or names a token from `num_tokens` on.
bool unpack(const uint8_t* packed, int64_t num_bytes, int64_t num_tokens, int32_t* ids, int32_t* weights);

// Draws a token from the quantised top of a truncated row with the number u; writes the row it was drawn from.
int64_t draw_quantized(const Row& row, const Sampler& sampler, double u, const Workspace& work, uint8_t* packed,
                       int32_t* num_bytes);

// --- drafting (engine/sampling/drafting.py) ---

// Where a drafted token comes from and what comes with it.
struct DraftPlace {
  const int64_t* prefix;  // tokens of the chain before this one
  int64_t num_prefix;
  int64_t base;      // where the first token of the chain will stand
  uint8_t* q;        // [kMaxRowBytes]
  int32_t* q_bytes;  // 0 where no q is sent
};
TANDEM_STRUCT(DraftPlace, prefix, num_prefix, base, q, q_bytes)

// A place of a tree whose children are looked for.
struct TreePlace {
  const int64_t* prefix;  // tokens after the committed ones
  int64_t num_prefix;
  int64_t position;  // where a child will stand
};
TANDEM_STRUCT(TreePlace, prefix, num_prefix, position)

// The `count` tokens likeliest to be the target's at a place, the likeliest first, and the logarithms of how likely, -inf
// where fewer can be drawn; the logits are edited in place (engine/sampling/candidates.py).
void likeliest(float* logits, const Sampler& sampler, DraftSampling sampling, const TreePlace& place, int64_t count,
               int64_t* ids, double* logprobs, const Workspace& work);

// Draws one token; the logits are edited in place.
int64_t draft_token(float* logits, const Sampler& sampler, DraftSampling sampling, const DraftPlace& place,
                    const Workspace& work);

}  // namespace tandem
