"""A row that begins with what others have stored equals the same row computed from its start, bit for bit."""

import dataclasses
import gc
import itertools

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.prefix import BLOCK_TOKENS
from engine.cache.prompts import MIN_PART_TOKENS
from engine.request import Sampling
from engine.size import Bound, Size
from tests.engines import Watched, drive
from tests.tiny import write_checkpoint
from tests.zoo import ZOO, zoo_loaded, zoo_model

NUM_USERS = 12
PREFIX = 40
LENGTHS = (1, 15, 16, 17, 32, 33, 100)
VARIANTS = [("llama", {}), ("gemma3_text", {"sliding_window": 8}), ("gemma3_text", {"sliding_window": 16})]
VARIANTS += [("gemma3_text", {"sliding_window": 40})]
# What keeps keys and values alone, latent ones among them, in each mode that it is run in.
FAMILIES = ("llama", "deepseek_v2", "gpt_oss", "gemma3n", "mimo_v2_flash")
ON_GRID = ("deepseek_v3", "gemma2")
HYBRIDS = ("mamba2", "granitemoehybrid", "qwen3_next", "jamba", "lfm2", "recurrent_gemma", "rwkv7")


class Warm:
    """An engine that keeps prompts and one that does not, whose rows are dense, over the same weights."""

    def __init__(self, model, decode_storage_backend="auto", **config):
        self.cold = Watched(model, decode_storage_backend="dense", **config)
        self.warm = Watched(model, no_prompt_cache=False, decode_storage_backend=decode_storage_backend, **config)
        self.is_paged = bool(self.warm.engine.kv_blocks)
        assert self.warm.engine.prompts.keeps
        assert not self.cold.engine.prompts.keeps

    def request(self, name, prompt, num_new=6, **options):
        seeded = self.cold.request(name, 1, num_new, seed=options.pop("seed", 0))
        return dataclasses.replace(seeded, prompt=tuple(prompt), **options)

    def cold_run(self, request):
        self.cold.logits.clear()
        tokens = self.cold.alone(request)
        return tokens, dict(self.cold.logits)

    def warm_run(self, request):
        """Tokens, logits, and how many prompt tokens were computed."""
        self.warm.logits.clear()
        tokens, [row] = drive(self.warm.engine, [request])
        self.warm.engine.prompts.check([])
        return tokens[0], dict(self.warm.logits), row

    def kept(self, num_tokens):
        """How many of tokens that both have are adopted: whole blocks and, of a paged row, the most of one."""
        part = num_tokens % BLOCK_TOKENS
        return num_tokens if self.is_paged and part >= MIN_PART_TOKENS else num_tokens - part

    def assert_same(self, request, *, cached=None):
        tokens, logits = self.cold_run(request)
        warm_tokens, warm_logits, row = self.warm_run(request)
        assert warm_tokens == tokens
        assert_equal(warm_logits, logits)
        assert cached is None or row.num_cached == cached
        return row


def assert_equal(logits, expected):
    assert logits.keys() == expected.keys()
    for key, row in expected.items():
        assert np.array_equal(logits[key], row)


def numbers(seed, count, vocab=259):
    return [(31 * seed + 7 * i + 3 + i * i % 5) % vocab for i in range(count)]


@pytest.fixture(
    scope="module",
    params=itertools.product(VARIANTS, (("float32", "dense"), ("float16", "paged"))),
    ids=lambda p: "-".join([p[0][0], *map(str, p[0][1].values()), *p[1]]),
)
def pair(request, tmp_path_factory):
    (family, overrides), (cache_dtype, backend) = request.param
    folder = write_checkpoint(tmp_path_factory.mktemp(family), family, **overrides)
    return Warm(folder, backend, cache_dtype=cache_dtype)


@pytest.fixture(autouse=True)
def _nothing_left(request):
    yield
    if "pair" in request.fixturenames:
        prompts = request.getfixturevalue("pair").warm.engine.prompts
        prompts.check([])
        prompts.reset()
        assert prompts.stats().num_bytes == 0
        assert not any(request.getfixturevalue("pair").warm.engine.kv_blocks.values())


@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_prompt_again(pair, length):
    request = pair.request("again", numbers(length, length))
    pair.assert_same(request, cached=0)
    for _ in range(2):
        pair.assert_same(request, cached=pair.kept(length - 1))


@pytest.mark.parametrize("shared", [16, 31, 32, 48, 90])
def test_prompts_that_begin_alike(pair, shared):
    pair.assert_same(pair.request("first", numbers(1, 100)), cached=0)
    other = numbers(1, 100)[:shared] + numbers(2, 30, 200)
    pair.assert_same(pair.request("other", other), cached=pair.kept(shared))


def test_an_answer_is_kept_for_the_next_turn(pair):
    prompt, known = numbers(3, 21), 0
    for turn in range(4):
        request = pair.request("turn", prompt, num_new=30)
        row = pair.assert_same(request, cached=known // BLOCK_TOKENS * BLOCK_TOKENS)
        known = len(prompt) + len(row.output) - 1  # the last token is not stored
        prompt = prompt + row.output + numbers(turn, 9)


def test_a_long_answer_whose_windows_have_moved(pair):
    request = pair.request("long", numbers(4, 20), num_new=300)
    row = pair.assert_same(request)
    known = len(request.prompt) + len(row.output) - 1
    following = pair.request("next", [*request.prompt, *row.output, 1, 2, 3], num_new=3)
    pair.assert_same(following, cached=known // BLOCK_TOKENS * BLOCK_TOKENS)


@pytest.mark.parametrize("size", [1, 7, 16, 50])
def test_however_the_prompt_was_cut(pair, size):
    request = pair.request("cut", numbers(5, 70))
    row = pair.warm.engine.submit(request)
    pair.warm.store(row, size)
    pair.warm.engine.cancel(row)
    pair.assert_same(request, cached=64)


def test_twelve_users_over_one_prefix_at_once(pair):
    prefix = numbers(6, PREFIX)
    requests = [
        pair.request(str(user), prefix + numbers(user, 3 + 4 * user), seed=user) for user in range(NUM_USERS)
    ]
    cold = [pair.cold_run(request) for request in requests]
    pair.warm_run(pair.request("first", [*prefix, 1]))
    pair.warm.logits.clear()
    tokens, rows = drive(pair.warm.engine, requests)
    assert tokens == [expected for expected, _ in cold]
    for _, logits in cold:
        assert_equal({key: pair.warm.logits[key] for key in logits}, logits)
    assert all(row.num_cached >= PREFIX // BLOCK_TOKENS * BLOCK_TOKENS for row in rows)


def test_twelve_users_one_after_the_other(pair):
    prefix = numbers(7, PREFIX)
    for user in range(NUM_USERS):
        request = pair.request(str(user), prefix + numbers(user, 25, 100 + user), seed=user)
        assert pair.assert_same(request).num_cached >= 32 * (user > 0)


def test_equal_prompts_that_arrive_together_are_computed_about_once(pair):
    """Whoever comes second goes on behind what the first has committed, piece by piece."""
    engine = pair.warm.engine
    plan = type(engine.plan())(fixed_tokens=16, held=engine.prompts.held)
    request = pair.request("twin", numbers(8, 100))
    expected, _ = pair.cold_run(request)
    tokens, rows = drive(engine, [request, request, request], plan)
    assert tokens == [expected] * 3
    assert sum(100 - row.num_cached for row in rows) <= 100 + 2 * 20


def test_users_who_arrive_together_have_one_of_them_compute_what_they_share(pair):
    """The others do not join its forward, and then share one of their own."""
    prefix = numbers(11, PREFIX)
    requests = [pair.request(str(user), prefix + numbers(user, 5, 90), seed=user) for user in range(4)]
    cold = [pair.cold_run(request)[0] for request in requests]
    pair.warm.engine.prompts.reset()
    tokens, (first, *others) = drive(pair.warm.engine, requests)
    assert tokens == cold
    assert first.num_cached == 0
    assert all(row.num_cached == PREFIX // BLOCK_TOKENS * BLOCK_TOKENS for row in others)


def test_after_eviction(tmp_path):
    folder = write_checkpoint(tmp_path, "gemma3_text")
    block_bytes = 3 * 2 * 8 * 4 * BLOCK_TOKENS
    pair = Warm(folder, cache_dtype="float32", prompt_cache_bytes=Size(5 * block_bytes))
    prompts = pair.warm.engine.prompts
    for seed, length in ((0, 64), (1, 40), (1, 60), (2, 100), (2, 100), (0, 64), (1, 20), (0, 64)):
        pair.assert_same(pair.request("r", numbers(seed, length)))
        assert prompts.stats().num_bytes <= 5 * block_bytes
    assert prompts.stats().evictions > 0
    assert prompts.stats().hits > 0


def test_what_is_committed_stays_when_its_client_goes(pair):
    request = pair.request("gone", numbers(9, 90))
    row = pair.warm.engine.submit(request)
    plan = type(pair.warm.engine.plan())(fixed_tokens=32, held=pair.warm.engine.prompts.held)
    pair.warm.engine.prefill(plan.pieces([row], decoding=False))
    pair.warm.engine.cancel(row)
    assert row.storage is None
    pair.assert_same(request, cached=32)


def test_salts_and_those_who_want_none_share_nothing(pair):
    request = pair.request("r", numbers(10, 50))
    salted = dataclasses.replace(request, cache_salt="mine")
    private = dataclasses.replace(request, cache_prompt=False)
    pair.assert_same(private, cached=0)
    pair.assert_same(request, cached=0)
    pair.assert_same(salted, cached=0)
    pair.assert_same(salted, cached=48)
    pair.assert_same(dataclasses.replace(salted, cache_salt="other"), cached=0)
    pair.assert_same(private, cached=0)


@pytest.fixture
def no_spare_buffers():
    """MLX gives no buffer away that is larger than what was asked for."""
    before = mx.set_cache_limit(0)
    mx.clear_cache()
    yield
    mx.set_cache_limit(before)


def test_memory_ends_where_it_began(pair, no_spare_buffers):
    """A block is one buffer of its own: what is counted is what is held, and what is dropped is free."""
    if pair.is_paged:
        pytest.skip("pools give memory back when they are reset")
    engine = pair.warm.engine

    def run(user):
        drive(engine, [pair.request(str(user), numbers(user, 70), num_new=20)])
        pair.warm.logits.clear()

    run(0)
    engine.prompts.reset()
    gc.collect()  # engines of other tests
    before = mx.get_active_memory()
    for user in range(4):
        run(user)
        assert 0 < engine.prompts.stats().num_bytes == mx.get_active_memory() - before
    engine.prompts.reset()
    assert mx.get_active_memory() == before


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    assert ZOO[name].mode == "spans"
    pair = Warm(zoo_loaded(zoo_model(name)), cache_dtype="float32")
    pair.assert_same(pair.request("first", numbers(1, 60)), cached=0)
    pair.assert_same(pair.request("again", numbers(1, 60)), cached=48)
    pair.assert_same(pair.request("other", numbers(1, 40) + numbers(2, 30, 200)), cached=32)


@pytest.mark.parametrize("name", ON_GRID)
def test_where_cuts_change_bits_only_split_points_are_adopted(name):
    assert ZOO[name].mode != "spans"
    pair = Warm(zoo_loaded(zoo_model(name)), cache_dtype="float32", prefill_chunk_size=32)
    plan = pair.warm.engine.plan()
    assert [plan.reproduces(hit) for hit in (0, 16, 32, 48, 64)] == [True, False, True, False, True]
    pair.assert_same(pair.request("first", numbers(1, 90)), cached=0)
    pair.assert_same(pair.request("again", numbers(1, 90)), cached=64)
    pair.assert_same(pair.request("other", numbers(1, 50) + numbers(2, 30, 200)), cached=32)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("size", [0, 32])
def test_a_conversation_goes_on_where_its_last_prompt_ended(name, size):
    """Whole rows are kept where turns begin, and a longer conversation is cut there too."""
    pair = Warm(zoo_loaded(zoo_model(name)), prefill_chunk_size=size)
    prompt, boundaries, ended = numbers(1, 21), [9, 21], 0
    for turn in range(4):
        request = pair.request("turn", prompt, num_new=8, boundaries=tuple(boundaries))
        row = pair.assert_same(request, cached=ended)
        ended = len(prompt)
        prompt = prompt + row.output + numbers(turn, 9)
        boundaries += [ended + len(row.output), len(prompt)]
    # The same question again is not computed; another one behind the same history, from where the turn begins.
    history = request.boundaries[-2]
    pair.assert_same(request, cached=len(request.prompt))
    edited = [*request.prompt[:history], *numbers(9, 20, 100)]
    pair.assert_same(dataclasses.replace(request, prompt=tuple(edited)), cached=history)


@pytest.mark.parametrize("name", HYBRIDS)
def test_users_over_one_history_at_once(name):
    pair = Warm(zoo_loaded(zoo_model(name)))
    prefix = numbers(6, PREFIX)
    requests = [
        pair.request(
            str(user),
            prefix + numbers(user, 3 + 4 * user),
            seed=user,
            boundaries=(PREFIX, PREFIX + 3 + 4 * user),
        )
        for user in range(NUM_USERS)
    ]
    cold = [pair.cold_run(request) for request in requests]
    pair.warm_run(requests[0])
    pair.warm.logits.clear()
    tokens, rows = drive(pair.warm.engine, requests)
    assert tokens == [expected for expected, _ in cold]
    for _, logits in cold:
        assert_equal({key: pair.warm.logits[key] for key in logits}, logits)
    assert [row.num_cached for row in rows] == [len(requests[0].prompt)] + [PREFIX] * (NUM_USERS - 1)


def choices_of(pair, length, **options):
    """Four requests for one prompt, each with draws of its own."""
    one = pair.request("one", numbers(2, length), **options)
    sampling = Sampling(temperature=1.0, seed=4)
    return [dataclasses.replace(one, sampling=sampling, choice=choice) for choice in range(4)]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(
    ("length", "boundaries"), [(1, ()), (2, (2,)), (32, ()), (33, (9, 33)), (90, (9, 70, 90))]
)
def test_choices_of_one_prompt_at_once(name, length, boundaries):
    """The first computes it, and the others go on from its end, each with the draws that it has alone."""
    pair = Warm(zoo_loaded(zoo_model(name)), prefill_chunk_size=32)
    choices = choices_of(pair, length, boundaries=boundaries)
    cold = [pair.cold_run(request) for request in choices]
    assert len({tuple(tokens) for tokens, _ in cold}) > 1
    tokens, rows = drive(pair.warm.engine, choices)
    assert tokens == [expected for expected, _ in cold]
    for _, logits in cold:
        assert_equal({key: pair.warm.logits[key] for key in logits}, logits)
    assert [row.num_cached for row in rows] == [0, length, length, length]
    assert pair.warm.engine.prompts.stats().off_plan == 0


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
@pytest.mark.parametrize(("num_rows", "num_copies"), [(1, 0), (2, 0), (3, 0), (4, 0), (4, 1), (4, 2)])
def test_choices_at_the_edge_of_the_memory(name, num_rows, num_copies):
    """Where there is room for a copy beside the rows, the prompt is computed once."""
    model = zoo_loaded(zoo_model(name))
    pair = Warm(model, prefill_chunk_size=32)
    choices = choices_of(pair, 90)
    cold = [pair.cold_run(request)[0] for request in choices]
    engine = pair.warm.engine
    drive(engine, choices[:1])
    row_bytes, copy_bytes = engine.memory.row_bytes(90 + 6), engine.prompts.stats().num_bytes
    budget = Bound(num_rows * row_bytes + num_copies * copy_bytes)
    narrow = Watched(model, no_prompt_cache=False, prefill_chunk_size=32, kv_cache_budget=budget)
    tokens, rows = drive(narrow.engine, choices)
    assert tokens == cold
    narrow.engine.memory.check()
    if num_copies:
        assert [row.num_cached for row in rows] == [0, 90, 90, 90]


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_users_over_one_new_history_at_once_compute_it_once(name):
    pair = Warm(zoo_loaded(zoo_model(name)), prefill_chunk_size=16)
    requests = [
        pair.request(
            str(user), [*numbers(6, PREFIX), user, *numbers(user, user)], boundaries=(PREFIX, PREFIX + 1 + user)
        )
        for user in range(5)
    ]
    cold = [pair.cold_run(request)[0] for request in requests]
    tokens, rows = drive(pair.warm.engine, requests)
    assert tokens == cold
    assert [row.num_cached for row in rows] == [0] + [PREFIX] * 4


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_a_prompt_with_turns_shares_nothing_with_one_without(name):
    """They are cut at other places."""
    pair = Warm(zoo_loaded(zoo_model(name)))
    for boundaries in ((), (40, 90)):
        request = pair.request("one", numbers(9, 90), boundaries=boundaries)
        pair.assert_same(request, cached=0)
        pair.assert_same(request, cached=90)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_prompt_whose_client_left_goes_on_where_it_stopped(name):
    pair = Warm(zoo_loaded(zoo_model(name)), prefill_chunk_size=32)
    request = pair.request("gone", numbers(9, 90), boundaries=(40, 90))
    for stop in (32, 40, 64):
        row = pair.warm.engine.submit(request)
        pair.warm.engine.prefill(pair.warm.engine.plan().pieces([row], decoding=False))
        pair.warm.engine.cancel(row)
        assert row.cursor == stop
    pair.assert_same(request, cached=64)


@pytest.mark.parametrize("name", ["recurrent_gemma", "qwen3_next"])
def test_copies_of_whole_rows_are_freed(name, no_spare_buffers):
    pair = Warm(zoo_loaded(zoo_model(name)))
    engine = pair.warm.engine

    def run(user):
        drive(engine, [pair.request(str(user), numbers(user, 70), boundaries=(30, 70))])
        pair.warm.logits.clear()

    run(0)
    engine.prompts.reset()
    gc.collect()
    before = mx.get_active_memory()
    for user in range(4):
        run(user)
        assert 0 < engine.prompts.stats().num_bytes == mx.get_active_memory() - before
    engine.prompts.reset()
    assert mx.get_active_memory() == before


def test_rows_in_caches_of_mlx_lm_are_not_kept():
    warm = Watched(zoo_loaded(zoo_model("llama4")), no_prompt_cache=False)
    assert not warm.engine.prompts.keeps
    assert any("prompt cache: off, what this family" in note for note in warm.engine.notes)
