"""How answers are shown, as it is said and set."""

import pytest

from engine.errors import ConfigError
from mlxcel_cli import view
from mlxcel_cli.view import View


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in view.VALUES.items() for text in texts])
def test_what_is_set_is_said(name, text):
    assert view.said(view.changed(View(), name, text), name) == text


def test_anything_else_is_refused_with_what_there_is():
    with pytest.raises(ConfigError, match="reasoning must be one of show, fold, hide, not 'no'"):
        view.changed(View(), "reasoning", "no")
