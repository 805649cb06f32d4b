"""Case 19: the type that keys and values are to be stored in is that of the live rows, or is refused by name."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from engine.cache.dtype import BY_NAME
from engine.errors import ConfigError
from tests.engines import Watched
from tests.serving import COMPLETIONS, served
from tests.tiny import write_checkpoint

BODY = {"prompt": [*range(40)], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.mark.anyio
@pytest.mark.parametrize("name", BY_NAME)
async def test_while_it_decodes(tiny: Path, name: str) -> None:
    seen: list[mx.Dtype] = []
    async with served(tiny, portable=True, cache_dtype=name) as service:
        run = service.engine.run

        def looking(tick):
            events = run(tick)
            seen.extend(a.dtype for row in tick.decode if row.storage is not None for a in row.storage.arrays())
            return events

        service.engine.run = looking  # type: ignore[method-assign]
        await service.answer(COMPLETIONS, BODY)
    assert {*seen} == {BY_NAME[name]}


def test_what_is_counted_is_what_is_stored(tiny: Path) -> None:
    bytes_of = {name: Watched(tiny, cache_dtype=name).engine.storable for name in BY_NAME}
    assert bytes_of["float32"].token_bytes == 2 * bytes_of["float16"].token_bytes > 0
    assert bytes_of["float16"].row_bytes == bytes_of["bfloat16"].row_bytes < bytes_of["float32"].row_bytes


def test_a_type_that_nobody_knows_is_refused(
    tiny: Path, mlxcel: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert mlxcel("serve", str(tiny), "--cache-dtype", "int8") == 1
    assert "cache_dtype must be one of auto, float32, float16, bfloat16, not int8" in capsys.readouterr().err


def test_a_model_on_which_it_would_not_act_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cache_dtype float16 would change nothing") as refused:
        Watched(write_checkpoint(tmp_path, "mamba2"), cache_dtype="float16")
    assert refused.value.setting == "cache_dtype"
