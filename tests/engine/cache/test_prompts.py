"""The prompt cache of an engine: what many requests store is what their different tokens need."""

import dataclasses

import pytest

from engine.cache.copies import RowCopy
from engine.cache.prefix import BLOCK_TOKENS
from engine.request import Request
from tests.engines import Watched
from tests.tiny import VOCAB_SIZE, write_checkpoint
from tests.zoo import zoo_loaded, zoo_model

NUM_TURNS = 20
NUM_USERS = 12
LOGITS_BYTES = 4 * VOCAB_SIZE
PREFIX = tuple((7 * i + i // 9) % 250 for i in range(512))


def own(number, count):
    return tuple((number * 31 + 11 * i + i // 7 + 100) % 250 for i in range(count))


def ask(watched, prompt, **options):
    """The answer to `prompt`, and the storage that its row ended with."""
    kept, release = [], watched.engine.release

    def released(row):
        kept.append(row.storage)
        release(row)

    watched.engine.release = released
    answer = watched.alone(Request("r", prompt, max_tokens=12, ignore_eos=True, **options))
    watched.engine.release = release
    watched.engine.prompts.check()
    return answer, kept[0]


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def watched(request, tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("models"), request.param)
    return Watched(folder, no_prompt_cache=False)


@pytest.fixture(autouse=True)
def _empty(request):
    if "watched" in request.fixturenames:
        request.getfixturevalue("watched").engine.prompts.reset()


def test_twenty_turns_store_their_tokens_once(watched):
    prompt = own(0, 40)
    for turn in range(NUM_TURNS):
        answer, _ = ask(watched, prompt)
        stored = len(prompt) + len(answer) - 1  # the last token is not stored
        assert watched.engine.prompts.stats().num_blocks == stored // BLOCK_TOKENS
        prompt = (*prompt, *answer, *own(turn + 1, 13))


def test_twelve_users_store_their_prefix_once(watched):
    one_prefix_blocks = len(PREFIX) // BLOCK_TOKENS
    for user in range(NUM_USERS):
        answer, _ = ask(watched, (*PREFIX, *own(user, 35)))
        own_blocks = (35 + len(answer) - 1) // BLOCK_TOKENS
        assert watched.engine.prompts.stats().num_blocks == one_prefix_blocks + (user + 1) * own_blocks


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "recurrent_gemma"])
def test_twenty_turns_of_what_is_kept_whole_keep_the_last_ones(name):
    watched = Watched(zoo_loaded(zoo_model(name)), no_prompt_cache=False)
    prompt, boundaries = own(0, 40), (20, 40)
    for turn in range(NUM_TURNS):
        answer, storage = ask(watched, prompt, boundaries=boundaries)
        following = (*prompt, *answer, *own(turn + 1, 13))
        boundaries = (len(prompt) + len(answer), len(following))
        prompt = following
        stats = watched.engine.prompts.stats()
        assert stats.num_snapshots <= 3
        assert stats.num_bytes <= stats.num_snapshots * (RowCopy.bytes_of(storage) + LOGITS_BYTES)


def test_a_key_is_not_part_of_what_is_shared(watched):
    request = Request("r", PREFIX, max_tokens=1, prompt_cache_key="one")
    for key in ("one", "two", ""):
        watched.alone(dataclasses.replace(request, prompt_cache_key=key))
    assert watched.engine.prompts.stats().num_blocks == len(PREFIX) // BLOCK_TOKENS
