"""What one server is, in one frozen dataclass: its engine, its address, its name for the model."""

from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

from engine.config import EngineConfig, check_bounds, setting
from engine.errors import ConfigError
from engine.size import AUTO, Bound
from server.address import is_local, is_loopback

LOG_LEVELS = ("debug", "info", "warning", "error")
OF_ONE_MODEL = ("draft_model", "adapter", "chat_template", "chat_template_args")
ROLES = ("none", "prefill", "decode", "router")
# What an engine does is said to whoever has one: these are the settings of it that a router acts on.
ROUTER_ENGINE = frozenset({
    "model", "n_predict", "max_queue_depth", "trust_remote_code", "chat_template", "chat_template_args", "temp",
    "top_k", "top_p", "min_p", "repeat_penalty", "seed", "loop_detection", "fallback_sampling",
})  # fmt: skip


def is_api_key(text: str) -> bool:
    """Whether `text` can be an API key: printable ASCII characters without spaces."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`model_id` is the name that clients send; `alias`, when given, replaces it in listings. `others` are further
    models, each with its name and its folder.
    """

    engine: EngineConfig
    model_id: str
    host: str = setting("127.0.0.1", "address to listen on, or a path ending in .sock for a unix socket")
    port: int = setting(8080, "port to listen on; 0: any free one", minimum=0, maximum=65535)
    alias: str = setting("", "the model's name for clients, in place of its own")
    api_key: tuple[str, ...] = setting(
        (), "a key that requests must carry; repeatable (other users of this machine see flags: prefer a file)",
        secret=True,
    )  # fmt: skip
    api_key_file: Path | None = setting(None, "a file of such keys, one a line")
    cors_origins: tuple[str, ...] = setting(
        (), "origins whose pages may use this server in a browser (https://chat.example); *: all"
    )
    insecure_no_auth: bool = setting(
        False, "allow listening beyond this machine without a key: anybody may use the model"
    )
    no_web: bool = setting(False, "do not serve the built-in page at /")
    stall_timeout: float = setting(
        60.0,
        "seconds without a token while requests run, after which /health/ready says 503; 0: never",
        minimum=0,
    )
    no_warmup_next_turn: bool = setting(
        False, "do not store the beginning of a conversation's next prompt while nothing else runs"
    )
    request_timeout: float = setting(
        0.0, "seconds after which a request that is not answered is ended with a 504; 0: never", minimum=0
    )
    models: tuple[str, ...] = setting(
        (), "more models, loaded when a request names them and unloaded when others need their place; all: those "
        "of the store"
    )  # fmt: skip
    models_max: int = setting(4, "of several models, the most that are loaded at once", minimum=1)
    models_memory: Bound = setting(
        AUTO, "most bytes that several models take, rows and prompt caches included; auto: what is free at the "
        "start; none: no bound"
    )  # fmt: skip
    models_ttl: float = setting(
        0.0, "seconds without a request after which one of several models is unloaded; 0: never", minimum=0
    )
    models_pin: tuple[str, ...] = setting(
        (), "those of several models that are loaded from the start and never unloaded"
    )
    adapter_dir: Path | None = setting(
        None, "a folder whose adapters clients may mount by /v1/adapters; not given: they may mount none"
    )
    log_level: str = setting("info", "the least that is logged", choices=LOG_LEVELS)
    log_format: str = setting("text", "how log lines are written", choices=("text", "json"))
    node_role: str = setting(
        "none",
        "what this process is among several: a prefill node computes prompts, a decode node goes on from them, a "
        "router has them run what clients send; none: all in one",
        choices=ROLES,
    )
    serving_bind: str = setting("", "HOST:PORT at which a prefill or decode node listens for others; port 0: any")
    prefill_peers: tuple[str, ...] = setting((), "HOST:PORT of the prefill nodes of a router")
    decode_peers: tuple[str, ...] = setting((), "HOST:PORT of the decode nodes of a router")
    node_key: Path | None = setting(
        None, "this node's key, made by `mlxcel cluster keygen`; needed beyond loopback"
    )
    node_peers: Path | None = setting(
        None, "a file of the nodes that may talk to this one: a public key a line, and its HOST:PORT behind it"
    )
    keep_alive_s: float = setting(
        10.0, "seconds of silence before a stream sends a comment", minimum=0.01, flag=False
    )

    others: tuple[tuple[str, Path], ...] = ()

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.others:
            self._check_models()
        for field in fields(self):
            if field.name.startswith("models_") and not self.models and getattr(self, field.name) != field.default:
                raise ConfigError(field.name, f"{field.name} is for several models", hint="--models names some")
        for origin in self.cors_origins:
            if origin != "*" and not _is_origin(origin):
                raise ConfigError(
                    "cors_origins", f"{origin!r} is no origin", hint="write scheme and host: https://chat.example"
                )
        for name in (self.served_name, self.model_id):
            if name in self.engine.mounts:
                raise ConfigError("adapters", f"adapters: {name} is the model's own name")
        self._check_role()
        local = self.is_unix_socket or self.is_on_loopback
        if not (local or self.needs_key or self.insecure_no_auth):
            raise ConfigError(
                "host",
                f"refusing to listen on {self.host}: anybody on the network could use the model",
                hint="set --api-key-file, listen on 127.0.0.1 or a unix socket, or accept the risk with "
                "--insecure-no-auth",
            )

    def _check_models(self) -> None:
        """Raise ConfigError for what cannot be with several models."""
        names = [self.served_name, *(name for name, _ in self.others)]
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise ConfigError("models", f"models: {twice} is named twice")
        for name in self.models_pin:
            if name not in names:
                raise ConfigError("models_pin", f"models_pin: {name} is none of {', '.join(names)}")
        num_left = self.models_max - len(self.models_pin)
        if num_left < 0 or (not num_left and len(self.models_pin) < len(names)):
            raise ConfigError(
                "models_pin",
                f"{len(self.models_pin)} models are pinned, so that of {self.models_max} none is left for others",
                hint="--models-max says how many may be loaded at once",
            )
        if self.engine.ranks is not None:
            raise ConfigError("models", "one model runs over several ranks, and no others beside it")
        for setting_name in OF_ONE_MODEL:
            if getattr(self.engine, setting_name):
                raise ConfigError(
                    setting_name,
                    f"{setting_name} is for one model, and several are served",
                    hint="leave it or --models out",
                )

    def _check_role(self) -> None:
        """Raise ConfigError for what does not belong to the role, or is missing for it."""
        role, is_node = self.node_role, self.node_role in ("prefill", "decode")
        if role != "none" and self.models:
            raise ConfigError("models", f"models: a {role} of several processes serves one model")
        if role != "none" and (self.engine.adapters or self.adapter_dir):
            name = "adapters" if self.engine.adapters else "adapter_dir"
            raise ConfigError(name, f"{name}: states of rows with an adapter cannot cross nodes ({role})")
        if role != "none" and self.engine.ranks is not None:
            raise ConfigError(
                "node_role", f"node_role {role} is for one process: states of rows cannot cross ranks"
            )
        of_role = {"serving_bind": is_node, "prefill_peers": role == "router", "decode_peers": role == "router"}
        for name, may in of_role.items():
            if getattr(self, name) and not may:
                raise ConfigError(name, f"{name} means nothing where node_role is {role}")
        if is_node and not self.serving_bind:
            raise ConfigError("serving_bind", f"node_role {role} needs serving_bind: where it listens")
        if role == "router" and not (self.prefill_peers or self.decode_peers):
            raise ConfigError("prefill_peers", "node_role router needs prefill_peers or decode_peers: its nodes")
        if role == "none" and (self.node_key or self.node_peers):
            raise ConfigError("node_key", "keys of nodes mean nothing where node_role is none")
        for name, address in self._addresses():
            try:
                stays_here = is_local(address)
            except ValueError as fault:
                raise ConfigError(name, f"{name}: {fault}") from fault
            if not (self.node_key and self.node_peers) and not stays_here:
                raise ConfigError(
                    name,
                    f"{name}: {address} is beyond this machine, and what goes there needs keys",
                    hint="set --node-key and --node-peers; mlxcel cluster keygen makes a key",
                )
        if role == "router":
            self._check_router()

    def _addresses(self) -> list[tuple[str, str]]:
        """Every address of a node, and the setting that it comes from."""
        peers = [("prefill_peers", address) for address in self.prefill_peers]
        peers += [("decode_peers", address) for address in self.decode_peers]
        addresses = [address for _, address in peers]
        for name, address in peers:
            if addresses.count(address) > 1:
                raise ConfigError(name, f"{name}: {address} is listed twice")
        return [*peers, *([("serving_bind", self.serving_bind)] if self.serving_bind else [])]

    def _check_router(self) -> None:
        for field in fields(self.engine):
            given = getattr(self.engine, field.name)
            if field.name not in ROUTER_ENGINE and given != field.default:
                raise ConfigError(
                    field.name,
                    f"{field.name} says what an engine does, and a router has none",
                    hint="say it to the nodes",
                )

    @property
    def is_unix_socket(self) -> bool:
        return self.host.endswith(".sock")

    @property
    def is_on_loopback(self) -> bool:
        return not self.is_unix_socket and is_loopback(self.host)

    @property
    def needs_key(self) -> bool:
        """Whether requests carry an API key."""
        return bool(self.api_key or self.api_key_file)

    @property
    def served_name(self) -> str:
        """The model's id in listings and answers."""
        return self.alias or self.model_id


def _is_origin(text: str) -> bool:
    """Whether `text` is written as browsers send an origin: scheme, host and port, and nothing behind."""
    try:
        parts = urlsplit(text)
        return bool(parts.scheme and parts.hostname) and text == f"{parts.scheme}://{parts.netloc}".lower()
    except ValueError:
        return False
