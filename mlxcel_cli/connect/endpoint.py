"""What a client has to know of a running server, asked from the server itself."""

from dataclasses import dataclass

from engine.errors import UserError
from mlxcel_cli.address import shown
from mlxcel_cli.client import Client, sent_key
from mlxcel_cli.errors import Refused, ServerFault

KEY_VARIABLE = "MLXCEL_API_KEY"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`root` is the server's URL without `/v1`; `context_tokens` is None where it does not say.

    A key is never here: configurations name the variable that holds it.
    """

    root: str
    model: str
    context_tokens: int | None = None
    needs_key: bool = False

    @property
    def api(self) -> str:
        """What OpenAI's clients call the base URL."""
        return f"{self.root}/v1"

    @property
    def shell_key(self) -> str:
        """The key as a shell expands it; what is sent where none is needed means nothing."""
        return f"${KEY_VARIABLE}" if self.needs_key else "unused"


async def ask(address: str, *, key: str = "", model: str | None = None) -> Endpoint:
    """Ask the server at `address` for its model, with the key only where it wants one.

    Raises UserError for a socket's path or a model that the server has not, and what a server that does not answer
    raises.
    """
    if "@" in address.partition("://")[2].partition("/")[0]:
        raise UserError("an address with a name or password in it would be printed and written as it is")
    if address.endswith(".sock"):
        raise UserError(f"{address} is a socket, and clients want a URL", hint="serve with --host 127.0.0.1")
    key = sent_key(key, shown(address))
    needs_key = False
    try:
        entries = await _entries(address, "")
    except Refused as refusal:
        if refusal.status not in (401, 403):
            raise
        if not key:
            raise UserError(f"{address} asks for a key", hint=f"set {KEY_VARIABLE}, or give --api-key") from None
        needs_key = True
        entries = await _entries(address, key)
    names = [str(entry["id"]) for entry in entries]
    if not names:
        raise ServerFault(f"{address} lists no models")
    if not all(name.isprintable() for name in names):
        raise ServerFault(f"{address} lists a model whose name cannot be written: {names!r}")
    if model is not None and model not in names:
        raise UserError(f"{address} has no model {model}", hint=f"it has {', '.join(names)}")
    entry = entries[names.index(model or names[0])]
    root = address.rstrip("/").removesuffix("/v1")
    return Endpoint(root, str(entry["id"]), _context(entry), needs_key)


def _context(entry: dict[str, object]) -> int | None:
    """The context's length as vLLM or llama-server would say it."""
    meta = entry.get("meta")
    said = entry.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    return said if isinstance(said, int) and said > 0 else None


async def _entries(address: str, key: str) -> list[dict[str, object]]:
    async with Client.to(address, key=key) as client:
        return await client.described_models()
