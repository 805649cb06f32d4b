"""`mlx.launch -n 2 -- mlxcel serve`: the answers of one process, and one end for all ranks."""

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.config import SERVE_SAMPLING, EngineConfig, Ranks
from engine.errors import ConfigError
from server.config import ServerConfig
from tests.launched import PROGRAM, Launched, client, ranked
from tests.serving import COMPLETIONS, PATIENCE_S, live
from tests.zoo import write_zoo

SHARED = {"max_tokens": 24, "ignore_eos": True, "logprobs": 1}
REQUESTS: list[dict[str, Any]] = [
    {**SHARED, "prompt": "the quick brown fox " * 20, "temperature": 0},
    {**SHARED, "prompt": "hi", "temperature": 0},
    {**SHARED, "prompt": "a seed", "temperature": 1, "seed": 3, "stream": True},
    {
        **SHARED,
        "prompt": "and penalties",
        "temperature": 0.8,
        "seed": 4,
        "repetition_penalty": 1.2,
        "stream": True,
    },
]


def answers(asking: httpx2.Client) -> list[tuple[list[str], list[float]]]:
    """Tokens and their logprobs of all requests, sent at once."""
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        return list(threads.map(lambda body: answer(asking, body), REQUESTS))


def answer(asking: httpx2.Client, body: dict[str, Any]) -> tuple[list[str], list[float]]:
    response = asking.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    if body.get("stream"):
        frames = [frame for frame in response.text.split("\n\n") if frame.startswith("data: {")]
        chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    else:
        chunks = [response.json()]
    told = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    tokens = [token for one in told for token in one["tokens"]]
    assert len(tokens) == SHARED["max_tokens"]
    return tokens, [logprob for one in told for logprob in one["token_logprobs"]]


def holds(checkpoint: Path, tmp_path: Path, ranks: Launched) -> None:
    """An assertion that the ranks give what one process gives."""
    alone = tmp_path / "alone.sock"
    with live(checkpoint, str(alone), portable=True, fallback_sampling=SERVE_SAMPLING), client(alone) as asking:
        expected = answers(asking)
    with ranks.client() as asking:
        given = answers(asking)
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(given, expected, strict=True):
        assert tokens == expected_tokens
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def test_tensor_parallel_llama_gives_the_same_and_ends_with_rank_0(tmp_path: Path) -> None:
    checkpoint = write_zoo(tmp_path / "llama", "llama")
    with ranked(checkpoint, tmp_path) as ranks:
        holds(checkpoint, tmp_path, ranks)
        assert "ranks: 2, tensor parallel (llama shards)" in ranks.said
        os.kill(ranks.pids[0], signal.SIGTERM)
        said = ranks.ended()
        assert "Finished server process" in said
        assert "rank 0 has ended, and so does this rank" in said
        assert "WARN" not in said, "none of them fails"
        assert ranks.launcher.wait(PATIENCE_S) == 0


def test_tensor_parallel_qwen3_gives_the_same_and_ends_where_a_rank_is_killed(tmp_path: Path) -> None:
    checkpoint = write_zoo(tmp_path / "qwen3", "qwen3")
    with ranked(checkpoint, tmp_path, "--split", "tensor") as ranks:
        holds(checkpoint, tmp_path, ranks)
        with (
            ranks.client() as asking,
            asking.stream(
                "POST", COMPLETIONS, json={**SHARED, "prompt": "hi", "max_tokens": 3000, "stream": True}
            ) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            os.kill(ranks.pids[1], signal.SIGKILL)
            assert any('"error"' in line and "the ranks cannot go on" in line for line in lines)
        said = ranks.ended()
        assert "the ranks cannot go on: rank 1 has ended" in said
        assert "Node with rank 0 exited with code 1" in said


def test_a_pipeline_gives_the_same_and_ends_with_its_launcher(tmp_path: Path) -> None:
    checkpoint = write_zoo(tmp_path / "qwen3_moe", "qwen3_moe")
    with ranked(checkpoint, tmp_path, "--split", "pipeline", "--parallel", "2") as ranks:
        holds(checkpoint, tmp_path, ranks)
        assert "ranks: 2, pipeline of layers (qwen3_moe pipelines)" in ranks.said
        ranks.launcher.terminate()
        ranks.launcher.communicate(timeout=PATIENCE_S)
        ranks.ended()


def test_what_cannot_be_split_is_refused_by_name_before_the_ranks_meet(tmp_path: Path) -> None:
    checkpoint = write_zoo(tmp_path / "llama", "llama")
    addresses = tmp_path / "hosts"
    addresses.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in (1, 2, 3)]))
    environment = {**os.environ, "MLX_RANK": "0", "MLX_HOSTFILE": str(addresses)}
    ended = subprocess.run([*PROGRAM, "serve", str(checkpoint)], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == (
        "error: llama cannot be split over 3 ranks (tensor: num_attention_heads is 4, num_key_value_heads is 2, "
        "which 3 does not divide; pipeline: its mlx-lm class does not pipeline)\n"
    )


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_a_node_is_one_process(role: str) -> None:
    engine = EngineConfig(model=Path("m"), ranks=Ranks(0, 2, "127.0.0.1"))
    with pytest.raises(ConfigError, match=f"node_role {role} is for one process"):
        ServerConfig(engine, model_id="m", node_role=role)
