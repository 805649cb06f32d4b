"""This process's part of a split model, loaded on the thread that runs it. The same on every rank."""

import functools
from typing import Any

import mlx.core as mx

from engine.cache import adapter
from engine.config import EngineConfig
from engine.kernels import portable
from engine.model.load import LoadedModel, load
from engine.model.split import Split
from engine.model.store import default_home


def load_part(config: EngineConfig, split: Split, group: Any) -> tuple[LoadedModel, str]:
    """The part, evaluated, when all ranks have theirs; and what the start-up line adds about MLX's operations."""
    adapter.self_test()
    adapter.install_attention()
    unfused = portable.prepare(default_home() / "kernels")
    loaded = load(
        config.model,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        split=functools.partial(split.apply, group=group),
    )
    # One rank may have read long before another; on a GPU, a forward that waited for it would be given up.
    mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group, stream=mx.cpu))
    return loaded, unfused
