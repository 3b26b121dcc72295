// Chains of drafted tokens in one call: feed, draw a token per chain, feed the tokens, draw, …
//
// A chain is the same whatever is drafted beside it: passes are batch-invariant and every row is drawn by itself.
#include <algorithm>
#include <cstdlib>

#include "decoder.h"
#include "sampler.h"

namespace tandem {

// Mirrors the record of chains.py.
struct Chain {
  const int32_t* blocks;  // of its sequence; positions beyond them go to block 0
  int64_t num_blocks;
  int64_t length;      // entries in the cache after the first pass: where its first token will be fed
  int64_t num_tokens;  // to draw
  const int32_t* stop;  // or null; written by other threads: not 0 ends the chain with the tokens it has
  int64_t* token_ids;   // [num_tokens], out
  int64_t* candidates;  // [num_tokens, num_candidates], out
  uint8_t* q_rows;      // [num_tokens, q_bytes], out
  int32_t* q_sizes;     // [num_tokens], out: bytes of each q row, 0 for none
  int64_t num_drawn;    // out
  DrawSettings draw;
};

namespace {

int64_t slot_of(const Chain& chain, int64_t position, int64_t block_size) {
  const int64_t block = position / block_size;
  return (block < chain.num_blocks ? chain.blocks[block] : 0) * block_size + position % block_size;
}

// What one step feeds: a token per chain that goes on. One allocation for the largest step.
class Step {
 public:
  Step(int64_t chains, int64_t table_width) : width_(table_width) {
    const size_t words = size_t(chains) * 4, small = size_t(chains + 1) + size_t(chains * table_width);
    memory_ = static_cast<int64_t*>(std::malloc(words * sizeof(int64_t) + small * sizeof(int32_t)));
    token_ids = memory_, positions = token_ids + chains, slots = positions + chains, rows = slots + chains;
    row_starts = reinterpret_cast<int32_t*>(memory_ + words), tables = row_starts + chains + 1;
  }
  ~Step() { std::free(memory_); }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  bool ok() const { return memory_; }

  void put(int64_t at, const Chain& chain, int64_t token, int64_t position, int64_t block_size) {
    token_ids[at] = token, positions[at] = position, slots[at] = slot_of(chain, position, block_size);
    rows[at] = at, row_starts[at] = int32_t(at), row_starts[at + 1] = int32_t(at + 1);
    int32_t* table = tables + at * width_;
    const int64_t used = position / block_size + 1;
    for (int64_t b = 0; b < width_; b++) table[b] = b < used && b < chain.num_blocks ? chain.blocks[b] : 0;
  }

  int64_t *token_ids, *positions, *slots, *rows;
  int32_t *row_starts, *tables;

 private:
  int64_t* memory_;
  int64_t width_;
};

bool stopped(const Chain& chain) {
  return chain.stop && __atomic_load_n(chain.stop, __ATOMIC_RELAXED);
}

int draft(const Model& model, const Batch& first, Chain* chains, int64_t num_chains, int64_t q_bytes, int threads) {
  int status = forward(model, first, threads);
  if (status || !num_chains) return status;
  const int64_t block_size = first.plan.block_size;
  int64_t width = 1;
  for (int64_t c = 0; c < num_chains; c++)
    width = std::max(width, (chains[c].length + chains[c].num_tokens - 1) / block_size + 1);
  Sampler sampler(model.vocab);
  Step step(num_chains, width);
  int64_t* active = static_cast<int64_t*>(std::malloc(size_t(num_chains) * sizeof(int64_t)));
  if (!sampler.ok() || !step.ok() || !active) return std::free(active), -1;

  Batch batch = first;
  batch.token_ids = step.token_ids, batch.logit_rows = step.rows;
  batch.plan.positions = step.positions, batch.plan.slots = step.slots;
  batch.plan.row_starts = step.row_starts, batch.plan.block_tables = step.tables, batch.plan.table_width = width;
  int64_t num_active = num_chains;
  for (int64_t c = 0; c < num_chains; c++) active[c] = c;
  for (int64_t drawn = 0; !status; drawn++) {
    int64_t going_on = 0;
    for (int64_t row = 0; row < num_active; row++) {
      Chain& chain = chains[active[row]];
      const DrawSettings& draw = chain.draw;
      int64_t* token = chain.token_ids + drawn;
      chain.q_sizes[drawn] = sampler.draw(first.logits + row * model.vocab, draw, drawn, token,
                                          chain.candidates + drawn * draw.num_candidates, chain.q_rows + drawn * q_bytes);
      chain.num_drawn = drawn + 1;
      if (chain.num_drawn == chain.num_tokens || stopped(chain)) continue;
      step.put(going_on, chain, *token, chain.length + drawn, block_size);
      active[going_on++] = active[row];
    }
    if (!going_on) break;
    num_active = going_on;
    batch.num_logits = batch.plan.num_rows = batch.plan.num_sequences = num_active;
    status = forward(model, batch, threads);
  }
  std::free(active);
  return status;
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// `first.logits` has room for a row per chain and holds the last step's afterwards; its logit_rows are those of the
// chains, in order. Returns what forward returns; after an error the chains mean nothing.
extern "C" __attribute__((visibility("default"))) int tandem_draft_chains(const Model* model, const Batch* first,
                                                                           Chain* chains, int64_t num_chains,
                                                                           int64_t q_bytes, int threads) {
  return draft(*model, *first, chains, num_chains, q_bytes, threads);
}
