#include "linear.h"

#include <bit>
#include <limits>

#include "levels.h"
#include "product.h"

namespace mlxcel {

namespace {

Work work_of(const Rows& rows, Linear call, Shelf& shelf) {
  Work stages;
  bool as_it_is = rows.dense && call.row_stride == rows.length && call.bits != 4;
  if (as_it_is && (call.num_rows == 1 || !takes_few_rows(call))) {
    call.x = rows.data;
  } else {
    bool made;
    // The level is part of it: memory that is read no longer is used again for something else.
    std::vector<int64_t> where{shelf.level, rows.count, rows.length, call.row_stride, call.bits == 4, rows.dense};
    if (!rows.dense) {
      where.insert(where.end(), rows.shape.begin(), rows.shape.end());
      where.insert(where.end(), rows.strides.begin(), rows.strides.end());
    }
    float* to = shelf.shared({rows.data, nullptr, std::move(where), {}}, rows.count * call.row_stride, made);
    call.x = to;
    int64_t per_task = std::max<int64_t>(1, 64 * 1024 / call.row_stride);
    auto lay_rows_out = [=](int64_t task) {
      int64_t last = std::min(rows.count, (task + 1) * per_task);
      for (int64_t row = task * per_task; row < last; row++) lay_out(rows, row, call, row, to);
    };
    int64_t cost = rows.count * call.row_stride;
    if (!made) stages.push_back({0, (rows.count + per_task - 1) / per_task, cost, lay_rows_out});
  }
  int64_t columns = columns_per_task(call);
  auto multiply = [call, columns](int64_t task) {
    int64_t last = std::min(call.num_columns, (task + 1) * columns);
    level().linear(call, task * columns, last, scratch(scratch_floats(call)));
  };
  int64_t cost = call.num_rows * call.num_columns * call.row_stride;
  stages.push_back({1, (call.num_columns + columns - 1) / columns, cost, multiply});
  return stages;
}

class LinearPrimitive : public Kernel {
 public:
  LinearPrimitive(mx::Stream stream, Packing how) : Kernel(stream), how_(how) {}

  Work work(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, Shelf& shelf) override {
    mx::array& out = outputs[0];
    if (out.size() == 0) return {};
    Linear call = product_of(inputs, 1, how_);
    call.y = out.data<float>();
    call.num_rows = int64_t(out.size()) / call.num_columns;
    return work_of(Rows(inputs[0]), call, shelf);
  }

  const char* name() const override { return "MlxcelLinear"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return static_cast<const LinearPrimitive&>(other).how_ == how_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[1].shape(0);
    return {shape};
  }

 private:
  Packing how_;
};

float wide(const void* from, Type type, int64_t at) {
  if (type == Type::float32) return ((const float*)from)[at];
  uint16_t half = ((const uint16_t*)from)[at];
  if (type == Type::float16) return float(std::bit_cast<mx::float16_t>(half));
  return float(std::bit_cast<mx::bfloat16_t>(half));
}

// Rows of a weight by their numbers, as float32.
class Embed : public Kernel {
 public:
  Embed(mx::Stream stream, Packing how) : Kernel(stream), how_(how) {}

  Work work(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, Shelf&) override {
    Indices ids(inputs[0]);
    const mx::array& weight = inputs[1];
    int bits = how_.bits;
    int64_t length = outputs[0].shape(-1), num_rows = weight.shape(0), count = inputs[0].size();
    int64_t row_bytes = int64_t(weight.shape(1)) * weight.itemsize(), groups = bits ? length / how_.group_size : 0;
    const uint8_t* packed = weight.data<uint8_t>();
    const void* scales = bits ? inputs[2].data<char>() : nullptr;
    const void* biases = bits ? inputs[3].data<char>() : nullptr;
    Type type = type_of(bits ? inputs[2].dtype() : weight.dtype());
    float* y = outputs[0].data<float>();
    auto take = [=, group_size = how_.group_size](int64_t i) {
      float* to = y + i * length;
      int64_t id = ids.at(i);
      // Ids are checked where they come in; one that is not shows in the result and reads nothing.
      if (id < 0 || id >= num_rows) {
        std::fill_n(to, length, std::numeric_limits<float>::quiet_NaN());
        return;
      }
      const uint8_t* row = packed + id * row_bytes;
      for (int64_t at = 0; at < length; at++) {
        if (!bits) {
          to[at] = wide(row, type, at);
          continue;
        }
        int64_t bit = at * bits, group = id * groups + at / group_size;
        unsigned word = row[bit / 8] | (bit % 8 + bits > 8 ? row[bit / 8 + 1] << 8 : 0);
        double value = (word >> bit % 8) & ((1u << bits) - 1);
        to[at] = float(value * wide(scales, type, group) + wide(biases, type, group));
      }
    };
    return {{0, count, count * length, take}};
  }

  const char* name() const override { return "MlxcelEmbed"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return static_cast<const Embed&>(other).how_ == how_;
  }

 private:
  Packing how_;
};

}  // namespace

mx::array linear(const mx::array& x, const mx::array& weight, const std::optional<mx::array>& scales,
                 const std::optional<mx::array>& biases, const std::optional<mx::array>& bias, int group_size,
                 int bits) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(x.ndim() >= 1 && weight.ndim() == 2, "linear takes x [..., inputs] and a weight of two axes");
  std::vector<mx::array> inputs{wide(x, stream)};
  append_weight(inputs, x.shape(-1), weight, scales, biases, bias, group_size, bits, stream);
  mx::Shape shape = x.shape();
  shape.back() = weight.shape(0);
  auto primitive = std::make_shared<LinearPrimitive>(stream, Packing{group_size, bits, bias.has_value()});
  return mx::array(std::move(shape), mx::float32, std::move(primitive), std::move(inputs));
}

mx::array embed(const mx::array& ids, const mx::array& weight, const std::optional<mx::array>& scales,
                const std::optional<mx::array>& biases, int group_size, int bits) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(weight.ndim() == 2, "embed takes a weight of two axes");
  int length = bits > 0 ? int(int64_t(weight.shape(1)) * 32 / bits) : weight.shape(1);
  std::vector<mx::array> inputs{dense(Indices::readable(ids, stream), stream)};
  append_weight(inputs, length, weight, scales, biases, std::nullopt, group_size, bits, stream);
  mx::Shape shape = ids.shape();
  shape.push_back(length);
  auto primitive = std::make_shared<Embed>(stream, Packing{group_size, bits, false});
  return mx::array(std::move(shape), mx::float32, std::move(primitive), std::move(inputs));
}

}  // namespace mlxcel
