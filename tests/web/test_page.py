"""The page in the distribution's Chromium, against a live tiny server whose tokens are given: see look.mjs.

Needs `chromium` on the path and `npm ci` in this folder; `.ci/run` brings both. Pictures of each state are left in
`MLXCEL_PAGE_PICTURES`, if that is set.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.sample.state import Draw
from tests.engines import BACKENDS
from tests.serving import ScriptedSampler, WatchedEngine, live, tokens_of
from tests.templates import THINKS_ITSELF
from tests.tiny import write_checkpoint, write_tokenizer

HERE = Path(__file__).parent
LONGEST_S = 300
SIZES = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 16384}
STEP_S = 0.003  # the least that a step takes, as with a model of some size: something to watch and to stop
KEY = "sk-of-the-page"

MARKDOWN = """<think>
They want to see everything at once. I will write one of each.
</think>

# All of it

Some **bold**, *slanted*, ~~struck~~ words and `code`, with a [link](https://example.org/a).
A [bad link](javascript:alert(1)) stays text, and so does <img src=x onerror=alert(1)>.

## Lists

- one
- two
  - two and a half
- three

1. first
2. second

> What is quoted
> goes on here.

| who | how much |
| --- | ---: |
| this | 12 |
| that | 345 |

---

```python
def add(a, b):
    return a + b
```
"""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCRIPTS = {
    1: MARKDOWN,
    2: f"I will look that up.\n{CALL}",
    3: "It rains at 18 degrees: take an umbrella.",
    4: " ".join(str(number) for number in range(1, 900)),
    5: "Hello.",
}


class Unhurried(ScriptedSampler):
    """Given tokens, at the pace of a model that computes them."""

    def __call__(self, logits: mx.array, draws: Sequence[Draw]) -> mx.array:
        time.sleep(STEP_S)
        return super().__call__(logits, draws)


def opened(config: EngineConfig) -> Engine:
    return WatchedEngine(config, sampler=Unhurried({seed: tokens_of(text) for seed, text in SCRIPTS.items()}))


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None or shutil.which("node") is None:
        pytest.skip("chromium or node is not installed")
    if not (HERE / "node_modules").exists():
        pytest.skip("tests/web/node_modules is missing: npm ci --prefix tests/web")
    model = write_checkpoint(tmp_path / "model", **SIZES)
    write_tokenizer(model, THINKS_ITSELF)
    pictures = Path(os.environ.get("MLXCEL_PAGE_PICTURES", tmp_path / "pictures"))
    pictures.mkdir(parents=True, exist_ok=True)
    with (
        live(
            model, open_engine=opened, parallel=2, prefill_chunk_size=64, decode_storage_backend=BACKENDS[-1]
        ) as server,
        live(model, open_engine=opened, parallel=2, server={"api_key": (KEY,)}) as locked,
        live(model, open_engine=opened, server={"models": ("other",), "others": (("other", model),)}) as several,
    ):
        urls = [server.base_url, locked.base_url, several.base_url]
        command = ["node", str(HERE / "look.mjs"), browser, str(pictures), *urls, KEY]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    told = json.loads(ended.stdout)
    (pictures / "told.json").write_text(ended.stdout)
    assert told["errors"] == [], "the console has errors"
    assert told["foreign"] == [], "something else was asked than this server"
    assert told["violations"] == [], json.dumps(told["violations"], indent=1)
