#include "rows.h"

#include <cmath>

#include "levels.h"
#include "work.h"

namespace mlxcel {

namespace {

constexpr int64_t kTaskFloats = 16 * 1024;

// One stage that calls task(first, last) for parts of [0, count), each with about kTaskFloats floats.
template <class Task>
Stage by_rows(int depth, int64_t count, int64_t length, Task task) {
  int64_t rows = std::max<int64_t>(1, kTaskFloats / std::max<int64_t>(1, length));
  return {depth, (count + rows - 1) / rows, 4 * count * length,
          [=](int64_t i) { task(i * rows, std::min(count, (i + 1) * rows)); }};
}

// Calls run(x, rows, y) for rows that lie densely.
template <class Run>
Work each_norm(const Rows& x, mx::array& out, Run run) {
  float* y = out.data<float>();
  return {by_rows(0, x.count, x.length, [=](int64_t first, int64_t last) {
    if (x.dense) return run(x.at(first), last - first, y + first * x.length);
    float* line = scratch(x.length);
    for (int64_t row = first; row < last; row++) {
      x.copy(row, line);
      run(line, 1, y + row * x.length);
    }
  })};
}

class Shaped : public Kernel {
 public:
  using Kernel::Kernel;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override { return {inputs[0].shape()}; }
};

class RmsNorm : public Shaped {
 public:
  RmsNorm(mx::Stream stream, float eps) : Shaped(stream), eps_(eps) {}

  Work work(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, Shelf&) override {
    const float* weight = inputs.size() > 1 ? inputs[1].data<float>() : nullptr;
    Rows x(inputs[0]);
    return each_norm(x, outputs[0], [=, eps = eps_, length = x.length](const float* from, int64_t rows, float* y) {
      level().rms_norm(from, weight, eps, rows, length, y);
    });
  }

  const char* name() const override { return "MlxcelRmsNorm"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return static_cast<const RmsNorm&>(other).eps_ == eps_;
  }

 private:
  float eps_;
};

class LayerNorm : public Shaped {
 public:
  LayerNorm(mx::Stream stream, float eps, bool has_weight, bool has_bias)
      : Shaped(stream), eps_(eps), has_weight_(has_weight), has_bias_(has_bias) {}

  Work work(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, Shelf&) override {
    const float* weight = has_weight_ ? inputs[1].data<float>() : nullptr;
    const float* bias = has_bias_ ? inputs.back().data<float>() : nullptr;
    Rows x(inputs[0]);
    return each_norm(x, outputs[0], [=, eps = eps_, length = x.length](const float* from, int64_t rows, float* y) {
      level().layer_norm(from, weight, bias, eps, rows, length, y);
    });
  }

  const char* name() const override { return "MlxcelLayerNorm"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    auto& same = static_cast<const LayerNorm&>(other);
    return same.eps_ == eps_ && same.has_weight_ == has_weight_ && same.has_bias_ == has_bias_;
  }

 private:
  float eps_;
  bool has_weight_, has_bias_;
};

struct Rotation {
  int dims;
  bool traditional, has_freqs;
  float base, scale;
  bool operator==(const Rotation&) const = default;
};

// Turns each pair of values of one row, of which `dims` are turned and the rest stay.
void turn(const Rotation& how, const float* cosines, const float* sines, const float* x, int64_t length, float* y) {
  int half = how.dims / 2;
  int step = how.traditional ? 2 : 1, apart = how.traditional ? 1 : half;
  for (int i = 0; i < half; i++) {
    float a = x[i * step], b = x[i * step + apart];
    y[i * step] = a * cosines[i] - b * sines[i];
    y[i * step + apart] = a * sines[i] + b * cosines[i];
  }
  for (int64_t i = how.dims; i < length; i++) y[i] = x[i];
}

class Rope : public Shaped {
 public:
  Rope(mx::Stream stream, Rotation how) : Shaped(stream), how_(how) {}

  Work work(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, Shelf& shelf) override {
    const mx::array& x = inputs[0];
    if (x.size() == 0) return {};
    float* y = outputs[0].data<float>();
    const float* freqs = how_.has_freqs ? inputs[2].data<float>() : nullptr;
    int64_t batch = x.shape(0), length = x.shape(-2);
    const int32_t* offset = inputs[1].data<int32_t>();
    int64_t step = inputs[1].size() > 1 ? 1 : 0;

    Work stages;
    bool made;
    int64_t tokens = batch * length, dims = how_.dims, half = dims / 2;
    Shelf::Key key{offset, freqs, {tokens, length, dims, step}, {how_.base, how_.scale}};
    float* angles = shelf.shared(key, tokens * dims, made);  // of a token its cosines first, then its sines
    if (!made) {
      std::vector<float> speeds(half);
      for (int64_t k = 0; k < half; k++) speeds[k] = std::exp(float(-k) * (std::log(how_.base) / float(half)));
      stages.push_back(by_rows(0, tokens, 8 * dims, [=, scale = how_.scale](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
          float position = float(offset[i / length * step] + i % length) * scale;
          for (int64_t k = 0; k < half; k++) {
            float angle = position * (freqs ? 1.0f / freqs[k] : speeds[k]);
            angles[i * dims + k] = std::cos(angle);
            angles[i * dims + half + k] = std::sin(angle);
          }
        }
      }));
    }
    Rows rows(x);
    int64_t heads = rows.count / tokens;
    stages.push_back(by_rows(1, tokens, heads * rows.length, [=, how = how_](int64_t first, int64_t last) {
      float* line = scratch(rows.length);
      for (int64_t i = first; i < last; i++) {
        for (int64_t head = 0; head < heads; head++) {
          int64_t row = (i / length * heads + head) * length + i % length;
          const float* from = rows.at(row);
          if (!rows.dense && rows.strides.back() != 1) {
            rows.copy(row, line);
            from = line;
          }
          turn(how, angles + i * dims, angles + i * dims + half, from, rows.length, y + row * rows.length);
        }
      }
    }));
    return stages;
  }

  const char* name() const override { return "MlxcelRope"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return static_cast<const Rope&>(other).how_ == how_;
  }

 private:
  Rotation how_;
};

// Calls run(gate, x, length, y) for rows of both that lie densely, or of the first alone.
template <class Run>
Work each_row(const Rows& gate, const std::optional<Rows>& x, mx::array& out, Run run) {
  float* y = out.data<float>();
  int64_t length = gate.length;
  return {by_rows(0, gate.count, length, [=](int64_t first, int64_t last) {
    if (gate.dense && (!x || x->dense))
      return run(gate.at(first), x ? x->at(first) : nullptr, (last - first) * length, y + first * length);
    float* line = scratch(2 * length);
    for (int64_t row = first; row < last; row++) {
      gate.copy(row, line);
      if (x) x->copy(row, line + length);
      run(line, x ? line + length : nullptr, length, y + row * length);
    }
  })};
}

class SwiGlu : public Shaped {
 public:
  using Shaped::Shaped;

  Work work(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, Shelf&) override {
    return each_row(Rows(inputs[0]), Rows(inputs[1]), outputs[0], level().swiglu);
  }

  const char* name() const override { return "MlxcelSwiGlu"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

class ActivatePrimitive : public Shaped {
 public:
  ActivatePrimitive(mx::Stream stream, Activate how) : Shaped(stream), how_(how) {}

  Work work(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, Shelf&) override {
    std::optional<Rows> x;
    if (inputs.size() > 1) x.emplace(inputs[1]);
    return each_row(Rows(inputs[0]), x, outputs[0], [how = how_](const float* gate, const float* x, int64_t length, float* y) {
      level().activate(how, gate, x, length, y);
    });
  }

  const char* name() const override { return "MlxcelActivate"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return static_cast<const ActivatePrimitive&>(other).how_ == how_;
  }

 private:
  Activate how_;
};

mx::array activate(const mx::array& gate, const std::optional<mx::array>& x, Activate how) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(gate.ndim() >= 1 && (!x || x->shape() == gate.shape()), "activations take rows, two arrays of one shape");
  std::vector<mx::array> inputs{wide(gate, stream)};
  if (x) inputs.push_back(wide(*x, stream));
  return mx::array(gate.shape(), mx::float32, std::make_shared<ActivatePrimitive>(stream, how), std::move(inputs));
}

}  // namespace

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(x.ndim() >= 1, "rms_norm takes rows");
  std::vector<mx::array> inputs{wide(x, stream)};
  if (weight) {
    expect(weight->shape() == mx::Shape({x.shape(-1)}), "rms_norm takes one weight for each value of a row");
    inputs.push_back(dense(wide(*weight, stream), stream));
  }
  return mx::array(x.shape(), mx::float32, std::make_shared<RmsNorm>(stream, eps), std::move(inputs));
}

mx::array layer_norm(const mx::array& x, const std::optional<mx::array>& weight, const std::optional<mx::array>& bias,
                     float eps) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(x.ndim() >= 1, "layer_norm takes rows");
  std::vector<mx::array> inputs{wide(x, stream)};
  for (const std::optional<mx::array>* each : {&weight, &bias}) {
    if (!*each) continue;
    expect((*each)->shape() == mx::Shape({x.shape(-1)}), "layer_norm takes one weight and bias for each value of a row");
    inputs.push_back(dense(wide(**each, stream), stream));
  }
  auto primitive = std::make_shared<LayerNorm>(stream, eps, weight.has_value(), bias.has_value());
  return mx::array(x.shape(), mx::float32, std::move(primitive), std::move(inputs));
}

mx::array rope(const mx::array& x, int dims, bool traditional, std::optional<float> base, float scale,
               const mx::array& offset, const std::optional<mx::array>& freqs) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(x.ndim() >= 3 && dims % 2 == 0 && dims > 0 && dims <= x.shape(-1), "rope takes [batch, ..., length, dim]");
  expect(base.has_value() != freqs.has_value(), "rope takes either a base or frequencies");
  expect(offset.size() == 1 || (offset.ndim() == 1 && offset.shape(0) == x.shape(0)),
         "rope takes one offset, or one for each of the batch");
  std::vector<mx::array> inputs{wide(x, stream), dense(mx::astype(offset, mx::int32, stream), stream)};
  if (freqs) {
    expect(freqs->shape() == mx::Shape({dims / 2}), "rope takes one frequency for each pair");
    inputs.push_back(dense(wide(*freqs, stream), stream));
  }
  Rotation how{dims, traditional, freqs.has_value(), base.value_or(1), scale};
  return mx::array(x.shape(), mx::float32, std::make_shared<Rope>(stream, how), std::move(inputs));
}

mx::array argmax(const mx::array& x) {
  expect(x.ndim() == 2 && x.shape(1) > 0, "argmax takes rows");
  if (x.dtype() != mx::float32 || !x.is_available() || !x.flags().row_contiguous)
    return mx::astype(mx::argmax(x, -1), mx::int32);
  mx::array places(mx::Shape{x.shape(0)}, mx::int32, nullptr, {});
  allocate(places);
  int32_t* to = places.data<int32_t>();
  const float* from = x.data<float>();
  int64_t length = x.shape(1);
  share(x.shape(0), [=](int64_t row) { to[row] = int32_t(level().argmax(from + row * length, length)); });
  places.set_status(mx::array::Status::available);
  return places;
}

mx::array swiglu(const mx::array& gate, const mx::array& x) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(x.ndim() >= 1 && gate.shape() == x.shape(), "swiglu takes two arrays of one shape");
  return mx::array(x.shape(), mx::float32, std::make_shared<SwiGlu>(stream),
                   std::vector<mx::array>{wide(gate, stream), wide(x, stream)});
}

mx::array gelu(const mx::array& gate, const std::string& approximation, const std::optional<mx::array>& x) {
  expect(approximation == "none" || approximation == "tanh" || approximation == "sigmoid",
         "gelu is approximated by none, tanh or sigmoid");
  Activation kind = approximation == "none"   ? Activation::gelu
                    : approximation == "tanh" ? Activation::gelu_tanh
                                              : Activation::gelu_sigmoid;
  return activate(gate, x, {kind, 0, 0});
}

mx::array clipped_swiglu(const mx::array& gate, const mx::array& x, float slope, float limit) {
  return activate(gate, x, {Activation::clipped_swiglu, slope, limit});
}

}  // namespace mlxcel
