// A suffix tree of bounded depth with counts: how often each short run of tokens stood in some texts, what came next.
//
// It stands for the trie of all inserted suffixes, in which a node counts the suffixes that pass through it. A chain of
// trie nodes that all count the same suffixes is one edge here, labelled by a place in a text, so that N suffixes need
// at most 2 N nodes whatever the depth. As edges point into the text where their run of tokens stood last, the oldest
// suffixes can be removed, and their text with them, and no edge loses its label.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem {

using Token = uint32_t;

// Tokens by position. Positions stay what they are when the oldest tokens are dropped.
class Tokens {
 public:
  Token operator[](int64_t at) const { return kept_[at - first_]; }
  int64_t end() const { return first_ + static_cast<int64_t>(kept_.size()); }
  int64_t num_bytes() const { return static_cast<int64_t>(kept_.capacity() * sizeof(Token)); }
  void append(const Token* tokens, int64_t count) { kept_.insert(kept_.end(), tokens, tokens + count); }
  void truncate(int64_t end) { kept_.resize(end - first_); }

  // What is dropped is moved away when it is half of all: each token moves once on average.
  void drop_before(int64_t at) {
    const int64_t dropped = at - first_;
    if (2 * dropped < static_cast<int64_t>(kept_.size())) return;
    kept_.erase(kept_.begin(), kept_.begin() + dropped);
    first_ = at;
  }

 private:
  std::vector<Token> kept_;
  int64_t first_ = 0;
};

class SuffixTree {
 public:
  // A run of tokens that stood in the texts: `depth` tokens from the root, on the edge into `node`.
  struct Place {
    int32_t node = 0;
    int32_t depth = 0;
  };
  // What may follow a place.
  struct Next {
    Token token = 0;
    int64_t count = 0;  // 0: nothing does
  };

  explicit SuffixTree(const Tokens& tokens) : tokens_(tokens), nodes_(1), slots_(64) {}

  int64_t num_nodes() const { return static_cast<int64_t>(nodes_.size()) - num_free_ - 1; }
  int64_t num_bytes() const {
    return static_cast<int64_t>(nodes_.capacity() * sizeof(Node) + slots_.capacity() * sizeof(Slot));
  }

  // Add the suffix of `length` tokens at `start`, which must be newer than all before.
  void insert(int64_t start, int32_t length) {
    int32_t node = 0, depth = 0;
    while (depth < length) {
      const int64_t slot = find(node, tokens_[start + depth]);
      int32_t child = slots_[slot].child;
      if (child == 0) {
        child = add(node, start, length);
        rank(node, child);
        node = child;
        break;
      }
      const int32_t end = common_prefix_len(child, depth + 1, start, length);
      if (end < nodes_[child].end) child = split(slot, end);
      nodes_[child].count++;
      nodes_[child].newest = start;
      rank(node, child);
      node = child;
      depth = end;
    }
    nodes_[node].ends++;
  }

  // Take back the suffix of `length` tokens at `start`, which must be the oldest one left.
  void remove(int64_t start, int32_t length) {
    int32_t node = 0;
    while (nodes_[node].end < length) {
      const int32_t child = slots_[find(node, tokens_[start + nodes_[node].end])].child;
      nodes_[child].count--;
      if (nodes_[node].best == child) nodes_[node].is_stale = true;
      node = child;
    }
    nodes_[node].ends--;
    if (nodes_[node].count == 0) {
      const int32_t parent = nodes_[node].parent;
      erase(find(parent, tokens_[start + nodes_[parent].end]));
      unlink(node);
      release(node);
      node = parent;
    }
    join(node, start);
  }

  // The place one token further; false, and nothing changes, if no suffix continues with it.
  bool step(Place& place, Token token) const {
    const Node& node = nodes_[place.node];
    if (place.depth < node.end) {
      if (tokens_[node.newest + place.depth] != token) return false;
    } else {
      const int32_t child = slots_[find(place.node, token)].child;
      if (child == 0) return false;
      place.node = child;
    }
    place.depth++;
    return true;
  }

  int64_t count(Place place) const { return nodes_[place.node].count; }

  // How often `token` follows.
  int64_t count(Place place, Token token) const { return step(place, token) ? count(place) : 0; }

  // What follows most often; of several, what did last.
  Next best(Place place) {
    Node& node = nodes_[place.node];
    if (place.depth < node.end) return {tokens_[node.newest + place.depth], node.count};
    if (node.first_child == 0) return {};
    if (node.is_stale) {
      node.best = node.first_child;
      for (int32_t child = node.first_child; child != 0; child = nodes_[child].next) {
        if (is_better(child, node.best)) node.best = child;
      }
      node.is_stale = false;
    }
    const Node& child = nodes_[node.best];
    return {tokens_[child.newest + node.end], child.count};
  }

 private:
  // The root is node 0; as a child, a sibling or a best child, 0 means none.
  struct Node {
    int64_t newest = 0;  // start of the last suffix that passes through
    int32_t count = 0;   // suffixes that pass through or end here
    int32_t ends = 0;    // suffixes that end here
    int32_t end = 0;     // depth
    int32_t parent = 0;
    int32_t first_child = 0, next = 0, previous = 0;
    int32_t best = 0;       // the child with the highest count, then the newest
    bool is_stale = false;  // it has lost a suffix since: search again
  };
  // An open-addressed table finds a child by its parent and first token.
  struct Slot {
    int32_t parent = 0;
    Token token = 0;
    int32_t child = 0;  // 0: empty
  };

  bool is_better(int32_t one, int32_t other) const {
    const Node &a = nodes_[one], &b = nodes_[other];
    return a.count != b.count ? a.count > b.count : a.newest > b.newest;
  }

  // A child has gained the newest suffix.
  void rank(int32_t parent, int32_t child) {
    Node& node = nodes_[parent];
    if (!node.is_stale && (node.best == 0 || is_better(child, node.best))) node.best = child;
  }

  // Depth up to which the edge into `node`, known to agree up to `depth`, reads like the suffix at `start`.
  int32_t common_prefix_len(int32_t node, int32_t depth, int64_t start, int32_t length) const {
    const int64_t label = nodes_[node].newest;
    const int32_t end = nodes_[node].end < length ? nodes_[node].end : length;
    while (depth < end && tokens_[label + depth] == tokens_[start + depth]) depth++;
    return depth;
  }

  int32_t take() {
    if (free_ == 0) {
      nodes_.emplace_back();
      return static_cast<int32_t>(nodes_.size()) - 1;
    }
    const int32_t node = free_;
    free_ = nodes_[node].next;
    num_free_--;
    nodes_[node] = Node();
    return node;
  }

  void release(int32_t node) {
    nodes_[node].next = free_;
    free_ = node;
    num_free_++;
  }

  void link(int32_t parent, int32_t child) {
    const int32_t first = nodes_[parent].first_child;
    nodes_[child].parent = parent;
    nodes_[child].previous = 0;
    nodes_[child].next = first;
    if (first != 0) nodes_[first].previous = child;
    nodes_[parent].first_child = child;
  }

  void unlink(int32_t child) {
    const Node& node = nodes_[child];
    if (node.previous != 0) {
      nodes_[node.previous].next = node.next;
    } else {
      nodes_[node.parent].first_child = node.next;
    }
    if (node.next != 0) nodes_[node.next].previous = node.previous;
  }

  // A new leaf for one suffix.
  int32_t add(int32_t parent, int64_t start, int32_t length) {
    const int32_t leaf = take();
    nodes_[leaf].newest = start;
    nodes_[leaf].count = 1;
    nodes_[leaf].end = length;
    link(parent, leaf);
    if (4 * num_children_ >= 3 * static_cast<int64_t>(slots_.size())) grow();
    const Token token = tokens_[start + nodes_[parent].end];
    slots_[find(parent, token)] = {parent, token, leaf};
    num_children_++;
    return leaf;
  }

  // Cut the edge into the child of a slot at depth `end`; the node made there takes its place.
  int32_t split(int64_t slot, int32_t end) {
    const int32_t child = slots_[slot].child, parent = slots_[slot].parent;
    const int32_t middle = take();
    nodes_[middle].newest = nodes_[child].newest;
    nodes_[middle].count = nodes_[child].count;
    nodes_[middle].end = end;
    unlink(child);
    link(parent, middle);
    if (nodes_[parent].best == child) nodes_[parent].best = middle;
    slots_[slot].child = middle;
    hang(middle, child);
    return middle;
  }

  // Make `child` the only child of a node.
  void hang(int32_t parent, int32_t child) {
    link(parent, child);
    nodes_[parent].best = child;
    if (4 * num_children_ >= 3 * static_cast<int64_t>(slots_.size())) grow();
    const Token token = tokens_[nodes_[child].newest + nodes_[parent].end];
    slots_[find(parent, token)] = {parent, token, child};
    num_children_++;
  }

  // A node that neither branches nor ends a suffix becomes a part of its child's edge.
  void join(int32_t node, int64_t start) {
    const int32_t child = nodes_[node].first_child;
    if (node == 0 || nodes_[node].ends > 0 || child == 0 || nodes_[child].next != 0) return;
    const int32_t parent = nodes_[node].parent;
    erase(find(node, tokens_[nodes_[child].newest + nodes_[node].end]));
    slots_[find(parent, tokens_[start + nodes_[parent].end])].child = child;
    unlink(node);
    link(parent, child);
    if (nodes_[parent].best == node) nodes_[parent].best = child;
    release(node);
  }

  // The slot of a child, or the empty one where it would be.
  int64_t find(int32_t parent, Token token) const {
    const int64_t mask = static_cast<int64_t>(slots_.size()) - 1;
    int64_t at = home(parent, token) & mask;
    while (slots_[at].child != 0 && (slots_[at].parent != parent || slots_[at].token != token)) at = (at + 1) & mask;
    return at;
  }

  static int64_t home(int32_t parent, Token token) {
    uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(parent)) << 32 | token;
    key = (key ^ (key >> 32)) * 0x9E3779B97F4A7C15u;
    return static_cast<int64_t>((key ^ (key >> 29)) >> 1);
  }

  // Empty a slot; what was displaced past it moves up (Knuth, The Art of Computer Programming 3, 6.4, Algorithm R).
  void erase(int64_t at) {
    const int64_t mask = static_cast<int64_t>(slots_.size()) - 1;
    num_children_--;
    for (int64_t from = at;;) {
      from = (from + 1) & mask;
      if (slots_[from].child == 0) break;
      const int64_t wanted = home(slots_[from].parent, slots_[from].token) & mask;
      if (((from - wanted) & mask) < ((from - at) & mask)) continue;
      slots_[at] = slots_[from];
      at = from;
    }
    slots_[at] = Slot();
  }

  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.child != 0) slots_[find(slot.parent, slot.token)] = slot;
    }
  }

  const Tokens& tokens_;
  std::vector<Node> nodes_;
  std::vector<Slot> slots_;  // a power of two of them
  int64_t num_children_ = 0;
  int32_t free_ = 0;  // released nodes, linked by `next`
  int64_t num_free_ = 0;
};

}  // namespace tandem
