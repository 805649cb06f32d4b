"""Constrained rows beside free ones, alone, preempted or submitted ahead: the same tokens."""

import dataclasses
import json

import pytest

from engine.direct import DirectEngine
from engine.errors import StepFailed
from engine.plan import Tick
from engine.request import Failed, Grammar
from tests.engines import BACKENDS, Watched
from tests.tiny import write_checkpoint

ITEM = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 9}}}
GRAMMARS = [
    None,
    Grammar("json", json.dumps({"type": "array", "items": ITEM, "minItems": 2})),
    Grammar("regex", "[a-f]{4,9}"),
    None,
    Grammar("regex", "(yes|no)", after="e"),
]
SAMPLINGS = {"greedy": {}, "drawn": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1}}


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "mamba2"])
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def requests(watched, **sampling):
    free = [watched.request(f"{i}", 4 + 7 * i, 40, seed=i, **sampling) for i in range(len(GRAMMARS))]
    return [
        one if grammar is None else dataclasses.replace(one, grammar=grammar, ignore_eos=False)
        for one, grammar in zip(free, GRAMMARS, strict=True)
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_says_the_same_alone_and_in_company(folder, backend, sampling):
    watched = Watched(folder, decode_storage_backend="auto" if backend == "paged" else "dense")
    asked = requests(watched, **sampling)
    alone = [watched.alone(request) for request in asked]
    rows = watched.together({1 + 2 * i: request for i, request in enumerate(asked)})
    assert [row.output for row in rows] == alone
    assert {row.finish_reason for row in rows} == {"stop", "length"}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_lookahead_changes_nothing(folder, sampling):
    outputs = []
    for lookahead in (False, True):
        watched = Watched(folder, lookahead=lookahead)
        asked = requests(watched, **sampling)
        outputs.append([row.output for row in watched.together({1 + i: one for i, one in enumerate(asked)})])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_preempted_row_goes_on_in_its_grammar(folder, number):
    watched = Watched(folder)
    engine, plan = watched.engine, watched.engine.plan()
    request = requests(watched, temperature=1.0)[number]
    outputs = DirectEngine(engine).complete(request)
    row, num_steps = engine.submit(request), 0
    while row.finish_reason is None:
        if row.prefilled:
            engine.step([row])
            num_steps += 1
        else:
            engine.prefill(plan.pieces([row], decoding=False))
        if row.finish_reason is None and num_steps % 3 == 1 and row.storage is not None:
            engine.run(Tick(preempt=(row,)))
            num_steps += 1
    assert row.num_preempted > 1
    assert row.output == [output.token for output in outputs]
    assert row.finish_reason == outputs[-1].finish_reason


class Broken:
    """A constraint that cannot go on behind a few tokens, found where masks are or where tokens are taken."""

    def __init__(self, at, *, by_mask):
        self._at, self._by_mask = at, by_mask

    def allowed(self, output):
        self._fail(self._by_mask and len(output) == self._at)

    def is_over(self, output):
        self._fail(not self._by_mask and len(output) == self._at)
        return False

    def _fail(self, now):
        if now:
            raise StepFailed("too complex")


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize(("at", "by_mask"), [(0, True), (3, True), (1, False), (3, False)])
def test_a_grammar_that_cannot_go_on_ends_its_own_row(folder, lookahead, at, by_mask):
    watched = Watched(folder, lookahead=lookahead)
    kept, broken = (watched.request(name, 5, 8, seed=i) for i, name in enumerate("kb"))
    expected = watched.alone(kept)
    rows = [watched.engine.submit(request) for request in (kept, broken)]
    rows[1].request = dataclasses.replace(broken, grammar=GRAMMARS[1])
    rows[1].constraint = Broken(at, by_mask=by_mask)
    plan, events = watched.engine.plan(), []
    while any(row.finish_reason is None for row in rows):
        live = [row for row in rows if row.finish_reason is None]
        waiting = [row for row in live if not row.prefilled]
        if waiting:
            events += watched.engine.prefill(plan.pieces(waiting, decoding=False))
        else:
            events += watched.engine.step(live)
    assert rows[0].output == expected
    assert len(rows[1].output) == at
    assert rows[1].storage is None
    assert [(e.row, str(e.error)) for e in events if isinstance(e, Failed)] == [(rows[1], "too complex")]
