"""Cases 24, 25, 26: text cut within its characters arrives as it was, on every lane and in any company."""

import asyncio
from pathlib import Path

import pytest

from tests.replay.unicode import TEXTS, end_of_turn, tokens_in, write_byte_fallback_checkpoint
from tests.serving import CHAT, COMPLETIONS, ScriptedSampler, served

pytestmark = pytest.mark.anyio

PROMPTS = {
    CHAT: {"messages": [{"role": "user", "content": "show me some emojis for clothes"}]},
    COMPLETIONS: {"prompt": "show me some emojis for clothes 👗"},
}


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_fallback_checkpoint(tmp_path_factory.mktemp("models") / "byte-fallback")


@pytest.mark.parametrize("company", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("vocabulary", ["tiny", "byte_fallback"])
async def test_deltas_join_to_the_text(request: pytest.FixtureRequest, vocabulary: str, company: int) -> None:
    """`company` rows decode together, of both dialects; 0 is the lane without batching."""
    folder = request.getfixturevalue(vocabulary)
    scripts = {seed: [*tokens_in(folder, text), end_of_turn(folder)] for seed, text in enumerate(TEXTS)}
    lane = {"parallel": company} if company else {"no_batch": True}
    async with served(folder, sampler=ScriptedSampler(scripts), **lane) as service:
        paths = [(CHAT, COMPLETIONS)[(seed + company) % 2] for seed in scripts]
        asked = [(path, PROMPTS[path] | {"seed": seed}) for path, seed in zip(paths, scripts, strict=True)]
        streams = await asyncio.gather(*(service.stream(path, body) for path, body in asked))
        wholes = await asyncio.gather(*(service.answer(path, body) for path, body in asked))
    for stream, whole, text in zip(streams, wholes, TEXTS, strict=True):
        if vocabulary == "byte_fallback":
            text = f" {text}"  # a first word's own space: it continues a prompt
        assert stream.text() == text
        assert stream.reasons() == ["stop"]
        [choice] = whole["choices"]
        assert choice.get("text", choice.get("message", {}).get("content")) == text


async def test_every_cut_by_the_token_bound_leaves_no_half_character(tiny: Path) -> None:
    script = tokens_in(tiny, TEXTS[0])
    async with served(tiny, sampler=ScriptedSampler({0: script}), max_queue_depth=100) as service:
        bodies = [{"prompt": "hi", "seed": 0, "max_tokens": n} for n in range(1, len(script) + 1)]
        streams = await asyncio.gather(*(service.stream(COMPLETIONS, body) for body in bodies))
    for num_tokens, stream in enumerate(streams, 1):
        assert stream.text() == TEXTS[0].encode()[:num_tokens].decode(errors="ignore")
        assert stream.reasons() == ["length"]


async def test_a_stop_string_of_cut_characters_is_found(tiny: Path) -> None:
    async with served(tiny, sampler=ScriptedSampler({0: tokens_in(tiny, TEXTS[0])})) as service:
        for at, character in enumerate(TEXTS[0]):
            stream = await service.stream(COMPLETIONS, {"prompt": "hi", "seed": 0, "stop": character})
            assert stream.text() == TEXTS[0][: TEXTS[0].index(character)], at
            assert stream.reasons() == ["stop"]
