"""The detokenizer: whole characters, the same text as decoding at once."""

import json

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from engine.model.load import load_tokenizer_of
from engine.text.tokens import REPLACEMENT, Detokenizer, tokens_of
from tests.tiny import VOCAB_SIZE, byte_tokenizer, write_checkpoint

TOKENIZER = byte_tokenizer()


def decode(ids):
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@given(prompt=st.text(max_size=5), answer=st.text(max_size=20))
def test_deltas_join_to_the_answer(prompt, answer):
    detokenizer = Detokenizer(decode, encode(prompt))
    deltas = [detokenizer.add(token) for token in encode(answer)]
    assert "".join(deltas) + detokenizer.finish() == answer.rstrip(REPLACEMENT)


def test_a_character_cut_by_the_end_is_dropped():
    detokenizer = Detokenizer(decode)
    deltas = [detokenizer.add(token) for token in encode("ok 👋")[:-1]]
    assert "".join(deltas) + detokenizer.finish() == "ok "


def test_a_character_begun_by_the_prompt_is_completed():
    first, *rest = encode("é")
    detokenizer = Detokenizer(decode, [*encode("caf"), first])
    assert "".join(detokenizer.add(token) for token in rest) == "é"


@pytest.mark.parametrize("prompt", ["", "a", "The capital is"])
def test_a_leading_space_is_kept(prompt):
    detokenizer = Detokenizer(decode, encode(prompt))
    assert "".join(detokenizer.add(token) for token in encode(" Paris")) == " Paris"


def test_bytes_that_never_become_text_are_not_held_for_good():
    detokenizer = Detokenizer(decode)
    invalid = encode("é")[1:]  # a continuation byte without its beginning
    shown = "".join(detokenizer.add(token) for token in invalid * 40 + encode("ok"))
    assert shown.strip(REPLACEMENT) == "ok"
    assert len(shown) == 42


def test_a_token_costs_the_same_at_any_length():
    seen = []
    detokenizer = Detokenizer(lambda ids: seen.append(len(ids)) or decode(ids))
    for token in encode("word " * 200):
        detokenizer.add(token)
    assert max(seen) <= 4


def test_a_text_longer_than_the_model_is_no_warning(tmp_path, caplog):
    folder = write_checkpoint(tmp_path)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**said, "model_max_length": 4}))
    transformers.logging.enable_propagation()
    try:
        tokens = tokens_of(load_tokenizer_of(folder, {}, trust_remote_code=False), VOCAB_SIZE)
        assert len(tokens.encode("a longer text", False)) == 13
    finally:
        transformers.logging.disable_propagation()
    assert caplog.records == []
