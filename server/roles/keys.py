"""Who may talk to whom: a node's own pair of CURVE keys, and the public keys of its peers.

A key file has a line `public HEX` and a line `secret HEX`. A file of peers has a public key a line and, behind it,
the address at which its owner listens, if anybody here connects to it; `#` begins a comment.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from engine.errors import ConfigError, UserError

KEY_BYTES = 32
HINT = "mlxcel cluster keygen FILE makes a key"


@dataclass(frozen=True, slots=True)
class Pair:
    """A node's keys, as ZeroMQ takes them."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class Keys:
    """What a node knows of keys: its own, those that may talk to it, and whose is at which address."""

    own: Pair
    allowed: frozenset[bytes]
    by_address: dict[str, bytes]

    def of(self, address: str) -> bytes:
        """The public key of the node that listens at `address`. Raises UserError."""
        if address not in self.by_address:
            raise UserError(
                f"there is no key for the node at {address}",
                hint="--node-peers names a file with a line `PUBLIC-KEY HOST:PORT` for each",
            )
        return self.by_address[address]


def keygen(file: Path) -> str:
    """Write a new pair to `file`, which only its owner may read; the public key. Raises UserError."""
    public, secret = (z85.decode(key).hex() for key in zmq.curve_keypair())
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as fault:
        raise UserError(f"{file} is there already, and a key is not replaced") from fault
    except OSError as fault:
        raise UserError(f"{file} cannot be written: {fault.strerror or fault}") from fault
    with os.fdopen(descriptor, "w") as out:
        out.write(f"public {public}\nsecret {secret}\n")
    return public


def read_keys(own: Path | None, peers: Path | None) -> Keys | None:
    """What two files say, or None where neither is given. Raises ConfigError."""
    if own is None and peers is None:
        return None
    if own is None or peers is None:
        missing, other = ("node_key", "node_peers") if own is None else ("node_peers", "node_key")
        raise ConfigError(missing, f"{other} needs {missing}: one's own key, and those of the others", hint=HINT)
    allowed: set[bytes] = set()
    by_address: dict[str, bytes] = {}
    for line in _lines("node_peers", peers):
        key, *address = line.split()
        allowed.add(_key("node_peers", peers, key))
        for place in address:
            by_address[place] = _key("node_peers", peers, key)
    return Keys(_pair(own), frozenset(allowed), by_address)


def _pair(file: Path) -> Pair:
    said = dict(line.partition(" ")[::2] for line in _lines("node_key", file))
    if not {"public", "secret"} <= said.keys():
        raise ConfigError("node_key", f"{file} is no key: it has no lines `public` and `secret`", hint=HINT)
    if os.name == "posix" and file.stat().st_mode & 0o077:
        raise ConfigError("node_key", f"others may read the secret key {file}", hint=f"chmod 600 {file}")
    return Pair(_key("node_key", file, said["public"]), _key("node_key", file, said["secret"]))


def _lines(setting: str, file: Path) -> list[str]:
    try:
        lines = [line.partition("#")[0].strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(setting, f"{file} cannot be read: {fault}") from fault
    return [line for line in lines if line]


def _key(setting: str, file: Path, text: str) -> bytes:
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(setting, f"{file}: {text[:20]!r} is no key of {2 * KEY_BYTES} hexadecimal digits")
    return z85.encode(key)
