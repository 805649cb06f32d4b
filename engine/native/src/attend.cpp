#include "attend.h"

#include "arrays.h"
#include "levels.h"
#include "pool.h"

namespace mlxcel {

namespace {

// Products of queries and keys below which handing over to other threads costs more than it saves.
constexpr int64_t kSharedProducts = 2048;
constexpr int64_t kTaskProducts = 8192;

// Rows [tokens, heads, 1, dim] into storage [heads, capacity, dim], each span's from `at` on.
void append(const Rows& rows, int64_t heads, int64_t capacity, int64_t start, int64_t count, int64_t at, float* to) {
  for (int64_t token = 0; token < count; token++)
    for (int64_t head = 0; head < heads; head++)
      rows.lay_out((start + token) * heads + head, rows.length, false,
                   to + (head * capacity + at + token) * rows.length);
}

struct Task {
  const Span* span;
  int64_t head, first, last;
};

void compute(const Attention& call, const std::vector<Span>& spans) {
  std::vector<Task> tasks;
  int64_t products = 0;
  for (const Span& span : spans) {
    int64_t keys = span.position + span.count;
    if (call.window) keys = std::min(keys, call.window);
    int64_t queries = std::max<int64_t>(1, kTaskProducts / std::max<int64_t>(1, keys));
    products += keys * span.count * call.num_heads;
    for (int64_t first = 0; first < span.count; first += queries)
      for (int64_t head = 0; head < call.num_heads; head++)
        tasks.push_back({&span, head, first, std::min(span.count, first + queries)});
  }
  const Level& now = level();
  auto run = [&](int64_t i) {
    const Task& task = tasks[i];
    now.attend(call, *task.span, task.head, task.first, task.last);
  };
  if (products >= kSharedProducts) return share(int64_t(tasks.size()), run);
  for (size_t i = 0; i < tasks.size(); i++) run(int64_t(i));
}

class Attend : public CpuPrimitive {
 public:
  Attend(mx::Stream stream, std::vector<SpanPlace> places, float scale, int64_t window, bool appends, bool has_sinks)
      : CpuPrimitive(stream), places_(std::move(places)), scale_(scale), window_(window), appends_(appends),
        has_sinks_(has_sinks) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    size_t at = appends_ ? 3 : 1;
    Attention call{};
    if (has_sinks_) call.sinks = inputs[at++].data<float>();
    Rows queries(inputs[0]);
    call.queries = queries.data;
    call.num_heads = inputs[0].shape(1);
    call.query_strides[0] = queries.dense ? call.num_heads * queries.length : queries.strides[0];
    call.query_strides[1] = queries.dense ? queries.length : queries.strides[1];
    call.out = allocate(outputs[0]);
    call.num_key_heads = inputs[at].shape(1);
    call.key_dim = inputs[at].shape(3);
    call.value_dim = inputs[at + 1].shape(3);
    call.window = window_;
    call.scale = scale_;

    std::vector<Span> spans;
    for (size_t i = 0; i < places_.size(); i++) {
      auto [start, count, position, base] = places_[i];
      mx::array keys = inputs[at + 2 * i], values = inputs[at + 2 * i + 1];
      if (!keys.flags().row_contiguous || !values.flags().row_contiguous)
        throw std::runtime_error("attend: a row's storage does not lie densely");
      if (appends_) {
        outputs[1 + 2 * i].copy_shared_buffer(keys);
        outputs[2 + 2 * i].copy_shared_buffer(values);
      }
      spans.push_back({start, count, position, base, keys.data<float>(), values.data<float>(), keys.shape(2)});
    }
    std::vector<Rows> added;
    if (appends_) added = {Rows(inputs[1]), Rows(inputs[2])};
    // A query whose values lie apart is laid out anew, which no model at hand needs.
    bool apart = !queries.dense && queries.strides.back() != 1;
    dispatch([call, queries, apart, spans = std::move(spans), added = std::move(added)]() mutable {
      for (const Span& span : spans) {
        if (added.empty()) break;
        int64_t from = span.position - span.base;
        append(added[0], call.num_key_heads, span.capacity, span.start, span.count, from, span.keys);
        append(added[1], call.num_key_heads, span.capacity, span.start, span.count, from, span.values);
      }
      std::vector<float> laid_out;
      if (apart) {
        laid_out.resize(queries.count * queries.length);
        for (int64_t row = 0; row < queries.count; row++)
          queries.lay_out(row, queries.length, false, laid_out.data() + row * queries.length);
        call.queries = laid_out.data();
        call.query_strides[0] = call.num_heads * queries.length;
        call.query_strides[1] = queries.length;
      }
      compute(call, spans);
    });
  }

  const char* name() const override { return "MlxcelAttend"; }

 private:
  std::vector<SpanPlace> places_;
  float scale_;
  int64_t window_;
  bool appends_, has_sinks_;
};

bool is(const mx::array& a, int64_t first, int64_t second, int64_t third, int64_t fourth) {
  return a.ndim() == 4 && a.dtype() == mx::float32 && a.shape(0) == first && a.shape(1) == second &&
         a.shape(2) == third && a.shape(3) == fourth;
}

}  // namespace

std::vector<mx::array> attend(const mx::array& queries, const std::optional<mx::array>& keys,
                              const std::optional<mx::array>& values, const std::vector<mx::array>& storage,
                              const std::vector<SpanPlace>& places, float scale, int64_t window,
                              const std::optional<mx::array>& sinks) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(!storage.empty() && storage.size() == 2 * places.size() && keys.has_value() == values.has_value(),
         "attend takes two arrays of storage for each span, and keys and values together");
  expect(storage[0].ndim() == 4 && storage[1].ndim() == 4, "storage has four axes");
  int64_t key_heads = storage[0].shape(1), key_dim = storage[0].shape(3), value_dim = storage[1].shape(3);
  expect(queries.ndim() == 4 && queries.shape(1) % std::max<int64_t>(1, key_heads) == 0 &&
             is(queries, queries.shape(0), queries.shape(1), 1, key_dim) && key_dim > 0 && value_dim > 0 &&
             key_dim <= kMaxHeadDim && value_dim <= kMaxHeadDim,
         "queries do not fit the storage");
  int64_t tokens = queries.shape(0);
  std::vector<mx::array> inputs{queries};
  if (keys) {
    expect(is(*keys, tokens, key_heads, 1, key_dim) && is(*values, tokens, key_heads, 1, value_dim),
           "keys and values do not fit the storage");
    inputs.push_back(*keys);
    inputs.push_back(*values);
  }
  if (sinks) {
    expect(sinks->shape() == mx::Shape({queries.shape(1)}), "attend takes one sink for each head");
    inputs.push_back(dense(wide(*sinks, stream), stream));
  }
  mx::Shape shape = queries.shape();
  shape.back() = int(value_dim);
  std::vector<mx::Shape> shapes{shape};
  for (size_t i = 0; i < places.size(); i++) {
    auto [start, count, position, base] = places[i];
    int64_t capacity = storage[2 * i].shape(2);
    expect(is(storage[2 * i], 1, key_heads, capacity, key_dim) && is(storage[2 * i + 1], 1, key_heads, capacity, value_dim),
           "the spans' storages are unlike");
    int64_t first = window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0;
    expect(start >= 0 && count >= 0 && start + count <= tokens && base >= 0 && base <= first &&
               position + count - base <= capacity,
           "a span lies outside of its tokens or storage");
    for (int64_t k = 0; k < 2; k++) {
      inputs.push_back(storage[2 * i + k]);
      if (keys) shapes.push_back(storage[2 * i + k].shape());
    }
  }
  std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  auto primitive =
      std::make_shared<Attend>(stream, places, scale, window, keys.has_value(), sinks.has_value());
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
}

}  // namespace mlxcel
