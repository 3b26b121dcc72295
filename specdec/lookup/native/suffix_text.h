// The growing text of one session, with a suffix tree over it.
//
// A suffix enters the tree when it is as long as the tree is deep: it never changes afterwards. The last few, shorter
// ones stay outside; a lookup counts them, too. So a token costs one insertion, and tokens at the end can be
// removed at no cost.
#pragma once

#include "suffix_tree.h"

namespace tandem {

class SuffixText {
  Tokens tokens_;

 public:
  explicit SuffixText(int32_t depth) : depth(depth), tree(tokens_) {}
  SuffixText(const SuffixText&) = delete;

  const int32_t depth;
  SuffixTree tree;

  const Tokens& tokens() const { return tokens_; }
  // Start of the first suffix that is not in the tree.
  int64_t first_outside() const { return num_inserted_; }

  void append(const Token* tokens, int64_t count) {
    tokens_.append(tokens, count);
    while (num_inserted_ + depth <= tokens_.end()) tree.insert(num_inserted_++, depth);
  }

  // Keep the first `length` tokens; false, and nothing changes, where the tree holds some of the others.
  bool truncate(int64_t length) {
    if (num_inserted_ > 0 && num_inserted_ - 1 + depth > length) return false;
    tokens_.truncate(length);
    return true;
  }

 private:
  int64_t num_inserted_ = 0;
};

}  // namespace tandem
