// Root mean square norms of rows.
#pragma once

#include "vector.h"

namespace tandem {

// 1 / sqrt(mean(x^2) + eps)
template <class T>
inline float inverse_rms(const T* x, int64_t n, float eps) {
  Vec squares{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = load(x + i);
    squares = fma(v, v, squares);
  }
  if (i < n) {
    const Vec v = load_part(x + i, int(n - i));
    squares = fma(v, v, squares);
  }
  return 1.0f / __builtin_sqrtf(sum(squares) / float(n) + eps);
}

// out = weight * (x / sqrt(mean(x^2) + eps)), as transformers' RMSNorm orders it; zeros up to whole vectors.
template <class In, class Out>
inline void rms_norm(const In* x, const float* weight, int64_t n, float eps, Out* out) {
  const float inverse = inverse_rms(x, n, eps);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * inverse * load(weight + i));
  if (i < n) store(out + i, load_part(x + i, int(n - i)) * inverse * load_part(weight + i, int(n - i)));
}

// The same, and nothing is written behind.
template <class Out>
inline void part_norm(const float* x, const float* weight, int64_t n, float eps, Out* out) {
  const float inverse = inverse_rms(x, n, eps);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int lanes = int(n - i < kLanes ? n - i : kLanes);
    store_part(out + i, load_part(x + i, lanes) * inverse * load_part(weight + i, lanes), lanes);
  }
}

inline Vec silu(Vec x) { return x / (1.0f + exp(-x)); }
inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

}  // namespace tandem
