// Attention over a paged cache, read in place.
//
// A task is one key-value head of some neighbouring rows of one sequence: its rows x query heads share every key and
// value that is loaded. Keys are read in tiles of kKeys positions with a running softmax, tiles in splits of kSplit
// positions that are then merged in order; both are aligned to position 0 and independent of the block size. Where tasks
// are few, the splits of a long context are shared out too.
//
// Batch invariance: what a row does with a tile (its scores, its maximum, its sums) and with a split depends on its own
// query and position alone; a tile or split a row must not see at all does not touch it, and a key masked inside a tile
// weighs exactly 0.
#pragma once

#include "gemm.h"
#include "norms.h"
#include "struct_table.h"

namespace tandem {

// Which rows belong to which sequence and where their cache lies (engine/plan.py).
struct Plan {
  const int64_t* positions;     // [T]
  const int64_t* slots;         // [T]
  const int32_t* row_starts;    // [S + 1]
  const int32_t* block_tables;  // [S, table_width]
  const int32_t* kv_lens;       // [S]
  const int64_t* ancestors;     // [T], or null where rows form chains
  int64_t num_rows;
  int64_t num_sequences;
  int64_t table_width;
  int64_t block_size;

  // The entry of a row of a sequence: rows lie behind the cached entries in order, whatever their positions are.
  int64_t entry_of(int64_t sequence, int64_t row) const { return kv_lens[sequence] - (row_starts[sequence + 1] - row); }
};
TANDEM_STRUCT(Plan, positions, slots, row_starts, block_tables, kv_lens, ancestors, num_rows, num_sequences, table_width,
              block_size)

struct AttentionShape {
  int heads, kv_heads, head_dim, value_dim;
  int64_t k_block_stride, v_block_stride;  // elements from one block of the cache to the next
  float scale;
  float softcap;  // 0: none
  int64_t window;  // positions a row sees, its own included; 0: all
  // How the keys of a block and head lie: 0: [block][D]; 1: [D][block], for blocks of whole tiles, which are multiplied
  // where they lie. Values always lie [block][Dv].
  int64_t keys_in_columns;
};
TANDEM_STRUCT(AttentionShape, heads, kv_heads, head_dim, value_dim, k_block_stride, v_block_stride, scale, softcap, window,
              keys_in_columns)

constexpr int kKeys = 2 * kLanes;  // positions of a tile
constexpr int kSplit = 512;        // positions of a split, whole tiles
constexpr int kFetchDepth = 4 * kScoreDepth;  // products of a score between which the next tile is fetched
constexpr int kTaskRows = 48;      // rows x query heads of a task: whole register tiles
constexpr int kSplitTasks = 4;     // tasks for each thread below which splits are shared out

struct AttentionTask {
  int32_t sequence, first, last;  // rows first … last - 1
  int32_t split, splits;          // this one of so many that are shared out, one task after another; or 0 of 1: all
};

inline int rows_per_task(const AttentionShape& shape) {
  int group = shape.heads / shape.kv_heads;
  return group >= kTaskRows ? 1 : kTaskRows / group;
}

// Whether the splits of long contexts are shared out, for want of tasks.
inline bool shares_splits(const Plan& plan, const AttentionShape& shape, int threads) {
  const int step = rows_per_task(shape);
  int64_t tasks = 0, longest = 0;
  for (int64_t s = 0; s < plan.num_sequences; s++) {
    if (plan.row_starts[s] == plan.row_starts[s + 1]) continue;
    tasks += (plan.row_starts[s + 1] - plan.row_starts[s] + step - 1) / step * shape.kv_heads;
    if (plan.kv_lens[s] - 1 > longest) longest = plan.kv_lens[s] - 1;
  }
  return threads > 1 && longest >= kSplit && tasks < kSplitTasks * threads;
}

// Lists the tasks of one key-value head and returns how many there are; `tasks` may be null. Later rows see more keys,
// so they come first: the last task to be taken is a short one.
inline int64_t list_attention_tasks(const Plan& plan, const AttentionShape& shape, bool shared, AttentionTask* tasks) {
  const int step = rows_per_task(shape);
  int64_t count = 0;
  for (int32_t s = 0; s < plan.num_sequences; s++) {
    const int32_t begin = plan.row_starts[s], end = plan.row_starts[s + 1];
    for (int32_t last = end; last > begin; last -= step) {
      const int32_t first = last - step > begin ? last - step : begin;
      const int32_t splits = shared ? int32_t(plan.entry_of(s, last - 1) / kSplit + 1) : 1;
      for (int32_t split = 0; split < splits; split++, count++)
        if (tasks) tasks[count] = {s, first, last, split, splits};
    }
  }
  return count;
}

// What rows x query heads have gathered from some keys: out = sum of exp(score - peak) x value, total = sum of those
// weights; nothing at all where total is 0.
struct Gathered {
  float *out, *peak, *total;
};

// Working memory: of one thread, and of the team where splits are shared out.
struct AttentionScratch {
  int64_t rows, query_stride, out_stride;
  float *query, *scores, *keys, *values;
  Gathered part, whole;  // of one split, of all so far
  float* shared;         // the team's: a Gathered for each task and head
  Counter* done;         // the team's, all zero: for each task and head, of which the first of its splits counts

  static int64_t own_floats(const AttentionShape& shape) { return AttentionScratch(shape, nullptr, nullptr, nullptr).end_; }
  static int64_t shared_floats(const AttentionShape& shape, int64_t items) {
    return items * AttentionScratch(shape, nullptr, nullptr, nullptr).gathered_floats();
  }

  AttentionScratch(const AttentionShape& shape, float* memory, float* shared, Counter* done) : shared(shared), done(done) {
    rows = int64_t(rows_per_task(shape)) * (shape.heads / shape.kv_heads);
    query_stride = row_stride(shape.head_dim);
    out_stride = row_stride(shape.value_dim);
    auto take = [&](int64_t n) {
      float* at = memory ? memory + end_ : nullptr;
      end_ += n;
      return at;
    };
    query = take(rows * query_stride);
    scores = take(rows * kKeys);
    keys = take(int64_t(shape.head_dim) * kKeys);
    values = take(kKeys * out_stride);
    part = gathered(take(gathered_floats()));
    whole = gathered(take(gathered_floats()));
  }

  Gathered gathered(float* at) const {
    const int64_t sums = rows * out_stride;
    return {at, at + sums, at + sums + round_up(rows, 16)};
  }
  int64_t gathered_floats() const { return rows * out_stride + 2 * round_up(rows, 16); }

 private:
  int64_t end_ = 0;
};

// keys[d][j] = row j's element d for 16 rows x 16 elements (or what a narrower machine has).
template <class T>
inline void transpose_tile(const T* const* rows, int count, int dim, float* keys) {
#if defined(__AVX512F__)
  for (int half = 0; half < kKeys; half += 16) {
    if (half >= count) {
      for (int d = 0; d < dim; d++) store(keys + d * kKeys + half, Vec{});
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
      for (int j = 0; j < width; j++) store(keys + (d0 + j) * kKeys + half, (Vec)r[j]);
    }
  }
#else
  for (int j = 0; j < kKeys; j++)
    for (int d = 0; d < dim; d++) keys[d * kKeys + j] = j < count ? to_float(rows[j][d]) : 0.0f;
#endif
}

// Rows as float32, padded with zeros to whole vectors of two; rows beyond `count` are zero.
template <class T>
inline void copy_tile(const T* const* rows, int count, int dim, float* out, int64_t stride) {
  int64_t padded = round_up(dim, kKeys);
  for (int j = 0; j < kKeys; j++) {
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
  const int begin = first > tile_begin ? int(first - tile_begin) : 0;
  for (int j = begin; j < count;) {  // one run per block
    const int64_t index = (tile_begin + j) / plan.block_size, offset = (tile_begin + j) % plan.block_size;
    const int64_t row = kv_head * plan.block_size + offset;
    const Cache* key = k_cache + table[index] * shape.k_block_stride + row * shape.head_dim;
    const Cache* value = v_cache + table[index] * shape.v_block_stride + row * shape.value_dim;
    const int end = count - j < plan.block_size - offset ? count : int(j + plan.block_size - offset);
    for (; j < end; j++, key += shape.head_dim, value += shape.value_dim) keys[j] = key, values[j] = value;
  }
  for (int j = 0; j < begin; j++) keys[j] = keys[begin], values[j] = values[begin];
}

template <class T>
inline void prefetch(const T* row, int n) {
  for (int i = 0; i < n; i += int(64 / sizeof(T))) __builtin_prefetch(row + i, 0, 2);
}

// Multiplies what a row has gathered so far by `shrink`.
inline void scale_row(float* out, int64_t n, float shrink) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, load(out + i) * shrink);
}

// Which entries the rows of one task see: those from the window's first to its own, and in a tree of those that were fed
// with it only its ancestors.
struct Sight {
  const Plan& plan;
  const int64_t *position, *ancestors;  // of the task's rows; no ancestors in a chain
  int64_t window;
  int64_t entry;   // of the first row; the others follow
  int64_t cached;  // entries that were there before the pass

  Sight(const Plan& plan, const AttentionShape& shape, const AttentionTask& task)
      : plan(plan),
        position(plan.positions + task.first),
        ancestors(plan.ancestors ? plan.ancestors + task.first : nullptr),
        window(shape.window),
        entry(plan.entry_of(task.sequence, task.first)),
        cached(plan.entry_of(task.sequence, plan.row_starts[task.sequence])) {}

  int64_t last(int r) const { return entry + r; }
  int64_t first(int r) const {
    const int64_t first = window ? position[r] - window + 1 : 0;
    if (first <= 0) return 0;
    return in_tree(r) && first > cached ? cached : first;
  }
  bool in_tree(int r) const { return ancestors && ancestors[r] != -1; }

  // Bit j: whether the row sees entry `from` + j, as far as the tree decides it.
  uint64_t branch(int r, int64_t from) const {
    uint64_t bits = uint64_t(ancestors[r]);
    // Ancestors stand in the order of their positions: the window holds the last of them, and the row itself.
    if (window && in_tree(r))
      for (const int64_t most = window - (last(r) - cached > 63); __builtin_popcountll(bits) > most;) bits &= bits - 1;
    const int64_t shift = from - cached;
    if (shift <= -64 || shift >= 64) return ~uint64_t(0);
    if (shift < 0) return bits << -shift | ((uint64_t(1) << -shift) - 1);
    return shift ? bits >> shift | ~uint64_t(0) << (64 - shift) : bits;
  }
};

// What one task's rows gather from the keys begin … end - 1 of one split.
template <bool kTrees, class Cache>
void attend_split(const Plan& plan, const AttentionShape& shape, const AttentionTask& task, const Sight& sight,
                  int kv_head, int64_t begin, int64_t end, const Cache* k_cache, const Cache* v_cache, const AttentionScratch& s,
                  const Gathered& sums) {
  const int group = shape.heads / shape.kv_heads, rows = task.last - task.first;
  const int dim = shape.head_dim, value_dim = shape.value_dim;
  const int64_t out_width = round_up(value_dim, kKeys);
  const int wide = out_width % kPanel ? 2 : kVectors;  // vectors of values that are summed together
  const int32_t* table = plan.block_tables + task.sequence * plan.table_width;
  // Where a tile's keys begin, if they lie in columns: within one block, and the mask drops those that nobody may see.
  auto first_column = [&](int64_t tile) {
    const Cache* block = k_cache + table[tile / plan.block_size] * shape.k_block_stride;
    return block + kv_head * plan.block_size * dim + tile % plan.block_size;
  };
  for (int m = 0; m < rows * group; m++) {
    for (int64_t i = 0; i < out_width; i += kLanes) store(sums.out + m * s.out_stride + i, Vec{});
    sums.peak[m] = -1e30f;
    sums.total[m] = 0.0f;
  }

  Vec lane;
  for (int i = 0; i < kLanes; i++) lane[i] = float(i);
  for (int64_t tile_begin = begin / kKeys * kKeys; tile_begin < end; tile_begin += kKeys) {
    // Rows that may see any of these keys, and those between them.
    int from = rows, to = 0;
    for (int r = 0; r < rows; r++)
      if (sight.last(r) >= tile_begin && sight.first(r) < tile_begin + kKeys) {
        if (from > r) from = r;
        to = r + 1;
      }
    if (from >= to) continue;
    const int m0 = from * group, count = (to - from) * group;

    const Cache *key_rows[kKeys], *value_rows[kKeys];
    const int count_keys = int(end - tile_begin < kKeys ? end - tile_begin : kKeys);
    find_rows(plan, shape, table, kv_head, tile_begin < begin ? begin : tile_begin, tile_begin, count_keys, k_cache,
              v_cache, key_rows, value_rows);
    const float* keys = s.keys;
    int64_t key_stride = kKeys;
    if (!shape.keys_in_columns) {
      transpose_tile(key_rows, count_keys, dim, s.keys);
    } else if constexpr (sizeof(Cache) == sizeof(float)) {
      keys = first_column(tile_begin), key_stride = plan.block_size;
    } else {
      const Cache* column = first_column(tile_begin);
      for (int d = 0; d < dim; d++, column += plan.block_size)
        for (int h = 0; h < kKeys; h += kLanes) store(s.keys + d * kKeys + h, load(column + h));
    }
    const float* values = s.values;
    int64_t value_stride = s.out_stride;
    if (sizeof(Cache) == sizeof(float) && value_dim % kKeys == 0 && plan.block_size % kKeys == 0 && count_keys == kKeys &&
        tile_begin >= begin) {
      values = reinterpret_cast<const float*>(value_rows[0]);  // they already lie as the kernel wants them
      value_stride = value_dim;
    } else {
      copy_tile(value_rows, count_keys, value_dim, s.values, s.out_stride);
    }

    float* scores = s.scores + m0 * kKeys;
    // The next tile is fetched bit by bit: a burst would hold up the loads of this one.
    const int64_t next = tile_begin + kKeys;
    const int next_count = next >= end ? 0 : int(end - next < kKeys ? end - next : kKeys);
    if (next_count)
      find_rows(plan, shape, table, kv_head, next, next, next_count, k_cache, v_cache, key_rows, value_rows);
    for (int d = 0, fetched = 0; d < dim; d += kFetchDepth) {
      const int depth = dim - d < kFetchDepth ? dim - d : kFetchDepth;
      for (; fetched < next_count * (d + depth) / dim; fetched++) {
        if (!shape.keys_in_columns) prefetch(key_rows[fetched], dim);
        prefetch(value_rows[fetched], value_dim);
      }
      if (next_count && shape.keys_in_columns)
        for (int i = d; i < d + depth; i++) prefetch(first_column(next) + i * plan.block_size, kKeys);
      score_tiles(count, s.query + m0 * s.query_stride + d, s.query_stride, keys + d * key_stride, key_stride, depth, scores,
                  d > 0);
    }
    for (int r = from; r < to; r++) {
      const Vec low = splat(float(sight.first(r) - tile_begin)), high = splat(float(sight.last(r) - tile_begin));
      bool sees_all = sight.first(r) <= tile_begin && sight.last(r) >= tile_begin + kKeys - 1;
      Vec on_branch[2];
      if constexpr (kTrees) {
        const uint64_t branch = sight.branch(r, tile_begin);
        sees_all &= (~branch & ((uint64_t(1) << kKeys) - 1)) == 0;
        for (int j = 0; !sees_all && j < kKeys; j++) on_branch[j / kLanes][j % kLanes] = float(branch >> j & 1);
      }
      auto sees = [&](int h) {
        const Vec at = lane + float(h * kLanes);
        if constexpr (kTrees) return at >= low && at <= high && on_branch[h] > Vec{};
        else return at >= low && at <= high;
      };
      for (int m = r * group; m < (r + 1) * group; m++) {
        float* row = s.scores + m * kKeys;
        Vec x[2];
        for (int h = 0; h < 2; h++) {
          x[h] = load(row + h * kLanes) * shape.scale;
          if (shape.softcap > 0.0f) x[h] = tanh(x[h] / shape.softcap) * shape.softcap;
          if (!sees_all) x[h] = sees(h) ? x[h] : splat(-1e30f);
        }
        const float peak = sums.peak[m], tile_peak = largest(max(x[0], x[1]));
        const float new_peak = tile_peak > peak ? tile_peak : peak;
        Vec weight_sum{};
        for (int h = 0; h < 2; h++) {
          Vec w = exp(x[h] - new_peak);
          if (!sees_all) w = sees(h) ? w : Vec{};
          store(row + h * kLanes, w);
          weight_sum += w;
        }
        float shrink = 1.0f;
        if (new_peak > peak) {
          shrink = exp(splat(peak - new_peak))[0];
          scale_row(sums.out + m * s.out_stride, out_width, shrink);
        }
        sums.total[m] = sums.total[m] * shrink + sum(weight_sum);
        sums.peak[m] = new_peak;
      }
    }
    for (int64_t column = 0; column < out_width; column += wide * kLanes)
      float_tiles(count, scores, kKeys, values + column, value_stride, kKeys, wide,
                  sums.out + m0 * s.out_stride + column, s.out_stride, true);
  }
}

// Adds what rows have gathered from the next split to what they have from those before.
inline void merge_split(const AttentionScratch& s, int count, int64_t width, const Gathered& part, const Gathered& whole) {
  for (int m = 0; m < count; m++) {
    if (part.total[m] == 0.0f) continue;
    const float* from = part.out + m * s.out_stride;
    float* to = whole.out + m * s.out_stride;
    if (whole.total[m] == 0.0f) {
      std::memcpy(to, from, size_t(width) * sizeof(float));
      whole.total[m] = part.total[m];
      whole.peak[m] = part.peak[m];
      continue;
    }
    const float peak = part.peak[m] > whole.peak[m] ? part.peak[m] : whole.peak[m];
    const float old_weight = exp(splat(whole.peak[m] - peak))[0], new_weight = exp(splat(part.peak[m] - peak))[0];
    for (int64_t i = 0; i < width; i += kLanes) store(to + i, fma(load(from + i), splat(new_weight), load(to + i) * old_weight));
    whole.total[m] = whole.total[m] * old_weight + part.total[m] * new_weight;
    whole.peak[m] = peak;
  }
}

// One task (number `index`) for one key-value head. query[row * query_row + head * query_head + d]; out likewise. `gate`
// lies as the query does, or is null: its sigmoid is multiplied with what is attended.
template <class Query, class Cache, class Out>
void attend(const Plan& plan, const AttentionShape& shape, const AttentionTask* tasks, int64_t index, int kv_head,
            const Query* query, int64_t query_row, int64_t query_head, const Query* gate, const Cache* k_cache, const Cache* v_cache, Out* out,
            int64_t out_row, int64_t out_head, const AttentionScratch& s) {
  const AttentionTask& task = tasks[index];
  const int group = shape.heads / shape.kv_heads, rows = task.last - task.first, count = rows * group;
  const int dim = shape.head_dim, value_dim = shape.value_dim;
  const int64_t out_width = round_up(value_dim, kKeys);
  const Sight sight(plan, shape, task);
  for (int r = 0; r < rows; r++)
    for (int g = 0; g < group; g++) {
      const Query* q = query + (task.first + r) * query_row + (kv_head * group + g) * query_head;
      float* to = s.query + (r * group + g) * s.query_stride;
      int d = 0;
      for (; d + kLanes <= dim; d += kLanes) store(to + d, load(q + d));
      for (; d < dim; d++) to[d] = to_float(q[d]);
    }

  // Keys that any row sees: the first row's window reaches back furthest, but for trees.
  const int64_t end = sight.last(rows - 1) + 1;
  int64_t begin = sight.first(0);
  for (int r = 1; sight.ancestors && r < rows; r++)
    if (sight.first(r) < begin) begin = sight.first(r);
  auto gather = [&](int64_t split, const Gathered& sums) {
    const int64_t from = split * kSplit > begin ? split * kSplit : begin;
    const int64_t to = (split + 1) * kSplit < end ? (split + 1) * kSplit : end;
    if (sight.ancestors)
      attend_split<true>(plan, shape, task, sight, kv_head, from, to, k_cache, v_cache, s, sums);
    else
      attend_split<false>(plan, shape, task, sight, kv_head, from, to, k_cache, v_cache, s, sums);
  };
  const Gathered* sums = &s.whole;
  if (task.splits > 1) {
    auto place = [&](int split) {
      return s.gathered(s.shared + ((index - task.split + split) * shape.kv_heads + kv_head) * s.gathered_floats());
    };
    gather(task.split, place(task.split));
    std::atomic<int>& finished = s.done[(index - task.split) * shape.kv_heads + kv_head].taken;
    if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < task.splits) return;
    finished.store(0, std::memory_order_relaxed);
    for (int m = 0; m < count; m++) s.whole.total[m] = 0.0f;
    for (int split = 0; split < task.splits; split++) merge_split(s, count, out_width, place(split), s.whole);
  } else if (begin / kSplit == (end - 1) / kSplit) {
    gather(begin / kSplit, s.part);
    sums = &s.part;
  } else {
    for (int m = 0; m < count; m++) s.whole.total[m] = 0.0f;
    for (int64_t split = begin / kSplit; split * kSplit < end; split++) {
      gather(split, s.part);
      merge_split(s, count, out_width, s.part, s.whole);
    }
  }

  for (int r = 0; r < rows; r++)
    for (int g = 0; g < group; g++) {
      const int m = r * group + g;
      const float* o = sums->out + m * s.out_stride;
      Out* to = out + (task.first + r) * out_row + (kv_head * group + g) * out_head;
      const Vec inverse = splat(1.0f / sums->total[m]);
      const int64_t at = (task.first + r) * query_row + (kv_head * group + g) * query_head;
      for (int d = 0; d < value_dim; d += kLanes) {
        const int lanes = value_dim - d < kLanes ? value_dim - d : kLanes;
        const Vec y = load(o + d) * inverse;
        store_part(to + d, gate ? y * sigmoid(load_part(gate + at + d, lanes)) : y, lanes);
      }
    }
}

}  // namespace tandem
