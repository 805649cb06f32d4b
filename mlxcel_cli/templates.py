"""Prompts kept under a name: TOML files with a system prompt, a prompt with variables, a model and options.

`$input` stands for what is asked; other variables have values from the command line or from `defaults`, and `$$`
is a dollar. The idea is that of simonw/llm. It does not know how a prompt is answered.
"""

import difflib
import json
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import UserError
from mlxcel_cli import asked, toml
from mlxcel_cli.errors import WrongUsage

KEYS = {"system": str, "prompt": str, "model": str, "defaults": dict, "options": dict}
SUFFIX = ".toml"
INPUT = "input"
FORMS = "a name has no /, no control characters, and does not begin with a dot"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Template:
    """`asked` are fields of a request, as its options say."""

    name: str
    system: str | None = None
    prompt: str | None = None
    model: str | None = None
    defaults: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def takes_input(self) -> bool:
        """Whether `$input` stands in it."""
        return INPUT in self.variables()

    def filled(self, said: str | None, given: Mapping[str, str]) -> tuple[str | None, str | None]:
        """The system prompt and the prompt for the input `said`, which goes behind a prompt that has no `$input`.

        Raises UserError for a variable without a value, and a value without a variable.
        """
        known = self.variables()
        for name in given:
            if name not in known:
                raise UserError(f"template {self.name} has no ${name}", hint=_near(name, known))
        values = {**self.defaults, **given}
        values |= {} if said is None else {INPUT: said}
        if missing := [name for name in known if name not in values]:
            hint = "give it a prompt" if missing[0] == INPUT else f"--param {missing[0]}=TEXT"
            raise UserError(f"template {self.name} needs ${missing[0]}", hint=hint)
        system, prompt = (
            None if text is None else string.Template(text).substitute(values)
            for text in (self.system, self.prompt)
        )
        if said and not self.takes_input:
            prompt = f"{prompt}\n\n{said}" if prompt else said
        return system, prompt

    def variables(self) -> list[str]:
        """The names that stand in it behind a dollar. Raises UserError for a dollar before something else."""
        names: list[str] = []
        for text in (self.system, self.prompt):
            if text is not None:
                if not string.Template(text).is_valid():
                    raise UserError(f"template {self.name}: a $ that begins no variable is written $$")
                names += string.Template(text).get_identifiers()
        return names


def read(name: str, folder: Path) -> Template:
    """The template called `name` in `folder`. Raises UserError, and WrongUsage for a name that is none."""
    path = _path(name, folder)
    try:
        said = toml.read(path, f"the template {path}")
    except FileNotFoundError:
        near = _near(name, names(folder))
        raise UserError(f"there is no template {path}", hint=near or f"templates lie in {folder}") from None
    for key, value in said.items():
        if key not in KEYS:
            raise UserError(f"unknown key {key} in {path}", hint=_near(key, KEYS) or f"keys are {', '.join(KEYS)}")
        if not isinstance(value, KEYS[key]):
            raise UserError(f"{key} in {path} must be a {'text' if KEYS[key] is str else 'table'}, not {value!r}")
    defaults, options = said.pop("defaults", {}), said.pop("options", {})
    for variable, value in defaults.items():
        if not isinstance(value, str | int | float):
            raise UserError(f"defaults.{variable} in {path} must be a text, not {value!r}")
    wanted: dict[str, Any] = {}
    for option, value in options.items():
        wanted = _with(wanted, option, value, path)
    return Template(name, defaults={v: str(value) for v, value in defaults.items()}, asked=wanted, **said)


def write(name: str, folder: Path, template: Template) -> Path:
    """Write `template` to a new file and return its path.

    Raises UserError where that cannot be or would not be read again, and WrongUsage for a name that is none.
    """
    path = _path(name, folder)
    template.variables()
    texts = {"model": template.model, "system": template.system, "prompt": template.prompt}
    lines = [f"{key} = {_quoted(text)}" for key, text in texts.items() if text is not None]
    options = {key: value for key in asked.NAMES if (value := template.asked.get(asked.NAMES[key])) is not None}
    for table, values in (("defaults", template.defaults), ("options", options)):
        if values:
            lines += ["", f"[{table}]", *(f"{key} = {_value(value)}" for key, value in values.items())]
    try:
        content = "\n".join([*lines, ""]).encode()
        if len(content) > toml.MOST_BYTES:
            raise ValueError("it is too large to be read again")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        raise UserError(f"{path} exists already", hint="edit it, or choose another name") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be written: {error}") from None
    return path


def names(folder: Path) -> list[str]:
    """The templates in `folder`."""
    return sorted(path.stem for path in folder.glob(f"[!.]*{SUFFIX}"))


def _path(name: str, folder: Path) -> Path:
    if not name or name.startswith(".") or not name.isprintable() or "/" in name:
        raise WrongUsage(f"{name!r} is no name of a template", hint=FORMS)
    return folder / f"{name}{SUFFIX}"


def _with(wanted: Mapping[str, Any], option: str, value: Any, path: Path) -> dict[str, Any]:
    """`wanted` with one option more, whose value is a number, a text, or texts for `stop`."""
    texts = value if isinstance(value, list) else [value]
    is_stop = asked.wire_name(option) == "stop"
    if isinstance(value, bool | dict) or not all(isinstance(text, str | int | float) for text in texts):
        raise UserError(f"options.{option} in {path} must be a number or a text, not {value!r}")
    if isinstance(value, list) and not (is_stop and value):
        raise UserError(f"options.{option} in {path} must be {'texts' if is_stop else 'one value'}, not {value!r}")
    if isinstance(value, list):
        parts = [asked.changed({}, option, json.dumps(text)) for text in texts]
        return {**wanted, **{key: [part[key][0] for part in parts] for key in parts[0]}}
    return asked.changed(wanted, option, json.dumps(value) if is_stop else str(value))


def _quoted(text: str) -> str:
    """A TOML string; one of several lines as it is written by hand."""
    if "\n" in text and not CONTROLS.search(text):
        body = text.replace("\\", "\\\\").replace('"""', '""\\"')
        return f'"""\n{body[:-1]}{body[-1:].replace(chr(34), chr(92) + chr(34))}"""'
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(part) for part in value)}]"
    return _quoted(value) if isinstance(value, str) else str(value)


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else ""
