#include "attend.h"

#include <algorithm>
#include <functional>

#include "arrays.h"
#include "levels.h"
#include "pool.h"

namespace mlxcel {

namespace {

// Products of queries and keys below which handing over to other threads costs more than it saves.
constexpr int64_t kSharedProducts = 2048;
// Queries, those of each head counted, that one task goes through a block of keys with.
constexpr int64_t kTaskRows = 64;
constexpr int64_t kAppendTokens = 64;

// `x` [tokens, heads, 1, dim] as the kernels read it. Values that lie apart are laid out anew, which no model at hand
// needs.
class Laid {
 public:
  Laid(const mx::array& x, int64_t heads) : rows_(x), heads_(heads) {}

  Heads heads() {
    if (rows_.dense) return {rows_.data, {heads_ * rows_.length, rows_.length}};
    if (rows_.strides.back() == 1) return {rows_.data, {rows_.strides[0], rows_.strides[1]}};
    copy_.resize(rows_.count * rows_.length);
    for (int64_t row = 0; row < rows_.count; row++)
      rows_.copy(row, copy_.data() + row * rows_.length);
    return {copy_.data(), {heads_ * rows_.length, rows_.length}};
  }

 private:
  Rows rows_;
  int64_t heads_;
  std::vector<float> copy_;
};

void each(int64_t count, bool shared, const std::function<void(int64_t)>& task) {
  if (shared && count > 1) return share(count, task);
  for (int64_t i = 0; i < count; i++) task(i);
}

void complete(AttendWork& work) {
  bool shared = work.is_large();
  each(work.num_appends(), shared, [&](int64_t i) { work.append(i); });
  each(work.num_tasks(), shared, [&](int64_t i) { work.run(i); });
  each(work.num_merges(), shared, [&](int64_t i) { work.merge(i); });
}

struct Options {
  float scale, softcap;
  int64_t window;
  bool appends, has_sinks, paged;
};

Type type_of(const mx::array& storage) {
  if (storage.dtype() == mx::float16) return Type::float16;
  return storage.dtype() == mx::bfloat16 ? Type::bfloat16 : Type::float32;
}

// One span's table, read and checked when its work is done.
struct Table {
  mx::array blocks;
  std::vector<int32_t> read;

  const int32_t* check(const Span& span, const Attention& call, int64_t num_blocks) {
    int64_t first = call.first_key(span.position), last = span.position + span.count - 1;
    read.resize(blocks.size());
    for (size_t i = 0; i < read.size(); i++) read[i] = blocks.data<int32_t>()[int64_t(i) * blocks.strides()[0]];
    for (int64_t i = (first - span.base) / kPage; span.count && i <= (last - span.base) / kPage; i++)
      if (read[i] < 0 || read[i] >= num_blocks)
        throw std::runtime_error("attend: a table names a block that the pool does not have");
    return read.data();
  }
};

class Attend : public CpuPrimitive {
 public:
  Attend(mx::Stream stream, std::vector<SpanPlace> places, Options options)
      : CpuPrimitive(stream), places_(std::move(places)), options_(options) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    size_t at = options_.appends ? 3 : 1;
    Attention call{};
    if (options_.has_sinks) call.sinks = inputs[at++].data<float>();
    call.num_heads = inputs[0].shape(1);
    call.out = allocate(outputs[0]);
    call.num_key_heads = inputs[at].shape(1);
    call.key_dim = inputs[at].shape(3);
    call.value_dim = inputs[at + 1].shape(3);
    call.type = type_of(inputs[at]);
    call.window = options_.window;
    call.scale = options_.scale;
    call.softcap = options_.softcap;

    std::vector<Span> spans;
    std::vector<Table> tables;
    for (size_t i = 0; i < places_.size(); i++) {
      auto [start, count, position, base] = places_[i];
      size_t own = options_.paged ? 0 : 2 * i;
      mx::array keys = inputs[at + own], values = inputs[at + own + 1];
      if (!keys.flags().row_contiguous || !values.flags().row_contiguous)
        throw std::runtime_error("attend: storage does not lie densely");
      if (options_.appends && (i == 0 || !options_.paged)) {
        outputs[1 + own].copy_shared_buffer(keys);
        outputs[2 + own].copy_shared_buffer(values);
      }
      spans.push_back({start, count, position, base, keys.data<char>(), values.data<char>(), keys.shape(2), nullptr});
      if (options_.paged) tables.push_back({mx::array::unsafe_weak_copy(inputs[at + 2 + i]), {}});
    }
    std::vector<Laid> laid{Laid(inputs[0], call.num_heads)};
    for (int i = 1; options_.appends && i < 3; i++) laid.emplace_back(inputs[i], call.num_key_heads);
    dispatch([call, num_blocks = int64_t(inputs[at].shape(2) / kPage), spans = std::move(spans), tables = std::move(tables),
              laid = std::move(laid)]() mutable {
      call.queries = laid[0].heads();
      if (laid.size() > 1) {
        call.keys = laid[1].heads();
        call.values = laid[2].heads();
      }
      for (size_t i = 0; i < tables.size(); i++) spans[i].table = tables[i].check(spans[i], call, num_blocks);
      thread_local AttendWork work;
      work.prepare(call, spans);
      complete(work);
    });
  }

  const char* name() const override { return "MlxcelAttend"; }

 private:
  std::vector<SpanPlace> places_;
  Options options_;
};

bool is(const mx::array& a, mx::Dtype type, int64_t first, int64_t second, int64_t third, int64_t fourth) {
  return a.ndim() == 4 && a.dtype() == type && a.shape(0) == first && a.shape(1) == second && a.shape(2) == third &&
         a.shape(3) == fourth;
}

// What both kinds of storage have in common: what goes in before the storage, and what comes out.
struct Graph {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  std::vector<mx::array> inputs;
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> types;
  int64_t tokens, key_heads, key_dim, value_dim;
  mx::Dtype type;
  Options options;

  Graph(const mx::array& queries, const std::optional<mx::array>& keys, const std::optional<mx::array>& values,
        const mx::array& key_storage, const mx::array& value_storage, float scale, int64_t window,
        const std::optional<mx::array>& sinks, float softcap, bool paged)
      : type(key_storage.dtype()), options{scale, softcap, window, keys.has_value(), sinks.has_value(), paged} {
    expect(keys.has_value() == values.has_value(), "attend takes keys and values together");
    expect(key_storage.ndim() == 4 && value_storage.ndim() == 4, "storage has four axes");
    expect(type == mx::float32 || type == mx::float16 || type == mx::bfloat16, "storage is of a float type");
    expect(window >= 0 && softcap >= 0, "a window or soft cap is not negative");
    key_heads = key_storage.shape(1), key_dim = key_storage.shape(3), value_dim = value_storage.shape(3);
    expect(queries.ndim() == 4 && key_heads > 0 && queries.shape(1) % key_heads == 0 &&
               is(queries, mx::float32, queries.shape(0), queries.shape(1), 1, key_dim) && key_dim > 0 &&
               value_dim > 0 && key_dim <= kMaxHeadDim && value_dim <= kMaxHeadDim,
           "queries do not fit the storage");
    tokens = queries.shape(0);
    inputs.push_back(queries);
    if (keys) {
      expect(is(*keys, mx::float32, tokens, key_heads, 1, key_dim) &&
                 is(*values, mx::float32, tokens, key_heads, 1, value_dim),
             "keys and values do not fit the storage");
      inputs.push_back(*keys);
      inputs.push_back(*values);
    }
    if (sinks) {
      expect(sinks->shape() == mx::Shape({queries.shape(1)}), "attend takes one sink for each head");
      inputs.push_back(dense(wide(*sinks, stream), stream));
    }
    shapes.push_back(queries.shape());
    shapes.back().back() = int(value_dim);
    types.push_back(mx::float32);
  }

  void store(const mx::array& keys, const mx::array& values, int64_t capacity) {
    expect(is(keys, type, 1, key_heads, capacity, key_dim) && is(values, type, 1, key_heads, capacity, value_dim),
           "the spans' storages are unlike");
    for (const mx::array& each : {keys, values}) {
      inputs.push_back(each);
      if (!options.appends) continue;
      shapes.push_back(each.shape());
      types.push_back(type);
    }
  }

  void check(const SpanPlace& place, int64_t capacity) const {
    auto [start, count, position, base] = place;
    int64_t first = options.window > 0 ? std::max<int64_t>(0, position + 1 - options.window) : 0;
    expect(start >= 0 && count >= 0 && start + count <= tokens && base >= 0 && base <= first &&
               position + count - base <= capacity,
           "a span lies outside of its tokens or storage");
  }

  std::vector<mx::array> outputs(const std::vector<SpanPlace>& places) {
    return mx::array::make_arrays(std::move(shapes), types, std::make_shared<Attend>(stream, places, options), inputs);
  }
};

}  // namespace

void AttendWork::prepare(const Attention& call, const std::vector<Span>& spans) {
  call_ = call;
  spans_ = spans;
  appends_.clear();
  tasks_.clear();
  merges_.clear();
  num_partials_ = products_ = 0;
  for (const Span& span : spans_)
    if (span.count > 0) add(span);
  partials_.resize(num_partials_);
}

void AttendWork::add(const Span& span) {
  int64_t last = span.position + span.count - 1, keys = call_.window ? std::min(last + 1, call_.window) : last + 1;
  products_ += keys * span.count * call_.num_heads;
  int64_t tokens = std::max<int64_t>(1, kTaskRows / (call_.num_heads / call_.num_key_heads));
  auto part_of = [&](int64_t position) { return position / kPartKeys; };
  for (int64_t head = 0; head < call_.num_key_heads; head++) {
    if (span.count <= tokens) {
      add_parts(span, head, part_of(call_.first_key(span.position)), part_of(last));
      continue;
    }
    for (int64_t first = 0; call_.keys.data && first < span.count; first += kAppendTokens)
      appends_.push_back({{&span, head, first, std::min(span.count, first + kAppendTokens)}});
  }
  if (span.count <= tokens) return;
  // The last queries see the most keys; begun first, they do not keep the other threads waiting at the end.
  for (int64_t first = (span.count - 1) / tokens * tokens; first >= 0; first -= tokens)
    for (int64_t head = 0; head < call_.num_key_heads; head++) {
      int64_t until = std::min(span.count, first + tokens);
      tasks_.push_back({{&span, head, first, until, part_of(call_.first_key(span.position + first)),
                         part_of(span.position + until - 1)}});
    }
}

// Few queries: a task for each part, which can store what is new in it, for no other reads that.
void AttendWork::add_parts(const Span& span, int64_t key_head, int64_t first_part, int64_t last_part) {
  AttendTask all{&span, key_head, 0, span.count, first_part, last_part};
  if (first_part < last_part) merges_.push_back({all, num_partials_});
  for (int64_t part = first_part; part <= last_part; part++) {
    Task task{all, -1, call_.keys.data != nullptr};
    task.task.first_part = task.task.last_part = part;
    if (first_part < last_part) {
      task.partial = num_partials_;
      num_partials_ += span.count * (call_.num_heads / call_.num_key_heads) * partial_floats(call_);
    }
    tasks_.push_back(task);
  }
}

AttendTask AttendWork::with_partial(const Task& task) {
  AttendTask whole = task.task;
  if (task.partial >= 0) whole.partial = partials_.data() + task.partial;
  return whole;
}

void AttendWork::append(int64_t i) {
  const AttendTask& task = appends_[i].task;
  level().append(call_, *task.span, task.key_head, task.first, task.last);
}

void AttendWork::run(int64_t i) {
  AttendTask task = with_partial(tasks_[i]);
  if (tasks_[i].appends) {
    int64_t from = task.first_part * kPartKeys - task.span->position;
    int64_t first = std::max(task.first, from), last = std::min(task.last, from + kPartKeys);
    level().append(call_, *task.span, task.key_head, first, last);
  }
  level().attend(call_, task, scratch(scratch_floats(call_, task)));
}

void AttendWork::merge(int64_t i) {
  AttendTask task = with_partial(merges_[i]);
  level().merge(call_, task, scratch(scratch_floats(call_, task)));
}

bool AttendWork::is_large() const { return products_ >= kSharedProducts; }

std::vector<mx::array> attend(const mx::array& queries, const std::optional<mx::array>& keys,
                              const std::optional<mx::array>& values, const std::vector<mx::array>& storage,
                              const std::vector<SpanPlace>& places, float scale, int64_t window,
                              const std::optional<mx::array>& sinks, float softcap) {
  expect(!storage.empty() && storage.size() == 2 * places.size(), "attend takes two arrays of storage for each span");
  Graph graph(queries, keys, values, storage[0], storage[1], scale, window, sinks, softcap, false);
  for (size_t i = 0; i < places.size(); i++) {
    int64_t capacity = storage[2 * i].ndim() == 4 ? storage[2 * i].shape(2) : 0;
    graph.store(storage[2 * i], storage[2 * i + 1], capacity);
    graph.check(places[i], capacity);
  }
  return graph.outputs(places);
}

std::vector<mx::array> attend_paged(const mx::array& queries, const std::optional<mx::array>& keys,
                                    const std::optional<mx::array>& values, const mx::array& key_pool,
                                    const mx::array& value_pool, const std::vector<mx::array>& tables,
                                    const std::vector<SpanPlace>& places, float scale, int64_t window,
                                    const std::optional<mx::array>& sinks, float softcap) {
  expect(!places.empty() && tables.size() == places.size(), "attend takes one table for each span");
  Graph graph(queries, keys, values, key_pool, value_pool, scale, window, sinks, softcap, true);
  expect(key_pool.shape(2) % kPage == 0, "a pool is of whole blocks");
  graph.store(key_pool, value_pool, key_pool.shape(2));
  for (size_t i = 0; i < places.size(); i++) {
    expect(tables[i].ndim() == 1 && tables[i].dtype() == mx::int32, "a table is a list of int32");
    expect(places[i][3] % kPage == 0, "a table begins with a whole block");
    graph.check(places[i], int64_t(tables[i].size()) * kPage);
    graph.inputs.push_back(tables[i]);
  }
  return graph.outputs(places);
}

}  // namespace mlxcel
