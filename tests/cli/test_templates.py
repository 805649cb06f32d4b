"""Templates: read, filled, written, and refused by name where they say something else."""

import os

import pytest

from engine.errors import MlxcelError, UserError
from mlxcel_cli import templates, toml
from mlxcel_cli.errors import WrongUsage
from mlxcel_cli.templates import Template

FULL = '''
system = "You are a $role."
prompt = """
Review this, for $$5:

$input"""
model = "smollm2-135m"

[defaults]
role = "reviewer"

[options]
temp = 0.5
max-tokens = 100
stop = ["\\n\\n", "End"]
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "review.toml").write_text(FULL)
    return tmp_path


def test_a_template_is_read_and_filled(folder):
    template = templates.read("review", folder)
    assert template.model == "smollm2-135m"
    assert template.asked == {"temperature": 0.5, "max_tokens": 100, "stop": ["\n\n", "End"]}
    assert template.takes_input
    assert template.filled("x = 1", {}) == ("You are a reviewer.", "Review this, for $5:\n\nx = 1")
    assert template.filled("$role", {"role": "poet"}) == ("You are a poet.", "Review this, for $5:\n\n$role")


def test_input_goes_behind_a_prompt_that_has_no_place_for_it():
    assert Template("t", prompt="Say hi.").filled(None, {}) == (None, "Say hi.")
    assert Template("t", prompt="Say hi.").filled("To Ann.", {}) == (None, "Say hi.\n\nTo Ann.")
    assert Template("t", system="Be brief.").filled("Hi", {}) == ("Be brief.", "Hi")
    assert Template("").filled("Hi $5", {}) == (None, "Hi $5")


@pytest.mark.parametrize(
    ("said", "given", "error", "hint"),
    [
        (None, {}, "template t needs $input", "give it a prompt"),
        ("x", {}, "template t needs $role", "--param role=TEXT"),
        ("x", {"role": "a", "rule": "b"}, "template t has no $rule", "did you mean role?"),
    ],
)
def test_variables_without_values_and_values_without_variables(said, given, error, hint):
    with pytest.raises(UserError) as raised:
        Template("t", prompt="$input $role").filled(said, given)
    assert (str(raised.value), raised.value.hint) == (error, hint)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("promt = 'x'", "unknown key promt in "),
        ("prompt = 1", "prompt in .* must be a text, not 1"),
        ("options = 1", "options in .* must be a table, not 1"),
        ("[options]\ntempp = 1", "unknown setting tempp"),
        ("[options]\ntemp = 'hot'", "temp must be a number, not 'hot'"),
        ("[options]\ntemp = true", "options.temp in .* must be a number or a text, not True"),
        ("[options]\nstop = ['']", "stop: an empty text"),
        ("[defaults]\nx = []", "defaults.x in .* must be a text"),
        ("prompt = ", "is not TOML"),
        ("\x00", "is not TOML"),
    ],
)
def test_a_file_that_says_something_else_is_refused(text, error, tmp_path):
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(MlxcelError, match=error):
        templates.read("t", tmp_path)


def test_a_dollar_that_is_no_variable_is_refused():
    with pytest.raises(UserError, match=r"a \$ that begins no variable is written \$\$"):
        Template("t", prompt="It costs $5").filled("x", {})


@pytest.mark.parametrize("texts", [{"prompt": "$"}, {"prompt": "x", "system": "It costs $5"}], ids=str)
def test_a_dollar_that_is_no_variable_is_not_written(texts, tmp_path):
    with pytest.raises(UserError, match=r"template t: a \$ that begins no variable is written \$\$"):
        templates.write("t", tmp_path, Template("t", **texts))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "../e", "a/b", "/a", "a\n", "a\x1b[1m", "\x85", "\udcff"]
)
def test_a_name_is_a_name(name, folder):
    with pytest.raises(WrongUsage, match="no name of a template"):
        templates.read(name, folder / "deep")
    with pytest.raises(WrongUsage, match="no name of a template"):
        templates.write(name, folder / "deep", Template(name, prompt="x"))
    assert [path.name for path in folder.iterdir()] == ["review.toml"]


def test_a_name_may_have_spaces_dots_and_letters_of_any_script(tmp_path):
    for name in ("code review", "v1.2", "übung", "名前", "a.toml"):
        templates.write(name, tmp_path, Template(name, prompt="x"))
        assert templates.read(name, tmp_path).prompt == "x"


def test_a_pipe_is_no_template_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "t.toml")
    with pytest.raises(UserError, match=r"the template .*t\.toml is no file that ends"):
        templates.read("t", tmp_path)


def test_a_template_that_is_not_there_names_the_nearest(folder):
    with pytest.raises(UserError, match="there is no template") as raised:
        templates.read("reviw", folder)
    assert raised.value.hint == "did you mean review?"
    with pytest.raises(UserError, match="there is no template") as raised:
        templates.read("xyz", folder)
    assert raised.value.hint == f"templates lie in {folder}"


@pytest.mark.parametrize(
    "text",
    [
        "one line",
        'two\nlines "quoted"',
        'ends with a quote\n"',
        '"""\n',
        "\n",
        "back\\slash\n\\",
        "\x00\x7f\n",
        "é\n\U0001f600",
    ],
)
def test_what_is_written_is_read(text, tmp_path):
    asked = {"temperature": 0.5, "stop": ["\n", 'a"'], "seed": 3}
    template = Template("t", system=text, prompt=text, model="m", defaults={"x": text}, asked=asked)
    assert templates.write("t", tmp_path / "deep", template) == tmp_path / "deep" / "t.toml"
    assert templates.read("t", tmp_path / "deep") == template


def test_nothing_is_overwritten(folder):
    with pytest.raises(UserError, match="exists already"):
        templates.write("review", folder, Template("review", prompt="x"))
    assert (folder / "review.toml").read_text() == FULL


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("temp = [0.5]", "options.temp in {} must be one value, not [0.5]"),
        ("temp = []", "options.temp in {} must be one value, not []"),
        ("max_tokens = [5]", "options.max_tokens in {} must be one value, not [5]"),
        ("stop = []", "options.stop in {} must be texts, not []"),
        ("stop = [[]]", "options.stop in {} must be a number or a text, not [[]]"),
    ],
)
def test_a_list_is_for_stop_alone(option, error, tmp_path):
    (tmp_path / "t.toml").write_text(f"[options]\n{option}\n")
    with pytest.raises(UserError) as raised:
        templates.read("t", tmp_path)
    assert str(raised.value) == error.format(tmp_path / "t.toml")


def test_what_is_too_large_to_be_read_again_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(toml, "MOST_BYTES", 20)
    with pytest.raises(UserError, match="it is too large to be read again"):
        templates.write("t", tmp_path, Template("t", prompt="one of more bytes"))
    assert list(tmp_path.iterdir()) == []
