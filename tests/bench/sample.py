"""What each stage of the sampler step costs, over a whole vocabulary: the step with it, in milliseconds.

The best of all repeats. The logits are there before; a step of the model is not part of it. Windows are full.

python -m tests.bench.sample [--vocab 49152] [--rows 1 8] [--repeats 50]
"""

import argparse
import time

import mlx.core as mx

from engine.kernels import native
from engine.request import Request, Row, Sampling
from engine.sample.chain import sample
from engine.sample.measure import measure
from engine.sample.state import draw_of

WINDOW = 64
STAGES = {
    "greedy": {"temperature": 0.0},
    "temperature alone": {},
    "logit bias": {"logit_bias": ((5, 1.0), (9, -1.0))},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1},
    "DRY": {"dry_multiplier": 0.8},
    "top-n-sigma": {"top_n_sigma": 1.5},
    "top-k": {"top_k": 40},
    "typical-p": {"typical_p": 0.9},
    "top-k and typical-p": {"top_k": 40, "typical_p": 0.9},
    "top-p": {"top_p": 0.95},
    "top-k, top-p and min-p": {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "XTC": {"xtc_probability": 1.0},
    "dynamic temperature": {"dynatemp_range": 0.5},
    "mirostat 1": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2},
}
LOGPROBS = {"logprobs": 0, "20 top_logprobs": 20}


def rows_of(sampling: Sampling, count: int) -> list[Row]:
    request = Request("r", tuple(i % 23 for i in range(WINDOW)), sampling)
    return [Row(request, 1000, i, None, output=[3, 4, 5]) for i in range(count)]


def milliseconds(logits: mx.array, rows: list[Row], wanted: int | None, repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        draws = [draw_of(row) for row in rows]
        tokens = sample(logits, draws)
        measures = measure(logits, tokens, draws, [wanted] * len(rows))
        mx.eval(tokens, measures.arrays)
        measures.read(tokens.tolist())
        taken.append((time.perf_counter() - started_s) * 1000)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=50)
    asked = parser.parse_args()
    print(f"kernels: {native.said(native.start())}; vocabulary {asked.vocab}")
    arms = {name: (Sampling(**{"temperature": 1.0, **options}), None) for name, options in STAGES.items()}
    arms |= {f"greedy, {name}": (Sampling(), count) for name, count in LOGPROBS.items()}
    print("| step | " + " | ".join(f"{count} row{'s' * (count > 1)}, ms" for count in asked.rows) + " |")
    print("| --- |" + " --- |" * len(asked.rows))
    for name, (sampling, wanted) in arms.items():
        cells = []
        for count in asked.rows:
            logits = mx.random.normal((count, asked.vocab), key=mx.random.key(1)) * 3
            mx.eval(logits)
            cells.append(f"{milliseconds(logits, rows_of(sampling, count), wanted, asked.repeats):.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
