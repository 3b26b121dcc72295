// Elementwise functions for modules that run under torch. Torch computes the last elements of a tensor in another way
// than the others, so what it returns for a row depends on the rows beside it; here each element is computed alike.
#include <cmath>

#include "pool.h"
#include "vector.h"

#define TANDEM_API extern "C" __attribute__((visibility("default")))

namespace tandem {
namespace {

enum Function { kSilu = 0, kSigmoid = 1, kSoftplus = 2, kGelu = 3 };

constexpr int64_t kPart = 1 << 14;  // elements a thread takes at a time

inline Vec apply(int function, Vec x) {
  if (function == kSilu) return x / (1.0f + exp(-x));
  if (function == kSigmoid) return 1.0f / (1.0f + exp(-x));
  float each[kLanes];
  store(each, x);
  for (float& value : each)
    if (function == kGelu)
      value = 0.5f * value * (1.0f + std::erf(value * 0.70710678f));
    else if (value <= 20.0f)
      value = std::log1p(std::exp(value));
  return load(each);
}

template <class T>
void apply(int function, const T* in, T* out, int64_t count, int threads) {
  const int64_t parts = (count + kPart - 1) / kPart;
  Counter counter;
  Pool::local().run(parts > 1 ? threads : 1, [&](Team& team) {
    for (int64_t part; (part = team.next(counter)) < parts;) {
      const int64_t last = part * kPart + kPart < count ? part * kPart + kPart : count;
      for (int64_t i = part * kPart; i < last; i += kLanes) {
        const int lanes = int(last - i < kLanes ? last - i : kLanes);
        store_part(out + i, apply(function, load_part(in + i, lanes)), lanes);
      }
    }
  });
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// out = function of in, elementwise: 0 silu, 1 sigmoid, 2 softplus, 3 gelu; dtype 0 float32, 1 bfloat16.
TANDEM_API void tandem_elementwise(int function, int dtype, const void* in, void* out, int64_t count, int threads) {
  if (dtype == 0)
    apply(function, static_cast<const float*>(in), static_cast<float*>(out), count, threads);
  else
    apply(function, static_cast<const bf16*>(in), static_cast<bf16*>(out), count, threads);
}
