"""Functions that models call by name, run by the compiled kernels while a model of theirs is called.

`mx.fast`'s functions, the GELUs of `mlx.nn` and mlx-lm's gated activations are wrapped once for the process, as
attention is; outside of such a call, and for any type but float32, the wrappers go on to what they wrap.
"""

import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, Literal

import mlx.core as mx
from mlx import nn
from mlx_lm.models import activations, gemma3n, gemma4_text

from engine.kernels import native

_in_use = ContextVar("compiled kernels are in use", default=False)

Function = Callable[..., mx.array]


def in_use() -> bool:
    """Whether the model that is being called runs on the compiled kernels."""
    return _in_use.get()


def are_used_by(model: Any) -> bool:
    """Whether `model` runs on the kernels when it is called."""
    return getattr(type(model), "uses_kernels", False) is True


def use_while_called(model: Any) -> None:
    """Let `model` run on the kernels whenever it is called. Its class is replaced by a subclass of it."""
    original = type(model)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        before = _in_use.set(True)
        try:
            return original.__call__(self, *arguments, **options)
        finally:
            _in_use.reset(before)

    own = {"__call__": call, "__module__": original.__module__, "uses_kernels": True}
    model.__class__ = type(f"Compiled{original.__name__}", (original,), own)
    _wrap_fast()
    _wrap_in(nn)
    for name in {type(module).__module__ for module in model.modules()}:
        _wrap_in(sys.modules[name])


def _runs(x: mx.array) -> bool:
    """Whether a function of `x` is for the kernels."""
    return _in_use.get() and x.dtype == mx.float32 and x.ndim > 0


def _run_together(gate: mx.array, x: mx.array) -> bool:
    return _runs(gate) and x.dtype == mx.float32 and x.shape == gate.shape


def _wrap_fast() -> None:
    for name, wrap in (("rms_norm", _rms_norm), ("layer_norm", _layer_norm), ("rope", _rope)):
        function = getattr(mx.fast, name)
        if not hasattr(function, "prefers_compiled"):
            wrapper = wrap(function)
            wrapper.prefers_compiled = True  # type: ignore[attr-defined]
            setattr(mx.fast, name, wrapper)


def _rms_norm(plain: Function) -> Function:
    def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **options: Any) -> mx.array:
        if _runs(x) and not options:
            return native.rms_norm(x, weight, eps)
        return plain(x, weight, eps, **options)

    return rms_norm


def _layer_norm(plain: Function) -> Function:
    def layer_norm(
        x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, **options: Any
    ) -> mx.array:
        if _runs(x) and not options:
            return native.layer_norm(x, weight, bias, eps)
        return plain(x, weight, bias, eps, **options)

    return layer_norm


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
        if _runs(x) and x.ndim >= 3 and not options:
            return native.rope(x, dims, traditional, base, scale, offset, freqs)
        return plain(
            x, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs, **options
        )

    return rope


def _apart(function: Function) -> Function:
    """A function that MLX compiles once for all who call it, so with none of the kernels within it."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> mx.array:
        before = _in_use.set(False)
        try:
            return function(*arguments, **options)
        finally:
            _in_use.reset(before)

    return call


def _gelu(plain: Function, approximation: Literal["none", "tanh", "sigmoid"]) -> Function:
    @wraps(plain)
    def gelu(x: mx.array) -> mx.array:
        return native.gelu(x, approximation) if _runs(x) else plain(x)

    return gelu


def _geglu(gate: mx.array, x: mx.array) -> mx.array:
    return native.gelu(gate, "tanh", x) if _run_together(gate, x) else _plain_geglu(gate, x)


def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return native.swiglu(gate, x) if _run_together(gate, x) else _plain_swiglu(gate, x)


def _precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    if _run_together(gate, x) and h.dtype == mx.float32:
        return native.swiglu(gate, x)
    return _plain_precise_swiglu(h, gate, x)


def _swiglu_oai(gate: mx.array, x: mx.array, alpha: float = 1.702, limit: float = 7.0) -> mx.array:
    if _run_together(gate, x):
        return native.clipped_swiglu(gate, x, alpha, limit)
    return _plain_swiglu_oai(gate, x, alpha=alpha, limit=limit)


_plain_geglu: Function = _apart(gemma4_text.geglu)
_plain_swiglu: Function = activations.swiglu
_plain_precise_swiglu: Function = activations.precise_swiglu
_plain_swiglu_oai: Function = activations.swiglu_oai

_WRAPPERS: tuple[tuple[Any, Function], ...] = (
    (nn.gelu, _gelu(nn.gelu, "none")),
    (nn.gelu_approx, _gelu(nn.gelu_approx, "tanh")),
    (nn.gelu_fast_approx, _gelu(nn.gelu_fast_approx, "sigmoid")),
    (gemma3n.gelu_topk, _apart(gemma3n.gelu_topk)),
    (gemma4_text.geglu, _geglu),
    (activations.swiglu, _swiglu),
    (activations.precise_swiglu, _precise_swiglu),
    (activations.swiglu_oai, _swiglu_oai),
)


def _wrap_in(module: Any) -> None:
    """Have the wrappers called wherever a module's names, or tables among them, lead to what they wrap."""
    names = vars(module)
    for table in (names, *(value for name, value in names.items() if type(value) is dict and name[:2] != "__")):
        for name, value in list(table.items()):
            for plain, wrapper in _WRAPPERS:
                if value is plain:
                    table[name] = wrapper
