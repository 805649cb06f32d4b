"""Case 17: a stop string ends the answer before itself, however the text was cut into tokens, in both modes."""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.serving import COMPLETIONS, ScriptedSampler, served
from tests.tiny import SPECIALS, VOCAB_SIZE, write_checkpoint

pytestmark = pytest.mark.anyio

TEXT = "1, 2, 3, 4, 5, 6, 7"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PARTS = sorted({TEXT[i:j] for i in range(len(TEXT)) for j in range(i + 2, len(TEXT) + 1)})
BYTES = {" ": "Ġ"}


def id_of(part: str) -> int:
    if len(part) > 1:
        return VOCAB_SIZE + PARTS.index(part)
    return ALPHABET.index(BYTES.get(part, part))


@pytest.fixture(scope="session")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a token for every part of the text."""
    folder = tmp_path_factory.mktemp("models") / "parted"
    write_checkpoint(folder, "gemma3_text", vocab_size=VOCAB_SIZE + len(PARTS))
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in PARTS])
    assert all(tokenizer.decode([id_of(part)]) == part for part in (*PARTS, *set(TEXT)))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def chunkings(most_cuts: int) -> list[Sequence[str]]:
    """The text in one piece, in pieces of each size, and cut at every choice of a few places."""
    places = [cuts for n in range(most_cuts + 1) for cuts in itertools.combinations(range(1, len(TEXT)), n)]
    places += [tuple(range(size, len(TEXT), size)) for size in range(1, len(TEXT))]
    return [[TEXT[i:j] for i, j in itertools.pairwise((0, *cuts, len(TEXT)))] for cuts in dict.fromkeys(places)]


STOPS = {
    "one": (["6"], "1, 2, 3, 4, 5, "),
    "longer than a token": ([", 5, 6"], "1, 2, 3, 4"),
    "the last text": (["7"], "1, 2, 3, 4, 5, 6, "),
    "the first text": (["1"], ""),
    "four": (["9", "5, 6", "3, 4", "7"], "1, 2, "),
    "begun and never ended": (["3, 4, 6", "7, 8"], None),
}


@pytest.mark.parametrize("stops", STOPS)
async def test_no_chunking_matters(parted: Path, stops: str) -> None:
    stop, expected = STOPS[stops]
    pieces = chunkings(2 if stops == "one" else 1)
    scripts = {seed: [id_of(part) for part in chunks] for seed, chunks in enumerate(pieces)}
    async with served(parted, sampler=ScriptedSampler(scripts), max_queue_depth=256) as service:

        def body(seed: int) -> dict[str, object]:
            return {"prompt": "count:", "stop": stop, "seed": seed, "max_tokens": len(scripts[seed])}

        streams = await asyncio.gather(*(service.stream(COMPLETIONS, body(seed)) for seed in scripts))
        wholes = await asyncio.gather(*(service.answer(COMPLETIONS, body(seed)) for seed in scripts))
    for stream, whole, chunks in zip(streams, wholes, pieces, strict=True):
        assert stream.text() == (TEXT if expected is None else expected), chunks
        assert stream.reasons() == ["length" if expected is None else "stop"], chunks
        [choice] = whole["choices"]
        assert (choice["text"], choice["finish_reason"]) == (stream.text(), stream.reasons()[0]), chunks


@pytest.mark.parametrize("company", range(1, 5))
async def test_each_row_of_a_batch_has_its_own_stops(parted: Path, company: int) -> None:
    scripts = {seed: [id_of(letter) for letter in TEXT] for seed in range(company)}
    async with served(parted, sampler=ScriptedSampler(scripts)) as service:
        answers = await asyncio.gather(
            *(service.answer(COMPLETIONS, {"prompt": "count:", "stop": str(s + 2), "seed": s}) for s in scripts)
        )
    for seed, answer in enumerate(answers):
        assert answer["choices"][0]["text"] == TEXT[: TEXT.index(str(seed + 2))]
