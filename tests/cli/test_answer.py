"""What is said of an answer once it is whole."""

from mlxcel_cli.answer import Answer, context, stats, taken
from mlxcel_cli.pieces import End


def test_cached_tokens_are_told_and_the_rate_is_that_of_the_others():
    timings = {"prompt_n": 4, "cache_n": 96, "prompt_per_second": 40.0}
    shown = Answer(End("stop", {"prompt_tokens": 100, "completion_tokens": 1}, timings), 0.1)
    assert (
        stats(shown)
        == "prompt: 100 tokens, 96 of them cached, 40.0 tokens/s | new: 1 token | first token after 0.10 s"
    )


def test_what_was_drafted_is_told():
    timings = {"draft_kind": "prompt-lookup", "draft_rounds": 4, "draft_n": 20, "draft_n_accepted": 9}
    timings |= {"draft_mean_accepted": 2.25, "draft_pauses": 1}
    assert "| prompt-lookup: 9 of 20 draft tokens accepted, 2.2 in each of 4 steps, paused 1 time" in stats(
        Answer(End("stop", {}, timings), 0.1)
    )
    nothing = {"draft_kind": "prompt-lookup", "draft_rounds": 0, "draft_n": 0, "draft_n_accepted": 0}
    assert stats(Answer(End("stop", {}, nothing), 0.1)).endswith("| prompt-lookup: nothing drafted")


def test_the_numbers_are_the_same_wherever_they_are_told():
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
    shown = Answer(End("stop", usage, {"predicted_n": 4}), 0.1)
    assert stats(shown) == "prompt: 9 tokens, 3 of them cached | new: 5 tokens | first token after 0.10 s"
    assert taken(shown, 100) == "5 tokens | context 14 of 100 (14%) | 3 cached"
    assert context(shown, None) == "14 tokens"
    assert context(Answer(End("stop"), 0.1), 100) == ""
