"""What one server is, in one frozen dataclass: its engine, its address, its name for the model."""

from dataclasses import dataclass

from engine.config import EngineConfig, check_bounds, setting
from engine.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`model_id` is the name that clients send; `alias`, when given, replaces it in listings."""

    engine: EngineConfig
    model_id: str
    host: str = setting("127.0.0.1", "address to listen on, or a path ending in .sock for a unix socket")
    port: int = setting(8080, "port to listen on; 0: any free one", minimum=0, maximum=65535)
    alias: str = setting("", "the model's name for clients, in place of its own")
    insecure_no_auth: bool = setting(False, "allow listening beyond this machine, where anybody may use the model")
    stall_timeout: float = setting(
        60.0,
        "seconds without a token while requests run, after which /health/ready says 503; 0: never",
        minimum=0,
    )
    no_warmup_next_turn: bool = setting(
        False, "do not store the beginning of a conversation's next prompt while nothing else runs"
    )
    log_level: str = setting("info", "the least that is logged", choices=LOG_LEVELS)
    log_format: str = setting("text", "how log lines are written", choices=("text", "json"))
    keep_alive_s: float = setting(
        10.0, "seconds of silence before a stream sends a comment", minimum=0.01, flag=False
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if not (self.is_unix_socket or self.host in LOOPBACK or self.insecure_no_auth):
            raise ConfigError(
                "host",
                f"refusing to listen on {self.host}: anybody on the network could use the model",
                hint="listen on 127.0.0.1 or a unix socket, or accept the risk with --insecure-no-auth",
            )

    @property
    def is_unix_socket(self) -> bool:
        return self.host.endswith(".sock")

    @property
    def served_name(self) -> str:
        """The model's id in listings and answers."""
        return self.alias or self.model_id
