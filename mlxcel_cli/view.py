"""How answers are shown: what becomes of reasoning, of Markdown, and of an answer's numbers.

Plain values with names that `/set` takes; who shows answers knows what they mean.
"""

import dataclasses
from dataclasses import dataclass

from engine.errors import ConfigError

SWITCH = ("on", "off")
VALUES = {"reasoning": ("show", "fold", "hide"), "markdown": SWITCH, "stats": SWITCH}


@dataclass(frozen=True, slots=True)
class View:
    """`reasoning` is shown, folded into one line or hidden; `markdown` is rendered, where stdout is a terminal
    that can; `stats` are an answer's numbers, in a line behind it.
    """

    reasoning: str = "hide"
    markdown: bool = False
    stats: bool = False


def said(view: View, name: str) -> str:
    """The value of one field, as it could be typed."""
    value = getattr(view, name)
    return value if isinstance(value, str) else SWITCH[not value]


def changed(view: View, name: str, text: str) -> View:
    """`view` with the field called `name` set to what `text` says. Raises ConfigError for anything else."""
    allowed = VALUES[name]
    if text not in allowed:
        raise ConfigError(name, f"{name} must be one of {', '.join(allowed)}, not {text!r}")
    return dataclasses.replace(view, **{name: text if allowed is not SWITCH else text == SWITCH[0]})
