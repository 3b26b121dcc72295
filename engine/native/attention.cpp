// Paged attention and the cache writes, for modules that run under torch.
#include "attention.h"

#define TANDEM_API extern "C" __attribute__((visibility("default")))

namespace tandem {
namespace {

template <class Query, class Cache>
int paged_attention(const Plan& plan, const AttentionShape& shape, const Query* query, int64_t query_row,
                    int64_t query_head, const Cache* k_cache, const Cache* v_cache, Query* out, int threads) {
  Pool& pool = Pool::local();
  const bool shared = shares_splits(plan, shape, threads);
  const int64_t num_tasks = list_attention_tasks(plan, shape, shared, nullptr), items = num_tasks * shape.kv_heads;
  const int64_t num_shared = shared ? items : 0;
  const int64_t floats = AttentionScratch::own_floats(shape);
  const int64_t all_floats = threads * floats + AttentionScratch::shared_floats(shape, num_shared);
  const int64_t task_bytes = round_up(num_tasks * sizeof(AttentionTask), 64);
  const int64_t done_bytes = num_shared * sizeof(Counter);
  char* memory = static_cast<char*>(pool.scratch(size_t(task_bytes + done_bytes + all_floats * sizeof(float))));
  if (!memory) return -1;
  AttentionTask* tasks = reinterpret_cast<AttentionTask*>(memory);
  Counter* done = reinterpret_cast<Counter*>(memory + task_bytes);
  float* own = reinterpret_cast<float*>(memory + task_bytes + done_bytes);
  list_attention_tasks(plan, shape, shared, tasks);
  for (int64_t i = 0; i < num_shared; i++) done[i].taken.store(0, std::memory_order_relaxed);
  Counter counter;
  pool.run(threads, [&](Team& team) {
    AttentionScratch mine(shape, own + team.id * floats, own + threads * floats, done);
    for (int item; (item = team.next(counter)) < items;)
      attend(plan, shape, tasks, item / shape.kv_heads, item % shape.kv_heads, query, query_row, query_head,
             static_cast<const Query*>(nullptr), k_cache, v_cache, out, int64_t(shape.heads) * shape.value_dim, shape.value_dim, mine);
  });
  return 0;
}

template <class T>
void write_rows(const T* rows, int64_t count, int64_t row_stride, int64_t head_stride, int heads, int dim, T* cache,
                int64_t block_stride, int64_t block_size, const int64_t* slots) {
  for (int64_t r = 0; r < count; r++) {
    T* block = cache + slots[r] / block_size * block_stride + slots[r] % block_size * dim;
    for (int h = 0; h < heads; h++)
      std::memcpy(block + h * block_size * dim, rows + r * row_stride + h * head_stride, size_t(dim) * sizeof(T));
  }
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// Blocks of a multiple of so many positions hold their keys in columns, in the decoder's cache.
TANDEM_API int tandem_key_tile() { return kKeys; }

// out [T, Hq, Dv] of query [T, Hq, D]; dtypes 0 float32, 1 bfloat16. Returns 0, or -1 without memory.
TANDEM_API int tandem_attention(const Plan* plan, const AttentionShape* shape, int query_dtype, int cache_dtype,
                                const void* query, int64_t query_row, int64_t query_head, const void* k_cache,
                                const void* v_cache, void* out, int threads) {
  auto run = [&](auto* q, auto* k, auto* v, auto* o) {
    return paged_attention(*plan, *shape, q, query_row, query_head, k, v, o, threads);
  };
  auto with_cache = [&](auto* q, auto* o) {
    if (cache_dtype == 0) return run(q, static_cast<const float*>(k_cache), static_cast<const float*>(v_cache), o);
    return run(q, static_cast<const bf16*>(k_cache), static_cast<const bf16*>(v_cache), o);
  };
  if (query_dtype == 0) return with_cache(static_cast<const float*>(query), static_cast<float*>(out));
  return with_cache(static_cast<const bf16*>(query), static_cast<bf16*>(out));
}

// cache[slot] = rows, where rows [T, H, D] and the cache have one dtype of `item` bytes (2 or 4).
TANDEM_API void tandem_write_rows(int item, const void* rows, int64_t count, int64_t row_stride, int64_t head_stride,
                                  int heads, int dim, void* cache, int64_t block_stride, int64_t block_size,
                                  const int64_t* slots) {
  if (item == 4)
    write_rows(static_cast<const float*>(rows), count, row_stride, head_stride, heads, dim, static_cast<float*>(cache),
               block_stride, block_size, slots);
  else
    write_rows(static_cast<const bf16*>(rows), count, row_stride, head_stride, heads, dim, static_cast<bf16*>(cache),
               block_stride, block_size, slots);
}
