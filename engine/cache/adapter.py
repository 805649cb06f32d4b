"""The one contact with mlx-lm's cache classes and with the modules of its models.

These interfaces change between patch releases; `self_test` holds them against what is relied on, at start.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from engine.cache.attend import dispatching
from engine.cache.kinds import LayerKind
from engine.cache.rows import StateLayer


def layer_kinds(model: Any) -> list[LayerKind]:
    """What each entry of the model's cache list keeps; there may be fewer or more entries than layers."""
    return [_kind(cache) for cache in make_prompt_cache(model)]


def _kind(cache: Any) -> LayerKind:
    name = type(cache).__name__
    if type(cache) is KVCache:
        return LayerKind("full", cache_class=name)
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return LayerKind("window", window=cache.max_size, cache_class=name)
    if type(cache) is ArraysCache:
        return LayerKind("state", size=len(cache.cache), cache_class=name)
    if type(cache) is CacheList:
        return LayerKind("list", parts=tuple(map(_kind, cache.caches)), cache_class=name)
    return LayerKind("other", cache_class=name)


def state_view(states: Sequence[StateLayer]) -> ArraysCache:
    """The recurrent states of B rows as the model expects them: each entry `[B, ...]`."""
    view = ArraysCache(len(states[0].entries))
    for number, entries in enumerate(zip(*(state.entries for state in states), strict=True)):
        if all(entry is not None for entry in entries):
            view[number] = mx.concatenate(list(entries)) if len(entries) > 1 else entries[0]
    return view


def keep_states(view: ArraysCache, states: Sequence[StateLayer]) -> None:
    """Give each row its part of what the model left in `view`."""
    for number in range(len(states[0].entries)):
        entry = view[number]
        for row, state in enumerate(states):
            state.entries[number] = None if entry is None else entry[row : row + 1]


def list_view(views: Sequence[Any]) -> CacheList:
    """Several views as the one entry that the model expects."""
    return CacheList(*views)


class SequenceStorage:
    """A row's state in mlx-lm's own single-sequence caches, for families that spans cannot serve."""

    __slots__ = ("__weakref__", "caches", "length")

    def __init__(self, model: Any) -> None:
        self.caches = make_prompt_cache(model)
        self.length = 0

    def arrays(self) -> list[mx.array]:
        states = [cache.state for cache in self.caches if not cache.empty()]
        return [leaf for _, leaf in tree_flatten(states) if isinstance(leaf, mx.array)]

    def free(self) -> None:
        """Nothing is shared."""


def leaf_caches(caches: Sequence[Any]) -> list[Any]:
    """Every cache that is not a list of others, parts of lists included, in their order."""
    return [
        leaf
        for cache in caches
        for leaf in (leaf_caches(cache.caches) if isinstance(cache, CacheList) else [cache])
    ]


class HeadSelection:
    """Which tokens of a forward need logits: those named by `of`, outside of it all."""

    def __init__(self) -> None:
        self._tokens: mx.array | None = None
        self._axis = 0
        self._hidden: list[mx.array] | None = None

    @contextlib.contextmanager
    def of(self, tokens: Sequence[int] | None, *, axis: int) -> Iterator[list[mx.array]]:
        """While the model is called; `axis` is that of the tokens in its hidden states, and None selects all.

        Gives the list that the hidden states of all tokens come to as the head is given them.
        """
        self._tokens = None if tokens is None else mx.array(list(tokens), mx.int32)
        hidden: list[mx.array] = []
        self._axis, self._hidden = axis, hidden
        try:
            yield hidden
        finally:
            self._tokens = self._hidden = None

    def select(self, hidden: mx.array) -> mx.array:
        if self._hidden is not None:
            self._hidden.append(hidden)
        return hidden if self._tokens is None else mx.take(hidden, self._tokens, axis=self._axis)


def select_before_head(model: Any, vocab_size: int) -> HeadSelection:
    """Let the model's output head run only on the tokens that the returned selection names.

    The head is the linear layer outside the blocks whose outputs are the vocabulary, or an embedding used as
    one; with an adapter's low-rank layer around it, that layer. Its class is replaced by a subclass of it; names
    and weights stay what they are.
    """
    selection = HeadSelection()
    modules = model.named_modules()
    around = {name for name, module in modules if "lora_a" in module}
    for name, module in modules:
        if any(part.isdigit() for part in name.split(".")) or name.rpartition(".")[0] in around:
            continue
        layer = module.get("linear", module.get("embedding")) if name in around else module
        if isinstance(layer, (nn.Embedding, nn.QuantizedEmbedding)):
            _override(module, "as_linear", selection)
        elif isinstance(layer, (nn.Linear, nn.QuantizedLinear)) and layer.weight.shape[0] == vocab_size:
            _override(module, "__call__", selection)
    return selection


def _override(module: nn.Module, method: str, selection: HeadSelection) -> None:
    original = type(module)
    run = getattr(original, method)

    def on_selection(self: nn.Module, hidden: mx.array) -> mx.array:
        selected: mx.array = run(self, selection.select(hidden))
        return selected

    module.__class__ = type(
        f"Selecting{original.__name__}", (original,), {method: on_selection, "selects_tokens": True}
    )


def install_attention() -> None:
    """Let every model's attention recognize handles; done once for a process, harmless when repeated."""
    if not hasattr(mx.fast.scaled_dot_product_attention, "dispatches_handles"):
        mx.fast.scaled_dot_product_attention = dispatching(mx.fast.scaled_dot_product_attention)


def self_test() -> None:
    """Hold mlx-lm's cache interface against what this module relies on. Raises AssertionError."""
    cache = KVCache()
    assert cache.empty(), "a new KVCache is empty"
    cache.update_and_fetch(mx.zeros((1, 1, 2, 4)), mx.zeros((1, 1, 2, 4)))
    assert cache.offset == 2, "KVCache counts its tokens in `offset`"
    assert any(isinstance(leaf, mx.array) for leaf in cache.state), "KVCache.state holds its arrays"
    window = RotatingKVCache(max_size=3)
    assert (window.max_size, window.keep) == (3, 0), "RotatingKVCache names its window `max_size`"
    state = ArraysCache(2)
    state[1] = mx.zeros((1,))
    assert state[0] is None, "a new ArraysCache is empty"
    assert state.make_mask(3) is None, "ArraysCache masks nothing where no lengths are given"
    assert CacheList(cache, state)[1] is state, "CacheList gives its parts by index"
