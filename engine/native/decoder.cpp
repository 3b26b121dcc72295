// The forward pass of a decoder in one call: one parallel region, barriers between its stages.
//
// The residual stream, attention and every sum are float32. What enters a linear layer has the type its kernel wants
// (Format::Activation): float32, bfloat16 where weights are bfloat16 and the machine multiplies those directly, int16
// with a scale for each row where weights are int8, or int8 with a scale for each run of a row where they are grouped.
#include "decoder.h"

#include "mixer.h"

#include <type_traits>

namespace tandem {

namespace {

// x cos + rotate_half(x) sin, in place.
inline void rotate(float* x, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

template <class Cache>
inline void store_row(const float* x, int n, Cache* to) {
  for (int i = 0; i < n; i += kLanes) store_part(to + i, load_part(x + i, n - i), n - i < kLanes ? n - i : kLanes);
}

template <class T>
inline void copy_row(const T* from, int64_t n, T* to) {
  std::memcpy(to, from, size_t(n) * sizeof(T));
}

constexpr int64_t kOwnCopy = 8192;  // activations up to which every thread prepares rows for itself
constexpr int kActivated = 4;       // rows whose activations are rounded together

// One pass: its sizes, its memory, and the stages that every thread of a team runs.
template <class Format, class Cache>
class Pass {
 public:
  Pass(const Model& model, const Batch& batch, int threads)
      : m(model),
        batch(batch),
        plan(batch.plan),
        threads(threads),
        rows(int(plan.num_rows)),
        num_logits(int(batch.num_logits)),
        dim(int(m.head_dim)),
        group(int(m.heads / m.kv_heads)),
        hidden(m.hidden),
        query_width(m.heads * dim),
        query_stride(m.gates_heads ? 2 * dim : dim),
        key_at(round_up(m.heads * query_stride, kPanel)),
        value_at(key_at + round_up(m.kv_heads * dim, kPanel)),
        qkv_width(value_at + round_up(m.kv_heads * dim, kPanel)),
        joined(2 * hidden),
        fused(!m.head ? 0 : m.head->kind == kEagle ? joined : m.head->num_features),
        hidden_stride(row_stride(hidden)),
        joined_stride(row_stride(joined)),
        fused_stride(row_stride(fused)),
        qkv_stride(row_stride(qkv_width)),
        mid_stride(row_stride(m.intermediate)),
        out_stride(row_stride(query_width)),
        block_stride(m.kv_heads * plan.block_size * dim),
        shape{int(m.heads), int(m.kv_heads), dim, dim, block_stride, block_stride, m.scale, 0.0f, 0,
              plan.block_size % kKeys == 0} {}

  int run() {
    for (int r = 0; r < rows; r++)
      if (batch.token_ids[r] < 0 || batch.token_ids[r] >= m.vocab) return -2;
    splits_shared = shares_splits(plan, shape, threads);
    num_tasks = list_attention_tasks(plan, shape, splits_shared, nullptr);
    // Whoever attends can rotate and store its own rows first if no one else attends to their sequence.
    rotates_in_attention = !splits_shared && num_tasks == plan.num_sequences;
    all_rows_wanted = num_logits == rows;
    for (int r = 0; all_rows_wanted && r < rows; r++) all_rows_wanted = batch.logit_rows[r] == r;
    for (int64_t l = 0; l < m.num_layers; l++)
      if (m.layers[l].qkv.weight || m.layers[l].mixer) last_meeting = l;
    states_at_end = false;
    for (int64_t f = 0; batch.num_states > 0 && f < batch.num_state_layers; f++)
      states_at_end |= batch.state_layers[f] < 0 || batch.state_layers[f] > last_meeting;
    if (!allocate()) return -1;
    choose_last_rows();
    list_attention_tasks(plan, shape, splits_shared, tasks);
    for (int64_t i = 0; i < num_counters; i++) counters[i].taken.store(0, std::memory_order_relaxed);
    Pool::local().run(threads, [&](Team& team) { Member(*this, team).run(); });
    return 0;
  }

 private:
  using Weight = typename Format::Weight;
  using Activation = typename Format::Activation;
  // What attention and activations leave behind. A row's scale is known only once all of it is.
  using Stored = std::conditional_t<Format::kRounds, float, Activation>;

  // Stages of a layer, each with a counter, and those around the layers.
  static constexpr int64_t kLayerStages = 18, kOtherStages = 7;

  static int64_t panels(int64_t columns) { return round_up(columns, kPanel) / kPanel; }

  static int64_t prepared_stride(int64_t width) { return row_stride(prepared_size<Format>(width)); }

  bool allocate() {
    const int most = rows > num_logits ? rows : num_logits;
    const int64_t num_stages = m.num_layers * kLayerStages + kOtherStages;
    const int64_t attention_items = splits_shared ? num_tasks * m.kv_heads : 0;
    num_counters = num_stages + attention_items + kSplitGroups * threads;
    int64_t own_floats = std::max(AttentionScratch::own_floats(shape), int64_t(ProductScratch::own_floats(most, 2)));
    const int sharing_rows = most < kSplitRows ? most : kSplitRows;
    int64_t chunk_floats = 0;
    auto need_chunks = [&](int64_t k, int64_t columns, int group) {
      const int64_t floats = ProductScratch::shared_floats(sharing_rows, k, int(panels(columns)), group, threads);
      if (floats > chunk_floats) chunk_floats = floats;
    };
    need_chunks(hidden, qkv_width, 1);
    need_chunks(query_width, hidden, 1);
    need_chunks(hidden, m.intermediate, m.gates_mlp ? 2 : 1);
    need_chunks(m.intermediate, hidden, 1);
    need_chunks(hidden, m.outputs, 1);
    if (m.head) {
      need_chunks(fused, hidden, 1);
      need_chunks(joined, qkv_width, 1);
    }
    // What prepares rows: those of the stream and, where rows are scaled, those of attention and of activations.
    int64_t own_elements = 0, shared_elements = 0;
    auto need_rows = [&](int64_t width) {
      const int64_t stride = prepared_stride(width);
      const int64_t own_rows = most * width <= kOwnCopy ? most : kOwnCopy / width;
      if (own_rows * stride > own_elements) own_elements = own_rows * stride;
      if (most * stride > shared_elements) shared_elements = most * stride;
    };
    need_rows(hidden);
    int64_t widest_stride = hidden_stride;  // of rows that are made in parts
    if (m.head) {
      need_rows(fused);
      need_rows(joined);
      widest_stride = fused_stride > joined_stride ? fused_stride : joined_stride;
    }
    if (Format::kRounds) {
      need_rows(query_width);
      need_rows(m.intermediate);
    }
    int64_t projected_width = 0, convolved_width = 0, answer_width = 0, number_floats = 0;
    for (int64_t l = 0; l < m.num_layers; l++) {
      if (!m.layers[l].mixer) continue;
      const Mixer& mixer = *m.layers[l].mixer;
      state_plan = {batch.state_plan, plan.num_sequences, mixer.num_records};
      const int64_t width = MixerRows<Cache>::width(mixer);
      need_chunks(hidden, mixer.width, 1);
      need_chunks(width, hidden, 1);
      need_rows(width);
      projected_width = std::max(projected_width, mixer.width);
      convolved_width = std::max(convolved_width, mixer.channels);
      answer_width = std::max(answer_width, width);
      number_floats = std::max(number_floats, rows * MixerRows<Cache>::row_floats(mixer));
      own_floats = std::max(own_floats, MixerRows<Cache>::own_floats(mixer));
    }
    widest_stride = std::max(widest_stride, int64_t(row_stride(answer_width)));
    projected.stride = row_stride(projected_width), convolved.stride = row_stride(convolved_width);
    answers.stride = row_stride(answer_width);
    const int64_t scale_floats = Format::kRounds ? round_up(most, 16) : 0;
    const int64_t work_floats = round_up(own_floats, 16);
    own_scales_at = work_floats * 4;
    own_row_at = own_scales_at + scale_floats * 4;
    own_rows_at = own_row_at + (Format::kRounds ? widest_stride * 4 : 0);
    own_bytes = own_rows_at + round_up(own_elements * int64_t(sizeof(Activation)), 64);
    // One allocation, laid out in a first round and handed out in a second.
    char* memory = nullptr;
    for (int round = 0; round < 2; round++) {
      int64_t end = 0;
      auto take = [&](auto*& to, int64_t count) {
        to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(memory ? memory + end : nullptr);
        end += round_up(count * int64_t(sizeof(*to)), 64);
      };
      take(counters, num_counters);
      take(tasks, num_tasks);
      take(stream, batch.stream && (all_rows_wanted || !batch.features) ? 0 : rows * hidden_stride);
      take(qkv, rows * qkv_stride);
      take(prepared, shared_elements);
      take(row_scales, scale_floats);
      take(attended, rows * out_stride);
      take(mid, most * mid_stride);
      // Rows of the last layer are those of the logits or, where states are wanted of what it leaves, of both.
      const int64_t last = states_at_end ? rows : num_logits;
      take(wanted_stream, batch.stream || all_rows_wanted ? 0 : last * hidden_stride);
      take(wanted_attended, all_rows_wanted ? 0 : last * out_stride);
      if (answer_width) {
        take(projected.at, rows * projected.stride);
        take(convolved.at, rows * convolved.stride);
        take(answers.at, rows * answers.stride);
        take(numbers, number_floats);
        take(wanted_answers, all_rows_wanted ? 0 : last * answers.stride);
      }
      take(logit_stream, states_at_end ? num_logits * hidden_stride : 0);
      take(last_row_of, states_at_end ? rows : 0);
      take(chosen_rows, states_at_end ? rows : 0);
      take(chunks, chunk_floats);
      take(splits, AttentionScratch::shared_floats(shape, attention_items));
      take(own, threads * own_bytes);
      if (round == 0 && !(memory = static_cast<char*>(Pool::local().scratch(size_t(end))))) return false;
    }
    attention_done = counters + num_stages;
    chunks_done = attention_done + attention_items;
    if (batch.stream && (all_rows_wanted || !batch.features)) stream = batch.stream;
    if (batch.stream && !all_rows_wanted) wanted_stream = batch.stream;
    return true;
  }

  // The rows that go through the last layer.
  void choose_last_rows() {
    last_rows = batch.logit_rows, num_last = num_logits;
    if (!states_at_end) return;
    for (int r = 0; r < rows; r++) last_row_of[r] = 0;
    for (int r = 0; r < num_logits; r++) last_row_of[batch.logit_rows[r]] = 1;
    for (int64_t s = 0; s < batch.num_states; s++) last_row_of[batch.state_rows[s]] = 1;
    num_last = 0;
    for (int r = 0; r < rows; r++)
      if (last_row_of[r]) last_row_of[r] = num_last, chosen_rows[num_last++] = r;
    last_rows = chosen_rows;
  }

  // What one thread does. Every member goes through the same stages in the same order.
  class Member {
   public:
    Member(const Pass& pass, Team& team)
        : p(pass),
          m(pass.m),
          team(team),
          counter(pass.counters),
          attention(pass.shape, own_floats(), pass.splits, pass.attention_done),
          scratch{own_floats(), pass.chunks, pass.chunks_done},
          x(pass.stream),
          heads_out(pass.attended),
          answers(pass.answers),
          n(pass.rows) {}

    void run() {
      m.head ? ingest(*m.head) : embed();
      for (int64_t l = 0; l < m.num_layers; l++) {
        const Layer& layer = m.layers[l];
        const bool attends = layer.qkv.weight, joins = l == 0 && m.head && m.head->kind == kEagle3;
        copy_states(l);
        if (layer.mixer) project_to_mixer(*layer.mixer, normed(layer.input_norm, layer.mixer->input));
        if (attends)
          project_to_heads(layer, joins ? joined(*m.head, layer.qkv) : normed(layer.input_norm, layer.qkv),
                           joins ? p.joined : p.hidden);
        if (layer.mixer) mix(*layer.mixer);
        if (attends) attend_rows(layer, l);
        if (l == p.last_meeting && !keep_wanted(layer)) return;
        if (layer.mixer) project_to_stream(answered(*layer.mixer), layer.mixer->output, MixerRows<Cache>::width(*layer.mixer));
        if (attends) project_to_stream(stored(heads_out, p.query_width, p.out_stride, layer.output), layer.output, p.query_width);
        if (!layer.down.weight) continue;
        activate(layer, normed(layer.post_norm, layer.gate_up));
        project_to_stream(activated(layer), layer.down, m.intermediate);
      }
      if (p.states_at_end && !keep_logits()) return;
      const bool norms_output = m.head && m.head->norms_output;
      if (norms_output) norm_stream(m.final_norm);
      write_logits(normed(norms_output ? nullptr : m.final_norm, m.lm_head));
    }

   private:
    float* own_floats() const { return reinterpret_cast<float*>(p.own + team.id * p.own_bytes); }

    void end_stage() {
      counter++;
      team.barrier();
    }

    // Calls act(row) with a row's embedding.
    template <class Act>
    void with_embedding(int r, Act&& act) const {
      const int64_t at = p.batch.token_ids[r] * p.hidden;
      m.embedding_dtype == 0 ? act(static_cast<const float*>(m.embedding) + at)
                             : act(static_cast<const bf16*>(m.embedding) + at);
    }

    // Calls act(row) with a row's features.
    template <class Act>
    void with_features(int r, Act&& act) const {
      const void* at = p.batch.features[r];
      p.batch.features_dtype == 0 ? act(static_cast<const float*>(at)) : act(static_cast<const bf16*>(at));
    }

    // The residual stream: a row of the embedding each.
    void embed() {
      for (int r; (r = team.next(*counter)) < n;)
        with_embedding(r, [&](auto* row) {
          float* to = x + r * p.hidden_stride;
          prepare_row(row, p.hidden, round_up(p.hidden, kPanel), to);
          for (int64_t i = 0; m.embedding_scale != 1.0f && i < p.hidden; i++) to[i] *= m.embedding_scale;
        });
      end_stage();
    }

    // The residual stream of a head.
    void ingest(const Head& head) {
      if (head.kind == kEagle)
        project_to_stream<false>(paired(head.fuse), head.fuse, p.fused);
      else if (p.batch.features && p.batch.features_are_fused)
        take_features();
      else if (p.batch.features)
        project_to_stream<false>(featured(head), head.fuse, p.fused);
      if (head.norms_residual) norm_stream(head.state_norm);
    }

    // The stream is the features.
    void take_features() {
      for (int r; (r = team.next(*counter)) < n;)
        with_features(r, [&](auto* from) { prepare_row(from, p.hidden, round_up(p.hidden, kPanel), x + r * p.hidden_stride); });
      end_stage();
    }

    // Replaces the stream's rows by their norms.
    void norm_stream(const float* weight) {
      for (int r; (r = team.next(*counter)) < n;) {
        float* row = x + r * p.hidden_stride;
        rms_norm(row, weight, p.hidden, m.eps, row);
      }
      end_stage();
    }

    // Embedding and state side by side. The states may be in the stream, which the product replaces: they are read before.
    Rows<Format> paired(const Linear& linear) {
      return prepare(p.joined, [&](int r, Activation* to) {
        return make_row(p.joined, to, linear, [&](auto* row) {
          with_embedding(r, [&](auto* from) { prepare_row(from, p.hidden, p.hidden, row); });
          auto add_state = [&](auto* from) { prepare_row(from, p.hidden, p.hidden, row + p.hidden); };
          p.batch.features ? with_features(r, add_state) : add_state(x + r * p.hidden_stride);
        });
      }, true);
    }

    // The target's features.
    Rows<Format> featured(const Head& head) {
      return prepare(p.fused, [&](int r, Activation* to) {
        return make_row(p.fused, to, head.fuse, [&](auto* row) {
          with_features(r, [&](auto* from) {
            if (!head.feature_norm) return void(prepare_row(from, p.fused, p.fused, row));
            const int64_t width = p.fused / head.feature_parts;
            for (int64_t at = 0; at < p.fused; at += width)
              rms_norm(from + at, head.feature_norm + at, width, m.eps, row + at);
          });
        });
      });
    }

    // What the first layer of an EAGLE-3 head sees: embedding and state, each through its norm, side by side.
    Rows<Format> joined(const Head& head, const Linear& linear) {
      return prepare(p.joined, [&](int r, Activation* to) {
        return make_row(p.joined, to, linear, [&](auto* row) {
          with_embedding(r, [&](auto* from) { rms_norm(from, head.embedding_norm, p.hidden, m.eps, row); });
          normed_row(x + r * p.hidden_stride, head.norms_residual ? nullptr : head.state_norm, row + p.hidden);
        });
      });
    }

    // A row of the stream through an RMSNorm, or as it is where there is none.
    template <class Out>
    void normed_row(const float* from, const float* weight, Out* to) const {
      weight ? rms_norm(from, weight, p.hidden, m.eps, to) : void(prepare_row(from, p.hidden, p.hidden, to));
    }

    // A row that make(row) writes, as a product with a weight takes it; returns its scale. Some zeros may be written behind it.
    template <class Make>
    float make_row(int64_t width, Activation* to, const Linear& linear, Make&& make) const {
      const int64_t padded = round_up(width, Format::kStep);
      if constexpr (Format::kRounds) {
        float* row = reinterpret_cast<float*>(p.own + team.id * p.own_bytes + p.own_row_at);
        make(row);
        return prepare_row(row, width, padded, to, order_of<Format>(linear.weight));
      } else {
        make(to);
        for (int64_t i = width; i < padded; i++) store_one(to + i, 0.0f);
        return 1.0f;
      }
    }

    // Rows made by make(row, to), which returns a scale. Of few every thread makes its own, which is cheaper than to wait
    // for each other; many are a stage, as are those that must be made before anything else continues.
    template <class Make>
    Rows<Format> prepare(int64_t width, Make&& make, bool first = false) {
      const int64_t stride = prepared_stride(width);
      char* own = p.own + team.id * p.own_bytes;
      const bool alone = n * width <= kOwnCopy && !first;
      Activation* to = alone ? reinterpret_cast<Activation*>(own + p.own_rows_at) : p.prepared;
      float* scales = alone ? reinterpret_cast<float*>(own + p.own_scales_at) : p.row_scales;
      auto make_one = [&](int r) {
        const float scale = make(r, to + r * stride);
        if (Format::kRounds) scales[r] = scale;
      };
      if (alone) {
        if (team.present())
          for (int r = 0; r < n; r++) make_one(r);
      } else {
        for (int r; (r = team.next(*counter)) < n;) make_one(r);
        end_stage();
      }
      return {to, stride, scales};
    }

    // The stream's rows through an RMSNorm.
    Rows<Format> normed(const float* norm, const Linear& linear) {
      return prepare(p.hidden, [&](int r, Activation* to) {
        return make_row(p.hidden, to, linear, [&](auto* row) { normed_row(x + r * p.hidden_stride, norm, row); });
      });
    }

    // Rows that attention or an activation left behind.
    Rows<Format> stored(const Stored* from, int64_t width, int64_t stride, const Linear& linear) {
      if constexpr (Format::kRounds)
        return prepare(width, [&](int r, Activation* to) {
          return prepare_row(from + r * stride, width, round_up(width, Format::kStep), to, order_of<Format>(linear.weight));
        });
      else
        return {from, stride, nullptr};
    }

    // What a mixer answers, normed.
    Rows<Format> answered(const Mixer& mixer) {
      const int64_t width = MixerRows<Cache>::width(mixer);
      return prepare(width, [&](int r, Activation* to) {
        return make_row(width, to, mixer.output,
                        [&](auto* row) { finish_answers(mixer, answers.row(r), width, m.eps, row); });
      });
    }

    template <class Done>
    void multiply(const Rows<Format>& a, const Linear& linear, int64_t k, int64_t groups, int group, Done&& done) {
      product<Format>(team, *counter, n, a, static_cast<const Weight*>(linear.weight), k, int(groups), group,
                      group, n == 1 ? m.prefetch_one : m.prefetch_several, scratch, done);
    }

    // A sum of products of some columns, as the layer has it.
    static Vec finish(const Linear& linear, int64_t column, const float* sums) {
      Vec y = load(sums);
      if (linear.bias) y += load(linear.bias + column);
      return linear.scale ? y * load(linear.scale + column) : y;
    }

    void project(const Rows<Format>& rows, const Linear& linear, int64_t k, int64_t width, float* to, int64_t stride) {
      multiply(rows, linear, k, panels(width), 1, [&](int first, int count, int panel, const float* s) {
        for (int r = 0; r < count; r++)
          for (int v = 0; v < kPanel; v += kLanes) {
            const int64_t column = int64_t(panel) * kPanel + v;
            store(to + (first + r) * stride + column, finish(linear, column, s + r * kPanel + v));
          }
      });
      end_stage();
    }

    void project_to_heads(const Layer& layer, const Rows<Format>& rows, int64_t k) {
      project(rows, layer.qkv, k, p.qkv_width, p.qkv, p.qkv_stride);
    }

    void project_to_mixer(const Mixer& mixer, const Rows<Format>& rows) {
      project(rows, mixer.input, p.hidden, mixer.width, p.projected.at, p.projected.stride);
    }

    // Runs a mixer's recurrence. What follows is part of the stage that keeps its records.
    void mix(const Mixer& mixer) {
      const MixerRows<Cache> all(mixer, p.state_plan, m.eps, p.projected, p.convolved, p.numbers, p.answers);
      for (int64_t item; (item = team.next(*counter)) < all.num_prepared();) all.prepare(item);
      end_stage();
      for (int64_t item; (item = team.next(*counter)) < all.num_run();) all.run(item, own_floats());
      end_stage();
      all.keep(team, *counter++);
    }

    // Adds a projection to the stream, or begins the stream with it.
    template <bool kAdds = true>
    void project_to_stream(const Rows<Format>& rows, const Linear& linear, int64_t k) {
      multiply(rows, linear, k, panels(p.hidden), 1, [&](int first, int count, int panel, const float* s) {
        for (int r = 0; r < count; r++)
          for (int v = 0; v < kPanel; v += kLanes) {
            const int64_t column = int64_t(panel) * kPanel + v;
            float* to = x + (first + r) * p.hidden_stride + column;
            const Vec sum = finish(linear, column, s + r * kPanel + v);
            store(to, kAdds ? load(to) + sum : sum);
          }
      });
      end_stage();
    }

    // Whether activations are rounded as they are made: a panel is a run of them.
    static bool rounds_panels(const Layer& layer) {
      return std::is_same_v<Format, Grouped> && kPanel == kRun && !order_of<Format>(layer.down.weight);
    }

    // mid = silu(gate) * up, or relu(up)^2
    void activate(const Layer& layer, const Rows<Format>& rows) {
      const int group = m.gates_mlp ? 2 : 1;
      const bool rounded = rounds_panels(layer);
      multiply(rows, layer.gate_up, p.hidden, panels(m.intermediate), group,
               [&](int first, int count, int panel, const float* s) {
                 // Some rows are rounded together, since each step of one waits for the last: 0.77 of the time.
                 for (int begin = 0, end; begin < count; begin = end) {
                   end = count - begin < kActivated ? count : begin + kActivated;
                   Vec y[kActivated][kVectors];
                   for (int r = begin; r < end; r++)
                     for (int v = 0; v < kVectors; v++) {
                       const int64_t column = int64_t(panel) * group * kPanel + v * kLanes;
                       Vec& to = y[r - begin][v];
                       to = finish(layer.gate_up, column, s + r * kPanel + v * kLanes);
                       if (m.gates_mlp) {
                         to = silu(to) * finish(layer.gate_up, column + kPanel, s + (count + r) * kPanel + v * kLanes);
                       } else {
                         to = max(to, Vec{});
                         to *= to;
                       }
                     }
                   for (int r = begin; r < end; r++) keep_activated(y[r - begin], first + r, panel, rounded);
                 }
               });
      end_stage();
    }

    // One panel of a row of activations.
    void keep_activated(const Vec* y, int row, int panel, bool rounded) {
      if constexpr (std::is_same_v<Format, Grouped> && kPanel == kRun)
        if (rounded)
          return prepare_run(y, reinterpret_cast<int8_t*>(p.mid) + row * prepared_stride(m.intermediate) +
                                    int64_t(panel) * kRunSize);
      for (int v = 0; v < kVectors; v++)
        store(p.mid + row * p.mid_stride + int64_t(panel) * kPanel + v * kLanes, y[v]);
    }

    // What `activate` has left.
    Rows<Format> activated(const Layer& layer) {
      if (rounds_panels(layer)) return {reinterpret_cast<const Activation*>(p.mid), prepared_stride(m.intermediate), nullptr};
      return stored(p.mid, m.intermediate, p.mid_stride, layer.down);
    }

    // Queries and keys of one row and key-value head get their positions, and its key and value go to the cache.
    void rotate_and_store(const Layer& layer, int64_t l, int64_t r, int64_t h) {
      const int dim = p.dim, half = int(m.rotary_dim / 2);
      float* row = p.qkv + r * p.qkv_stride;
      const float* cosine = p.batch.cosines + p.plan.positions[r] * half;
      const float* sine = p.batch.sines + p.plan.positions[r] * half;
      for (int g = 0; g < p.group; g++) {
        float* query = row + (h * p.group + g) * p.query_stride;
        if (layer.query_norm) part_norm(query, layer.query_norm, dim, m.eps, query);
        rotate(query, cosine, sine, half);
      }
      float* key = row + p.key_at + h * dim;
      if (layer.key_norm) part_norm(key, layer.key_norm, dim, m.eps, key);
      rotate(key, cosine, sine, half);
      const int64_t block = p.plan.slots[r] / p.plan.block_size, offset = p.plan.slots[r] % p.plan.block_size;
      const int64_t at = block * p.block_stride + (h * p.plan.block_size + offset) * dim;
      if (p.shape.keys_in_columns) {
        const int64_t column = block * p.block_stride + h * p.plan.block_size * dim + offset;
        Cache* to = static_cast<Cache*>(p.batch.k_caches[l]) + column;
        for (int d = 0; d < dim; d++) store_one(to + d * p.plan.block_size, key[d]);
      } else {
        store_row(key, dim, static_cast<Cache*>(p.batch.k_caches[l]) + at);
      }
      store_row(row + p.value_at + h * dim, dim, static_cast<Cache*>(p.batch.v_caches[l]) + at);
    }

    void attend_rows(const Layer& layer, int64_t l) {
      const int64_t heads = m.kv_heads;
      if (!p.rotates_in_attention) {
        for (int item; (item = team.next(*counter)) < n * heads;) rotate_and_store(layer, l, item / heads, item % heads);
        end_stage();
      }
      AttentionShape shape = p.shape;
      shape.window = layer.window;
      for (int item; (item = team.next(*counter)) < p.num_tasks * heads;) {
        const int64_t index = item / heads, head = item % heads;
        if (p.rotates_in_attention)
          for (int r = p.tasks[index].first; r < p.tasks[index].last; r++) rotate_and_store(layer, l, r, head);
        if (l == p.last_meeting && p.num_last == 0) continue;
        attend(p.plan, shape, p.tasks, index, int(head), p.qkv, p.qkv_stride, p.query_stride,
               m.gates_heads ? p.qkv + p.dim : nullptr, static_cast<const Cache*>(p.batch.k_caches[l]),
               static_cast<const Cache*>(p.batch.v_caches[l]), p.attended, p.out_stride, int64_t(p.dim), attention);
      }
      end_stage();
    }

    // From then on rows no longer meet: only those that are wanted continue. False: none are.
    bool keep_wanted(const Layer& layer) {
      if (p.all_rows_wanted || p.num_last == 0) return p.num_last > 0;
      const bool moves = x == p.wanted_stream;  // then one thread does, from the first row on: none is lost
      for (int item; (item = team.next(*counter)) < (moves ? 1 : p.num_last);)
        for (int64_t r = item; r < (moves ? p.num_last : item + 1); r++) {
          const int64_t from = p.last_rows[r];
          if (!moves || from != r)
            copy_row(x + from * p.hidden_stride, round_up(p.hidden, kPanel), p.wanted_stream + r * p.hidden_stride);
          if (layer.qkv.weight) copy_row(heads_out + from * p.out_stride, p.query_width, p.wanted_attended + r * p.out_stride);
          if (layer.mixer)
            copy_row(answers.row(from), MixerRows<Cache>::width(*layer.mixer), p.wanted_answers + r * answers.stride);
        }
      end_stage();
      x = p.wanted_stream, heads_out = p.wanted_attended, answers.at = p.wanted_answers, n = p.num_last;
      return true;
    }

    // Writes the states that the last layer leaves; then only the rows whose logits are wanted continue. False: none are.
    bool keep_logits() {
      const int gathered = p.all_rows_wanted ? 0 : p.num_logits;
      for (int item; (item = team.next(*counter)) < gathered + p.batch.num_states;) {
        if (item >= gathered)
          copy_state(item - gathered, m.num_layers);
        else
          copy_row(x + p.last_row_of[p.batch.logit_rows[item]] * p.hidden_stride, round_up(p.hidden, kPanel),
                   p.logit_stream + item * p.hidden_stride);
      }
      if (!gathered) {  // nobody reads what was written: the logits belong to the same stage
        counter++;
        return p.num_logits > 0;
      }
      end_stage();
      x = p.logit_stream, n = p.num_logits;
      return true;
    }

    // The states that enter a layer. What follows is part of the same stage, and must not write to the stream.
    void copy_states(int64_t l) {
      bool is_wanted = false;
      for (int64_t f = 0; f < p.batch.num_state_layers; f++) is_wanted |= p.batch.state_layers[f] == l;
      if (!is_wanted) return;
      for (int item; (item = team.next(*counter)) < p.batch.num_states;) copy_state(item, l);
      counter++;
    }

    // The states of one row between two layers, or behind the last one.
    void copy_state(int64_t s, int64_t boundary) {
      const int64_t row = p.batch.state_rows[s];
      const float* from = x + (boundary > p.last_meeting ? p.last_row_of[row] : row) * p.hidden_stride;
      for (int64_t f = 0; f < p.batch.num_state_layers; f++) {
        bf16* to = p.batch.states + (s * p.batch.num_state_layers + f) * p.hidden;
        if (p.batch.state_layers[f] == boundary) store_row(from, int(p.hidden), to);
        if (p.batch.state_layers[f] < 0 && boundary == m.num_layers) rms_norm(from, m.final_norm, p.hidden, m.eps, to);
      }
    }

    void write_logits(const Rows<Format>& rows) {
      multiply(rows, m.lm_head, p.hidden, panels(m.outputs), 1,
               [&](int first, int count, int panel, const float* s) {
                 for (int r = 0; r < count; r++)
                   for (int v = 0; v < kPanel; v += kLanes) {
                     const int64_t column = int64_t(panel) * kPanel + v, left = m.outputs - column;
                     if (left <= 0) break;
                     store_part(p.batch.logits + (first + r) * m.outputs + column,
                                finish(m.lm_head, column, s + r * kPanel + v),
                                int(left < kLanes ? left : kLanes));
                   }
               });
    }

    const Pass& p;
    const Model& m;
    Team& team;
    Counter* counter;  // of the stage that is running
    const AttentionScratch attention;
    const ProductScratch scratch;
    float* x;  // the residual stream of the rows that are still of interest
    const Stored* heads_out;
    FloatRows answers;  // of mixers
    int n;
  };

  const Model& m;
  const Batch& batch;
  const Plan& plan;
  const int threads, rows, num_logits, dim, group;
  const int64_t hidden, query_width, query_stride, key_at, value_at, qkv_width;
  const int64_t joined, fused;  // what enters the first layer of an EAGLE-3 head, and `fuse`
  const int64_t hidden_stride, joined_stride, fused_stride, qkv_stride, mid_stride, out_stride, block_stride;
  const AttentionShape shape;
  int64_t last_meeting = -1;  // the last layer in which rows read each other
  bool splits_shared, rotates_in_attention, all_rows_wanted, states_at_end;
  int num_last;
  int64_t num_tasks, num_counters, own_bytes, own_scales_at, own_row_at, own_rows_at;
  Counter *counters, *attention_done, *chunks_done;
  AttentionTask* tasks;
  const int64_t* last_rows;           // [num_last]
  int64_t *last_row_of, *chosen_rows;  // [rows]: its number among the last ones, and those
  float *stream, *wanted_stream, *logit_stream, *qkv, *chunks, *splits, *row_scales;
  Activation* prepared;
  Stored *attended, *wanted_attended, *mid;
  StatePlan state_plan{};
  FloatRows projected{}, convolved{}, answers{};  // of mixers
  float *numbers = nullptr, *wanted_answers = nullptr;
  char* own;
};

}  // namespace

template <class Format>
static int run(const Model& model, const Batch& batch, int threads) {
  return model.cache_dtype == 0 ? Pass<Format, float>(model, batch, threads).run()
                                : Pass<Format, bf16>(model, batch, threads).run();
}

int forward(const Model& model, const Batch& batch, int threads) {
  if (model.weight_dtype == 0) return run<Float32>(model, batch, threads);
  if (model.weight_dtype == 1) return run<BFloat16>(model, batch, threads);
  if (model.weight_dtype == 2) return run<Int8>(model, batch, threads);
  if (model.weight_dtype == 3) return run<Grouped>(model, batch, threads);
  return model.embedding_dtype == 0 ? run<Decoded<Float32>>(model, batch, threads)
                                    : run<Decoded<BFloat16>>(model, batch, threads);
}

}  // namespace tandem

extern "C" __attribute__((visibility("default"))) int tandem_decoder_forward(const tandem::Model* model,
                                                                              const tandem::Batch* batch, int threads) {
  return tandem::forward(*model, *batch, threads);
}
