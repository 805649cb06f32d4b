"""A smaller model drafts, and answers stay what they were, however right it is."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from engine.cache import adapter
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kernels import leaves
from engine.probe import probe
from engine.remembered import Remembered
from engine.request import Request, Sampling
from engine.speculate.drafter import CATCH_UP_TOKENS, Drafter
from tests.engines import Watched, drive
from tests.tiny import VOCAB_SIZE, write_checkpoint
from tests.zoo import zoo_loaded, zoo_model


def drafter(name="llama", **made) -> Drafter:
    model = zoo_model(name, **made)
    leaves.replace(model)
    adapter.install_attention()
    loaded = zoo_loaded(model)
    return Drafter(loaded, probe(model, VOCAB_SIZE)[0])


def target(drafter: Drafter | None = None, name="llama", **config) -> Watched:
    """The zoo's model, and what drafts for it; every round pays."""
    model = zoo_model(name)
    leaves.replace(model)
    kind = {} if drafter is None else {"draft_model": Path("in memory too")}
    watched = Watched(zoo_loaded(model), mode="spans", drafter=drafter, parallel=4, **kind, **config)
    if drafter is not None:
        for costs in (watched.engine.drafts.governor.plain, watched.engine.drafts.governor.rounds):
            costs._seconds = {1: 1.0, 64: 1.01}
    return watched


def assert_same(watched, requests):
    alone = [watched.alone(request) for request in requests]
    logits = dict(watched.logits)
    watched.logits.clear()
    outputs, rows = drive(watched.engine, requests)
    assert outputs == alone
    assert all(np.array_equal(watched.logits[key], logits[key]) for key in logits)
    assert not watched.engine._speculation.model._rows, "what was stored for a row outlived it"
    return rows


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 30}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_same_model_is_always_right(num_rows, sampling):
    """Drawn answers too: it draws with the row's own noise."""
    watched = target(drafter())
    requests = [watched.request(str(i), 5 + 30 * i, 24, seed=i, **sampling) for i in range(num_rows)]
    rows = assert_same(watched, requests)
    stats = watched.engine.drafts.stats()
    assert stats.accepted == stats.proposed > 20 * num_rows / 2
    assert sum(row.drafts.rounds for row in rows) == stats.rounds


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_another_model_is_sometimes_right(name, num_rows):
    """Windows of the draft model forget, and are rewound all the same."""
    watched = target(drafter(name, seed=5), no_prompt_cache=False)
    requests = [watched.request(str(i), 5 + 40 * i, 50, seed=i, temperature=1.5) for i in range(num_rows)]
    assert_same(watched, requests)
    stats = watched.engine.drafts.stats()
    assert 0 < stats.accepted < stats.proposed


def test_a_long_prompt_is_read_over_several_steps():
    watched = target(drafter())
    request = watched.request("long", 3 * CATCH_UP_TOKENS, 24, seed=1)
    [row] = assert_same(watched, [request])
    assert 0 < row.drafts.rounds < 24 / 2


def test_a_row_that_is_preempted_is_read_again():
    watched = target(drafter(), ctx_size=120, kv_unified=True)
    rows = assert_same(watched, [watched.request(str(i), 20, 30 + i, seed=i) for i in range(4)])
    assert sum(row.num_preempted for row in rows) > 0


def test_a_draft_model_that_fails_costs_nobody_a_row(monkeypatch):
    watched = target(drafter())
    requests = [watched.request(str(i), 9, 20, seed=i) for i in range(2)]
    alone = [watched.alone(request) for request in requests]
    model = watched.engine._speculation.model
    propose, calls = model.propose, []

    def failing(wanted):
        calls.append(1)
        if len(calls) % 2:
            raise RuntimeError("no draft today")
        return propose(wanted)

    monkeypatch.setattr(model, "propose", failing)
    assert drive(watched.engine, requests)[0] == alone


def test_a_model_that_is_wrong_is_paused():
    watched = target(drafter(seed=9))
    for costs in (watched.engine.drafts.governor.plain, watched.engine.drafts.governor.rounds):
        costs._seconds = {1: 1.0, 64: 30.0}
    request = watched.request("wrong", 9, 60, seed=3, temperature=1.0)
    alone = watched.alone(request)
    assert drive(watched.engine, [request])[0] == [alone]
    assert watched.engine.drafts.stats().pauses > 0


def test_what_a_draft_model_stores_is_in_the_books():
    assert target(drafter()).engine.memory.row_bytes(500) > target().engine.memory.row_bytes(500), (
        "rows cost what both models keep of them"
    )


def test_tokenizers_that_differ_are_refused():
    other = drafter()
    tokenizer = type("Other", (type(other.loaded.tokenizer),), {"get_vocab": lambda self: {"<other>": 0}})()
    with pytest.raises(ConfigError, match=r"another tokenizer: .* is token 0") as refused:
        target(Drafter(dataclasses.replace(other.loaded, tokenizer=tokenizer), other.forward))
    assert refused.value.setting == "draft_model"


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_models_that_cannot_go_back_are_refused(name):
    with pytest.raises(ConfigError, match="the draft model decodes in the mode rows"):
        target(drafter(name))
    for kind in ({"draft_kind": "prompt-lookup"}, {"draft_model": Path("in memory too")}):
        with pytest.raises(ConfigError, match=r"this model decodes in the mode rows: .* cannot forget"):
            Engine(zoo_loaded(zoo_model(name)), EngineConfig(model=Path("in memory"), **kind))


def test_extra_heads_are_refused_by_the_models_name():
    loaded = dataclasses.replace(zoo_loaded(zoo_model("llama")), config={"model_type": "llama"})
    with pytest.raises(ConfigError, match="mlx-lm's llama keeps no extra heads"):
        Engine(loaded, EngineConfig(model=Path("in memory"), draft_kind="mtp"))


def test_from_checkpoints_and_across_runs(tmp_path):
    """What was measured and seen is known to the next engine of the same pair."""
    model, other = (write_checkpoint(tmp_path / name, "llama") for name in ("model", "other"))
    config = EngineConfig(model=model, draft_model=other)
    first = Engine.open(config)
    request = Watched.request(type("Sized", (), {"engine": first})(), "asked", 9, 40)
    drive(first, [dataclasses.replace(request, sampling=Sampling())])
    for costs in (first.drafts.governor.plain, first.drafts.governor.rounds):
        costs._seconds = {1: 0.5, 8: 0.75}
    policy = first.drafts.policy()
    first.drafts.close()
    second = Engine.open(config)
    again = second.drafts.policy()
    assert again.verdicts[0].accepted_share == first.drafts.policy().verdicts[0].accepted_share
    assert again.plain_step_ms == 500.0
    assert (policy.target, policy.drafter) == ("model", "other")
    assert any("drafts: other" in note for note in second.notes)


def test_a_file_that_is_damaged_is_found_out_again(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.engine.Remembered", lambda folder: Remembered(tmp_path / "drafts"))
    model = write_checkpoint(tmp_path / "model", "llama")
    config = EngineConfig(model=model, draft_kind="prompt-lookup")
    Engine.open(config).drafts.close()
    [kept] = (tmp_path / "drafts").glob("*.json")
    damaged = [
        {"plain_s": {"1": seconds}, "rounds_s": {}, "seen": []}
        for seconds in (-1, float("inf"), float("nan"), 10**401)
    ]
    good = {"plain_s": {"1": 1.0}, "rounds_s": {"2": 1.5}}
    damaged += [{**good, "seen": [[accepted, 0]] * 4} for accepted in (-2, float("nan"), float("inf"), "much")]
    texts = ["{", "[]", "[" * 100_000, '{"plain_s": 3}', *map(json.dumps, damaged)]
    for text in texts:
        kept.write_text(text)
        assert Engine.open(config).drafts.policy().plain_step_ms is None


def test_a_row_with_a_token_that_the_draft_model_lacks_takes_one_token_a_step():
    """Models of one tokenizer are padded to different sizes; nothing is known of what lies behind a table."""
    other = drafter()
    watched = target(Drafter(dataclasses.replace(other.loaded, vocab_size=200), other.forward))
    known = Request("known", (5, 6, 7), Sampling(), 12, ignore_eos=True)
    strange = dataclasses.replace(known, id="strange", prompt=(5, 250, 7))
    bias = tuple((token, -100.0) for token in range(200, VOCAB_SIZE))
    requests = [dataclasses.replace(one, sampling=Sampling(logit_bias=bias)) for one in (known, strange)]
    alone = [watched.alone(request) for request in requests]
    outputs, rows = drive(watched.engine, requests)
    assert outputs == alone
    assert rows[0].drafts.rounds > 0
    assert rows[1].drafts.rounds == 0
