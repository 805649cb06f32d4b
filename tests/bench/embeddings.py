"""Texts embedded by `mlxcel serve`, one request for each in turn, and all of them in one request.

    python -m tests.bench.embeddings [MODEL] [--texts 64] [--words 24] [--repeats 3] [--parallel 4]

Both arms on one server, in turn; medians of the repeats. The vectors of both are held against each other.
"""

import argparse
import statistics
import time

import httpx2

from engine.model.pull import ensure
from tests.bench.serve import WORDS, running

EMBEDDINGS = "/v1/embeddings"


def texts(count: int, num_words: int, salt: int) -> list[str]:
    """Texts of half as many words to half as many more."""
    lengths = [max(1, num_words // 2 + (7 * i) % (num_words + 1)) for i in range(count)]
    return [
        f"{salt} {i}: " + " ".join(WORDS[(5 * i + 3 * k + salt) % len(WORDS)] for k in range(length))
        for i, length in enumerate(lengths)
    ]


def embedded(client: httpx2.Client, asked: str | list[str]) -> tuple[float, int, list[list[float]]]:
    """Seconds, tokens, and vectors."""
    begun_s = time.perf_counter()
    answer = client.post(EMBEDDINGS, json={"input": asked}).raise_for_status().json()
    seconds = time.perf_counter() - begun_s
    return seconds, answer["usage"]["prompt_tokens"], [entry["embedding"] for entry in answer["data"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--words", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=4)
    asked = parser.parse_args()
    rates: dict[str, list[float]] = {"one by one": [], "in one request": []}
    flags = ("--max-batch-prefill", str(asked.parallel))
    num_tokens, same = 0, True
    first = {"input": texts(1, asked.words, 99)}
    with (
        running("mlxcel", ensure(asked.model), asked.parallel, *flags, path=EMBEDDINGS, first=first) as address,
        httpx2.Client(base_url=address, timeout=None) as client,
    ):
        for repeat in range(asked.repeats):
            said = texts(asked.texts, asked.words, repeat)
            single = [embedded(client, text) for text in said]
            seconds, num_tokens, vectors = embedded(client, said)
            rates["one by one"].append(num_tokens / sum(one for one, _, _ in single))
            rates["in one request"].append(num_tokens / seconds)
            same = same and vectors == [vector for _, _, [vector] in single]
    print(f"{asked.texts} texts, {num_tokens} tokens; vectors {'equal' if same else 'DIFFER'}")
    print(f"{'':16}{'tokens/s':>10}{'texts/s':>10}")
    for name, measured in rates.items():
        rate = statistics.median(measured)
        print(f"{name:16}{rate:10.0f}{rate * asked.texts / num_tokens:10.1f}")


if __name__ == "__main__":
    main()
