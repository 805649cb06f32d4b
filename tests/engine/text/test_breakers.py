"""The bytes of tokens, and the tokens of sequence breakers, on byte-level and SentencePiece vocabularies."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.text.breakers import SequenceBreakers
from engine.text.spelling import spelling_of
from engine.text.tokens import tokens_of
from tests.tiny import END_OF_TURN, VOCAB_SIZE, byte_tokenizer

PIECES = ["<0x0A>", "\u2581a", "b", "\u2581", "a\u2581b", "<0xC3>", "é"]


@pytest.fixture
def byte_level():
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|im_end|>")


def sentencepiece():
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_byte_level_tokens_are_their_bytes(byte_level):
    spell = spelling_of(byte_level)
    text = "Line\n é \u20ac \U0001f600"
    assert b"".join(map(spell, byte_level.encode(text))) == text.encode()
    assert spell(END_OF_TURN) == b"<|im_end|>"
    assert spell(VOCAB_SIZE + 100) == b""


def test_sentencepiece_tokens_are_their_bytes():
    spell = spelling_of(sentencepiece())
    assert [spell(i) for i in range(len(PIECES))] == [b"\n", b" a", b"b", b" ", b"a b", b"\xc3", "é".encode()]


def test_tokens_know_their_spelling(byte_level):
    tokens = tokens_of(byte_level, VOCAB_SIZE)
    [newline] = tokens.encode("\n", False)
    assert tokens.spell(newline) == b"\n"
    assert tokens.breakers(("\n",)) == {newline: ((),)}


def test_a_breaker_begins_in_any_token_that_holds_or_begins_it():
    vocabulary = [b"a", b": ", b"x*", b"*", b"**", b"END", b"xE", b"ND!", b"D", b"N"]
    numbers = {"ND": [9, 8], "D": [8]}
    breakers = SequenceBreakers(len(vocabulary), vocabulary.__getitem__, lambda text: numbers[text])
    assert breakers.find((":",)) == {1: ((),)}
    assert breakers.find(("*",)) == {2: ((),), 3: ((),), 4: ((),)}
    assert breakers.find(("END",)) == {5: ((),), 6: ((9, 8),)}
    assert breakers.find(("END", "E")) == {5: ((),), 6: ((), (9, 8))}
    assert breakers.find(()) == {}


def test_a_breaker_that_no_token_writes_breaks_nothing():
    breakers = SequenceBreakers(2, [b"a", b"b"].__getitem__, lambda text: [])
    assert breakers.find(("\u20ac",)) == {}
