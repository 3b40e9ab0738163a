#include "cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <limits>

namespace ringlm::cpu {
namespace {

// Enough to hide reading and widening a tile behind its use; more would not fit the first-level cache.
constexpr std::int32_t kMostQueries = 32;

constexpr std::size_t kLine = 64 / sizeof(float);

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
std::size_t whole_lines(std::size_t floats) { return (floats + kLine - 1) / kLine * kLine; }

// What the queries at positions first to last of one session see, cut at multiples of kSpan: the pinned
// positions, then the moving ones.
class Spans {
 public:
  struct Span {
    std::int64_t start;  // position
    bool pinned;
  };

  Spans(const kv::Ring& ring, std::int64_t first, std::int64_t last)
      : n_pinned_((std::min(ring.pinned, last + 1) + kSpan - 1) / kSpan),
        moving_(ring.oldest(first) / kSpan) {
    n_moving_ = ring.oldest(first) <= last ? last / kSpan - moving_ + 1 : 0;
  }

  std::int64_t count() const { return n_pinned_ + n_moving_; }
  Span operator[](std::int64_t i) const {
    const bool pinned = i < n_pinned_;
    return {(pinned ? i : moving_ + i - n_pinned_) * kSpan, pinned};
  }

 private:
  std::int64_t n_pinned_, moving_, n_moving_ = 0;
};

// What a query at p sees of it.
Range seen(const kv::Ring& ring, const Spans::Span& span, std::int64_t p) {
  const std::int64_t begin = span.pinned ? 0 : ring.oldest(p);
  const std::int64_t end = span.pinned ? std::min(ring.pinned, p + 1) : p + 1;
  const auto cut = [&](std::int64_t t) {
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(t - span.start, 0, kSpan));
  };
  return {cut(begin), std::max(cut(begin), cut(end))};
}

}  // namespace

struct Attention::Task {
  const Config& c;
  const LayerWeights& w;
  std::int32_t layer;
  const Step& s;
  std::size_t first;      // row of the step
  std::int32_t n_tokens;  // rows from there, of one session
  std::int32_t head;      // KV head

  const Row& row(std::int32_t token) const { return s.rows[first + size(token)]; }
  const kv::Cache& cache() const { return *row(0).kv; }
  const kv::Ring& ring() const { return cache().ring(layer); }
  std::int32_t n() const { return n_tokens * c.group(); }
  Spans spans() const { return Spans(ring(), row(0).position, row(n_tokens - 1).position); }
  // Index of query i of the task among all [M, n_head].
  std::size_t query(std::int64_t i) const {
    return (first + size(i / c.group())) * size(c.n_head) + size(head) * size(c.group()) +
           size(i % c.group());
  }
  // The first key of a span that the first token sees.
  const std::uint8_t* first_key(std::int32_t kv_head, std::int64_t span_index) const {
    const Spans::Span span = spans()[span_index];
    const std::int64_t slot = ring().slot(span.start + seen(ring(), span, row(0).position).begin);
    const kv::Rows keys = cache().k(layer, kv_head);
    return keys.data + size(slot * c.head_dim) * element_bytes(keys.format);
  }
  void prepare(const Kernels& k, bool pinned, float* workspace) const {
    const float* q = (pinned ? s.a.q_pinned : s.a.q).data() + query(0) * size(c.head_dim);
    k.prepare_queries({q, std::int64_t{c.n_head} * c.head_dim, n_tokens, c.group(), c.head_dim,
                       c.attention_scale, cache().layout().k_format},
                      workspace);
  }
};

struct Attention::Memory {
  float* workspace;
  float* offsets;           // [kSpan / kTile, n]
  Range* seen;              // [n]
  Partial *parts, *next;    // [n] each
  float *sums, *next_sums;  // [n, width] each
};

namespace {

std::size_t memory_floats(std::int32_t head_dim, std::int32_t n) {
  const std::size_t width = size(state_width(head_dim));
  const std::size_t per_query = kSpan / kTile + (sizeof(Range) + 2 * sizeof(Partial)) / sizeof(float);
  return workspace_floats(head_dim, n) + 2 * size(n) * width + whole_lines(per_query * size(n));
}

}  // namespace

Attention::Attention(const Config& c, const Kernels& k, const kv::Rotation& rotation,
                     std::span<const float> tables, int n_threads)
    : k_(k),
      rotation_(rotation),
      tables_(tables),
      most_(std::max(kMostQueries / c.group(), 1) * c.group()),
      thread_floats_(memory_floats(c.head_dim, most_)),
      memory_(thread_floats_ * size(n_threads) + kLine) {}

Attention::Memory Attention::memory(int thread, std::int32_t n) {
  void* begin = memory_.data();
  std::size_t space = memory_.size() * sizeof(float);
  auto* next = static_cast<float*>(std::align(64, thread_floats_ * sizeof(float), begin, space));
  next += size(thread) * thread_floats_;
  const auto take = [&](std::size_t floats) {
    float* part = next;
    next += floats;
    return part;
  };
  const std::int32_t head_dim = rotation_.head_dim;
  const std::size_t sums = size(n) * size(state_width(head_dim));
  Memory m;
  m.workspace = take(workspace_floats(head_dim, n));
  m.sums = take(sums);
  m.next_sums = take(sums);
  m.offsets = take(size(n) * (kSpan / kTile));
  m.seen = reinterpret_cast<Range*>(take(size(n) * sizeof(Range) / sizeof(float)));
  m.parts = reinterpret_cast<Partial*>(take(size(n) * sizeof(Partial) / sizeof(float)));
  m.next = reinterpret_cast<Partial*>(take(size(n) * sizeof(Partial) / sizeof(float)));
  return m;
}

// Of one row: a state per span and head. Two runs of tiles are cut into at most one span more than a quarter
// of each.
std::size_t Attention::tile_floats(const Config& c, std::int64_t tiles) {
  const std::int64_t spans = std::min(tiles, tiles / (kSpan / kTile) + 3);
  return size(spans) * size(c.n_head) * (size(state_width(c.head_dim)) + sizeof(Partial) / sizeof(float)) +
         kLine;
}

void Attention::attend_span(const Task& t, std::int64_t index, const Memory& memory,
                            const std::uint8_t* next_keys, Partial* parts, float* sums) const {
  const Spans::Span span = t.spans()[index];
  const kv::Ring& ring = t.ring();
  const std::int32_t group = t.c.group(), n = t.n();
  Range all{kSpan, 0};
  for (std::int32_t token = 0; token < t.n_tokens; ++token) {
    const Range r = seen(ring, span, t.row(token).position);
    std::fill_n(memory.seen + token * group, group, r);
    if (r.begin == r.end) continue;
    all = {std::min(all.begin, r.begin), std::max(all.end, r.end)};
  }
  const std::int64_t slot = ring.slot(span.start + all.begin);
  const std::int64_t until_wrap = span.pinned ? kSpan : ring.capacity - slot;
  SpanArgs args{n,
                t.c.head_dim,
                t.c.attention_scale,
                t.c.attn_softcap,
                t.cache().k(t.layer, t.head),
                t.cache().v(t.layer, t.head),
                all,
                memory.seen,
                slot,
                static_cast<std::int32_t>(std::min<std::int64_t>(all.end, all.begin + until_wrap)),
                ring.pinned,
                nullptr,
                next_keys};
  if (centred(t.w, t.cache())) {
    for (std::int32_t tile = 0; tile < kSpan / kTile; ++tile) {
      const std::int64_t first = std::max(span.start + tile * kTile, span.pinned ? 0 : ring.pinned);
      for (std::int32_t i = 0; i < n; ++i) {
        const Epoch e = epoch_of(t.cache().layout(), first, t.row(i / group).position, span.pinned);
        memory.offsets[tile * n + i] = t.s.a.offsets[t.query(i) * kEpochs + size(e)];
      }
    }
    args.offsets = memory.offsets;
  }
  k_.attend_span(args, memory.workspace, parts, sums);
}

// The end of a head: the weighted mean, and values back from their rotation.
void Attention::finish(const Task& t, std::int64_t query, const Partial& part, const float* sum) const {
  float* out = t.s.a.att.data() + t.query(query) * size(t.c.head_dim);
  k_.finish(part, sum, out, t.c.head_dim);
  if (t.cache().layout().v_format == KvFormat::Int8) k_.rotate(rotation_, tables_.data(), out, true);
}

// One row: threads take spans; then each merges its share of the heads.
void Attention::split(Team& team, const Task& row) {
  const std::int32_t group = row.c.group(), width = state_width(row.c.head_dim);
  const std::int64_t n_spans = row.spans().count(), n_head = row.c.n_head;
  void* begin = row.row(0).tiles;
  std::size_t space = std::numeric_limits<std::size_t>::max();
  auto* sums = static_cast<float*>(std::align(64, 1, begin, space));  // [spans, n_head, width]
  auto* parts = reinterpret_cast<Partial*>(sums + n_spans * n_head * width);
  Claims claims(n_spans * row.c.n_head_kv, 1, team.size());  // a thread's spans follow one another
  team.run([&](int thread) {
    const Memory m = memory(thread, group);
    Task task = row;
    bool pinned = false;
    task.head = -1;
    const auto attend = [&](std::int64_t i) {
      const std::int64_t span = i % n_spans;
      const auto head = static_cast<std::int32_t>(i / n_spans);
      if (head != task.head || row.spans()[span].pinned != pinned) {
        task.head = head;
        pinned = row.spans()[span].pinned;
        task.prepare(k_, pinned, m.workspace);
      }
      const std::int64_t state = span * n_head + head * group;
      const auto next_head = static_cast<std::int32_t>((i + 1) / n_spans);
      const std::uint8_t* next =
          next_head < row.c.n_head_kv ? row.first_key(next_head, (i + 1) % n_spans) : nullptr;
      attend_span(task, span, m, next, parts + state, sums + state * width);
    };
    for (std::int64_t begin_at, end; claims.take(thread, begin_at, end);) {
      for (std::int64_t i = begin_at; i < end; ++i) attend(i);
    }
    team.barrier();
    for (std::int64_t h = thread; h < n_head; h += team.size()) {
      for (std::int64_t span = 1; span < n_spans; ++span) {
        const std::int64_t from = span * n_head + h;
        k_.merge(parts[h], sums + h * width, parts[from], sums + from * width, width);
      }
      task.head = static_cast<std::int32_t>(h / group);
      finish(task, h % group, parts[h], sums + h * width);
    }
  });
}

// A block of queries through all its spans.
void Attention::whole_block(const Task& t, const Memory& m) const {
  const std::int32_t n = t.n(), width = state_width(t.c.head_dim);
  const Spans spans = t.spans();
  for (std::int64_t i = 0; i < spans.count(); ++i) {
    const bool pinned = spans[i].pinned;
    const std::uint8_t* next = i + 1 < spans.count() ? t.first_key(t.head, i + 1) : nullptr;
    if (i == 0 || pinned != spans[i - 1].pinned) t.prepare(k_, pinned, m.workspace);
    if (i == 0) {
      attend_span(t, i, m, next, m.parts, m.sums);
      continue;
    }
    attend_span(t, i, m, next, m.next, m.next_sums);
    for (std::int32_t j = 0; j < n; ++j) {
      if (m.seen[j].begin == m.seen[j].end) continue;
      if (m.parts[j].total == 0.0f) {  // its first
        m.parts[j] = m.next[j];
        std::copy_n(m.next_sums + j * width, width, m.sums + j * width);
      } else {
        k_.merge(m.parts[j], m.sums + j * width, m.next[j], m.next_sums + j * width, width);
      }
    }
  }
  for (std::int32_t j = 0; j < n; ++j) finish(t, j, m.parts[j], m.sums + j * width);
}

// Many rows: threads take blocks of them with a KV head, the longest first.
void Attention::whole(Team& team, const Task& step, std::int32_t n_tokens) {
  // Blocks start where a session does and every n_tokens rows behind.
  const std::span<const Row> rows = step.s.rows;
  std::atomic<std::int64_t> next{0};
  team.run([&](int thread) {
    const Memory m = memory(thread, most_);
    Task task = step;
    std::int64_t index = 0, mine = next.fetch_add(1, std::memory_order_relaxed);
    for (std::size_t end = rows.size(); end > 0;) {
      std::size_t first = end - 1;
      while (first > 0 && end - first < size(n_tokens) && rows[first - 1].kv == rows[first].kv) --first;
      for (std::int32_t head = 0; head < step.c.n_head_kv; ++head, ++index) {
        if (index != mine) continue;
        task.first = first;
        task.n_tokens = static_cast<std::int32_t>(end - first);
        task.head = head;
        whole_block(task, m);
        mine = next.fetch_add(1, std::memory_order_relaxed);
      }
      end = first;
    }
  });
}

void Attention::run(Team& team, const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s) {
  const auto rows = static_cast<std::int64_t>(s.rows.size());
  Task task{c, w, layer, s, 0, 1, 0};
  if (rows == 1 || rows * c.n_head_kv < team.size()) {
    for (; task.first < s.rows.size(); ++task.first) split(team, task);
    return;
  }
  // Fewer queries a block when there would not be enough blocks to go round.
  const std::int64_t fair = rows * c.n_head_kv / (std::int64_t{4} * team.size());
  whole(team, task, static_cast<std::int32_t>(std::clamp<std::int64_t>(fair, 1, most_ / c.group())));
}

}  // namespace ringlm::cpu
