// A suffix tree over the outputs of past requests: first in, first out.
#pragma once

#include <algorithm>
#include <deque>

#include "suffix_tree.h"

namespace tandem {

class SuffixCache {
  Tokens tokens_;

 public:
  SuffixCache(int32_t depth, int64_t max_requests, int64_t max_tokens)
      : tree(tokens_), depth_(depth), max_requests_(max_requests), max_tokens_(max_tokens) {}
  SuffixCache(const SuffixCache&) = delete;

  SuffixTree tree;

  int64_t num_requests() const { return static_cast<int64_t>(outputs_.size()); }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_bytes() const { return tree.num_bytes() + tokens_.num_bytes(); }

  // Queue an output; apply_pending() puts it into the tree.
  void add(const Token* tokens, int64_t count) {
    tokens_.append(tokens, count);
    num_tokens_ += count;
    outputs_.push_back({tokens_.end() - count, tokens_.end()});
  }

  // Put in and take out up to `budget` suffixes; returns how many there are still to do (at least).
  int64_t apply_pending(int64_t budget) {
    for (; budget > 0; budget--) {
      const bool is_full = num_requests() > max_requests_ || num_tokens_ > max_tokens_;
      if (is_full && inserted_ >= outputs_.front().end) {
        remove_one();
      } else if (inserted_ < tokens_.end()) {
        insert_one();
      } else {
        return 0;
      }
    }
    return tokens_.end() - inserted_ + (num_requests() > max_requests_ || num_tokens_ > max_tokens_);
  }

 private:
  // An output's tokens, by position; outputs follow one another.
  struct Output {
    int64_t start, end;
  };

  static int32_t length(int64_t start, const Output& output, int32_t depth) {
    return static_cast<int32_t>(std::min<int64_t>(depth, output.end - start));
  }

  void insert_one() {
    while (inserted_ >= outputs_[building_].end) building_++;
    tree.insert(inserted_, length(inserted_, outputs_[building_], depth_));
    inserted_++;
  }

  void remove_one() {
    Output& oldest = outputs_.front();
    tree.remove(oldest.start, length(oldest.start, oldest, depth_));
    oldest.start++;
    if (oldest.start < oldest.end) return;
    num_tokens_ -= oldest.end - dropped_;
    dropped_ = oldest.end;
    tokens_.drop_before(oldest.end);
    outputs_.pop_front();
    building_ = std::max<int64_t>(building_ - 1, 0);
  }

  const int32_t depth_;
  const int64_t max_requests_, max_tokens_;
  std::deque<Output> outputs_;
  int64_t num_tokens_ = 0;  // of all outputs
  int64_t inserted_ = 0;    // position up to which suffixes are in the tree
  int64_t building_ = 0;    // the output that position is in, or one before it
  int64_t dropped_ = 0;     // position up to which outputs are gone
};

}  // namespace tandem
