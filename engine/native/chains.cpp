// Chains of drafted tokens in one call: a pass over what is pending, then a token drawn and fed for every chain that goes
// on, by a language model or a head.
#include "decoder.h"
#include "drafting.h"
#include "layout.h"

namespace tandem {

namespace {

// Passes of a model.
class Passes {
 public:
  const int64_t vocab, outputs;
  const int32_t* const target_ids;

  Passes(const Model& model, const Batch& caches, const Chain* chains, int64_t num_chains, const Drafted& out, int threads)
      : vocab(model.vocab), outputs(model.outputs), target_ids(model.target_ids), model_(model), batch_(caches),
        chains_(chains), num_chains_(num_chains), out_(out), threads_(threads) {
    layout_.block_size = batch_.plan.block_size;
    for (int64_t c = 0; c < num_chains; c++) {
      num_rows_ += chains[c].num_token_ids;
      num_masks_ += chains[c].num_masks;
      const int64_t longest = chains[c].length + chains[c].num_token_ids + chains[c].num_tokens;
      layout_.width = std::max(layout_.width, layout_.blocks_of(longest));
    }
  }

  void take(Take& take) {
    layout_.take(take, num_rows_, num_chains_);
    ids_ = reinterpret_cast<int64_t*>(take(num_rows_ * 8));
    logit_rows_ = reinterpret_cast<int64_t*>(take((num_chains_ + num_masks_) * 8));
    if (!model_.head) return;
    features_ = reinterpret_cast<const void**>(take(num_rows_ * int64_t(sizeof(void*))));
    batch_.stream = reinterpret_cast<float*>(take(num_chains_ * state_stride() * 4));
  }

  int first(const Active&, float* logits) {
    int64_t row = 0, wanted = 0;
    for (int64_t c = 0; c < num_chains_; c++) {
      const Chain& chain = chains_[c];
      layout_.place(c, chain.blocks, chain.length, chain.num_dropped, chain.num_token_ids, row);
      std::memcpy(ids_ + row, chain.token_ids, size_t(chain.num_token_ids) * 8);
      if (model_.head) name_features(chain, row);
      row += chain.num_token_ids;
      for (int64_t i = row - chain.num_masks - 1; chain.num_tokens && i < row; i++) logit_rows_[wanted++] = i;
    }
    batch_.features = features_;
    return pass(num_chains_, row, wanted, logits);
  }

  int next(const Active& active, int64_t step, float* logits) {
    batch_.features = nullptr;
    for (int64_t i = 0; i < active.count; i++) {
      const Chain& chain = chains_[active.chains[i]];
      if (model_.head && active.rows[i] != i)  // states move down to where their rows are now
        std::memcpy(batch_.stream + i * state_stride(), batch_.stream + active.rows[i] * state_stride(),
                    size_t(state_stride()) * 4);
      layout_.place(i, chain.blocks, chain.length + chain.num_token_ids + step, chain.num_dropped, 1, i);
      ids_[i] = out_.token_ids[active.chains[i] * out_.depth + step];
      logit_rows_[i] = i;
    }
    return pass(active.count, active.count, active.count, logits);
  }

 private:
  int64_t state_stride() const { return row_stride(model_.hidden); }

  void name_features(const Chain& chain, int64_t row) {
    const int64_t width = batch_.features_are_fused ? model_.hidden : model_.head->num_features;
    const int64_t bytes = width * (batch_.features_dtype == 0 ? 4 : 2);
    for (int64_t i = 0; i < chain.num_token_ids; i++)
      features_[row + i] = static_cast<const char*>(chain.features) + i * bytes;
  }

  int pass(int64_t num_sequences, int64_t num_rows, int64_t num_logits, float* logits) {
    batch_.plan = layout_.plan(num_sequences, num_rows);
    batch_.token_ids = ids_;
    batch_.logit_rows = logit_rows_;
    batch_.num_logits = num_logits;
    batch_.logits = logits;
    return forward(model_, batch_, threads_);
  }

  const Model& model_;
  Batch batch_;
  const Chain* chains_;
  const int64_t num_chains_;
  const Drafted& out_;
  const int threads_;
  int64_t num_rows_ = 0, num_masks_ = 0;
  Layout layout_{};
  int64_t *ids_, *logit_rows_;
  const void** features_ = nullptr;  // of the rows fed first
};

}  // namespace

}  // namespace tandem

// Drafts every chain. `caches` names caches, rotary tables and block size; the rest of it is not read. Returns what
// forward() returns.
extern "C" __attribute__((visibility("default"))) int tandem_draft_chains(
    const tandem::Model* model, const tandem::Batch* caches, const tandem::Chain* chains, int64_t num_chains,
    const int32_t* stop, const tandem::Drafted* out, int threads) {
  tandem::Passes passes(*model, *caches, chains, num_chains, *out, threads);
  return tandem::Drafting<tandem::Passes>(passes, chains, num_chains, stop, *out, threads).run();
}
