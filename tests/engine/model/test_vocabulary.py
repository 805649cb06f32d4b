import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
from gguf import GGUFWriter
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.errors import UnsupportedModel
from engine.model.gguf import GGUFFile
from engine.model.vocabulary import GPT2_SPLIT, WORDS, write_tokenizer
from tests.engine.model.tiny_gguf import MERGES, TOKENS, TYPES, byte_level_tokenizer, weights, write_gguf

TEXTS = [
    "Hello world",
    "hello  hello\n\n\thello ",
    "In 2024, 1234567 people (3.14%) said: \"it's fine\" — don't they?",
    "def f(x):\n    return {'a': [x ** 2 for x in range(10)]}  # ok\n",
    "naïve café, Привет мир, 你好世界, مرحبا, नमस्ते",
    "👩‍👩‍👧‍👦 and 🇫🇷; é vs é; ½ Ⅷ ²",
    " \t \r\n  leading and trailing   ",
    "\x00\x7f zero-width\u200bspace",
    "",
]


def tokenizer_of(tmp_path: Path, tokenizer: Any = byte_level_tokenizer, vocab: int = len(TOKENS)) -> Any:
    """The tokenizer as transformers loads it from what was written."""
    metadata = GGUFFile(write_gguf(tmp_path / "m.gguf", weights(vocab=vocab), tokenizer=tokenizer)).metadata
    write_tokenizer(metadata, tmp_path, {"max_position_embeddings": 128})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)


def merged(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Byte-pair encoding as the paper has it: join the best-ranked neighbours until none is left."""
    pieces = list(word)
    while True:
        ranked = [(ranks.get(pair, len(ranks)), at) for at, pair in enumerate(itertools.pairwise(pieces))]
        rank, at = min(ranked, default=(len(ranks), 0))
        if rank == len(ranks):
            return pieces
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


def encoded(text: str, metadata: dict[str, Any]) -> list[int]:
    """SmolLM2's way, written out: numbers one by one, then GPT-2's words, then merges over bytes."""
    ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    letters = bytes_to_unicode()
    found = []
    for part in regex.findall(r"\p{N}|\P{N}+", text):
        for word in regex.findall(GPT2_SPLIT, part):
            spelled = "".join(letters[byte] for byte in word.encode())
            found += [ids[piece] for piece in merged(spelled, ranks)]
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_comes_back(tmp_path: Path, text: str) -> None:
    tokenizer = tokenizer_of(tmp_path)
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert tokenizer.decode(ids) == text
    metadata = {"tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.merges": MERGES}
    assert ids == encoded(text, metadata)


@pytest.mark.real
def test_the_real_vocabulary_encodes_as_written_out(real_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(real_checkpoint / "tokenizer.json"))
    model = json.loads((real_checkpoint / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in model["merges"]]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == encoded(text, metadata)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    user, line_end = tokens.index("user"), tokens.index("Ċ")
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>").ids == [1, user, line_end, 2]


def test_ids_are_those_of_the_gguf_and_chat_tokens_are_whole(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == list(TOKENS)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    ids = tokenizer.encode(text)
    assert (ids[0], ids[-2]) == (1, 2)
    assert TOKENS.index("hello") in ids
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id) == (2, 1, 0)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhello\n"


def test_digits_are_split_where_the_vocabulary_was_trained_so(tmp_path: Path) -> None:
    whole = lambda writer: byte_level_tokenizer(writer, "gpt-2")  # noqa: E731
    assert len(tokenizer_of(tmp_path).encode("12")) == 2
    assert tokenizer_of(tmp_path, whole).encode("12") == [TOKENS.index("12")]


@pytest.mark.parametrize("pre", sorted(WORDS))
def test_every_known_way_of_splitting_gives_text_back(tmp_path: Path, pre: str) -> None:
    tokenizer = tokenizer_of(tmp_path, lambda writer: byte_level_tokenizer(writer, pre))
    for text in TEXTS:
        composed = WORDS[pre].normal_form_c
        assert composed or tokenizer.decode(tokenizer.encode(text)) == text


def test_llama3_cuts_numbers_in_threes_and_qwen2_in_ones(tmp_path: Path) -> None:
    def cut(pre: str, text: str) -> list[str]:
        tokenizer = tokenizer_of(tmp_path, lambda writer: byte_level_tokenizer(writer, pre))
        return [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    assert cut("llama-bpe", "12345 I'LL") == ["123", "45", "ĠI", "'LL"]
    assert cut("qwen2", "123 I'LL") == ["1", "2", "3", "ĠI", "'LL"]


def test_a_beginning_token_is_added_when_the_file_says_so(tmp_path: Path) -> None:
    def begins(writer: GGUFWriter) -> None:
        byte_level_tokenizer(writer)
        del writer.kv_data[0]["tokenizer.ggml.add_bos_token"]
        writer.add_add_bos_token(True)

    tokenizer = tokenizer_of(tmp_path, begins)
    assert tokenizer.encode("hello") == [1, TOKENS.index("hello")]
    assert tokenizer.encode("hello", add_special_tokens=False) == [TOKENS.index("hello")]


@pytest.mark.parametrize(
    ("model", "pre", "said"), [("gpt2", "klingon", "klingon"), ("t5", "", "t5"), ("bert", "", "bert")]
)
def test_an_unknown_tokenizer_is_refused_by_name(tmp_path: Path, model: str, pre: str, said: str) -> None:
    def odd(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(list(TOKENS))
        writer.add_token_types(TYPES)

    with pytest.raises(UnsupportedModel, match=said):
        tokenizer_of(tmp_path, odd)


def test_a_vocabulary_that_names_a_token_twice_is_refused(tmp_path: Path) -> None:
    def twice(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "a"])

    with pytest.raises(UnsupportedModel, match="twice"):
        tokenizer_of(tmp_path, twice)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A small SentencePiece model of the kind that llama models use."""
    folder = tmp_path_factory.mktemp("pieces")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(TEXTS[:4]) + "\n" + Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "m"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


def test_sentence_pieces_are_encoded_as_sentencepiece_does(
    tmp_path: Path, pieces: sentencepiece.SentencePieceProcessor
) -> None:
    size = pieces.get_piece_size()

    def kind(index: int) -> int:
        if pieces.is_unknown(index):
            return 2
        return 3 if pieces.is_control(index) else 6 if pieces.is_byte(index) else 1

    def tokenizer(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([pieces.id_to_piece(index) for index in range(size)])
        writer.add_token_scores([pieces.get_score(index) for index in range(size)])
        writer.add_token_types([kind(index) for index in range(size)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    ours = tokenizer_of(tmp_path, tokenizer, size)
    for text in TEXTS[:-1]:
        text = text.replace("\x00", "")
        ids = ours.encode(text)
        assert ids == [1, *pieces.encode(text)], text
        assert ours.decode(ids, skip_special_tokens=True) == text
