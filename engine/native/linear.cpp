// Packing weights, and one packed linear layer for modules that run under torch.
#include <stdlib.h>
#include <sys/mman.h>

#include <type_traits>

#include "gemm.h"

namespace tandem {
namespace {

enum DType { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kGrouped = 3, kDecoded = 4 };

template <class Format>
void pack(const typename Format::Weight* source, const float* scales, long n, long k, long stride,
          typename Format::Weight* packed, long first_panel, long panel_step, int threads) {
  long panels = (n + kPanel - 1) / kPanel;
  Counter counter;
  Pool::local().run(threads, [&](Team& team) {
    for (long p; (p = team.next(counter)) < panels;) {
      typename Format::Weight* panel = packed + (first_panel + p * panel_step) * panel_size<Format>(k);
      long columns = n - p * kPanel < kPanel ? n - p * kPanel : kPanel;
      if (columns < kPanel || k % Format::kStep || Format::kScales)
        std::memset(static_cast<void*>(panel), 0, size_t(panel_size<Format>(k)) * sizeof(*panel));
      constexpr long kBlock = 16;
      for (long from = 0; from < k; from += kBlock) {
        long to = from + kBlock < k ? from + kBlock : k;
        for (int j = 0; j < columns; j++) {
          const typename Format::Weight* row = source + (p * kPanel + j) * stride;
          for (long i = from; i < to; i++) panel[Format::index(i, j)] = row[i];
        }
      }
      if (Format::kScales)
        std::memcpy(static_cast<void*>(panel + round_up(k, Format::kStep) * kPanel), scales + p * kPanel,
                    size_t(columns) * sizeof(float));
    }
  });
}

template <class Format, class T>
int linear(const T* x, int rows, long ldx, long k, const typename Format::Weight* weight, long n, const float* bias,
           T* y, long ldy, long panel_step, long prefetch, int threads) {
  using Activation = typename Format::Activation;
  constexpr bool same = std::is_same_v<T, Activation>;
  bool copied = !same || k % Format::kStep || (rows > 1 && (ldx * sizeof(T)) % 1024 == 0) || ldx % Format::kStep ||
                order_of<Format>(weight);
  long lda = copied ? row_stride(prepared_size<Format>(k)) : ldx;
  const int groups = int((n + kPanel - 1) / kPanel);
  const long own_floats = ProductScratch::own_floats(rows, 1);
  const long chunk_floats = ProductScratch::shared_floats(rows, k, groups, 1, threads);
  const size_t copy_bytes = copied ? size_t(rows) * lda * sizeof(Activation) : 0;
  const size_t scale_floats = Format::kScales ? size_t(round_up(rows, 16)) : 0;
  const size_t done_bytes = chunk_floats ? size_t(kSplitGroups) * threads * sizeof(Counter) : 0;
  Pool& pool = Pool::local();
  const size_t floats = size_t(threads * own_floats + chunk_floats) + scale_floats;
  char* scratch = static_cast<char*>(pool.scratch(copy_bytes + done_bytes + floats * sizeof(float)));
  if (!scratch) return -1;
  Counter* done = reinterpret_cast<Counter*>(scratch);
  float* sums = reinterpret_cast<float*>(scratch + done_bytes);
  float* scales = sums + threads * own_floats + chunk_floats;
  Activation* copy = reinterpret_cast<Activation*>(sums + floats);
  for (size_t i = 0; i < done_bytes / sizeof(Counter); i++) done[i].taken.store(0, std::memory_order_relaxed);
  Counter copying, counter;
  pool.run(threads, [&](Team& team) {
    const Activation* a = copied ? copy : reinterpret_cast<const Activation*>(x);
    if (copied) {
      for (int r; (r = team.next(copying)) < rows;) {
        const float scale =
            prepare_row(x + r * ldx, k, round_up(k, Format::kStep), copy + r * lda, order_of<Format>(weight));
        if (Format::kScales) scales[r] = scale;
      }
      team.barrier();
    }
    const ProductScratch mine{sums + team.id * own_floats, sums + threads * own_floats, done};
    product<Format>(team, counter, rows, {a, lda, scales}, weight, k, groups, 1, panel_step, prefetch, mine,
                    [&](int first, int count, int panel, const float* s) {
                      const long column = long(panel) * kPanel;
                      for (int r = 0; r < count; r++)
                        for (int v = 0; v < kPanel && column + v < n; v += kLanes) {
                          const int lanes = int(n - column - v < kLanes ? n - column - v : kLanes);
                          const Vec b = bias ? load_part(bias + column + v, lanes) : Vec{};
                          store_part(y + (first + r) * ldy + column + v, load(s + r * kPanel + v) + b, lanes);
                        }
                    });
  });
  return 0;
}

}  // namespace
}  // namespace tandem

using namespace tandem;

#define TANDEM_API extern "C" __attribute__((visibility("default")))

// Columns of a panel.
TANDEM_API int tandem_panel() { return kPanel; }

// Calls act(Format{}) with the format of a weight's dtype.
template <class Act>
static auto with_format(int dtype, Act&& act) {
  if (dtype == kFloat32) return act(Float32{});
  return dtype == kBFloat16 ? act(BFloat16{}) : act(Int8{});
}

// Bytes of `panels` panels of a weight with k inputs.
TANDEM_API int64_t tandem_packed_bytes(int dtype, int64_t panels, int64_t k) {
  return with_format(dtype, [&](auto format) {
    using Format = decltype(format);
    return int64_t(panels * panel_size<Format>(k) * long(sizeof(typename Format::Weight)));
  });
}

// Memory in huge pages where the system has them; null when there is none. Untouched pages take no memory.
TANDEM_API void* tandem_alloc(int64_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, size_t(2) << 20, size_t(bytes)) != 0) return nullptr;
#if defined(MADV_HUGEPAGE)
  madvise(memory, size_t(bytes), MADV_HUGEPAGE);
#endif
  return memory;
}

TANDEM_API void tandem_free(void* memory) { free(memory); }

// weight [n, k] row-major, rows `stride` apart, into panels first_panel, first_panel + panel_step, … of `packed`; `scales`
// float32 [n] for int8, else null.
TANDEM_API void tandem_pack(int dtype, const void* weight, const float* scales, int64_t n, int64_t k, int64_t stride,
                            void* packed, int64_t first_panel, int64_t panel_step, int threads) {
  with_format(dtype, [&](auto format) {
    using Weight = typename decltype(format)::Weight;
    pack<decltype(format)>(static_cast<const Weight*>(weight), scales, n, k, stride, static_cast<Weight*>(packed),
                           first_panel, panel_step, threads);
  });
}

// y [rows, n] = x [rows, k] W^T + bias; x and y of one dtype, float32 or bfloat16, which is W's unless that is int8 or
// grouped or decoded (then `packed` is a list of panels); bias
// float32 [n] or null; W's panels are panel_step apart. Returns 0, or -1 without memory.
TANDEM_API int tandem_linear(int dtype, int weight_dtype, const void* x, int rows, int64_t ldx, int64_t k,
                             const void* packed, int64_t n, const float* bias, void* y, int64_t ldy, int64_t panel_step,
                             int64_t prefetch, int threads) {
  auto run = [&](auto format, auto* rows_in, auto* rows_out) {
    using Weight = typename decltype(format)::Weight;
    return linear<decltype(format)>(rows_in, rows, ldx, k, static_cast<const Weight*>(packed), n, bias, rows_out, ldy,
                                    panel_step, prefetch, threads);
  };
  if (dtype == kFloat32) {
    const auto* in = static_cast<const float*>(x);
    auto* out = static_cast<float*>(y);
    if (weight_dtype == kGrouped) return run(Grouped{}, in, out);
    if (weight_dtype == kDecoded) return run(Decoded<Float32>{}, in, out);
    return weight_dtype == kInt8 ? run(Int8{}, in, out) : run(Float32{}, in, out);
  }
  const auto* in = static_cast<const bf16*>(x);
  auto* out = static_cast<bf16*>(y);
  if (weight_dtype == kGrouped) return run(Grouped{}, in, out);
  if (weight_dtype == kDecoded) return run(Decoded<BFloat16>{}, in, out);
  return weight_dtype == kInt8 ? run(Int8{}, in, out) : run(BFloat16{}, in, out);
}
