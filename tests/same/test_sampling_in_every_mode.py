"""The whole sampler chain and logprobs in each of the three modes: a row in company is what it is alone."""

import dataclasses

import numpy as np
import pytest

from engine.direct import DirectEngine
from tests.engines import Watched
from tests.zoo import ZOO, zoo_loaded, zoo_model

SAMPLINGS = [
    {},
    {"temperature": 1.0, "typical_p": 0.7, "min_keep": 3},
    {"temperature": 1.0, "top_n_sigma": 1.0, "xtc_probability": 0.7, "xtc_threshold": 0.01},
    {"temperature": 0.9, "mirostat": 1, "mirostat_tau": 3.0},
    {"temperature": 0.9, "mirostat": 2, "mirostat_tau": 4.0, "dry_multiplier": 3.0},
    {"dry_multiplier": 3.0, "dry_allowed_length": 1, "dry_penalty_last_n": -1},
    {"temperature": 1.0, "dynatemp_range": 0.8, "dynatemp_exponent": 2.0, "top_k": 40},
]


@pytest.mark.parametrize("name", ["llama", "mamba2", "qwen3_next", "deepseek_v3", "gpt_bigcode"])
def test_company_changes_neither_tokens_nor_logprobs(name):
    watched = Watched(zoo_loaded(zoo_model(name)), mode=ZOO[name].mode)
    requests = [
        dataclasses.replace(
            watched.request(str(i), 5 + 3 * i, 12, seed=i, **options), top_logprobs=i if i % 3 else None
        )
        for i, options in enumerate(SAMPLINGS)
    ]
    alone = [DirectEngine(watched.engine).complete(request) for request in requests]
    told = {}
    finish = watched.engine._finish.finish

    def kept(row, *arguments):
        output = finish(row, *arguments)
        told.setdefault(row, []).append(output)
        return output

    watched.engine._finish.finish = kept
    rows = watched.together({1 + i // 2 + 4 * (i % 2): request for i, request in enumerate(requests)})
    together = {row.request.id: told[row] for row in rows}
    assert len(together) == len(requests)
    for request, outputs in zip(requests, alone, strict=True):
        assert [output.token for output in together[request.id]] == [output.token for output in outputs]
        one, other = (
            [logprob for output in lists for logprob in output.logprobs]
            for lists in (outputs, together[request.id])
        )
        assert len(one) == len(other) == (12 if request.top_logprobs is not None else 0)
        for first, second in zip(one, other, strict=True):
            assert len(first.top) == len(second.top) == request.top_logprobs
            assert np.isclose(first.logprob, second.logprob, atol=1e-4)
            assert [token for token, _ in first.top] == [token for token, _ in second.top]
