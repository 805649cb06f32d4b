"""Flag over environment over file over default, and unknown names are errors that name the nearest."""

import dataclasses
import inspect
from pathlib import Path

import pytest

from engine.config import EngineConfig, setting_of
from engine.errors import ConfigError, UserError
from engine.model.store import default_home
from engine.size import Bound
from mlxcel_cli import config
from server.config import ServerConfig


def settle(given=(), environment=(), file=None, **named):
    return config.settle(
        dict(given), environment={"XDG_CONFIG_HOME": "/nowhere", **dict(environment)}, file=file, **named
    )


@pytest.fixture
def homeless(monkeypatch):
    """A person of whom neither environment nor system knows a home."""
    for variable in ("HOME", "MLXCEL_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pathlib.os.path.expanduser", lambda path: path)


def test_without_a_home_the_error_is_a_line(homeless):
    with pytest.raises(UserError, match="there is no home folder") as settings:
        config.user_config_dir({})
    assert settings.value.hint == "HOME names one"
    with pytest.raises(UserError, match="there is no home folder") as models:
        default_home()
    assert models.value.hint.startswith("MLXCEL_HOME names")


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "settings.toml"
        path.write_text(text)
        return path

    return write


def test_flag_over_environment_over_file_over_default(write):
    file = write("port = 1\nctx-size = 2\nparallel = 3\n")
    settings = settle({"port": 11, "top_k": None}, {"MLXCEL_PORT": "12", "MLXCEL_CTX_SIZE": "13"}, file)
    server = settings.server("m", settings.engine(Path("m")))
    assert (server.port, server.engine.ctx_size, server.engine.parallel) == (11, 13, 3)
    assert server.host == "127.0.0.1"
    assert server.engine.top_k is None


def test_what_nobody_says_is_left_to_the_dataclass():
    assert settle().values == {}


def test_the_model_too(write):
    file = write('model = "in-file"')
    assert settle(file=file).model == "in-file"
    assert settle(file=file, environment={"MLXCEL_MODEL": "in-environment"}).model == "in-environment"
    assert settle(file=file, environment={"MLXCEL_MODEL": "e"}, model="flag").model == "flag"
    assert settle().model is None


def test_the_usual_file_may_be_missing_and_a_named_one_may_not(tmp_path):
    (tmp_path / "mlxcel").mkdir()
    (tmp_path / "mlxcel" / "config.toml").write_text("port = 7")
    assert config.settle({}, environment={"XDG_CONFIG_HOME": str(tmp_path)}).values == {"port": 7}
    with pytest.raises(UserError, match="no config file"):
        settle(file=tmp_path / "missing.toml")
    with pytest.raises(UserError, match="no config file"):
        settle(environment={"MLXCEL_CONFIG": str(tmp_path / "missing.toml")})


def test_an_unknown_key_names_the_nearest(write):
    with pytest.raises(ConfigError, match="unknown setting prot in") as raised:
        settle(file=write("prot = 1"))
    assert raised.value.hint == "did you mean port?"


def test_an_unknown_variable_that_is_close_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown variable MLXCEL_CTXSIZE") as raised:
        settle(environment={"MLXCEL_CTXSIZE": "1"})
    assert raised.value.hint == "did you mean MLXCEL_CTX_SIZE?"
    assert settle(environment={"MLXCEL_HOME": "/x", "MLXCEL_SOMETHING_ELSE": "1", "OTHER": "1"}).values == {}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"MLXCEL_PORT": "abc"}, "MLXCEL_PORT must be a whole number, not 'abc'"),
        ({"MLXCEL_TEMP": "hot"}, "MLXCEL_TEMP must be a number, not 'hot'"),
        (
            {"MLXCEL_KV_CACHE_BUDGET": "much"},
            "MLXCEL_KV_CACHE_BUDGET must be auto, none, a number of bytes, or a size such as 2GiB, not 'much'",
        ),
        ({"MLXCEL_NO_BATCH": "perhaps"}, "MLXCEL_NO_BATCH must be true or false, not 'perhaps'"),
    ],
)
def test_a_variable_of_the_wrong_kind(environment, message):
    with pytest.raises(ConfigError) as raised:
        settle(environment=environment)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "text", ["port = 'a'", "port = true", "port = 1.5", "no-batch = 1", "temp = '1'", "host = 1"]
)
def test_a_key_of_the_wrong_kind(write, text):
    with pytest.raises(ConfigError, match="must be"):
        settle(file=write(text))


def test_a_file_that_is_no_toml(write):
    with pytest.raises(UserError, match="is not TOML"):
        settle(file=write("port: 1"))


def test_kinds_are_read_from_texts():
    environment = {
        "MLXCEL_NO_BATCH": "Yes",
        "MLXCEL_TEMP": "0.5",
        "MLXCEL_CHAT_TEMPLATE": "a/b",
        "MLXCEL_ALIAS": "",
        "MLXCEL_KV_UNIFIED": "off",
        "MLXCEL_KV_CACHE_BUDGET": "2GiB",
    }
    assert settle(environment=environment).values == {
        "no_batch": True,
        "temp": 0.5,
        "chat_template": Path("a/b"),
        "kv_unified": False,
        "kv_cache_budget": Bound("2GiB"),
    }


@pytest.mark.parametrize(("said", "bound"), [("'none'", "none"), ("3072", "3KiB"), ("'1 kB'", "1000")])
def test_a_bound_is_a_word_a_number_or_a_size(write, said, bound):
    settings = settle(file=write(f"kv-cache-budget = {said}"))
    assert settings.engine(Path("m")).kv_cache_budget == bound


def test_what_may_be_left_open_has_a_flag_for_yes_and_one_for_no():
    assert config.table()["kv_unified"].flags == ("--kv-unified/--no-kv-unified",)


def test_bounds_are_the_dataclasses_own(write):
    with pytest.raises(ConfigError, match="top_p must be at most 1"):
        settle({"top_p": 2.0}).engine(Path("m"))
    with pytest.raises(ConfigError, match="MLXCEL_TOP_P must be at most 1"):
        settle(environment={"MLXCEL_TOP_P": "2"})
    with pytest.raises(ConfigError, match=r"port in .* must be at most 65535"):
        settle(file=write("port = 99999999"))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused(number):
    with pytest.raises(ConfigError, match="temp must be a finite number"):
        config.finite({"temp": number, "top_k": None})


def test_every_setting_of_the_dataclasses_is_in_the_table_with_their_words():
    for owner in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(owner):
            said = setting_of(field)
            if said is not None and said.flag:
                row = config.table()[field.name]
                assert (row.said, row.default, row.owner) == (said, field.default, owner)


def test_flags_take_the_place_of_the_flags_parameter():
    @config.takes("ctx_size", request=("temp",))
    def command(model: str | None = None, **flags: object) -> None: ...

    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["model", "temp", "ctx_size"]
    assert parameters["temp"].default is None


def test_lists_are_written_with_commas_or_by_repeating_the_flag(write):
    both = ("https://a.example", "https://b.example")
    for settings in (
        settle({"cors_origins": [*both]}),
        settle({"cors_origins": [", ".join(both)]}),
        settle(environment={"MLXCEL_CORS_ORIGINS": ",".join(both)}),
        settle(file=write(f"cors-origins = {list(both)}")),
    ):
        assert settings.server("m", settings.engine(Path("m"))).cors_origins == both


@pytest.mark.parametrize("said", [{"given": {"api_key": [""]}}, {"environment": {"MLXCEL_API_KEY": "a,,b"}}])
def test_a_list_with_nothing_in_it_is_refused(said):
    with pytest.raises(ConfigError, match="empty part"):
        settle(**said)


def test_a_list_of_other_things_is_refused(write):
    with pytest.raises(ConfigError, match="a list of texts"):
        settle(file=write("api-key = [1]"))


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ('"sk-hidden"', "a text"),
        ('["sk-hidden", 5]', "a list that holds other things"),
        ('{sk-hidden = "sk-hidden"}', "a table"),
        ("5101", "a whole number"),
        ("2030-01-02", "a date or time"),
    ],
)
def test_a_secret_of_the_wrong_kind_is_told_by_its_kind(said, kind, write):
    file = write(f"api_key = {said}\n")
    error = f"api_key in {file} must be a list of texts, not {kind}"
    with pytest.raises(ConfigError) as raised:
        settle(file=file)
    assert str(raised.value) == error
    assert [remark.said for remark in config.remarks(file, {})] == [error]


def test_keys_in_the_place_of_the_file_of_keys_are_not_shown_either(write):
    with pytest.raises(ConfigError, match=r"must be a path, not a list$"):
        settle(file=write('api_key_file = ["sk-hidden"]'))


def test_a_secret_in_the_environment_is_not_shown():
    for text in ("sk-hidden,,", ",sk-hidden"):
        with pytest.raises(ConfigError, match=r"^MLXCEL_API_KEY has an empty part$"):
            settle(environment={"MLXCEL_API_KEY": text})


def test_a_number_of_hundreds_of_digits_is_refused():
    for variable in ("MLXCEL_PORT", "MLXCEL_CTX_SIZE"):
        with pytest.raises(ConfigError, match="must be a number of at most 64 bits"):
            settle(environment={variable: "9" * 400})


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--prompt-cache-bytes", "a number of bytes, or a size such as 2GiB"),
        ("--models-memory", "auto, none, a number of bytes, or a size such as 2GiB"),
    ],
)
def test_a_flag_that_is_no_size_is_said_as_a_variable_is(flag, said, mlxcel):
    ended = mlxcel("serve", "x", flag, "18M")
    assert ended.code == 2
    assert ended.err.splitlines()[0] == f"error: Invalid value for '{flag}': it must be {said}, not '18M'"
