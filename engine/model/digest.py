"""What a checkpoint is by its contents, the same on every machine: for nodes that have to run the same model."""

import hashlib
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # of each file of weights; what is smaller is read whole
WEIGHTS, SAID = "*.safetensors", ("config.json", "adapter_config.json")


def digest_of(*checkpoints: Path) -> str:
    """A name for the weights and configurations of these folders.

    Of large files the length, the beginning with its table of tensors, and places all over are read. Raises
    OSError.
    """
    digest = hashlib.sha256()
    for checkpoint in checkpoints:
        for file in (checkpoint / name for name in SAID):
            if file.is_file():
                digest.update(file.read_bytes())
        for file in sorted(checkpoint.glob(WEIGHTS)):
            _take(digest, file)
    return digest.hexdigest()[:16]


def _take(digest: "hashlib._Hash", file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size}".encode())
    with file.open("rb") as content:
        if size <= SAMPLES * SAMPLE_BYTES:
            digest.update(content.read())
            return
        for number in range(SAMPLES):
            content.seek(number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(content.read(SAMPLE_BYTES))
