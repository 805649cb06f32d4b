#include "rows.h"

#include <cmath>

#include "arrays.h"
#include "levels.h"
#include "pool.h"

namespace mlxcel {

namespace {

constexpr int64_t kTaskFloats = 16 * 1024;

// Calls task(first, last) for parts of [0, count), each with about kTaskFloats floats.
template <class Task>
void share_rows(int64_t count, int64_t length, const Task& task) {
  int64_t rows = std::max<int64_t>(1, kTaskFloats / std::max<int64_t>(1, length));
  share((count + rows - 1) / rows, [&](int64_t i) { task(i * rows, std::min(count, (i + 1) * rows)); });
}

class Shaped : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override { return {inputs[0].shape()}; }
};

class RmsNorm : public Shaped {
 public:
  RmsNorm(mx::Stream stream, float eps) : Shaped(stream), eps_(eps) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    float* y = allocate(outputs[0]);
    const float* weight = inputs.size() > 1 ? inputs[1].data<float>() : nullptr;
    dispatch([x = Rows(inputs[0]), weight, y, eps = eps_] {
      share_rows(x.count, x.length, [&](int64_t first, int64_t last) {
        if (x.dense) return level().rms_norm(x.at(first), weight, eps, last - first, x.length, y + first * x.length);
        float* line = scratch(x.length);
        for (int64_t row = first; row < last; row++) {
          x.lay_out(row, x.length, false, line);
          level().rms_norm(line, weight, eps, 1, x.length, y + row * x.length);
        }
      });
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

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    float* y = allocate(outputs[0]);
    const float* weight = has_weight_ ? inputs[1].data<float>() : nullptr;
    const float* bias = has_bias_ ? inputs.back().data<float>() : nullptr;
    dispatch([x = Rows(inputs[0]), weight, bias, y, eps = eps_] {
      share_rows(x.count, x.length, [&](int64_t first, int64_t last) {
        if (x.dense)
          return level().layer_norm(x.at(first), weight, bias, eps, last - first, x.length, y + first * x.length);
        float* line = scratch(x.length);
        for (int64_t row = first; row < last; row++) {
          x.lay_out(row, x.length, false, line);
          level().layer_norm(line, weight, bias, eps, 1, x.length, y + row * x.length);
        }
      });
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

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    float* y = allocate(outputs[0]);
    const mx::array& x = inputs[0];
    if (x.size() == 0) return;
    const float* freqs = how_.has_freqs ? inputs[2].data<float>() : nullptr;
    int64_t length = x.shape(-2);
    const int32_t* offset = inputs[1].data<int32_t>();
    int64_t step = inputs[1].size() > 1 ? 1 : 0;
    // What inputs hold is known when the work is done, not before.
    dispatch([=, x = Rows(x), batch = x.shape(0), how = how_] {
      std::vector<float> speeds(how.dims / 2);
      for (int i = 0; i < how.dims / 2; i++)
        speeds[i] = freqs ? 1.0f / freqs[i] : std::exp(float(-i) * (std::log(how.base) / float(how.dims / 2)));
      int64_t heads = x.count / batch / length;
      share_rows(batch * length, heads * x.length, [&](int64_t first, int64_t last) {
        int half = how.dims / 2;
        float* cosines = scratch(how.dims + x.length);
        float *sines = cosines + half, *line = cosines + how.dims;
        for (int64_t i = first; i < last; i++) {
          int64_t of_batch = i / length, token = i % length;
          float position = float(offset[of_batch * step] + token) * how.scale;
          for (int k = 0; k < half; k++) {
            cosines[k] = std::cos(position * speeds[k]);
            sines[k] = std::sin(position * speeds[k]);
          }
          for (int64_t head = 0; head < heads; head++) {
            int64_t row = (of_batch * heads + head) * length + token;
            const float* from = x.at(row);
            if (!x.dense && x.strides.back() != 1) {
              x.lay_out(row, x.length, false, line);
              from = line;
            }
            turn(how, cosines, sines, from, x.length, y + row * x.length);
          }
        }
      });
    });
  }

  const char* name() const override { return "MlxcelRope"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return static_cast<const Rope&>(other).how_ == how_;
  }

 private:
  Rotation how_;
};

// Calls work(gate, x, length, y) for rows of both that lie densely, or of the first alone.
template <class Work>
void each_row(const Rows& gate, const std::optional<Rows>& x, float* y, const Work& work) {
  int64_t length = gate.length;
  share_rows(gate.count, length, [&](int64_t first, int64_t last) {
    if (gate.dense && (!x || x->dense))
      return work(gate.at(first), x ? x->at(first) : nullptr, (last - first) * length, y + first * length);
    float* line = scratch(2 * length);
    for (int64_t row = first; row < last; row++) {
      gate.lay_out(row, length, false, line);
      if (x) x->lay_out(row, length, false, line + length);
      work(line, x ? line + length : nullptr, length, y + row * length);
    }
  });
}

class SwiGlu : public Shaped {
 public:
  using Shaped::Shaped;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    float* y = allocate(outputs[0]);
    dispatch([gate = Rows(inputs[0]), x = std::optional(Rows(inputs[1])), y] { each_row(gate, x, y, level().swiglu); });
  }

  const char* name() const override { return "MlxcelSwiGlu"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

class ActivatePrimitive : public Shaped {
 public:
  ActivatePrimitive(mx::Stream stream, Activate how) : Shaped(stream), how_(how) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    float* y = allocate(outputs[0]);
    std::optional<Rows> x;
    if (inputs.size() > 1) x.emplace(inputs[1]);
    dispatch([gate = Rows(inputs[0]), x, y, how = how_] {
      each_row(gate, x, y, [&](const float* gate, const float* x, int64_t length, float* y) {
        level().activate(how, gate, x, length, y);
      });
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
