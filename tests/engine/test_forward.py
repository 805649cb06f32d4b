"""The mode is found by trying the model, and says why."""

from functools import partial

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


def test_recurrent_families_run_in_rows_and_it_says_what_they_keep(open_model):
    forward, verdict = probe(open_model("mamba2"), VOCAB_SIZE)
    assert (forward.name, verdict.reason) == (
        "rows",
        "rows together equal each alone exactly; spans: layers keep ArraysCache",
    )


def attention_of_its_own(queries, keys, values, cache, scale, mask, *, grouped):
    """Hand-written attention; `grouped` puts the heads that share keys on an axis of their own."""
    batch, heads, num_queries, dim = queries.shape
    if grouped:
        queries = queries.reshape(batch, keys.shape[1], -1, num_queries, dim)
        keys, values = keys[:, :, None], values[:, :, None]
    else:
        keys, values = (mx.repeat(array, heads // keys.shape[1], axis=1) for array in (keys, values))
    scores = (queries * scale) @ keys.swapaxes(-1, -2)
    if isinstance(mask, str):
        mask = mx.tri(num_queries, scores.shape[-1], scores.shape[-1] - num_queries).astype(mx.bool_)
    scores = scores if mask is None else mx.where(mask, scores, -mx.inf)
    return (mx.softmax(scores, axis=-1) @ values).reshape(batch, heads, num_queries, -1)


@pytest.mark.parametrize(
    ("grouped", "mode"), [(False, "rows, keys gathered"), (True, "rows, keys gathered by group")]
)
def test_a_model_that_looks_at_its_keys_gets_them_gathered(open_model, monkeypatch, grouped, mode):
    monkeypatch.setattr(llama, "scaled_dot_product_attention", partial(attention_of_its_own, grouped=grouped))
    verdict = probe(open_model("llama"), VOCAB_SIZE)[1]
    assert verdict.mode == mode
    assert "; spans / rows: " in verdict.reason


def test_a_model_that_reads_its_caches_arrays_runs_alone(open_model, monkeypatch):
    """What it would do with them shows perhaps only on long rows: it is not tried."""
    original = llama.Attention.__call__

    def attention(self, x, mask=None, cache=None):
        output = original(self, x, mask, cache)
        return output if cache is None else mx.depends(output, [cache.keys])

    monkeypatch.setattr(llama.Attention, "__call__", attention)
    verdict = probe(open_model("llama"), VOCAB_SIZE)[1]
    assert (verdict.mode, verdict.reason) == ("alone", "all others: the model reads its cache's arrays itself")


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
    forward.run([Span(forward.open(), [1, 2, 3, 4], num_sampled=0), Span(forward.open(), [5, 6], num_sampled=1)])
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
