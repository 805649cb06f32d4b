"""The mode is found by trying the model, and says why."""

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.utils import load_model

from engine.cache import adapter
from engine.forward import AloneForward, Span
from engine.probe import probe
from tests.tiny import VOCAB_SIZE, write_checkpoint


@pytest.fixture(autouse=True)
def _handles():
    adapter.install_attention()


@pytest.fixture
def open_model(tmp_path):
    return lambda family, **overrides: load_model(write_checkpoint(tmp_path / family, family, **overrides))[0]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_attention_families_run_in_spans_exactly(open_model, family):
    forward, verdict = probe(open_model(family), VOCAB_SIZE)
    assert (forward.name, verdict.reason) == ("spans", "rows together equal each alone exactly")


def test_recurrent_families_run_alone_and_it_says_what_they_keep(open_model):
    forward, verdict = probe(open_model("mamba2"), VOCAB_SIZE)
    assert (forward.name, verdict.reason) == (
        "rows",
        "rows together equal each alone exactly; spans: layers keep ArraysCache",
    )


def test_a_model_that_looks_at_its_keys_runs_alone(open_model, monkeypatch):
    def attention(queries, keys, values, cache, scale, mask, **_):
        scores = (queries * scale) @ mx.repeat(keys, queries.shape[1] // keys.shape[1], axis=1).swapaxes(-1, -2)
        return mx.softmax(scores, axis=-1) @ mx.repeat(values, queries.shape[1] // values.shape[1], axis=1)

    monkeypatch.setattr(llama, "scaled_dot_product_attention", attention)
    assert probe(open_model("llama"), VOCAB_SIZE)[1].mode == "alone"


def test_a_model_that_goes_wrong_in_company_runs_alone(open_model, monkeypatch):
    """A model that mixes its rows gives no error, only other numbers: the probe compares them."""
    original = llama.MLP.__call__
    monkeypatch.setattr(llama.MLP, "__call__", lambda self, x: original(self, x) + x.mean(axis=0, keepdims=True))
    forward, verdict = probe(open_model("llama"), VOCAB_SIZE)
    assert forward.name == "alone"
    assert "differ" in verdict.reason


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_runs_only_where_logits_are_needed(open_model, tied, monkeypatch):
    forward, _ = probe(open_model("llama", tie_word_embeddings=tied), VOCAB_SIZE)
    select, seen = adapter.HeadSelection.select, []

    def watched(self, hidden):
        seen.append((hidden.shape[0], select(self, hidden).shape[0]))
        return select(self, hidden)

    monkeypatch.setattr(adapter.HeadSelection, "select", watched)
    forward.run([Span(forward.open(), [1, 2, 3, 4], sample=False), Span(forward.open(), [5, 6], sample=True)])
    assert seen == [(6, 1)]


def test_outside_a_forward_the_model_is_untouched(open_model):
    model = open_model("llama")
    ids = mx.array([[1, 2, 3]])
    before = model(ids)
    probe(model, VOCAB_SIZE)
    assert mx.array_equal(model(ids), before)


def test_alone_gives_the_last_tokens_logits_even_where_no_head_is_found(open_model):
    model = open_model("llama")
    expected = model(mx.array([[1, 2, 3]]))[0, -1:]
    forward = AloneForward(model, adapter.HeadSelection())
    assert mx.array_equal(forward.run([Span(forward.open(), [1, 2, 3], True)]), expected)


def test_mlx_lm_is_as_the_adapter_relies_on():
    adapter.self_test()
