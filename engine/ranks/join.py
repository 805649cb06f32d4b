"""How a process that MLX's launcher started becomes one of the ranks, before anything is served.

Light to import: MLX is loaded when a process joins.
"""

import contextlib
import secrets
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loop import limits_kept
from engine.ranks.links import SECRET_BYTES, Links, as_numbers, connect, listen, of_numbers

if TYPE_CHECKING:
    from engine.ranks.follower import Follower
    from engine.ranks.leader import Leader


def join(config: EngineConfig) -> "Leader | Follower":
    """Connect this process with the others, on its main thread. `config` is `settings.over_ranks`'.

    Raises ConfigError and ModelError, before anything is sent, where the model cannot be split as asked.
    """
    assert config.ranks is not None, "one process has nobody to join"
    ranks = config.ranks
    with limits_kept(), _ends_on_ctrl_c():
        import mlx.core as mx

        from engine.model.load import open_model
        from engine.model.split import split_of
        from engine.model.store import check_complete
        from engine.ranks.follower import Follower
        from engine.ranks.leader import Leader

        check_complete(config.model)
        split = split_of(*open_model(config.model, config.trust_remote_code)[:2], ranks.num_ranks, config.split)
        group = mx.distributed.init(strict=True)
        if (group.rank(), group.size()) != (ranks.rank, ranks.num_ranks):
            raise ConfigError(
                "ranks",
                f"rank {ranks.rank} of {ranks.num_ranks} was started here, but MLX finds "
                f"{group.rank()} of {group.size()}",
            )
        listener = listen(ranks.host) if ranks.rank == 0 else None
        own = [0] * (1 + SECRET_BYTES)
        if listener is not None:
            own = as_numbers(listener.getsockname()[1], secrets.token_bytes(SECRET_BYTES))
        # What is shared is rank 0's, the others add nothing to it.
        shared = mx.distributed.all_sum(mx.array(own, mx.int32), group=group)
        port, secret = of_numbers(cast(list[int], shared.tolist()))
        if listener is not None:
            mx.clear_streams()  # the engine has a thread of its own
            return Leader(split, group, Links.accept(listener, secret, ranks.num_ranks - 1))
        return Follower(config, split, group, connect(ranks.host, port, rank=ranks.rank, secret=secret))


@contextlib.contextmanager
def _ends_on_ctrl_c() -> Iterator[None]:
    """MLX waits for the others without looking at signals: until they are there, Ctrl-C ends the process."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
