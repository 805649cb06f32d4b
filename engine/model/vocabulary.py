"""The tokenizer of a GGUF file, from its metadata to tokenizer.json and tokenizer_config.json.

Two families: byte-level BPE (`gpt2`), whose way to cut text into words is known by name only, and SentencePiece
BPE with byte fallback (`llama`), whose merges are rebuilt from the scores. Ids are those of the GGUF, one for one.
It knows metadata and tokenizers; no tensors, no MLX.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import UnsupportedModel

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPACE = "▁"

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class Words:
    """How a byte-level BPE cuts text before it merges."""

    split: str = GPT2_SPLIT
    single_digits: bool = False
    whole_words_first: bool = False
    normal_form_c: bool = False
    adds_bos: bool = False


LLAMA3_WORDS = Words(LLAMA3_SPLIT, whole_words_first=True, adds_bos=True)
WORDS = {
    "gpt-2": Words(),
    "default": Words(),
    "smollm": Words(single_digits=True),
    "starcoder": Words(single_digits=True),
    "refact": Words(single_digits=True),
    "llama-bpe": LLAMA3_WORDS,
    "llama3": LLAMA3_WORDS,
    "llama-v3": LLAMA3_WORDS,
    "smaug-bpe": LLAMA3_WORDS,
    "qwen2": Words(QWEN2_SPLIT, normal_form_c=True),
    "deepseek-r1-qwen": Words(QWEN2_SPLIT, normal_form_c=True),
}


def write_tokenizer(metadata: dict[str, Any], folder: Path, config: dict[str, Any]) -> None:
    """Write the tokenizer's two files into `folder`, and the ids of the special tokens into `config`.

    Raises UnsupportedModel naming the tokenizer model or the way of splitting that is not known.
    """
    model = metadata.get("tokenizer.ggml.model", "(none)")
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise UnsupportedModel("the vocabulary names a token twice, so its ids cannot be kept")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, ids)
    elif model == "llama":
        tokenizer, adds_bos = _sentence_piece(metadata, ids), True
    else:
        raise UnsupportedModel(f"the tokenizer model {model!r} is not imported; gpt2 and llama are")
    types = metadata.get("tokenizer.ggml.token_type", ())
    _mark(tokenizer, tokens, types)
    special = _special_tokens(metadata, tokens)
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids[bos])]
        )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **special,
    }
    if template := metadata.get("tokenizer.chat_template"):
        said["chat_template"] = template
    text = json.dumps(said, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    config.update(_special_ids(metadata, len(tokens)))


def _byte_level(metadata: dict[str, Any], ids: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether its kind puts a beginning-of-sequence token first."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    words = WORDS.get(name)
    if words is None:
        raise UnsupportedModel(
            f"the tokenizer splits text in the way called {name!r}, which is not known here; known are "
            f"{', '.join(sorted(WORDS))}"
        )
    cut = [merge.partition(" ") for merge in metadata.get("tokenizer.ggml.merges", ())]
    merges = [(left, right) for left, _, right in cut]
    tokenizer = Tokenizer(_bpe(ids, merges, ignore_merges=words.whole_words_first))
    if words.normal_form_c:
        tokenizer.normalizer = normalizers.NFC()
    if words.split == GPT2_SPLIT:
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        steps = [
            pre_tokenizers.Split(Regex(words.split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    if words.single_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, words.adds_bos


def _sentence_piece(metadata: dict[str, Any], ids: dict[str, int]) -> Tokenizer:
    """SentencePiece BPE with byte fallback: a space is written ▁, and an unknown character as its UTF-8 bytes."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(ids):
        raise UnsupportedModel("the SentencePiece vocabulary has no score for each token")
    types = metadata.get("tokenizer.ggml.token_type", [])
    unknown = next((token for token, index in ids.items() if index < len(types) and types[index] == UNKNOWN), None)
    model = _bpe(ids, _merges(ids, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if prefix else []), normalizers.Replace(" ", SPACE)]
    )
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _bpe(ids: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(ids, merges, **options)
    except Exception as error:
        # The library raises no narrower type when a merge names a token that is not there.
        raise UnsupportedModel(f"the vocabulary and its merges do not fit together: {error}") from error


def _merges(ids: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way two pieces make a third, the best-scored third first: the order SentencePiece joins them in."""
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, index in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[index], ids[left], ids[right], (left, right)))
    ranked.sort()
    return [pair for *_, pair in ranked]


def _mark(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Let control and user-defined tokens be found whole in any text; control tokens are special.

    All of a kind at once, because the library rebuilds its search for each call, and Gemma marks 6414 tokens.
    """
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        marked = [tokens[index] for index, given in enumerate(types) if given == kind]
        add([AddedToken(token, special=kind == CONTROL, normalized=False) for token in marked])


def _special_tokens(metadata: dict[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    found = {}
    for name, key in SPECIAL_TOKENS.items():
        index = metadata.get(f"tokenizer.ggml.{key}")
        if index is not None and 0 <= index < len(tokens):
            found[name] = tokens[index]
    return found


def _special_ids(metadata: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The ids as config.json and generation_config.json say them; every token that ends an answer is in `eos`."""

    def known(key: str) -> int | None:
        index = metadata.get(f"tokenizer.ggml.{key}")
        return index if index is not None and 0 <= index < num_tokens else None

    ends = list(dict.fromkeys(index for key in END_TOKENS if (index := known(key)) is not None))
    ids = {"bos_token_id": known("bos_token_id"), "pad_token_id": known("padding_token_id")}
    said: dict[str, Any] = {name: index for name, index in ids.items() if index is not None}
    if ends:
        said["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return said
