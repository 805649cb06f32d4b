"""Weights of noise, and what they stand for in float64."""

import mlx.core as mx
import numpy as np

from engine.kernels import native

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


class Weight:
    """A weight of noise `[outputs, inputs]`, packed where `bits` says so, and the values it stands for."""

    def __init__(self, rng, num_inputs, num_outputs, dtype, bits=0, group_size=0, with_bias=False):
        values = mx.array(rng.standard_normal((num_outputs, num_inputs)).astype(np.float32))
        self.arguments = {"group_size": group_size, "bits": bits}
        if bits:
            weight, scales, biases = mx.quantize(values, group_size, bits)
            scales, biases = scales.astype(dtype), biases.astype(dtype)
            self.arguments |= {"weight": weight, "scales": scales, "biases": biases}
            wide = scales.astype(mx.float32), biases.astype(mx.float32)
            self.values = np.array(mx.dequantize(weight, *wide, group_size, bits), np.float64)
        else:
            self.arguments["weight"] = values.astype(dtype)
            self.values = np.array(self.arguments["weight"].astype(mx.float32), np.float64)
        self.bias = np.zeros(num_outputs)
        if with_bias:
            self.arguments["bias"] = mx.array(rng.standard_normal(num_outputs).astype(np.float32))
            self.bias = np.array(self.arguments["bias"], np.float64)

    def product(self, x):
        return np.array(native.linear(mx.array(x), **self.arguments))

    def error(self, x, product):
        """The largest difference, relative to what the magnitudes of the products add up to."""
        expected = np.asarray(x, np.float64) @ self.values.T + self.bias
        scale = np.abs(x).astype(np.float64) @ np.abs(self.values).T + np.abs(self.bias)
        return (np.abs(product - expected) / scale).max()


def noise(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)
