"""One table of settings: flag over environment over config file over default.

The table's rows are the fields of EngineConfig and ServerConfig: names, help texts, bounds and defaults live there
and nowhere else. This is the only module of the command line that reads the environment. It does not know what
the commands do with the values.
"""

import dataclasses
import difflib
import functools
import inspect
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from engine.config import EngineConfig, Ranks, Setting, setting_of
from engine.errors import ConfigError, UserError
from engine.size import Bound, Size
from mlxcel_cli import toml
from server.config import ServerConfig

PREFIX = "MLXCEL_"
BUILT_IN_MODEL = "smollm2-135m"
WORDS_FOR_BOOL = {"1": True, "true": True, "yes": True, "on": True}
WORDS_FOR_BOOL |= {"0": False, "false": False, "no": False, "off": False}
METAVARS = {
    int: "N",
    float: "X",
    str: "TEXT",
    tuple: "TEXT",
    Path: "FILE",
    Size: "BYTES",
    Bound: "auto|BYTES|none",
}
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
KINDS[tuple] = "a list of texts"
KINDS[Size] = "a number of bytes, or a size such as 2GiB"
KINDS[Bound] = "auto, none, a number of bytes, or a size such as 2GiB"
FOUND = {str: "a text", int: "a whole number", float: "a number", bool: "a truth", list: "a list", dict: "a table"}
WRITTEN = (Size, Bound)  # kinds that are read from a text of their own

# Variables of this project that are no setting: where things lie, and which model is meant.
OTHER_VARIABLES = ("MLXCEL_HOME", "MLXCEL_MODEL", "MLXCEL_CONFIG")


@dataclass(frozen=True, slots=True)
class Row:
    """One setting: its field's name, the class that holds it, its kind, its default, and what is said of it."""

    name: str
    owner: type
    kind: type
    default: Any
    said: Setting

    @property
    def flags(self) -> tuple[str, ...]:
        """Whatever is true, false or not given has a flag for each of the first two."""
        name = self.name.replace("_", "-")
        named = f"--{name}/--no-{name}" if self.kind is bool and self.default is None else f"--{name}"
        return (named, *self.said.aliases)

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


@functools.cache
def table() -> dict[str, Row]:
    """Every setting that has a flag, by its field's name."""
    rows: dict[str, Row] = {}
    for owner in (EngineConfig, ServerConfig):
        hints = get_type_hints(owner)
        for field in dataclasses.fields(owner):
            said = setting_of(field)
            if said is not None and said.flag:
                rows[field.name] = Row(field.name, owner, _kind(hints[field.name]), field.default, said)
    return rows


def _kind(hint: Any) -> type:
    """The type of a setting's value, without its None and without what a tuple holds, which is texts."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    kind: type = get_origin(hint) if get_origin(hint) is tuple else kinds[0] if kinds else hint
    return kind


def names_of(owner: type) -> tuple[str, ...]:
    """The settings that the dataclass `owner` holds, in the order of its fields."""
    return tuple(row.name for row in table().values() if row.owner is owner)


def takes(*names: str, request: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of these settings in place of its `**flags` parameter.

    The command receives None for a flag that was not given. `request` names those that become fields of a request:
    their defaults are the server's, so none is shown.
    """

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = [_parameter(table()[name], per_request=name in request) for name in (*request, *names)]
        command.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
        return command

    return wrap


def _parameter(row: Row, *, per_request: bool) -> inspect.Parameter:
    help_text = row.said.help.removeprefix("default ") if per_request else row.said.help
    if not (per_request or row.kind is bool or row.default in (None, "", ())):
        help_text += f" [default: {row.default}]"
    bounds = {"min": row.said.minimum, "max": row.said.maximum}
    metavar = "|".join(row.said.choices) or METAVARS.get(row.kind)
    parser = functools.partial(_written, row.kind) if row.kind in WRITTEN else None
    option = typer.Option(*row.flags, help=help_text, metavar=metavar, parser=parser, **bounds)
    kind = list[str] if row.kind is tuple else row.kind
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(row.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _written(kind: type, text: str) -> Any:
    """What the text of a flag is, with a fault said as that of a variable is."""
    try:
        return kind(text)
    except ValueError:
        raise typer.BadParameter(f"it must be {KINDS[kind]}, not {text!r}") from None


@dataclass(frozen=True, slots=True)
class Settings:
    """What flags, environment and file say, settled; what nobody says is absent."""

    values: Mapping[str, Any]
    model: str | None = None

    def engine(self, model: Path, **fixed: Any) -> EngineConfig:
        """An EngineConfig for the checkpoint at `model`; `fixed` is what the command itself decides."""
        return EngineConfig(model=model, **{**self._of(EngineConfig), **fixed})

    def server(self, model_id: str, engine: EngineConfig) -> ServerConfig:
        """A ServerConfig around `engine`, which answers to `model_id`."""
        return ServerConfig(engine=engine, model_id=model_id, **self._of(ServerConfig))

    @property
    def listens_at(self) -> tuple[str, int]:
        """Host, or a socket's path, and port where `serve` would listen."""
        host, port = (self.values.get(name, table()[name].default) for name in ("host", "port"))
        return host, port

    @property
    def address(self) -> str:
        """The URL, or a socket's path, by which a client on this machine reaches it there."""
        host, port = self.listens_at
        if host.endswith(".sock"):
            return host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _of(self, owner: type) -> dict[str, Any]:
        return {name: self.values[name] for name in names_of(owner) if name in self.values}


def settle(
    given: Mapping[str, Any],
    *,
    model: str | None = None,
    file: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """Settle the settings: `given` flags (None: not given) over `environment` over `file` (None: the usual one).

    Raises ConfigError naming the key or variable that is unknown or of the wrong kind.
    """
    named = file or environment.get(f"{PREFIX}CONFIG")
    in_file = _from_file(
        Path(named) if named else user_config_dir(environment) / "config.toml", required=bool(named)
    )
    model_in_file = in_file.pop("model", None)
    values = {**in_file, **_from_environment(environment), **_from_flags(given)}
    return Settings(values, model or environment.get(f"{PREFIX}MODEL") or model_in_file)


@dataclass(frozen=True, slots=True)
class Remark:
    """What is to be said of one key or variable; `is_error` where it keeps commands from running."""

    said: str
    is_error: bool = False
    hint: str = ""


def remarks(file: Path | None = None, environment: Mapping[str, str] = os.environ) -> Iterator[Remark]:
    """Of config file and environment: every key and variable that is unknown or wrong, not the first alone, and
    what is set in both.
    """
    named = file or environment.get(f"{PREFIX}CONFIG")
    path = Path(named) if named else user_config_dir(environment) / "config.toml"
    in_file: dict[str, Any] = {}
    try:
        in_file = _parsed_file(path, required=bool(named))
    except UserError as error:
        yield Remark(str(error), True, error.hint)
    for key, value in in_file.items():
        if (fault := _fault(_of_file, {key: value}, path)) is not None:
            yield fault
    keys = {key.replace("-", "_"): key for key in in_file}
    for variable in sorted(name for name in environment if name.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX).lower()
        if (fault := _fault(_from_environment, {variable: environment[variable]})) is not None:
            yield fault
        elif variable not in OTHER_VARIABLES and name not in table():
            yield Remark(f"{variable} means nothing to mlxcel", hint="docs/settings.md lists what does")
        elif name in keys and environment[variable]:
            yield Remark(f"{variable} is used in place of {keys[name]} in {path}")


def _fault(settle_one: Callable[..., Any], *given: Any) -> Remark | None:
    try:
        settle_one(*given)
    except UserError as error:
        return Remark(str(error), True, error.hint)
    return None


def proxies(environment: Mapping[str, str] = os.environ) -> tuple[dict[str, str], str]:
    """The proxy variables that are set, by name, and the hosts that need none."""
    names = [name for kind in ("http", "https", "all") for name in (f"{kind}_proxy", f"{kind}_proxy".upper())]
    found = {name: environment[name] for name in names if environment.get(name)}
    return found, environment.get("no_proxy") or environment.get("NO_PROXY") or ""


def _from_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given; a list, of a flag that may be repeated, as the texts between its commas."""
    said = {name: value for name, value in given.items() if value is not None}
    return {
        name: _texts(",".join(value), name, name) if isinstance(value, list) else value
        for name, value in said.items()
    }


def _texts(said: str, name: str, place: str) -> tuple[str, ...]:
    """The texts between commas. Raises ConfigError for an empty one, as an unset variable leaves it."""
    texts = tuple(text.strip() for text in said.split(","))
    if "" in texts:
        raise ConfigError(name, f"{place} has an empty part")
    return texts


def finite(given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given. Raises ConfigError for a number that is none (`nan`, `inf`)."""
    said = {name: value for name, value in given.items() if value is not None}
    for name, value in said.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(name, f"{name} must be a finite number, not {value}")
    return said


def value_of(name: str, text: str) -> Any:
    """The value that `text` is for the setting `name`. Raises ConfigError where its kind or bounds are others."""
    row = table()[name]
    value = _parsed(row.kind, text, name, name)
    row.said.check(name, value)
    return value


def launched(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """This process among those that `mlx.launch` has started together, or None where it is alone.

    Raises UserError where what MLX is told about the others cannot be read, or where MPI has started them.
    """
    if "MLX_RANK" not in environment:
        if environment.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
            raise UserError("ranks that MPI starts cannot be joined", hint="mlx.launch --backend ring starts some")
        return None
    try:
        hosts = _hosts_of_ranks(environment)
        num_ranks = int(environment.get("MLX_WORLD_SIZE", len(hosts)))
        ranks = Ranks(int(environment["MLX_RANK"]), num_ranks, hosts[0] if hosts else "127.0.0.1")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"what mlx.launch says of the ranks cannot be read: {error}") from None
    return ranks if num_ranks > 1 else None


def _hosts_of_ranks(environment: Mapping[str, str]) -> list[str]:
    """A host for each rank, as far as they are told: at least that of rank 0, where several are."""
    if "MLX_HOSTFILE" in environment:  # the ring's: addresses of each rank
        text = Path(environment["MLX_HOSTFILE"]).read_text("utf-8").strip()
        addresses = [of_rank[0] if isinstance(of_rank, list) else of_rank for of_rank in json.loads(text or "[]")]
        return [address.rpartition(":")[0].strip("[]") for address in addresses]
    if "MLX_IBV_DEVICES" in environment:  # jaccl's: the devices of each rank
        devices = json.loads(Path(environment["MLX_IBV_DEVICES"]).read_text("utf-8"))
        return [environment["MLX_JACCL_COORDINATOR"].rpartition(":")[0].strip("[]")] * len(devices)
    return [environment["NCCL_HOST_IP"]] if "NCCL_HOST_IP" in environment else []


def user_data_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where things that the person made are kept across sessions."""
    home = environment.get("XDG_DATA_HOME")
    if home:
        return Path(home) / "mlxcel"
    import platformdirs

    return Path(platformdirs.user_data_dir("mlxcel", appauthor=False))


def sessions_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where chats are kept."""
    return user_data_dir(environment) / "sessions"


def templates_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where templates are."""
    return user_config_dir(environment) / "templates"


def wants_colour(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the person allows colour and cursor movement at all (https://no-color.org, dumb terminals)."""
    return not environment.get("NO_COLOR") and not is_dumb(environment)


def is_dumb(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the terminal can only append text."""
    return environment.get("TERM", "") in ("dumb", "unknown")


def user_config_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the config file and the templates are."""
    return config_home(environment) / "mlxcel"


def config_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Where programs of this person keep their settings. Raises UserError where nothing says."""
    home = environment.get("XDG_CONFIG_HOME")
    try:
        return Path(home) if home else Path("~/.config").expanduser()
    except RuntimeError:
        raise UserError("there is no home folder", hint="HOME names one") from None


def _from_file(path: Path, *, required: bool) -> dict[str, Any]:
    return _of_file(_parsed_file(path, required=required), path)


def _parsed_file(path: Path, *, required: bool) -> dict[str, Any]:
    """The file's keys and values as they stand. Raises UserError where it cannot be read."""
    try:
        return toml.read(path, f"the config file {path}")
    except FileNotFoundError:
        if required:
            raise UserError(f"there is no config file {path}") from None
        return {}


def _of_file(said: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The settings that the keys of a config file are. Raises ConfigError."""
    values: dict[str, Any] = {}
    for key, value in said.items():
        name = key.replace("-", "_")
        if name == "model":
            values[name] = _typed(str, value, name, f"{key} in {path}")
        elif name in table():
            row, place = table()[name], f"{key} in {path}"
            values[name] = _typed(row.kind, value, name, place)
            row.said.check(name, values[name], place)
        else:
            near = difflib.get_close_matches(name, [*table(), "model"], n=1)
            hint = f"did you mean {near[0].replace('_', '-')}?" if near else "names are those of serve's flags"
            raise ConfigError(name, f"unknown setting {key} in {path}", hint=hint)
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    rows = {row.variable: row for row in table().values()}
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if variable in rows:
            row = rows[variable]
            if text:
                values[row.name] = _parsed(row.kind, text, row.name, variable)
                row.said.check(row.name, values[row.name], variable)
        elif variable.startswith(PREFIX) and variable not in OTHER_VARIABLES:
            near = difflib.get_close_matches(variable, [*rows, *OTHER_VARIABLES], n=1, cutoff=0.85)
            if near:
                name = variable.removeprefix(PREFIX).lower()
                raise ConfigError(name, f"unknown variable {variable}", hint=f"did you mean {near[0]}?")
    return values


def _parsed(kind: type, text: str, name: str, place: str) -> Any:
    if kind is tuple:
        return _texts(text, name, place)
    try:
        return WORDS_FOR_BOOL[text.strip().lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise ConfigError(name, f"{place} must be {KINDS[kind]}, not {text!r}") from None


def _typed(kind: type, value: Any, name: str, place: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    if kind in WRITTEN and type(value) in (int, str):
        return _parsed(kind, str(value), name, place)
    if kind is tuple and isinstance(value, list) and all(isinstance(text, str) for text in value):
        return tuple(value)
    if type(value) is not kind:
        raise ConfigError(name, f"{place} must be {KINDS[kind]}, not {_shown(value, name)}")
    return value


def _shown(value: Any, name: str) -> str:
    """A value of the wrong kind as an error names it: by its kind alone where it is a secret, or may hold some."""
    is_secret = name in table() and table()[name].said.secret
    if isinstance(value, list):
        return "a list" if all(isinstance(part, str) for part in value) else "a list that holds other things"
    return FOUND.get(type(value), "a date or time") if is_secret or isinstance(value, dict) else repr(value)
