"""Two hundred random schemas: each is refused by name, or every answer that ends by itself is valid."""

from collections import Counter
from pathlib import Path

import pytest

from tests.server.schemas import outcomes
from tests.serving import CHAT, COMPLETIONS, served, tokens_of

pytestmark = pytest.mark.anyio

NUM_SCHEMAS, AT_ONCE = 200, 8


async def test_random_weights_keep_to_every_schema(tiny: Path) -> None:
    body = {
        "prompt": "x",
        "temperature": 1.0,
        "max_tokens": 120,
        "logit_bias": {str(token): 5.0 for token in tokens_of('"]},')},
    }
    async with served(tiny, parallel=AT_ONCE) as service:
        found = await outcomes(service, COMPLETIONS, body, range(NUM_SCHEMAS), AT_ONCE)
    told = Counter(outcome.reason for outcome in found)
    assert told["stop"] > NUM_SCHEMAS / 2
    assert NUM_SCHEMAS / 20 < told["refused"] < NUM_SCHEMAS / 3


@pytest.mark.real
async def test_the_real_model_keeps_to_them(real_checkpoint: Path) -> None:
    messages = [{"role": "user", "content": "Answer with a short JSON value of any kind."}]
    body = {"messages": messages, "temperature": 0.8, "max_tokens": 60}
    async with served(real_checkpoint, parallel=AT_ONCE, decode_storage_backend="paged") as service:
        found = await outcomes(service, CHAT, body, range(24), AT_ONCE)
    assert [outcome.reason for outcome in found].count("stop") > 8
