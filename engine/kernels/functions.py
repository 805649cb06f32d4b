"""Functions that models call by name, run by the compiled kernels while a model of theirs is called.

`mx.fast`'s functions and mlx-lm's SwiGLU are wrapped once for the process, as attention is; outside of such a
call, and for any type but float32, the wrappers go on to what they wrap.
"""

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
from mlx_lm.models import activations

from engine.kernels import native

_in_use = ContextVar("compiled kernels are in use", default=False)

Function = Callable[..., mx.array]


def in_use() -> bool:
    """Whether the model that is being called runs on the compiled kernels."""
    return _in_use.get()


def are_used_by(model: Any) -> bool:
    """Whether `model` runs on the compiled kernels when it is called."""
    return getattr(type(model), "runs_compiled", False)


def use_while_called(model: Any) -> None:
    """Let `model` run on the kernels whenever it is called. Its class is replaced by a subclass of it."""
    original = type(model)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        before = _in_use.set(True)
        try:
            return original.__call__(self, *arguments, **options)
        finally:
            _in_use.reset(before)

    model.__class__ = type(f"Compiled{original.__name__}", (original,), {"__call__": call, "runs_compiled": True})
    _install()
    for name in {type(module).__module__ for module in model.modules()}:
        if vars(sys.modules[name]).get("swiglu") is _plain_swiglu:
            sys.modules[name].swiglu = _swiglu  # type: ignore[attr-defined]


def _install() -> None:
    for name, wrap in (("rms_norm", _rms_norm), ("rope", _rope)):
        function = getattr(mx.fast, name)
        if not hasattr(function, "prefers_compiled"):
            wrapper = wrap(function)
            wrapper.prefers_compiled = True  # type: ignore[attr-defined]
            setattr(mx.fast, name, wrapper)


def _rms_norm(plain: Function) -> Function:
    def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **options: Any) -> mx.array:
        if _in_use.get() and x.dtype == mx.float32 and not options:
            return native.rms_norm(x, weight, eps)
        return plain(x, weight, eps, **options)

    return rms_norm


def _rope(plain: Function) -> Function:
    def rope(
        x: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None,
        scale: float,
        offset: int | mx.array,
        freqs: mx.array | None = None,
        **options: Any,
    ) -> mx.array:
        if _in_use.get() and x.dtype == mx.float32 and x.ndim >= 3 and not options:
            return native.rope(x, dims, traditional, base, scale, offset, freqs)
        return plain(
            x, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs, **options
        )

    return rope


_plain_swiglu = activations.swiglu


def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    if _in_use.get() and gate.dtype == x.dtype == mx.float32 and gate.shape == x.shape:
        return native.swiglu(gate, x)
    product: mx.array = _plain_swiglu(gate, x)
    return product
