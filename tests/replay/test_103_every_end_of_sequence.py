"""Case 103: an answer ends at whatever any of a checkpoint's files calls an end, not at one file's word only."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, COMPLETIONS, ScriptedSampler, served, tokens_of
from tests.tiny import END_OF_TURN, SPECIALS, VOCAB_SIZE, write_checkpoint

pytestmark = pytest.mark.anyio

END_OF_TEXT, START = VOCAB_SIZE - 3, VOCAB_SIZE - 2
LETTER = tokens_of("z")[0]
SOMEWHERE_ELSE: dict[str, tuple[dict[str, Any], list[int]]] = {
    "generation_config differs from the template's terminator": (
        {"config": {"eos_token_id": END_OF_TEXT}, "generation_config": {"eos_token_id": END_OF_TEXT}},
        [END_OF_TEXT, END_OF_TURN],
    ),
    "generation_config is a list": (
        {"config": {"eos_token_id": END_OF_TEXT}, "generation_config": {"eos_token_id": [START, LETTER]}},
        [END_OF_TEXT, START, LETTER, END_OF_TURN],
    ),
    "config is a list and nothing else says": ({"config": {"eos_token_id": [START, LETTER]}}, [START, LETTER]),
    "the tokenizer names another": (
        {"config": {"eos_token_id": END_OF_TURN}, "tokenizer_config": {"eos_token": SPECIALS[0]}},
        [END_OF_TEXT, END_OF_TURN],
    ),
    "only the template closes with it": (
        {"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": SPECIALS[0]}},
        [END_OF_TURN],
    ),
}


@pytest.mark.parametrize(("files", "ends"), SOMEWHERE_ELSE.values(), ids=SOMEWHERE_ELSE)
async def test_every_end_ends(tmp_path: Path, files: dict[str, dict[str, Any]], ends: list[int]) -> None:
    folder = write_checkpoint(tmp_path / "tiny", "gemma3_text")
    for name, edits in files.items():
        path = folder / f"{name}.json"
        said = (json.loads(path.read_text()) if path.exists() else {}) | edits
        path.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    script = {seed: [*tokens_of("abc"), end, *tokens_of("defghijk")] for seed, end in enumerate(ends)}
    async with served(folder, sampler=ScriptedSampler(script)) as service:
        for seed in script:
            for path, prompt in (
                (COMPLETIONS, {"prompt": "hi"}),
                (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
            ):
                stream = await service.stream(path, {**prompt, "seed": seed, "max_tokens": 12})
                assert stream.reasons() == ["stop"]
                assert stream.text() == "abc"
