"""How one client is told of a server: lines for a shell or a person, or content for its file. Plain data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from mlxcel_cli.connect.endpoint import Endpoint

Content = Mapping[str, Any] | Sequence[Any]


class Kind(StrEnum):
    """How a file is written."""

    JSON = "json"
    TOML = "toml"
    YAML = "yaml"


@dataclass(frozen=True, slots=True)
class File:
    """A client's usual file, and what has to be in it.

    `is_made`: it is written where it does not exist yet, and then has what is in `beginning` as well.
    """

    place: Callable[[], Path]
    kind: Kind
    content: Callable[[Endpoint], Content]
    is_made: bool = True
    beginning: Mapping[str, Any] = field(default_factory=dict)

    def whole(self, endpoint: Endpoint) -> Content:
        """What a file has that holds nothing else."""
        content = self.content(endpoint)
        return {**self.beginning, **content} if isinstance(content, Mapping) else content


@dataclass(frozen=True, slots=True)
class Recipe:
    """`name` is what is asked for, `docs` the client's own page on this. `lines` are commands, or what a person
    does; `instead` says why there is no file.
    """

    name: str
    title: str
    docs: str
    lines: Callable[[Endpoint], Sequence[str]]
    file: File | None = None
    instead: str = "it is told by its environment"
