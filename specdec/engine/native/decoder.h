// The forward pass of a Llama-shaped decoder: what it is given, and the call.
#pragma once

#include "attention.h"

namespace tandem {

// Everything below mirrors the ctypes structures of decoder.py.
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

struct Model {
  const Layer* layers;
  const void* embedding;  // [V, H] row-major
  const float* final_norm;
  const void* lm_head;
  const float* lm_head_bias;
  int64_t num_layers, hidden, intermediate, vocab, heads, kv_heads, head_dim;
  float eps, scale;
  int32_t weight_dtype, embedding_dtype, cache_dtype;  // 0 float32, 1 bfloat16, 2 int8 (weights only)
};

struct Batch {
  const int64_t* token_ids;   // [T]
  const int64_t* logit_rows;  // [N]
  int64_t num_logits;
  Plan plan;
  void* const* k_caches;  // one per layer
  void* const* v_caches;
  const float* cosines;  // [positions, D / 2]
  const float* sines;
  float* logits;  // [N, V]
};

// Writes the cache and batch.logits; `threads` counts the calling thread. Returns 0, -1 without memory, -2 for a token id
// outside the vocabulary (nothing has been written then). It takes the scratch memory of the thread's pool.
int forward(const Model& model, const Batch& batch, int threads);

}  // namespace tandem
