// The forward pass of a Llama-shaped decoder: what it is given, and the call.
#pragma once

#include "attention.h"

namespace tandem {

// Python fills in the structs below (structs.py).
struct Layer {
  const float* input_norm;  // [H]
  const void* qkv;          // packed: query, key and value columns, each in whole panels
  const float* qkv_bias;    // one number per packed column, or null; so are the other biases
  const float* query_norm;  // [D] or null
  const float* key_norm;
  const void* output;
  const float* output_bias;
  const float* post_norm;  // [H]
  const void* gate_up;     // packed: panels of gate and up in turn
  const float* gate_up_bias;
  const void* down;
  const float* down_bias;
  int64_t window;  // 0: none
};
TANDEM_STRUCT(Layer, input_norm, qkv, qkv_bias, query_norm, key_norm, output, output_bias, post_norm, gate_up, gate_up_bias,
              down, down_bias, window)

// How a draft head ingests a token and the state before it, where a model takes the token's embedding.
enum HeadKind : int32_t {
  kEagle,   // the stream is fuse(embedding, state); norms may be missing
  kEagle3,  // the stream is the state, made by fuse(features); the first layer's heads see embedding and state side by side
};

struct Head {
  const void* fuse;  // packed [H, 2 H], or [H, num_features] for EAGLE-3
  const float* fuse_bias;
  const float* feature_norm;    // [num_features] or null: each of feature_parts equal parts has an RMSNorm of its own
  const float* embedding_norm;  // [H]; EAGLE-3 only, as is the next
  const float* state_norm;      // [H]
  int64_t num_features;         // of a row; those of an EAGLE head are its state
  int64_t feature_parts;
  int32_t kind;            // a HeadKind
  int32_t norms_residual;  // the normed state is what the first layer adds to
  int32_t norms_output;    // the final norm is part of the state that the next step reads
};
TANDEM_STRUCT(Head, fuse, fuse_bias, feature_norm, embedding_norm, state_norm, num_features, feature_parts, kind,
              norms_residual, norms_output)

struct Model {
  const Layer* layers;
  const void* embedding;  // [V, H] row-major
  const float* final_norm;  // or null, as may be the norms of an EAGLE head's layers
  const void* lm_head;
  const float* lm_head_bias;
  const Head* head;           // null: a language model
  const int32_t* target_ids;  // [outputs]: the token each output stands for; null: itself
  int64_t num_layers, hidden, intermediate, vocab, outputs, heads, kv_heads, head_dim;
  float eps, scale;
  int32_t weight_dtype, embedding_dtype, cache_dtype;  // 0 float32, 1 bfloat16; of weights 2 int8, 3 grouped, 4 decoded (to the embedding's), too
  int64_t prefetch_one, prefetch_several;              // of weights, for one row and for several: gemm.h
};
TANDEM_STRUCT(Model, layers, embedding, final_norm, lm_head, lm_head_bias, head, target_ids, num_layers, hidden,
              intermediate, vocab, outputs, heads, kv_heads, head_dim, eps, scale, weight_dtype, embedding_dtype,
              cache_dtype, prefetch_one, prefetch_several)

struct Batch {
  const int64_t* token_ids;   // [T]
  const int64_t* logit_rows;  // [N]
  int64_t num_logits;
  Plan plan;
  void* const* k_caches;  // one per layer
  void* const* v_caches;
  const float* cosines;  // [positions, D / 2]
  const float* sines;
  float* logits;  // [N, outputs]
  // Of heads. A row's state is that of the row before it, of which its token is the next: as the target's features, or as
  // what the head itself made of that row.
  const void* const* features;  // [T] rows of num_features, or null: the states are in `stream`
  float* stream;  // [T or N, row_stride(H)]: takes the states that the wanted rows, which ascend, bring: N rows
  int32_t features_dtype;
  int32_t features_are_fused;  // EAGLE-3: the rows are what `fuse` makes of features, [hidden]
  // Hidden states wanted: of these rows, of these layers in turn: 0 is the embedding's output, i that of layer i, all
  // before the final norm; -1 is the last one's after it.
  const int64_t* state_rows;    // [S]
  const int64_t* state_layers;  // [F]
  int64_t num_states, num_state_layers;
  bf16* states;  // [S, F, H]
};
TANDEM_STRUCT(Batch, token_ids, logit_rows, num_logits, plan, k_caches, v_caches, cosines, sines, logits, features, stream,
              features_dtype, features_are_fused, state_rows, state_layers, num_states, num_state_layers, states)

// Writes the cache, batch.logits and batch.states; `threads` counts the calling thread. Returns 0, -1 without memory, -2
// for a token id outside the vocabulary (nothing has been written then). It takes the scratch memory of the thread's pool.
int forward(const Model& model, const Batch& batch, int threads);

}  // namespace tandem
