// One pass over segments: tokens fed to sequences, laid out here.
#include <algorithm>

#include "decoder.h"
#include "layout.h"
#include "sampling.h"

namespace tandem {

// Tokens to feed to one sequence.
struct Feed {
  const int32_t* blocks;     // of its sequence; null: block 0 takes all rows
  const int64_t* token_ids;  // [num_tokens]; those of the next feed follow
  int64_t num_tokens;
  int64_t length;          // entries in the cache
  int64_t num_logits;      // of the last rows
  int64_t num_states;      // likewise
  const int64_t* parents;  // [num_tokens], or null where the tokens form a chain
  int64_t slot, base, new_base;  // of recurrent states: engine/recurrent/plan.py
};
TANDEM_STRUCT(Feed, blocks, token_ids, num_tokens, length, num_logits, num_states, parents, slot, base, new_base)

}  // namespace tandem

using namespace tandem;

// Feeds every segment. `caches` names caches, rotary tables, block size and what states are of which layers and go where;
// the rest of it is not read. `logits` takes the rows wanted, in order. Returns what forward() returns.
extern "C" __attribute__((visibility("default"))) int tandem_feed(const Model* model, const Batch* caches, const Feed* feeds,
                                                                  int64_t num_feeds, float* logits, int threads) {
  Batch batch = *caches;
  Layout layout{};
  layout.block_size = batch.plan.block_size;
  int64_t num_rows = 0, num_logits = 0, num_states = 0;
  bool has_trees = false;
  for (int64_t s = 0; s < num_feeds; s++) {
    num_rows += feeds[s].num_tokens;
    num_logits += feeds[s].num_logits;
    num_states += feeds[s].num_states;
    has_trees |= feeds[s].parents != nullptr;
    layout.width = std::max(layout.width, layout.blocks_of(feeds[s].length + feeds[s].num_tokens));
  }
  int64_t *logit_rows = nullptr, *state_rows = nullptr, *state_plan = nullptr;
  const bool has_memory = take_all([&](Take& take) {
    layout.take(take, num_rows, num_feeds, has_trees);
    logit_rows = reinterpret_cast<int64_t*>(take(num_logits * 8));
    state_rows = reinterpret_cast<int64_t*>(take(num_states * 8));
    state_plan = reinterpret_cast<int64_t*>(take(6 * num_feeds * 8));
  });
  if (!has_memory) return -1;
  int64_t row = 0, wanted = 0, kept = 0;
  for (int64_t s = 0; s < num_feeds; s++) {
    const Feed& feed = feeds[s];
    layout.place(s, feed.blocks, feed.length, 0, feed.num_tokens, row, feed.parents);
    const int64_t of_states[] = {feed.slot, feed.base, feed.length, feed.length + feed.num_tokens, feed.new_base, row};
    for (int64_t i = 0; i < 6; i++) state_plan[i * num_feeds + s] = of_states[i];
    row += feeds[s].num_tokens;
    for (int64_t i = row - feeds[s].num_logits; i < row; i++) logit_rows[wanted++] = i;
    for (int64_t i = row - feeds[s].num_states; i < row; i++) state_rows[kept++] = i;
  }
  batch.plan = layout.plan(num_feeds, num_rows);
  batch.token_ids = num_feeds ? feeds[0].token_ids : nullptr;
  batch.logit_rows = logit_rows;
  batch.num_logits = num_logits;
  batch.logits = logits;
  batch.state_rows = state_rows;
  batch.num_states = num_states;
  batch.state_plan = state_plan;
  return forward(*model, batch, threads);
}
