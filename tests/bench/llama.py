"""llama.cpp's arm of `tests.bench.decode`, run by a Python that has llama-cpp-python and nothing of this project.

Jobs on stdin, one JSON line each, {"prompt": N, "new": N}; answers on stdout, [prompt tokens/s, new tokens/s].
"""

import ctypes
import json
import os
import statistics
import sys
import time

import llama_cpp as llama

PIECE_TOKENS = 512


def main() -> None:
    file, num_threads = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(run(model, job["prompt"], job["new"], num_threads)), file=answers, flush=True)


def run(model: object, num_prompt: int, num_new: int, num_threads: int) -> tuple[float, float]:
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_batch = num_prompt + num_new + 8, PIECE_TOKENS
    settings.n_threads = settings.n_threads_batch = num_threads
    context = llama.llama_init_from_model(model, settings)
    tokens = (llama.llama_token * num_prompt)(*[(7 * i + 3) % 32000 for i in range(num_prompt)])
    started_s = time.perf_counter()
    for start in range(0, num_prompt, PIECE_TOKENS):
        piece = ctypes.cast(
            ctypes.byref(tokens, start * ctypes.sizeof(llama.llama_token)), ctypes.POINTER(llama.llama_token)
        )
        step(context, piece, min(PIECE_TOKENS, num_prompt - start))
    prompt_rate = num_prompt / (time.perf_counter() - started_s)
    token, times_s = (llama.llama_token * 1)(5), []
    for _ in range(num_new - 1):
        started_s = time.perf_counter()
        step(context, token, 1)
        times_s.append(time.perf_counter() - started_s)
    llama.llama_free(context)
    return prompt_rate, 1 / statistics.median(times_s)


def step(context: object, tokens: object, count: int) -> None:
    assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, count)) == 0
    llama.llama_get_logits_ith(context, -1)[0]


if __name__ == "__main__":
    main()
