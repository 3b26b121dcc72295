// Attention over a paged cache, read in place.
//
// A task is one key-value head of some neighbouring rows of one sequence: its rows x query heads share every key and
// value that is loaded. Keys are taken in tiles of kPanel positions, aligned to position 0 and independent of the block
// size, with a running softmax from tile to tile in order.
//
// Batch invariance: what a row does with a tile (its scores, its maximum, its sums) depends on its own query and
// position alone; a tile a row must not see at all does not touch it, and a key masked inside a tile weighs exactly 0.
#pragma once

#include "gemm.h"

namespace tandem {

// Which rows belong to which sequence and where their cache lies (specdec/engine/plan.py).
struct Plan {
  const int64_t* positions;     // [T]
  const int64_t* slots;         // [T]
  const int32_t* row_starts;    // [S + 1]
  const int32_t* block_tables;  // [S, table_width]
  int64_t num_rows;
  int64_t num_sequences;
  int64_t table_width;
  int64_t block_size;
};

struct AttentionShape {
  int heads, kv_heads, head_dim, value_dim;
  int64_t k_block_stride, v_block_stride;  // elements from one block of the cache to the next
  float scale;
  float softcap;  // 0: none
  int64_t window;  // positions a row sees, its own included; 0: all
};

constexpr int kTaskRows = 48;  // rows x query heads of a task: whole register tiles

struct AttentionTask {
  int32_t sequence, first, last;  // rows first … last - 1
};

inline int rows_per_task(const AttentionShape& shape) {
  int group = shape.heads / shape.kv_heads;
  return group >= kTaskRows ? 1 : kTaskRows / group;
}

inline int64_t max_attention_tasks(const Plan& plan, const AttentionShape& shape) {
  return plan.num_sequences + plan.num_rows / rows_per_task(shape);
}

// Later rows see more keys, so they come first: the last task to be taken is a short one.
inline int list_attention_tasks(const Plan& plan, const AttentionShape& shape, AttentionTask* tasks) {
  int step = rows_per_task(shape), count = 0;
  for (int s = 0; s < plan.num_sequences; s++) {
    int begin = plan.row_starts[s], end = plan.row_starts[s + 1];
    for (int last = end; last > begin; last -= step)
      tasks[count++] = {s, last - step > begin ? last - step : begin, last};
  }
  return count;
}

// Working memory of one thread, in floats.
struct AttentionScratch {
  int64_t rows, query_stride, out_stride;
  float *query, *scores, *out, *keys, *values, *peak, *total;

  static int64_t floats(const AttentionShape& shape) { return AttentionScratch(shape, nullptr).end_; }

  AttentionScratch(const AttentionShape& shape, float* memory) {
    rows = int64_t(rows_per_task(shape)) * (shape.heads / shape.kv_heads);
    query_stride = row_stride(shape.head_dim);
    out_stride = row_stride(shape.value_dim);
    auto take = [&](int64_t n) {
      float* at = memory ? memory + end_ : nullptr;
      end_ += round_up(n, 16);
      return at;
    };
    query = take(rows * query_stride);
    scores = take(rows * kPanel);
    out = take(rows * out_stride);
    keys = take(int64_t(shape.head_dim) * kPanel);
    values = take(kPanel * out_stride);
    peak = take(rows);
    total = take(rows);
  }

 private:
  int64_t end_ = 0;
};

// keys[d][j] = row j's element d for 16 rows x 16 elements (or what a narrower machine has).
template <class T>
inline void transpose_tile(const T* const* rows, int count, int dim, float* keys) {
#if defined(__AVX512F__)
  for (int half = 0; half < kPanel; half += 16) {
    if (half >= count) {
      for (int d = 0; d < dim; d++) store(keys + d * kPanel + half, Vec{});
      continue;
    }
    for (int d0 = 0; d0 < dim; d0 += 16) {
      int width = dim - d0 < 16 ? dim - d0 : 16;
      __m512 r[16], t[16];
      if (width == 16 && half + 16 <= count) {
        for (int j = 0; j < 16; j++) r[j] = (__m512)load(rows[half + j] + d0);
      } else {
        for (int j = 0; j < 16; j++)
          r[j] = half + j < count ? (__m512)load_part(rows[half + j] + d0, width) : (__m512)Vec{};
      }
      for (int j = 0; j < 8; j++) {
        t[2 * j] = _mm512_unpacklo_ps(r[2 * j], r[2 * j + 1]);
        t[2 * j + 1] = _mm512_unpackhi_ps(r[2 * j], r[2 * j + 1]);
      }
      for (int j = 0; j < 4; j++) {
        auto low = [](__m512 a, __m512 b) {
          return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
        };
        auto high = [](__m512 a, __m512 b) {
          return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
        };
        r[4 * j] = low(t[4 * j], t[4 * j + 2]);
        r[4 * j + 1] = high(t[4 * j], t[4 * j + 2]);
        r[4 * j + 2] = low(t[4 * j + 1], t[4 * j + 3]);
        r[4 * j + 3] = high(t[4 * j + 1], t[4 * j + 3]);
      }
      for (int j = 0; j < 4; j++) {
        t[j] = _mm512_shuffle_f32x4(r[j], r[j + 4], 0x88);
        t[j + 4] = _mm512_shuffle_f32x4(r[j], r[j + 4], 0xdd);
        t[j + 8] = _mm512_shuffle_f32x4(r[j + 8], r[j + 12], 0x88);
        t[j + 12] = _mm512_shuffle_f32x4(r[j + 8], r[j + 12], 0xdd);
      }
      for (int j = 0; j < 8; j++) {
        r[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd);
      }
      for (int j = 0; j < width; j++) store(keys + (d0 + j) * kPanel + half, (Vec)r[j]);
    }
  }
#else
  for (int j = 0; j < kPanel; j++)
    for (int d = 0; d < dim; d++) keys[d * kPanel + j] = j < count ? to_float(rows[j][d]) : 0.0f;
#endif
}

// Rows as float32, padded with zeros to whole panels; rows beyond `count` are zero.
template <class T>
inline void copy_tile(const T* const* rows, int count, int dim, float* out, int64_t stride) {
  int64_t padded = round_up(dim, kPanel);
  for (int j = 0; j < kPanel; j++) {
    float* to = out + j * stride;
    int d = 0;
    if (j < count) {
      for (; d + kLanes <= dim; d += kLanes) store(to + d, load(rows[j] + d));
      if (d < dim) store(to + d, load_part(rows[j] + d, dim - d)), d += kLanes;
    }
    for (; d < padded; d += kLanes) store(to + d, Vec{});
  }
}

// Where the keys and values of positions tile_begin … + count lie. Those before `first` are outside the window and their
// blocks may be anyone's: they read as `first`, and the mask drops them.
template <class Cache>
inline void find_rows(const Plan& plan, const AttentionShape& shape, const int32_t* table, int kv_head, int64_t first,
                      int64_t tile_begin, int count, const Cache* k_cache, const Cache* v_cache, const Cache** keys,
                      const Cache** values) {
  int64_t index = first / plan.block_size, offset = first % plan.block_size;
  const Cache* key = nullptr;
  const Cache* value = nullptr;
  for (int j = 0; j < count; j++) {
    if (!key || (tile_begin + j > first && ++offset == plan.block_size)) {
      if (key) index++, offset = 0;
      key = k_cache + table[index] * shape.k_block_stride + (kv_head * plan.block_size + offset) * shape.head_dim;
      value = v_cache + table[index] * shape.v_block_stride + (kv_head * plan.block_size + offset) * shape.value_dim;
    } else if (tile_begin + j > first) {
      key += shape.head_dim;
      value += shape.value_dim;
    }
    keys[j] = key;
    values[j] = value;
  }
}

template <class T>
inline void prefetch(const T* row, int n) {
  for (int i = 0; i < n; i += int(64 / sizeof(T))) __builtin_prefetch(row + i, 0, 2);
}

// One task. query[row * query_row + head * query_head + d]; out likewise.
template <class Query, class Cache, class Out>
void attend(const Plan& plan, const AttentionShape& shape, const AttentionTask& task, int kv_head, const Query* query,
            int64_t query_row, int64_t query_head, const Cache* k_cache, const Cache* v_cache, Out* out, int64_t out_row,
            int64_t out_head, const AttentionScratch& s) {
  const int group = shape.heads / shape.kv_heads, rows = task.last - task.first;
  const int dim = shape.head_dim, value_dim = shape.value_dim;
  const int64_t out_width = round_up(value_dim, kPanel);
  const int64_t* position = plan.positions + task.first;
  const int32_t* table = plan.block_tables + task.sequence * plan.table_width;
  auto first_key = [&](int r) {
    int64_t first = shape.window ? position[r] - shape.window + 1 : 0;
    return first > 0 ? first : 0;
  };

  int64_t begin = first_key(0), end = 0;  // keys that any row sees
  for (int r = 0; r < rows; r++) {
    if (position[r] + 1 > end) end = position[r] + 1;
    if (first_key(r) < begin) begin = first_key(r);
    for (int g = 0; g < group; g++) {
      const int m = r * group + g;
      const Query* q = query + (task.first + r) * query_row + (kv_head * group + g) * query_head;
      float* to = s.query + m * s.query_stride;
      int d = 0;
      for (; d + kLanes <= dim; d += kLanes) store(to + d, load(q + d));
      for (; d < dim; d++) to[d] = to_float(q[d]);
      for (int64_t i = 0; i < out_width; i += kLanes) store(s.out + m * s.out_stride + i, Vec{});
      s.peak[m] = -1e30f;
      s.total[m] = 0.0f;
    }
  }

  Vec lane;
  for (int i = 0; i < kLanes; i++) lane[i] = float(i);
  for (int64_t tile_begin = begin / kPanel * kPanel; tile_begin < end; tile_begin += kPanel) {
    // Rows that see any of these keys; neighbours, as positions grow from row to row.
    int from = rows, to = 0;
    for (int r = 0; r < rows; r++)
      if (position[r] >= tile_begin && first_key(r) < tile_begin + kPanel) {
        if (from > r) from = r;
        to = r + 1;
      }
    if (from >= to) continue;
    const int m0 = from * group, count = (to - from) * group;

    const Cache *key_rows[kPanel], *value_rows[kPanel];
    const int keys = int(end - tile_begin < kPanel ? end - tile_begin : kPanel);
    find_rows(plan, shape, table, kv_head, tile_begin < begin ? begin : tile_begin, tile_begin, keys, k_cache, v_cache,
              key_rows, value_rows);
    if (tile_begin + kPanel < end) {  // fetch the next tile while this one is computed
      const int64_t next = tile_begin + kPanel;
      const Cache *next_keys[kPanel], *next_values[kPanel];
      const int count = int(end - next < kPanel ? end - next : kPanel);
      find_rows(plan, shape, table, kv_head, next, next, count, k_cache, v_cache, next_keys, next_values);
      for (int j = 0; j < count; j++) {
        prefetch(next_keys[j], dim);
        prefetch(next_values[j], value_dim);
      }
    }
    transpose_tile(key_rows, keys, dim, s.keys);
    const float* values = s.values;
    int64_t value_stride = s.out_stride;
    if (sizeof(Cache) == sizeof(float) && value_dim % kPanel == 0 && plan.block_size % kPanel == 0 &&
        keys == kPanel && tile_begin >= begin) {
      values = reinterpret_cast<const float*>(value_rows[0]);  // they already lie as the kernel wants them
      value_stride = value_dim;
    } else {
      copy_tile(value_rows, keys, value_dim, s.values, s.out_stride);
    }

    float* scores = s.scores + m0 * kPanel;
    tiles<Float32>(count, s.query + m0 * s.query_stride, s.query_stride, s.keys, kPanel, dim, scores, kPanel, false);
    for (int r = from; r < to; r++) {
      const Vec low = splat(float(first_key(r) - tile_begin)), high = splat(float(position[r] - tile_begin));
      for (int g = 0; g < group; g++) {
        const int m = r * group + g;
        float* row = s.scores + m * kPanel;
        Vec x[2];
        for (int h = 0; h < 2; h++) {
          Vec at = lane + float(h * kLanes);
          x[h] = load(row + h * kLanes) * shape.scale;
          if (shape.softcap > 0.0f) x[h] = tanh(x[h] / shape.softcap) * shape.softcap;
          x[h] = (at >= low && at <= high) ? x[h] : splat(-1e30f);
        }
        const float peak = s.peak[m], tile_peak = largest(max(x[0], x[1]));
        const float new_peak = tile_peak > peak ? tile_peak : peak;
        Vec weight_sum{};
        for (int h = 0; h < 2; h++) {
          Vec at = lane + float(h * kLanes);
          Vec w = exp(x[h] - new_peak);
          w = (at >= low && at <= high) ? w : Vec{};
          store(row + h * kLanes, w);
          weight_sum += w;
        }
        float shrink = 1.0f;
        if (new_peak > peak) {
          shrink = exp(splat(peak - new_peak))[0];
          float* o = s.out + m * s.out_stride;
          for (int64_t i = 0; i < out_width; i += kLanes) store(o + i, load(o + i) * shrink);
        }
        s.total[m] = s.total[m] * shrink + sum(weight_sum);
        s.peak[m] = new_peak;
      }
    }
    for (int64_t column = 0; column < out_width; column += kPanel)
      tiles<Float32>(count, scores, kPanel, values + column, value_stride, kPanel,
                     s.out + m0 * s.out_stride + column, s.out_stride, true);
  }

  for (int r = 0; r < rows; r++)
    for (int g = 0; g < group; g++) {
      const int m = r * group + g;
      const float* o = s.out + m * s.out_stride;
      Out* to = out + (task.first + r) * out_row + (kv_head * group + g) * out_head;
      const Vec inverse = splat(1.0f / s.total[m]);
      for (int d = 0; d < value_dim; d += kLanes)
        store_part(to + d, load(o + d) * inverse, value_dim - d < kLanes ? value_dim - d : kLanes);
    }
}

}  // namespace tandem
