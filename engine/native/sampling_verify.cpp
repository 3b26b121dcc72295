// Verification of drafted chains and trees on a CPU: what target_service/verification/tensor_verifier.py does with
// tensors, for all rounds of a step in one call. The rules are those of target_service/verification/rules, where their sources are named.
#include <algorithm>
#include <atomic>
#include <new>

#include "pool.h"
#include "sampling_wide.h"

namespace tandem {

namespace {

// Tokens times rows from which on they are worth waking other threads for: where only the largest logit is wanted, and
// where tokens are weighed or hashed.
constexpr int64_t kSharedLooks = int64_t(1) << 17, kSharedDraws = int64_t(1) << 15;

constexpr int kNoMemory = -1, kMalformed = -2;

}  // namespace

// How drafted tokens are accepted; _ACCEPTANCE of sampling_verify.py says which rule does it so.
enum Acceptance : int64_t {
  kOwnChoice,   // the target draws its own token first, and accepts a drafted one that equals it
  kTokenRatio,  // rules/token.py: token by token with probability p / q
  kBlockRatio,  // rules/block.py: the longest prefix that passes
};

// A round to verify. Row start_row of the logits decides the first token (place 0), row
// start_row + i + 1 the one after drafted token i (place i + 1).
struct Round {
  const Sampler* sampler;
  const int64_t* token_ids;  // [num_tokens] drafted
  int64_t num_tokens;
  int64_t start_row;
  int64_t length;  // committed tokens: where the round's first token stands
  int64_t acceptance;  // an Acceptance; kOwnChoice at temperature 0
  const uint8_t* q;        // the rows drafted tokens were drawn from, one after the other; null: the draft is deterministic
  const int64_t* q_bytes;  // [groups of siblings] in the order of their first tokens; in a chain [num_tokens]
  const double* uniforms;  // [2 num_tokens + 1] for acceptance, residual and bonus, in a tree [3 num_tokens + 1], one for
                           // the bonus draw of each place; null: the session's own noise
  const int64_t* parents;  // [num_tokens] of each token the one it follows, or -1; null: a chain
  const uint32_t* masks;   // [num_tokens + 1, mask_words] of each place the tokens that may be drawn; null: all
  int64_t mask_words;
};
TANDEM_STRUCT(Round, sampler, token_ids, num_tokens, start_row, length, acceptance, q, q_bytes, uniforms, parents, masks,
              mask_words)

struct Decision {
  int64_t end;    // the place where the walk along the drafted tokens ends; in a chain so many are accepted
  int64_t token;  // the target's own, which stands there
  int64_t valid;  // 0: there was no token to draw
};
TANDEM_STRUCT(Decision, end, token, valid)

namespace {

// One place of a round, and its row.
struct Place {
  int64_t round, index;
  float* edited;  // memory for the logits; null: they are not edited
  double* spans;  // [ceil(V / kSpan)]: weights of the row, summed up; null: no ratio rule
  int32_t* q_ids;  // [num_q], ascending; so are the others
  int32_t* q_weights;
  int64_t num_q;
  double q_total;
  double *q, *rest;  // [num_q] of a tree's: q_j, and p_j while siblings are tried; null in a chain
  Row row;
  int64_t choice;  // greedy and coupled: the target's own token
  double ratio;    // p(x) / q(x) of the token drafted here
};

// A session's numbers are keyed by where the round starts, that of a bonus draw by where the token stands.
double own_uniform(const Round& round, Stream stream, int64_t position, int64_t index) {
  return uniform(position_key(round.sampler->stream_keys[stream], position), index);
}

bool is_ratio(const Round& round) { return round.acceptance != kOwnChoice; }

// u_1..u_k, then those of the residual draws, then that of the bonus draw: Uniforms of rules/drafts.py.
double uniform_of(const Round& round, Stream stream, int64_t index) {
  if (round.uniforms) return round.uniforms[stream == kAccept ? index : round.num_tokens + index];
  if (stream == kBonus) return own_uniform(round, stream, round.length + round.num_tokens, 0);
  return own_uniform(round, stream, round.length, index);
}

class Verification {
 public:
  Verification(const float* logits, int64_t stride, const Round* rounds, int64_t num_rounds, Decision* out, int threads)
      : logits_(logits), stride_(stride), rounds_(rounds), num_rounds_(num_rounds), out_(out), threads_(threads) {}

  int run() {
    if (const int status = lay_out()) return status;
    Counter looks, decisions;
    Pool::local().run(team_size(), [&](Team& team) {
      const Workspace work = Workspace::at(own_ + team.id * own_bytes(), size_);
      for (int i; (i = team.next(looks)) < num_places_;)
        if (!rounds_[places_[i].round].parents) look(places_[i], work);
      team.barrier();
      for (int b; (b = team.next(decisions)) < num_rounds_;) out_[b] = rounds_[b].parents ? walk(b, work) : decide(b);
    });
    return malformed_.load() ? kMalformed : 0;
  }

 private:
  // Takes all working memory and names every row.
  int lay_out() {
    num_places_ = size_ = 0;
    for (int64_t b = 0; b < num_rounds_; b++) {
      num_places_ += rounds_[b].num_tokens + 1;
      size_ = std::max(size_, rounds_[b].sampler->num_tokens);
      for (int64_t i = 0; i < rounds_[b].num_tokens; i++) {
        if (uint64_t(rounds_[b].token_ids[i]) >= uint64_t(rounds_[b].sampler->num_tokens)) return kMalformed;
        if (rounds_[b].parents && (rounds_[b].parents[i] < -1 || rounds_[b].parents[i] >= i)) return kMalformed;
      }
    }
    bool well_formed = true;
    const bool has_memory = take_all([&](Take& take) { well_formed = well_formed && name_places(take); });
    return !well_formed ? kMalformed : !has_memory ? kNoMemory : 0;
  }

  // Every row and what it needs; false if a q row is malformed.
  bool name_places(Take& take) {
    const bool counts = !take.memory;
    places_ = reinterpret_cast<Place*>(take(num_places_ * int64_t(sizeof(Place))));
    first_ = reinterpret_cast<int64_t*>(take(num_rounds_ * 8));
    paths_ = reinterpret_cast<int64_t**>(take(num_rounds_ * 8));
    ends_ = reinterpret_cast<std::atomic<int64_t>*>(take(num_rounds_ * int64_t(sizeof(std::atomic<int64_t>))));
    own_ = take(threads_ * own_bytes());
    int64_t at = 0;
    for (int64_t b = 0; b < num_rounds_; b++) {
      const Round& round = rounds_[b];
      if (!counts) {
        first_[b] = at;
        new (&ends_[b]) std::atomic<int64_t>(round.num_tokens);
      }
      if (round.parents) {
        int64_t* path = reinterpret_cast<int64_t*>(take(round.num_tokens * 8));
        if (!counts) paths_[b] = path;
      }
      for (int64_t i = 0, q_at = 0; i <= round.num_tokens; i++) {
        Place place{};
        place.round = b;
        place.index = i;
        if (round.sampler->edits) place.edited = reinterpret_cast<float*>(take(size_ * 4));
        if (is_ratio(round)) {
          place.spans = reinterpret_cast<double*>(take((size_ + kSpan - 1) / kSpan * 8));
          if (round.parents) {
            if (!name_siblings(place, round, take)) return false;
          } else if (i < round.num_tokens) {
            place.num_q = round.q ? named_tokens(round.q + q_at, round.q_bytes[i]) : 1;
            if (!place.num_q) return false;
            place.q_ids = reinterpret_cast<int32_t*>(take(place.num_q * 4));
            place.q_weights = reinterpret_cast<int32_t*>(take(place.num_q * 4));
            if (round.q) q_at += round.q_bytes[i];
          }
        }
        if (!counts) places_[at++] = place;
      }
    }
    return true;
  }

  int64_t own_bytes() const { return round_up(Workspace::bytes(size_), 64); }

  int team_size() const {
    int64_t draws = 0;
    for (int64_t b = 0; b < num_rounds_; b++) draws += (rounds_[b].sampler->temperature != 0) * (rounds_[b].num_tokens + 1);
    return num_places_ * size_ >= kSharedLooks || draws * size_ >= kSharedDraws ? threads_ : 1;
  }

  // --- row by row ---

  // Nothing after place `index` of a round can be accepted.
  void end_at(int64_t round, int64_t index) {
    int64_t end = ends_[round].load(std::memory_order_relaxed);
    while (index < end && !ends_[round].compare_exchange_weak(end, index, std::memory_order_relaxed)) {
    }
  }

  void look(Place& at, const Workspace& work) {
    if (at.index > ends_[at.round].load(std::memory_order_relaxed)) return;
    const Round& round = rounds_[at.round];
    const bool last = at.index == round.num_tokens;
    look_at_row(at, round, round.token_ids, at.index, work);
    if (!at.row.valid) end_at(at.round, at.index);
    if (is_ratio(round)) {
      if (!last && !read_q(at, round)) malformed_.store(true, std::memory_order_relaxed);
      else if (at.row.valid) weigh_row(at, round);
      return;
    }
    if (!last && at.choice != round.token_ids[at.index]) end_at(at.round, at.index);
  }

  // The row of a place that follows `prefix`, edited and cut; greedy and coupled rounds also get their choice.
  void look_at_row(Place& at, const Round& round, const int64_t* prefix, int64_t num_prefix, const Workspace& work) {
    const Sampler& sampler = *round.sampler;
    const float* logits = logits_ + (round.start_row + at.index) * stride_;
    if (at.edited) {
      std::memcpy(at.edited, logits, size_t(sampler.num_tokens) * 4);
      edit(at.edited, sampler, prefix, num_prefix);
      logits = at.edited;
    }
    const uint32_t* mask = round.masks ? round.masks + at.index * round.mask_words : nullptr;
    at.row = tandem::look_at(logits, sampler.num_tokens, mask);
    at.choice = at.row.best;
    if (sampler.temperature == 0 || !at.row.valid) return;
    truncate(at.row, sampler, work);
    if (!is_ratio(round))
      race(at.row, position_key(sampler.stream_keys[kCoupling], round.length + num_prefix), 1, &at.choice);
  }

  // q of a place; without one it could propose nothing but the token it proposed.
  bool read_q(Place& at, const Round& round) {
    if (!round.q) {
      at.q_ids[0] = int32_t(round.token_ids[at.index]);
      at.q_weights[0] = 1;
      at.q_total = 1;
      return true;
    }
    const uint8_t* packed = round.q;
    for (int64_t i = 0; i < at.index; i++) packed += round.q_bytes[i];
    if (!unpack(packed, round.q_bytes[at.index], round.sampler->num_tokens, at.q_ids, at.q_weights)) return false;
    int64_t total = 0;
    for (int64_t i = 0; i < at.num_q; i++) total += at.q_weights[i];
    at.q_total = double(total);
    return true;
  }

  void weigh_row(Place& at, const Round& round) {
    sum_spans(at);
    if (at.index == round.num_tokens) return;
    const int64_t x = round.token_ids[at.index];
    const int32_t* found = std::lower_bound(at.q_ids, at.q_ids + at.num_q, int32_t(x));
    const bool named = found < at.q_ids + at.num_q && *found == x;
    at.ratio = named ? at.row.weight(x) / at.row.total / (at.q_weights[found - at.q_ids] / at.q_total) : 0;
    const bool passes = round.acceptance == kTokenRatio ? uniform_of(round, kAccept, at.index) < at.ratio : at.ratio > 0;
    if (!passes) end_at(at.round, at.index);
  }

  void sum_spans(Place& at) {
    at.row.total = 0;
    for (int64_t i = 0, s = 0; i < at.row.size; i += kSpan, s++)
      at.row.total += at.spans[s] = weight_between(at.row, i, std::min(i + kSpan, at.row.size));
  }

  // --- trees: from place to place, looking at no more rows than the path has ---

  // Memory for the tokens that q of a place names; without q those are the siblings. False where q is malformed.
  static bool name_siblings(Place& at, const Round& round, Take& take) {
    int64_t siblings = 0, first = -1;
    for (int64_t i = at.index; i < round.num_tokens; i++)
      if (round.parents[i] == at.index - 1 && siblings++ == 0) first = i;
    if (!siblings) return true;
    at.num_q = siblings;
    if (round.q) {
      const int64_t group = group_of(round, first);
      at.num_q = named_tokens(q_row(round, group), round.q_bytes[group]);
      if (!at.num_q) return false;
    }
    at.q_ids = reinterpret_cast<int32_t*>(take(at.num_q * 4));
    at.q_weights = reinterpret_cast<int32_t*>(take(at.num_q * 4));
    at.q = reinterpret_cast<double*>(take(at.num_q * 8));
    at.rest = reinterpret_cast<double*>(take(at.num_q * 8));
    return true;
  }

  // The number of a token's group of siblings, of which it is the first.
  static int64_t group_of(const Round& round, int64_t first) {
    int64_t group = 0;
    for (int64_t i = 0; i < first; i++) {
      bool is_first = true;
      for (int64_t j = 0; is_first && j < i; j++) is_first = round.parents[j] != round.parents[i];
      group += is_first;
    }
    return group;
  }

  static const uint8_t* q_row(const Round& round, int64_t index) {
    const uint8_t* packed = round.q;
    for (int64_t i = 0; i < index; i++) packed += round.q_bytes[i];
    return packed;
  }

  Decision walk(int64_t b, const Workspace& work) {
    const Round& round = rounds_[b];
    int64_t* path = paths_[b];
    for (int64_t end = 0, depth = 0;; depth++) {
      Place& at = places_[first_[b] + end];
      look_at_row(at, round, path, depth, work);
      if (!at.row.valid) return {end, at.choice, 0};
      int64_t next = -1;
      if (!is_ratio(round)) {
        for (int64_t i = end; i < round.num_tokens && next < 0; i++)
          if (round.parents[i] == end - 1 && round.token_ids[i] == at.choice) next = i;
        if (next < 0) return {end, at.choice, 1};
      } else {
        sum_spans(at);
        double scale = 1;
        if (at.num_q) {
          if (!read_siblings(at, round)) {
            malformed_.store(true, std::memory_order_relaxed);
            return {end, 0, 0};
          }
          next = try_siblings(at, round, scale);
        }
        if (next < 0) return {end, draw(at, scale, at.num_q > 0, last_uniform(round, end, depth, at.num_q > 0)), 1};
      }
      path[depth] = round.token_ids[next];
      end = next + 1;
    }
  }

  static double last_uniform(const Round& round, int64_t end, int64_t depth, bool is_rejection) {
    if (is_rejection) return uniform_of(round, kResidual, end);
    if (round.uniforms) return round.uniforms[2 * round.num_tokens + end];
    return own_uniform(round, kBonus, round.length + depth, 0);
  }

  // The ids that q names, ascending, with p and q of each; q stays 0 where siblings were chosen, not drawn.
  static bool read_siblings(Place& at, const Round& round) {
    if (round.q) {
      int64_t first = at.index;
      while (round.parents[first] != at.index - 1) first++;
      const int64_t group = group_of(round, first);
      if (!unpack(q_row(round, group), round.q_bytes[group], round.sampler->num_tokens, at.q_ids, at.q_weights)) return false;
      double total = 0;
      for (int64_t i = 0; i < at.num_q; i++) total += at.q_weights[i];
      for (int64_t i = 0; i < at.num_q; i++) at.q[i] = at.q_weights[i] / total;
    } else {
      int64_t count = 0;
      for (int64_t i = at.index; i < round.num_tokens; i++)
        if (round.parents[i] == at.index - 1) at.q_ids[count++] = int32_t(round.token_ids[i]);
      std::sort(at.q_ids, at.q_ids + at.num_q);
      for (int64_t i = 0; i < at.num_q; i++) at.q[i] = 0, at.q_weights[i] = 1;
    }
    at.q_total = 1;
    int64_t i = 0;
    each_named(at, [&](int64_t, double p, double) { at.rest[i++] = p; });
    return true;
  }

  // rules/siblings.py: the sibling that is accepted, or -1; then at.rest is what is left of p for the tokens that q names,
  // and all others have `scale` times theirs.
  static int64_t try_siblings(Place& at, const Round& round, double& scale) {
    double others = 1;
    for (int64_t i = 0; i < at.num_q; i++) others -= at.rest[i];
    others = std::max(others, 0.0);
    for (int64_t node = at.index; node < round.num_tokens; node++) {
      if (round.parents[node] != at.index - 1) continue;
      const int32_t x = int32_t(round.token_ids[node]);
      const int64_t found = std::lower_bound(at.q_ids, at.q_ids + at.num_q, x) - at.q_ids;
      const bool named = found < at.num_q && at.q_ids[found] == x;
      const double q_x = !named ? 0 : round.q ? at.q[found] : 1;
      if (q_x > 0 && uniform_of(round, kAccept, node) < at.rest[found] / q_x) return node;
      double total = scale * others;
      auto left = [&](int64_t i) { return std::max(at.rest[i] - (round.q ? at.q[i] : double(named && i == found)), 0.0); };
      for (int64_t i = 0; i < at.num_q; i++) total += left(i);
      if (total > 0) {
        for (int64_t i = 0; i < at.num_q; i++) at.rest[i] = left(i) / total;
        scale /= total;
      }
      if (!round.q) continue;
      if (named) at.q[found] = 0;
      double q_left = 0;
      for (int64_t i = 0; i < at.num_q; i++) q_left += at.q[i];
      for (int64_t i = 0; q_left > 0 && i < at.num_q; i++) at.q[i] /= q_left;
    }
    return -1;
  }

  // --- round by round ---

  Decision decide(int64_t b) {
    const Round& round = rounds_[b];
    int64_t accepted = ends_[b].load(std::memory_order_relaxed);
    double share = 1;
    if (round.acceptance == kBlockRatio) accepted = accepted_block(b, accepted, share);
    const Place& at = places_[first_[b] + accepted];
    if (!is_ratio(round) || !at.row.valid) return {accepted, at.choice, at.row.valid};
    if (accepted == round.num_tokens) return {accepted, draw(at, 1, false, uniform_of(round, kBonus, accepted)), 1};
    return {accepted, draw(at, share, true, uniform_of(round, kResidual, accepted)), 1};
  }

  // What is left of p for the token of index i that q names, where others have `scale` times theirs.
  static double left_of(const Place& at, int64_t i, double p, double q, double scale) {
    return at.rest ? at.rest[i] : std::max(p * scale - q, 0.0);
  }

  // Calls visit(id, p, q) for every token that q names.
  template <class Visit>
  static void each_named(const Place& at, Visit&& visit) {
    for (int64_t i = 0; i < at.num_q; i += kWide) {
      const int part = at.num_q - i < kWide ? int(at.num_q - i) : kWide;
      HalfVec logits{};
      for (int j = 0; j < part; j++) logits[j] = at.row.logit(at.q_ids[i + j]);
      const DVec weight = weights(at.row, logits) / at.row.total;
      for (int j = 0; j < part; j++) {
        const int32_t id = at.q_ids[i + j];
        visit(id, at.row.survives(logits[j], id) ? weight[j] : 0.0, at.q_weights[i + j] / at.q_total);
      }
    }
  }

  // rules/block.py: the last prefix that passes counts, and its share P scales the residual.
  int64_t accepted_block(int64_t b, int64_t end, double& share) const {
    const Round& round = rounds_[b];
    int64_t accepted = 0;
    double p = 1;
    for (int64_t i = 1; i <= end; i++) {
      p = std::min(1.0, p * places_[first_[b] + i - 1].ratio);
      double h = p;
      if (i < round.num_tokens) {
        const double z = surplus(places_[first_[b] + i], p);
        h = z + 1 - p > 0 ? z / (z + 1 - p) : 1;
      }
      if (uniform_of(round, kAccept, i - 1) < h) accepted = i, share = p;
    }
    return accepted;
  }

  // Z = sum over v of max(share p(v) - q(v), 0); where q is 0 that is share p(v), and p sums to 1.
  static double surplus(const Place& at, double share) {
    if (!at.row.valid) return share;
    double above = 0, named = 0;
    each_named(at, [&](int64_t, double p, double q) {
      above += std::max(share * p - q, 0.0);
      named += p;
    });
    return share * std::max(1 - named, 0.0) + above;
  }

  // The token where the running sum of max(scale p - q, 0), or what is left after all siblings, first exceeds u times the
  // total, or of p where rounding leaves nothing of that: rules/residual.py. The sum runs over spans, then within the one
  // it ends in. at.spans is used up.
  static int64_t draw(const Place& at, double scale, bool less_q, double u) {
    const int64_t num_spans = (at.row.size + kSpan - 1) / kSpan;
    for (int64_t s = 0; s < num_spans; s++) at.spans[s] = at.spans[s] / at.row.total * scale;
    int64_t index = 0;
    if (less_q)
      each_named(at, [&](int64_t id, double p, double q) {
        at.spans[id / kSpan] += left_of(at, index++, p, q, scale) - p * scale;
      });
    double total = 0;
    for (int64_t s = 0; s < num_spans; s++) total += at.spans[s] = std::max(at.spans[s], 0.0);
    int64_t chosen = 0;
    double before = 0, after = 0;
    for (int64_t s = 0; s < num_spans && after <= u * total; s++) {
      if (at.spans[s] == 0) continue;
      chosen = s;
      before = after;
      after += at.spans[s];
    }
    double rest[kSpan];
    rests(at, chosen, scale, less_q, rest);
    int64_t last = -1;
    for (int64_t i = 0; i < kSpan && before <= u * total; i++) {
      if (!(rest[i] > 0)) continue;
      last = i;
      before += rest[i];
    }
    if (last >= 0) return chosen * kSpan + last;
    if (!less_q) return at.row.best;
    for (int64_t i = 0, s = 0; i < at.row.size; i += kSpan, s++)
      at.spans[s] = weight_between(at.row, i, std::min(i + kSpan, at.row.size));
    return draw(at, 1, false, u);
  }

  // max(scale p - q, 0), or what is left after all siblings, of the tokens of a span.
  static void rests(const Place& at, int64_t span, double scale, bool less_q, double* rest) {
    const int64_t begin = span * kSpan;
    for (int64_t i = 0; i < kSpan; i += kLanes) {
      Weights found{DVec{}, DVec{}};
      if (begin + i < at.row.size) found = weights_from(at.row, begin + i);
      const DVec parts[2] = {found.low / at.row.total * scale, found.high / at.row.total * scale};
      std::memcpy(rest + i, parts, sizeof(parts));
    }
    if (!less_q) return;
    const int32_t* first = std::lower_bound(at.q_ids, at.q_ids + at.num_q, int32_t(begin));
    for (int64_t j = first - at.q_ids; j < at.num_q && at.q_ids[j] < begin + kSpan; j++) {
      double& here = rest[at.q_ids[j] - begin];
      here = at.rest ? at.rest[j] : std::max(here - at.q_weights[j] / at.q_total, 0.0);
    }
  }

  const float* logits_;
  const int64_t stride_;
  const Round* rounds_;
  const int64_t num_rounds_;
  Decision* out_;
  const int threads_;
  int64_t size_ = 0, num_places_ = 0;
  Place* places_ = nullptr;
  int64_t* first_ = nullptr;              // place of each round's first row
  int64_t** paths_ = nullptr;             // of each tree, memory for the tokens of a path
  std::atomic<int64_t>* ends_ = nullptr;  // the last place of each round that may matter
  char* own_ = nullptr;
  std::atomic<bool> malformed_{false};
};

}  // namespace

}  // namespace tandem

using namespace tandem;

// Decides every round: raw logits [., stride], not written to. Returns 0, -1 without memory, -2 for a drafted token or a q
// row that is none (the decisions mean nothing then).
extern "C" __attribute__((visibility("default"))) int tandem_verify_rounds(const float* logits, int64_t stride,
                                                                           const Round* rounds, int64_t num_rounds,
                                                                           Decision* out, int threads) {
  return Verification(logits, stride, rounds, num_rounds, out, threads).run();
}

// The first drafted token [count] outside 0..num_tokens-1, or whose q row (one after the other, of q_bytes [count]) is
// malformed, names such a token, or does not name the drafted one; -1 if there is none. `q` may be null.
extern "C" __attribute__((visibility("default"))) int64_t tandem_check_draft(const int64_t* token_ids, int64_t count,
                                                                             const uint8_t* q, const int64_t* q_bytes,
                                                                             int64_t num_tokens) {
  for (int64_t i = 0; i < count; i++) {
    if (uint64_t(token_ids[i]) >= uint64_t(num_tokens)) return i;
    if (!q) continue;
    const int64_t named = named_tokens(q, q_bytes[i]);
    int32_t* ids = reinterpret_cast<int32_t*>(working_memory(size_t(named) * 8 + 8));
    if (!ids || !unpack(q, q_bytes[i], num_tokens, ids, ids + named)) return i;
    if (!std::binary_search(ids, ids + named, int32_t(token_ids[i]))) return i;
    q += q_bytes[i];
  }
  return -1;
}
