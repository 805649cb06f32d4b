"""The engine's numbers in the text format of Prometheus: one table from a name to the number behind it.

A metric without a source is not exposed. Each application has its own registry. Knows no routes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from engine.metrics import Histogram, Numbers
from server.residency import Place
from server.roles.counts import Counts

Value = float | Histogram | Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Metric:
    """One name: its kind, its help text, and the number. A mapping's keys are values of the label `label`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    value: Callable[[Numbers], Value]
    label: str = ""

    def family(self, of_models: Mapping[str, Numbers]) -> Family:
        """The metric as the library writes it, with the models' names as a label where they have some."""
        named = ["model"] if any(of_models) else []
        if self.kind == "histogram":
            histograms = HistogramMetricFamily(self.name, self.help, labels=named)
            for name, numbers in of_models.items():
                value = self.value(numbers)
                assert isinstance(value, Histogram), "the kind says so"
                histograms.add_metric([name][: len(named)], _buckets(value), value.total)
            return histograms
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.name, self.help, labels=[*named, *filter(None, [self.label])])
        for name, numbers in of_models.items():
            for key, count in self._counts(numbers):
                family.add_metric([*[name][: len(named)], *filter(None, [key])], count)
        return family

    def _counts(self, numbers: Numbers) -> Iterable[tuple[str, float]]:
        """Each number with its label's value, which is empty where there is one number."""
        value = self.value(numbers)
        assert not isinstance(value, Histogram), "the kind says so"
        return value.items() if isinstance(value, Mapping) else [("", value)]


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    buckets, seen = [], 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        seen += count
        buckets.append((bound, float(seen)))
    return buckets


def _ratio(number: float, of: float) -> float:
    return number / of if of else 0.0


METRICS = (
    Metric(
        "mlxcel_requests_total", "counter",
        "requests that are over: `stop`, `length`, `cancelled` (the client left), `failed`, `refused`, "
        "`handed_over` (they go on at another node)",
        lambda n: {str(outcome): count for outcome, count in n.requests.items()}, label="outcome",
    ),
    Metric("mlxcel_prompt_tokens_total", "counter", "prompt tokens computed", lambda n: n.prompt_tokens),
    Metric(
        "mlxcel_recomputed_tokens_total", "counter",
        "tokens of prompts and answers computed once more, for rows that were preempted; not among the above",
        lambda n: n.recomputed_tokens,
    ),
    Metric(
        "mlxcel_prompt_tokens_cached_total", "counter", "prompt tokens reused, and so not computed",
        lambda n: n.prompt_cache.tokens_reused,
    ),
    Metric("mlxcel_completion_tokens_total", "counter", "new tokens", lambda n: n.completion_tokens),
    Metric("mlxcel_queue_depth", "gauge", "requests that wait for a slot", lambda n: n.queue_depth),
    Metric("mlxcel_active_rows", "gauge", "requests that have a slot", lambda n: n.active_rows),
    Metric(
        "mlxcel_decode_steps_total", "counter", "steps that gave rows their next token",
        lambda n: n.decode_steps,
    ),
    Metric(
        "mlxcel_lookahead_steps_total", "counter", "those of them that began before the last was read",
        lambda n: n.lookahead_steps,
    ),
    Metric(
        "mlxcel_prefill_pieces_total", "counter", "pieces of prompts that were run",
        lambda n: n.prefill_pieces,
    ),
    Metric(
        "mlxcel_prefill_grants_total", "counter", "steps granted to prompts, each for one piece or several",
        lambda n: n.prefill_grants,
    ),
    Metric(
        "mlxcel_preemptions_total", "counter", "rows that gave their place away and run again later",
        lambda n: n.preemptions,
    ),
    Metric(
        "mlxcel_kv_bytes", "gauge", "bytes of what live rows keep in the model's layers",
        lambda n: n.kv_bytes,
    ),
    Metric(
        "mlxcel_kv_blocks", "gauge",
        "blocks of 16 tokens, where rows are paged: `held` by rows, `cached` for later ones alone, `free`",
        lambda n: n.kv_blocks, label="state",
    ),
    Metric(
        "mlxcel_attention_launches_total", "counter",
        "forwards by how rows are kept and attention ran over them: in one launch (`fused`), in a recorded step, "
        "row by row, or over keys laid side by side (`gathered`); `alone`: one call of the model for each row; "
        "`whole`: texts that an encoder sees whole",
        lambda n: n.launches, label="path",
    ),
    Metric(
        "mlxcel_prefix_cache_hits_total", "counter", "rows that began with what the prompt cache held",
        lambda n: n.prompt_cache.hits,
    ),
    Metric(
        "mlxcel_prefix_cache_misses_total", "counter", "rows that might have and found nothing",
        lambda n: n.prompt_cache.misses,
    ),
    Metric(
        "mlxcel_prefix_cache_tokens_reused_total", "counter", "tokens taken from the prompt cache",
        lambda n: n.prompt_cache.tokens_reused,
    ),
    Metric(
        "mlxcel_prefix_cache_evictions_total", "counter", "entries that made room in the prompt cache",
        lambda n: n.prompt_cache.evictions,
    ),
    Metric(
        "mlxcel_prefix_cache_off_plan_total", "counter",
        "adoptions that ended where the plan of a cold prompt would not have cut",
        lambda n: n.prompt_cache.off_plan,
    ),
    Metric(
        "mlxcel_prefix_cache_verify_checked_total", "counter",
        "hits that `--verify-cache` has computed again from the start",
        lambda n: n.prompt_cache.verify_checked,
    ),
    Metric(
        "mlxcel_prefix_cache_verify_different_total", "counter",
        "those of them that differed from what was adopted", lambda n: n.prompt_cache.verify_different,
    ),
    Metric(
        "mlxcel_prefix_cache_bytes", "gauge", "bytes that the prompt cache holds",
        lambda n: n.prompt_cache.num_bytes,
    ),
    Metric(
        "mlxcel_draft_rounds_total", "counter", "steps of a row that verified draft tokens",
        lambda n: n.drafts.rounds,
    ),
    Metric("mlxcel_draft_tokens_total", "counter", "draft tokens verified", lambda n: n.drafts.proposed),
    Metric(
        "mlxcel_draft_accepted_total", "counter", "those of them that were what the row drew",
        lambda n: n.drafts.accepted,
    ),
    Metric(
        "mlxcel_draft_accepted_mean", "gauge", "accepted draft tokens of a round, on average",
        lambda n: n.drafts.mean_accepted,
    ),
    Metric(
        "mlxcel_draft_pauses_total", "counter", "rows that went on without drafts, since these did not pay",
        lambda n: n.drafts.pauses,
    ),
    Metric(
        "mlxcel_ttft_seconds", "histogram", "from a request's arrival to its first token",
        lambda n: n.ttft_s,
    ),
    Metric(
        "mlxcel_inter_token_seconds", "histogram", "between two tokens of a request",
        lambda n: n.inter_token_s,
    ),
    Metric(
        "mlxcel_queue_wait_seconds", "histogram", "from a request's arrival to its start",
        lambda n: n.queue_wait_s,
    ),
    Metric(
        "mlxcel_e2e_seconds", "histogram", "from a request's arrival to its end, however it ends",
        lambda n: n.e2e_s,
    ),
    Metric("llamacpp:prompt_tokens_total", "counter", "prompt tokens computed", lambda n: n.prompt_tokens),
    Metric(
        "llamacpp:prompt_tokens_cached_total", "counter", "prompt tokens reused, and so not computed",
        lambda n: n.prompt_cache.tokens_reused,
    ),
    Metric(
        "llamacpp:prompt_seconds_total", "counter", "from requests' start to their first token",
        lambda n: n.prompt_s,
    ),
    Metric("llamacpp:tokens_predicted_total", "counter", "new tokens", lambda n: n.completion_tokens),
    Metric(
        "llamacpp:tokens_predicted_seconds_total", "counter", "from requests' first token to their last",
        lambda n: n.inter_token_s.total,
    ),
    Metric("llamacpp:n_decode_total", "counter", "forwards of the model", lambda n: n.forwards),
    Metric(
        "llamacpp:n_tokens_max", "gauge", "prompt and answer of the longest request",
        lambda n: n.longest_tokens,
    ),
    Metric(
        "llamacpp:n_busy_slots_per_decode", "gauge", "rows in a forward, on average",
        lambda n: _ratio(n.rows_run, n.forwards),
    ),
    Metric(
        "llamacpp:prompt_tokens_seconds", "gauge", "prompt tokens a second, on average",
        lambda n: _ratio(n.prompt_tokens, n.prompt_s),
    ),
    Metric(
        "llamacpp:predicted_tokens_seconds", "gauge", "new tokens a second of one request, on average",
        lambda n: _ratio(n.inter_token_s.num_observed, n.inter_token_s.total),
    ),
    Metric("llamacpp:requests_processing", "gauge", "requests that have a slot", lambda n: n.active_rows),
    Metric("llamacpp:requests_deferred", "gauge", "requests that wait for a slot", lambda n: n.queue_depth),
)  # fmt: skip


# Of a process that is one of several.
NODE_METRICS = (
    ("mlxcel_node_refused_total", "frames and connections that were not taken, by why", "reason", "refused"),
    ("mlxcel_node_state_bytes_total", "bytes of rows' states `sent` to others and `fetched` from them", "way",
     "state_bytes"),
    ("mlxcel_node_states_total",
     "rows' states: `left` to be fetched, `fetched`, `recomputed` since they could not be, `expired` unfetched",
     "outcome", "states"),
)  # fmt: skip


# Of a server with several models, each of which is a value of the label `model`.
MODEL_METRICS: tuple[tuple[str, Literal["counter", "gauge"], str, Callable[[Place], float]], ...] = (
    ("mlxcel_model_loaded", "gauge", "whether the model is loaded", lambda p: p.state == "loaded"),
    ("mlxcel_model_loads_total", "counter", "how often it was loaded", lambda p: p.num_loads),
    ("mlxcel_model_bytes", "gauge", "bytes that it may take, rows and prompt cache included; 0: not there",
     lambda p: p.claim_bytes),
    ("mlxcel_model_requests", "gauge", "requests that keep it loaded", lambda p: p.num_leases),
)  # fmt: skip


class Exposition(Collector):
    """Writes the numbers that `read` gives of each model, as they are when it is asked, where the `places` of
    several models are, and a node's `counts`, if it is one.
    """

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(
        self,
        read: Callable[[], Mapping[str, Numbers]],
        counts: Callable[[], Counts] | None = None,
        places: Sequence[Place] = (),
    ) -> None:
        self._read = read
        self._counts = counts
        self._places = places
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Family]:
        of_models = self._read()
        for metric in METRICS:
            yield metric.family(of_models)
        for name, kind, said, value in MODEL_METRICS if self._places else ():
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(
                name, said, labels=["model"]
            )
            for place in self._places:
                family.add_metric([place.name], value(place))
            yield family
        counts = None if self._counts is None else self._counts()
        for name, said, label, field in NODE_METRICS if counts else ():
            family = CounterMetricFamily(name, said, labels=[label])
            for key, count in getattr(counts, field).items():
                family.add_metric([key], count)
            yield family

    def write(self) -> bytes:
        """The metrics as they are now. (The library's other formats rename what has a colon in it.)"""
        return generate_latest(self._registry)
