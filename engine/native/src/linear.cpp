#include "linear.h"

#include <bit>
#include <limits>

#include "levels.h"
#include "work.h"

namespace mlxcel {

namespace {

// A task is a few columns, so that threads of unlike speed end together, yet enough work to be worth the handing over.
constexpr int64_t kTaskFlops = 128 * 1024;

Type type_of(mx::Dtype dtype) {
  if (dtype == mx::float32) return Type::float32;
  if (dtype == mx::float16) return Type::float16;
  if (dtype == mx::bfloat16) return Type::bfloat16;
  throw std::invalid_argument("linear takes float32, float16 and bfloat16");
}

Work work_of(const Rows& rows, Linear call, Shelf& shelf) {
  Work stages;
  int64_t stride = call.num_blocks() * kBlock;
  call.row_stride = stride;
  if (rows.dense && stride == rows.length && call.bits != 4) {
    call.x = rows.data;
  } else {
    bool made;
    int64_t apart = rows.count > 1 ? rows.at(1) - rows.at(0) : 0, step = rows.dense ? 1 : rows.strides.back();
    Shelf::Key key{rows.data, nullptr, {rows.count, rows.length, stride, apart, step, call.bits == 4}, {}};
    float* to = shelf.shared(key, rows.count * stride, made);
    call.x = to;
    int64_t per_task = std::max<int64_t>(1, 64 * 1024 / stride);
    auto lay_out = [rows, stride, even_first = call.bits == 4, to, per_task](int64_t task) {
      int64_t last = std::min(rows.count, (task + 1) * per_task);
      for (int64_t row = task * per_task; row < last; row++)
        rows.lay_out(row, stride, even_first, to + row * stride);
    };
    if (!made) stages.push_back({0, (rows.count + per_task - 1) / per_task, rows.count * stride, lay_out});
  }
  int64_t columns = kTaskFlops / (stride * std::min<int64_t>(call.num_rows, 8)) / 4 * 4;
  int64_t most = (call.num_columns / (4 * num_threads()) + 3) / 4 * 4;
  columns = std::max<int64_t>(4, call.num_rows > 8 ? kPanelColumns : std::min(columns, most));
  auto multiply = [call, columns](int64_t task) {
    int64_t last = std::min(call.num_columns, (task + 1) * columns);
    level().linear(call, task * columns, last, scratch(scratch_floats(call)));
  };
  stages.push_back({1, (call.num_columns + columns - 1) / columns, call.num_rows * call.num_columns * stride, multiply});
  return stages;
}

class LinearPrimitive : public Kernel {
 public:
  LinearPrimitive(mx::Stream stream, int group_size, int bits, bool has_bias)
      : Kernel(stream), group_size_(group_size), bits_(bits), has_bias_(has_bias) {}

  Work work(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, Shelf& shelf) override {
    mx::array& out = outputs[0];
    if (out.size() == 0) return {};
    const mx::array &x = inputs[0], &weight = inputs[1];
    Linear call{};
    call.y = out.data<float>();
    call.num_inputs = x.shape(-1);
    call.num_columns = weight.shape(0);
    call.num_rows = int64_t(out.size()) / call.num_columns;
    call.weight = weight.data<char>();
    call.bits = bits_;
    if (bits_) {
      call.scales = inputs[2].data<char>();
      call.biases = inputs[3].data<char>();
      call.scale_type = type_of(inputs[2].dtype());
      call.group_size = group_size_;
    } else {
      call.weight_type = type_of(weight.dtype());
    }
    if (has_bias_) call.bias = inputs.back().data<float>();
    return work_of(Rows(x), call, shelf);
  }

  const char* name() const override { return "MlxcelLinear"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto& same = static_cast<const LinearPrimitive&>(other);
    return same.group_size_ == group_size_ && same.bits_ == bits_ && same.has_bias_ == has_bias_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[1].shape(0);
    return {shape};
  }

 private:
  int group_size_, bits_;
  bool has_bias_;
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
  Embed(mx::Stream stream, int group_size, int bits) : Kernel(stream), group_size_(group_size), bits_(bits) {}

  Work work(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, Shelf&) override {
    const int32_t* ids = inputs[0].data<int32_t>();
    const mx::array& weight = inputs[1];
    int64_t length = outputs[0].shape(-1), num_rows = weight.shape(0), count = inputs[0].size();
    int64_t row_bytes = int64_t(weight.shape(1)) * weight.itemsize(), groups = bits_ ? length / group_size_ : 0;
    const uint8_t* packed = weight.data<uint8_t>();
    const void* scales = bits_ ? inputs[2].data<char>() : nullptr;
    const void* biases = bits_ ? inputs[3].data<char>() : nullptr;
    Type type = type_of(bits_ ? inputs[2].dtype() : weight.dtype());
    float* y = outputs[0].data<float>();
    auto take = [=, bits = bits_, group_size = group_size_](int64_t i) {
      float* to = y + i * length;
      int64_t id = ids[i];
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
    auto& same = static_cast<const Embed&>(other);
    return same.group_size_ == group_size_ && same.bits_ == bits_;
  }

 private:
  int group_size_, bits_;
};

void check_packed(const mx::array& weight, int num_inputs, const std::optional<mx::array>& scales,
                  const std::optional<mx::array>& biases, int group_size, int bits) {
  expect(bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8, "bits are 2, 3, 4, 5, 6 or 8");
  expect(group_size == 32 || group_size == 64 || group_size == 128, "groups are of 32, 64 or 128");
  expect(scales && biases && scales->dtype() == biases->dtype() && scales->shape() == biases->shape(),
         "packed weights have scales and biases of one type and shape");
  type_of(scales->dtype());
  expect(weight.dtype() == mx::uint32 && num_inputs % group_size == 0 &&
             int64_t(weight.shape(1)) * 32 == int64_t(num_inputs) * bits &&
             scales->shape() == mx::Shape({weight.shape(0), num_inputs / group_size}),
         "x, packed weight, scales and biases do not fit each other");
}

}  // namespace

mx::array linear(const mx::array& x, const mx::array& weight, const std::optional<mx::array>& scales,
                 const std::optional<mx::array>& biases, const std::optional<mx::array>& bias, int group_size,
                 int bits) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(x.ndim() >= 1 && weight.ndim() == 2, "linear takes x [..., inputs] and a weight of two axes");
  int num_inputs = x.shape(-1), num_columns = weight.shape(0);
  std::vector<mx::array> inputs{wide(x, stream), dense(weight, stream)};
  if (bits) {
    check_packed(weight, num_inputs, scales, biases, group_size, bits);
    inputs.push_back(dense(*scales, stream));
    inputs.push_back(dense(*biases, stream));
  } else {
    type_of(weight.dtype());
    expect(weight.shape(1) == num_inputs && num_inputs > 0, "x and weight do not fit each other");
  }
  if (bias) {
    expect(bias->shape() == mx::Shape({num_columns}), "the bias has one value for each output");
    inputs.push_back(dense(wide(*bias, stream), stream));
  }
  mx::Shape shape = x.shape();
  shape.back() = num_columns;
  auto primitive = std::make_shared<LinearPrimitive>(stream, group_size, bits, bias.has_value());
  return mx::array(std::move(shape), mx::float32, std::move(primitive), std::move(inputs));
}

mx::array embed(const mx::array& ids, const mx::array& weight, const std::optional<mx::array>& scales,
                const std::optional<mx::array>& biases, int group_size, int bits) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(weight.ndim() == 2, "embed takes a weight of two axes");
  std::vector<mx::array> inputs{dense(mx::astype(ids, mx::int32, stream), stream), dense(weight, stream)};
  int length = weight.shape(1);
  if (bits) {
    length = bits > 0 ? int(int64_t(length) * 32 / bits) : 0;
    check_packed(weight, length, scales, biases, group_size, bits);
    inputs.push_back(dense(*scales, stream));
    inputs.push_back(dense(*biases, stream));
  } else {
    type_of(weight.dtype());
  }
  mx::Shape shape = ids.shape();
  shape.push_back(length);
  return mx::array(std::move(shape), mx::float32, std::make_shared<Embed>(stream, group_size, bits), std::move(inputs));
}

}  // namespace mlxcel
