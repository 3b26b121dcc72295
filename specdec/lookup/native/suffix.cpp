// Suffix decoding: what followed the last tokens most often, in this text or in past outputs.
#include <algorithm>

#include "struct_table.h"
#include "suffix_cache.h"
#include "suffix_text.h"

namespace tandem {

// _Query of suffix_tree.py.
struct Query {
  int64_t max_tokens;
  double max_spec_factor;
  double min_token_prob;
  Token* drafted;  // [max_tokens]
  // What was found.
  int64_t num_drafted;
  int64_t longest_match;
};
TANDEM_STRUCT(Query, max_tokens, max_spec_factor, min_token_prob, drafted, num_drafted, longest_match)

// _Size of suffix_tree.py: what past outputs take.
struct Size {
  int64_t num_requests, num_tokens, num_nodes, num_bytes;
};
TANDEM_STRUCT(Size, num_requests, num_tokens, num_nodes, num_bytes)

// A drafted path and its score: the expected number of right tokens.
struct Path {
  std::vector<Token> tokens;
  double score = 0;
  int32_t longest_match = 0;  // of all runs that can be continued
};

// Looks for the best path in one tree. Suffixes of the text that are not in its tree (see SuffixText) count as well.
class Search {
 public:
  // `first_outside` is the start of the first suffix of `text` to count besides those in the tree; its end: none.
  Search(SuffixTree& tree, const Tokens& text, int64_t first_outside, int32_t depth, const Query& query)
      : tree_(tree), text_(text), first_outside_(first_outside), depth_(depth), query_(query) {
    const int64_t end = text.end();
    for (int64_t at = first_outside + 1; at <= end && first_outside < end; at++) {
      const int64_t longest = std::min<int64_t>(at - first_outside, depth - 1);
      int32_t length = 0;
      while (length < longest && text[at - 1 - length] == text[end - 1 - length]) length++;
      if (length > 0) outside_.push_back({at, length});
    }
    find_places();
  }

  // For every m, the last m tokens are matched and continued by what followed most often, that by what followed both,
  // up to m * factor tokens and while all of it together is likely enough. Probability of a path: of all the times its
  // tokens but the last stood there, how often the last one followed, multiplied. The score is the sum of probabilities
  // along it; the best wins, among equals the longest match (Oliaro et al. 2024, "SuffixDecoding"). Where match and path
  // are as long as the tree is deep, only the last half of that is kept, and the path continues after it.
  void improve(Path& best) {
    for (int32_t m = num_places_; m >= 1; m--) follow(m, best);
  }

 private:
  // An occurrence of the last `length` tokens before position `at`, outside the tree.
  struct Occurrence {
    int64_t at;
    int32_t length;
  };

  // Where the last m tokens are in the tree, for each m from 1 up to the longest run that stood anywhere before.
  void find_places() {
    const int64_t end = text_.end();
    const int32_t longest = static_cast<int32_t>(std::min<int64_t>(depth_, end) - 1);
    places_.resize(std::max(longest, 0) + 1);
    int32_t longest_outside = 0;
    for (const Occurrence& occurrence : outside_) {
      if (occurrence.at < end) longest_outside = std::max(longest_outside, occurrence.length);
    }
    for (int32_t m = 1; m <= longest; m++) {
      SuffixTree::Place place;
      while (place.depth < m && tree_.step(place, text_[end - m + place.depth])) continue;
      if (place.depth < m && m > longest_outside) return;
      places_[m] = place;  // short of m tokens: it is not in the tree
      num_places_ = m;
    }
  }

  // The path after the last m tokens, if it is better than `best`.
  void follow(int32_t m, Path& best) {
    const double wanted = std::min(m * query_.max_spec_factor + 1e-6, static_cast<double>(query_.max_tokens));
    const int64_t limit = static_cast<int64_t>(wanted);
    int32_t run = m;  // tokens that what follows is looked up by
    SuffixTree::Place place = places_[m];
    bool is_in_tree = place.depth == m;
    ends_.clear();
    for (const Occurrence& occurrence : outside_) {
      if (occurrence.length >= m) ends_.push_back(occurrence.at);
    }
    int64_t count = static_cast<int64_t>(ends_.size()) + (is_in_tree ? tree_.count(place) : 0);
    double probability = 1, score = 0;
    tokens_.clear();
    const int64_t end = text_.end();
    while (static_cast<int64_t>(tokens_.size()) < limit) {
      if (run == depth_) {
        run = std::max(depth_ / 2, 1);
        place = find(run);
        is_in_tree = place.depth == run;
        count = static_cast<int64_t>(ends_.size()) + (is_in_tree ? tree_.count(place) : 0);
      }
      const SuffixTree::Next next = likeliest(place, is_in_tree);
      if (next.count == 0) break;
      probability *= static_cast<double>(next.count) / static_cast<double>(count);
      if (probability < query_.min_token_prob) break;
      best.longest_match = std::max(best.longest_match, m);
      const double left = static_cast<double>(limit - static_cast<int64_t>(tokens_.size()));
      if (score + left * probability < best.score - 1e-9) break;  // whatever follows
      tokens_.push_back(next.token);
      score += probability;
      run++;
      count = next.count;
      is_in_tree = is_in_tree && tree_.step(place, next.token);
      size_t kept = 0;
      for (const int64_t at : ends_) {
        if (at < end && text_[at] == next.token) ends_[kept++] = at + 1;
      }
      ends_.resize(kept);
    }
    if (score > best.score) {
      best.tokens.swap(tokens_);
      best.score = score;
    }
  }

  // Where the last `run` tokens of text and path are, in the tree (short of so many: nowhere) and outside.
  SuffixTree::Place find(int32_t run) {
    const int64_t end = text_.end(), first = end + static_cast<int64_t>(tokens_.size()) - run;
    const auto token = [&](int64_t i) { return first + i < end ? text_[first + i] : tokens_[first + i - end]; };
    ends_.clear();
    for (int64_t at = first_outside_ + run; at <= end; at++) {
      int32_t same = 0;
      while (same < run && text_[at - run + same] == token(same)) same++;
      if (same == run) ends_.push_back(at);
    }
    SuffixTree::Place place;
    while (place.depth < run && tree_.step(place, token(place.depth))) continue;
    return place;
  }

  // What follows most often, in the tree and outside; of several, what did last.
  SuffixTree::Next likeliest(SuffixTree::Place place, bool is_in_tree) {
    SuffixTree::Next best;
    const int64_t end = text_.end();
    seen_.clear();
    for (auto at = ends_.rbegin(); at != ends_.rend(); ++at) {  // the newest first
      if (*at == end || std::find(seen_.begin(), seen_.end(), text_[*at]) != seen_.end()) continue;
      const Token token = text_[*at];
      seen_.push_back(token);
      int64_t count = is_in_tree ? tree_.count(place, token) : 0;
      for (const int64_t same : ends_) count += same < end && text_[same] == token;
      if (count > best.count) best = {token, count};
    }
    const SuffixTree::Next known = is_in_tree ? tree_.best(place) : SuffixTree::Next();
    return known.count > best.count ? known : best;
  }

  SuffixTree& tree_;
  const Tokens& text_;
  const int64_t first_outside_;
  const int32_t depth_;
  const Query& query_;
  std::vector<Occurrence> outside_;
  std::vector<SuffixTree::Place> places_;  // by the number of tokens matched
  int32_t num_places_ = 0;
  std::vector<int64_t> ends_;  // where the occurrences outside the tree continue
  std::vector<Token> tokens_, seen_;
};

}  // namespace tandem

using namespace tandem;

#define TANDEM extern "C" __attribute__((visibility("default")))

TANDEM void* tandem_suffix_text(int32_t depth) { return new SuffixText(depth); }
TANDEM void tandem_free_suffix_text(SuffixText* text) { delete text; }
TANDEM void tandem_suffix_append(SuffixText* text, const Token* tokens, int64_t count) { text->append(tokens, count); }
TANDEM int32_t tandem_suffix_truncate(SuffixText* text, int64_t length) { return text->truncate(length); }

TANDEM void* tandem_suffix_cache(int32_t depth, int64_t max_requests, int64_t max_tokens) {
  return new SuffixCache(depth, max_requests, max_tokens);
}
TANDEM void tandem_free_suffix_cache(SuffixCache* cache) { delete cache; }
TANDEM void tandem_suffix_cache_add(SuffixCache* cache, const Token* tokens, int64_t count) {
  cache->add(tokens, count);
}
TANDEM int64_t tandem_suffix_cache_apply_pending(SuffixCache* cache, int64_t budget) { return cache->apply_pending(budget); }

// Requests, tokens, nodes, bytes.
TANDEM void tandem_suffix_cache_size(const SuffixCache* cache, Size* size) {
  size->num_requests = cache->num_requests();
  size->num_tokens = cache->num_tokens();
  size->num_nodes = cache->tree.num_nodes();
  size->num_bytes = cache->num_bytes();
}

// How often the tokens stood in past outputs.
TANDEM int64_t tandem_suffix_cache_count(const SuffixCache* cache, const Token* tokens, int64_t count) {
  SuffixTree::Place place;
  for (int64_t i = 0; i < count; i++) {
    if (!cache->tree.step(place, tokens[i])) return 0;
  }
  return cache->tree.count(place);
}

// Drafts after a text, whose own tree wins ties. `cache` may be null.
TANDEM void tandem_suffix_draft(SuffixText* text, SuffixCache* cache, Query* query) {
  Path best;
  Search(text->tree, text->tokens(), text->first_outside(), text->depth, *query).improve(best);
  if (cache != nullptr) Search(cache->tree, text->tokens(), text->tokens().end(), text->depth, *query).improve(best);
  std::copy(best.tokens.begin(), best.tokens.end(), query->drafted);
  query->num_drafted = static_cast<int64_t>(best.tokens.size());
  query->longest_match = best.longest_match;
}
