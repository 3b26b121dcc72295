// The forward pass of a decoder of attention, recurrences and MLPs: what it is given, and the call.
#pragma once

#include "attention.h"

namespace tandem {

// Python fills in the structs below (structs.py).

// y = (W x + bias) scale. Bias and scale have one number per packed column, or are null.
struct Linear {
  const void* weight;  // packed; null: the layer has none
  const float* bias;
  const float* scale;
};
TANDEM_STRUCT(Linear, weight, bias, scale)

enum MixerKind : int32_t { kShortConvolution, kDeltaNet, kMamba2 };

// A recurrent part of a layer: a linear layer, a convolution of some of its outputs, the recurrence (recurrent.h), a norm
// and a linear layer.
struct Mixer {
  Linear input, output;
  const float *taps, *taps_bias;      // [num_taps, channels]; [channels] or null
  const float *rates, *time_bias;     // [heads]: A, below 0; what is added to time steps
  const float* skip;                  // [heads]: D
  const float* norm;                  // delta net [value_dim]; Mamba2 [heads, value_dim] or null
  void* rings;                        // [slots, ring_size, channels], of the cache's dtype
  float* state;                       // [slots, heads, key_dim, value_dim]; Mamba2 [slots, heads, value_dim, key_dim]
  float *keys, *values, *decays;      // records [slots, num_records, …]: key or B; delta or dt x; decay
  int64_t width;                      // of a projected row, in whole panels
  int64_t channels, num_taps, ring_size, num_records;
  int64_t conv_at, gate_at, time_at;  // where parts of a projected row begin: what is convolved, the gate, time steps,
  int64_t factor_at;                  // beta, or what a short convolution's inputs are multiplied by
  int64_t key_heads, heads, key_dim, value_dim;
  int64_t norm_groups;
  float shortest, longest;            // time step of Mamba2
  int32_t kind;                       // a MixerKind
};
TANDEM_STRUCT(Mixer, input, output, taps, taps_bias, rates, time_bias, skip, norm, rings, state, keys, values, decays, width,
              channels, num_taps, ring_size, num_records, conv_at, gate_at, time_at, factor_at, key_heads, heads, key_dim,
              value_dim, norm_groups, shortest, longest, kind)

// Attention and a mixer, or one of them, read the normed stream and are added to it; then an MLP is. Each may be missing.
struct Layer {
  const float* input_norm;  // [H]
  Linear qkv;               // query, key and value columns, each in whole panels; a gated head's gate is behind its query
  const float* query_norm;  // [D] or null
  const float* key_norm;
  Linear output;
  const Mixer* mixer;
  const float* post_norm;  // [H]
  Linear gate_up;          // panels of gate and up in turn; silu(gate) up. Without a gate: of up alone; relu(up)^2
  Linear down;
  int64_t window;  // 0: none
};
TANDEM_STRUCT(Layer, input_norm, qkv, query_norm, key_norm, output, mixer, post_norm, gate_up, down, window)

// How a draft head ingests a token and the state before it, where a model takes the token's embedding.
enum HeadKind : int32_t {
  kEagle,   // the stream is fuse(embedding, state); norms may be missing
  kEagle3,  // the stream is the state, made by fuse(features); the first layer's heads see embedding and state side by side
};

struct Head {
  Linear fuse;  // [H, 2 H], or [H, num_features] for EAGLE-3
  const float* feature_norm;    // [num_features] or null: each of feature_parts equal parts has an RMSNorm of its own
  const float* embedding_norm;  // [H]; EAGLE-3 only, as is the next
  const float* state_norm;      // [H]
  int64_t num_features;         // of a row; those of an EAGLE head are its state
  int64_t feature_parts;
  int32_t kind;            // a HeadKind
  int32_t norms_residual;  // the normed state is what the first layer adds to
  int32_t norms_output;    // the final norm is part of the state that the next step reads
};
TANDEM_STRUCT(Head, fuse, feature_norm, embedding_norm, state_norm, num_features, feature_parts, kind,
              norms_residual, norms_output)

struct Model {
  const Layer* layers;
  const void* embedding;  // [V, H] row-major
  const float* final_norm;  // or null, as may be the norms of an EAGLE head's layers
  Linear lm_head;
  const Head* head;           // null: a language model
  const int32_t* target_ids;  // [outputs]: the token each output stands for; null: itself
  int64_t num_layers, hidden, intermediate, vocab, outputs, heads, kv_heads, head_dim;
  int64_t rotary_dim;  // the first elements of a head, which are rotated
  float eps, scale, embedding_scale;
  int32_t gates_heads, gates_mlp;  // attended heads are multiplied by the sigmoid of a gate; MLPs have one
  int32_t weight_dtype, embedding_dtype, cache_dtype;  // 0 float32, 1 bfloat16; of weights 2 int8, 3 grouped, too
  int64_t prefetch_one, prefetch_several;              // of weights, for one row and for several: gemm.h
};
TANDEM_STRUCT(Model, layers, embedding, final_norm, lm_head, head, target_ids, num_layers, hidden,
              intermediate, vocab, outputs, heads, kv_heads, head_dim, rotary_dim, eps, scale, embedding_scale, gates_heads,
              gates_mlp, weight_dtype, embedding_dtype,
              cache_dtype, prefetch_one, prefetch_several)

struct Batch {
  const int64_t* token_ids;   // [T]
  const int64_t* logit_rows;  // [N]
  int64_t num_logits;
  Plan plan;
  const int64_t* state_plan;  // [6, S] of engine/recurrent/plan.py; null: no layer is recurrent
  void* const* k_caches;      // one per layer
  void* const* v_caches;
  const float* cosines;  // [positions, rotary_dim / 2]
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
TANDEM_STRUCT(Batch, token_ids, logit_rows, num_logits, plan, state_plan, k_caches, v_caches, cosines, sines, logits, features, stream,
              features_dtype, features_are_fused, state_rows, state_layers, num_states, num_state_layers, states)

// Writes the cache, batch.logits and batch.states; `threads` counts the calling thread. Returns 0, -1 without memory, -2
// for a token id outside the vocabulary (nothing has been written then). It takes the scratch memory of the thread's pool.
int forward(const Model& model, const Batch& batch, int threads);

}  // namespace tandem
