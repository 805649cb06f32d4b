"""Content brought into a file that may hold other things, as text, so that comments and order stay.

A merged text is read again and must hold exactly what was there and what was brought. Where that cannot be reached
nothing is written; nor in TOML and YAML where another value stands there already.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.errors import UserError
from mlxcel_cli import toml
from mlxcel_cli.connect.recipe import Content, Kind

NAMES = ("name", "model_id")  # what tells one entry of a list from another
_INDENT = re.compile(r'^([ \t]+)"', re.MULTILINE)


class Unsafe(UserError):
    """The file cannot be changed without a risk to what it holds."""


def dump(kind: Kind, content: Content) -> str:
    """`content` as a file of its own."""
    match kind:
        case Kind.JSON:
            return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        case Kind.TOML:
            assert isinstance(content, Mapping), "a TOML file is a table"
            return _toml(content)
        case Kind.YAML:
            import yaml

            return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=False))


def merge(kind: Kind, text: str, content: Content) -> str:
    """`text` with `content` in it, in `text`'s own line ends; `text` itself where it is there already.

    Raises Unsafe.
    """
    lines = text.replace("\r\n", "\n")
    if lines == text or text.count("\n") != text.count("\r\n"):
        return _merged(kind, text, content)
    merged = _merged(kind, lines, content)
    return text if merged == lines else merged.replace("\n", "\r\n")


def _merged(kind: Kind, text: str, content: Content) -> str:
    old = _parse(kind, text)
    if old is None:
        merged = text + ("" if text.endswith("\n") or not text else "\n") + dump(kind, content)
        if _parse(kind, merged) != _parse(kind, dump(kind, content)):
            raise Unsafe("the file holds something that nothing can be added to")
        return merged
    wanted = _combined(old, content, replaces=kind is Kind.JSON)
    if wanted == old:
        return text
    match kind:
        case Kind.JSON:
            indent = _INDENT.search(text)
            merged = json.dumps(wanted, indent=indent[1] if indent else 2, ensure_ascii=False) + "\n"
        case Kind.TOML:
            merged = _toml_text(text, old, content)
        case Kind.YAML:
            merged = _yaml_text(text, old, content)
    if _parse(kind, merged) != wanted or not _keeps_numbers(kind, text, merged):
        raise Unsafe("the file is written in a way that cannot be added to")
    try:
        merged.encode()
    except UnicodeEncodeError:
        raise Unsafe("it holds half of a surrogate pair, which cannot be written as UTF-8") from None
    return merged


def _keeps_numbers(kind: Kind, before: str, after: str) -> bool:
    """Whether every number of a JSON file is written as it was: not all of them fit into a machine's."""
    if kind is not Kind.JSON:
        return True
    written: list[list[str]] = [[], []]
    for text, numbers in zip((before, after), written, strict=True):
        json.loads(text, parse_float=numbers.append, parse_constant=numbers.append)
    return all(number in written[1] for number in written[0])


def replaced(kind: Kind, text: str, content: Content) -> list[str]:
    """The places, as dotted names, whose values in `text` would give way to others."""
    return list(_differences(_parse(kind, text), content, ""))


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, Mapping):
        for key in new.keys() & old.keys():
            yield from _differences(old[key], new[key], f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, Sequence) and not isinstance(new, str):
        return  # entries are added
    elif old is not None and old != new:
        yield path or "all of it"


def _parse(kind: Kind, text: str) -> Any:
    """What `text` holds, None: nothing. Raises Unsafe."""
    try:
        match kind:
            case Kind.JSON:
                return json.loads(text, object_pairs_hook=_once) if text.strip() else None
            case Kind.TOML:
                return toml.parsed(text) or None
            case Kind.YAML:
                import yaml

                try:
                    return yaml.safe_load(text)
                except yaml.YAMLError as error:
                    raise ValueError(" ".join(str(error).split())) from None
    except (ValueError, RecursionError) as error:
        raise Unsafe(f"the file is not plain {kind.upper()}: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _combined(old: Any, new: Any, *, replaces: bool) -> Any:
    """What a file with `old` holds once `new` is in it: keys of both, and new entries of lists before old ones.

    `replaces`: what has the same name gives way; else it is refused, as text cannot be replaced with certainty.
    """
    if old == new:
        return old
    if isinstance(old, dict) and isinstance(new, Mapping):
        both = {k: _combined(old[k], v, replaces=replaces) if k in old else v for k, v in new.items()}
        return {k: both.get(k, v) for k, v in old.items()} | both
    if isinstance(old, list) and isinstance(new, Sequence) and not isinstance(new, str):
        added = [entry for entry in new if entry not in old]
        named = {_name(entry) for entry in added} - {None}
        if not replaces and any(_name(entry) in named for entry in old):
            raise Unsafe(f"it has another {', '.join(map(str, sorted(named, key=str)))} already")
        return [*added, *(entry for entry in old if _name(entry) not in named)]
    if replaces:
        return new
    raise Unsafe(f"it says {old!r} where {new!r} would go")


def _name(entry: Any) -> Any:
    return next((entry[key] for key in NAMES if key in entry), None) if isinstance(entry, Mapping) else None


def _toml_text(text: str, old: Any, content: Content) -> str:
    """Plain values go before everything, since they would belong to the last table behind it; tables go last."""
    assert isinstance(content, Mapping), "a TOML file is a table"
    new = {key: value for key, value in content.items() if key not in old}
    plain = {key: value for key, value in new.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in content.items() if isinstance(value, Mapping)}
    for key in tables.keys() & old.keys():
        tables[key] = {name: value for name, value in tables[key].items() if name not in old[key]}
    behind = "" if text.endswith("\n") or not text else "\n"
    return _toml(plain) + text + behind + ("\n" + _toml(tables) if any(tables.values()) else "")


def _toml(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """A table of texts, numbers, truths and tables."""
    plain = [f"{_key(k)} = {_toml_value(v)}\n" for k, v in table.items() if not isinstance(v, Mapping)]
    head = f"[{'.'.join(map(_key, path))}]\n" if path and plain else ""
    inner = [_toml(v, (*path, k)) for k, v in table.items() if isinstance(v, Mapping)]
    return "\n".join(part for part in (head + "".join(plain), *inner) if part)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _toml_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # texts, whole numbers and truths are written alike in both


def _yaml_text(text: str, old: Any, content: Content) -> str:
    """New keys and entries of the top level go last; new entries of a list below go first in it."""
    text += "" if text.endswith("\n") else "\n"
    if not isinstance(content, Mapping):
        return dump(Kind.YAML, [entry for entry in content if entry not in old]) + text
    for key, value in content.items():
        if key not in old:
            text += dump(Kind.YAML, {key: value})
        elif old[key] != value:
            text = _yaml_below(text, (key,), old[key], value)
    return text


def _yaml_below(text: str, path: tuple[str, ...], old: Any, new: Any) -> str:
    """`text` with the new entries of the list at `path`, or of lists below it. Raises Unsafe."""
    if isinstance(new, Mapping) and isinstance(old, dict):
        for key, value in new.items():
            if key in old and old[key] != value:
                text = _yaml_below(text, (*path, key), old[key], value)
        return text
    lines = text.splitlines(keepends=True)
    place = 0
    for key in path:
        head = re.compile(rf"\s*(['\"]?){re.escape(key)}\1\s*:\s*(#.*)?$")
        place = next((i + 1 for i in range(place, len(lines)) if head.match(lines[i])), len(lines))
    first = next((i for i in range(place, len(lines)) if lines[i].strip() and lines[i].lstrip()[0] != "#"), None)
    if first is None or not lines[first].lstrip().startswith("- "):
        raise Unsafe(f"{'.'.join(path)} is written in a way that cannot be added to")
    indent = lines[first][: -len(lines[first].lstrip())]
    added = dump(Kind.YAML, [entry for entry in new if entry not in old])
    lines[first:first] = [indent + line for line in added.splitlines(keepends=True)]
    return "".join(lines)
