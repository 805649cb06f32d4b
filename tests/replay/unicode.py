"""Texts whose characters are cut by tokens, and checkpoints whose tokenizers cut them."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tests.tiny import CONFIGS, SPECIALS, write_checkpoint

TEXTS = (
    "ďábelské 👋 承知しました 🏳️‍🌈 e\u0301",
    "🏳️‍🌈",
    "'\ufe0f",
    "e\u0301x",
    "👩‍👩‍👧‍👦👍🏽 ok",
    "\u200d\ufe0f\u0301",
    " leading,  double and trailing ",
    "नमस्ते\n\tעברית",
)
WORDS = ("▁", "e", "x", "ok", "▁👋", "\u0301", "\u200d", "か", "承知", "▁▁", "し")


def write_byte_fallback_checkpoint(folder: Path) -> Path:
    """A checkpoint with a tokenizer in the manner of SentencePiece: words, and bytes for what is no word."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {name: i for i, name in enumerate(names)}
    parts = [("▁", "▁"), ("o", "k"), ("▁", "👋"), ("承", "知")]
    for pair in parts[1:]:
        for part in pair:
            vocab.setdefault(part, len(vocab))
    merges = [pair for pair in parts if "".join(pair) in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    vocab_size = tokenizer.get_vocab_size()
    write_checkpoint(folder, "gemma3_text", vocab_size=vocab_size, eos_token_id=vocab_size - 1)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def tokens_in(folder: Path, text: str) -> list[int]:
    """Ids whose one-shot decode is `text`, as cut by the folder's tokenizer."""
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def end_of_turn(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    assert config.keys() >= CONFIGS["gemma3_text"].keys()
    return int(config["eos_token_id"])
