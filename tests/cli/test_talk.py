"""run, chat and generate: where the prompt comes from, what is sent, and how they end."""

import re
import socket

import pytest

from tests.cli.conftest import served
from tests.cli.double import Double, Refusal
from tests.serving import live
from tests.tiny import write_checkpoint, write_tokenizer


def prompts(double: Double) -> list[str]:
    return [body["messages"][-1]["content"] if "messages" in body else body["prompt"] for _, body in double.asked]


@pytest.mark.parametrize(
    ("arguments", "stdin", "prompt"),
    [
        (["-p", "ask"], b"", "ask"),
        (["-p", "ask"], None, "ask"),
        (["-p", "ask"], b" \n", "ask"),
        (["-p", "ask"], b"text\n", "ask\n\ntext"),
        ([], b"text\n", "text"),
        ([], b"two\nlines\n\n", "two\nlines\n"),
        ([], "né\U0001f600".encode(), "né\U0001f600"),
        ([], b"x" * 200_000, "x" * 200_000),
    ],
)
@pytest.mark.parametrize("command", ["run", "generate"])
def test_the_prompt_comes_from_the_flag_and_from_stdin(command, arguments, stdin, prompt, double, address, mlxcel):
    ended = mlxcel(command, "--server", address, *arguments, stdin=stdin)
    assert (ended.code, ended.out, ended.err) == (0, "Hello\n", "")
    assert prompts(double) == [prompt]
    path = double.asked[0][0]
    assert path == ("/v1/completions" if command == "generate" else "/v1/chat/completions")


@pytest.mark.parametrize("stdin", [b"", b"\n", None])
@pytest.mark.parametrize("command", ["run", "generate"])
def test_no_prompt_at_all_is_wrong_usage(command, stdin, mlxcel):
    ended = mlxcel(command, stdin=stdin)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "error: there is no prompt: stdin is empty\nhint: give one with -p TEXT\n"


@pytest.mark.parametrize("command", ["run", "generate"])
def test_an_empty_flag_is_no_prompt(command, double, address, mlxcel):
    ended = mlxcel(command, "-p", "", stdin=b"")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "error: there is no prompt: -p is empty\nhint: give one with -p TEXT\n"
    mlxcel(command, "--server", address, "-p", "", stdin=b"from stdin")
    assert prompts(double) == ["from stdin"]


def test_a_prompt_that_is_no_text(mlxcel):
    ended = mlxcel("run", stdin=b"a\xff")
    assert (ended.code, ended.err) == (1, "error: stdin is not UTF-8 text: byte 0xff at 1\n")


def test_only_flags_that_were_given_are_sent(double, address, mlxcel):
    mlxcel("run", "--server", address, "-p", "hi")
    mlxcel("run", "--server", address, "-p", "hi", "-n", "-1")
    mlxcel(
        *(
            "run",
            "other",
            "--server",
            address,
            "-p",
            "hi",
            "-s",
            "brief",
            "-n",
            "5",
            "--temp",
            "0",
            "--top-p",
            "0.5",
        ),
        *("--top-k", "3", "--min-p", "0.1", "--seed", "0", "--stop", "a", "--stop", "b"),
    )
    plain, to_the_end, full = (body for _, body in double.asked)
    always = {"stream": True, "stream_options": {"include_usage": True}}
    hi = {"role": "user", "content": "hi"}
    assert plain == to_the_end == {"messages": [hi], **always}
    sampling = {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 0}
    asked = {"model": "other", "max_tokens": 5, "stop": ["a", "b"], **sampling}
    assert full == {"messages": [{"role": "system", "content": "brief"}, hi], **asked, **always}


def test_settings_of_the_environment_are_not_sent_to_another_server(double, address, mlxcel, monkeypatch):
    monkeypatch.setenv("MLXCEL_TEMP", "0.5")
    monkeypatch.setenv("MLXCEL_MODEL", "mine")
    mlxcel("run", "--server", address, "-p", "hi")
    assert not {"model", "temperature"} & double.asked[0][1].keys()


def test_a_server_that_asks_for_a_key(mlxcel, tiny):
    with live(tiny, server={"api_key": ("sk-first",)}) as server:
        for command in ("run", "generate"):
            asked = (command, "--server", server.address, "-p", "hi", "-n", "1")
            assert mlxcel(*asked, "--api-key", "sk-first").code == 0
            for wrong in ((), ("--api-key", "sk-wrong")):
                ended = mlxcel(*asked, *wrong)
                assert ended.code == 1
                assert "a valid API key is needed" in ended.err
            ended = mlxcel(*asked, "--api-key", "schlüssel")
            assert ended.code == 1
            assert ended.err.startswith(f"error: the API key for {server.address} cannot be one\nhint: ")
            assert "schlüssel" not in ended.err


def test_a_server_on_a_unix_socket(double, mlxcel, tmp_path):
    path = str(tmp_path / "s.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        with served(double, listener):
            assert mlxcel("run", "--server", path, "-p", "hi").out == "Hello\n"
            assert mlxcel("chat", "--server", path, stdin=b'one\n"""two\nthree"""\n').out == "Hello\nHello\n"
    assert prompts(double) == ["hi", "one", "two\nthree"]


def test_stats_and_cuts_are_talk(double, address, mlxcel):
    double.finish_reason = "length"
    ended = mlxcel("generate", "--server", address, "-p", "hi", "-n", "2", "--stats")
    assert ended.out == "Hello\n"
    cut, stats = ended.err.splitlines()
    assert cut.startswith("(cut at 2 tokens by --max-tokens 2")
    assert stats.startswith("prompt: 4 tokens, 40.0 tokens/s | new: 2 tokens, 20.0 tokens/s | first token after")


def test_an_answer_that_ends_its_line_gets_no_further_one(double, address, mlxcel):
    double.answer = lambda body: ["one\n", "two\n"]
    assert mlxcel("run", "--server", address, "-p", "hi").out == "one\ntwo\n"


def test_a_refusal_is_one_line(double, address, mlxcel):
    double.answer = lambda body: Refusal(400, "too\nlong")
    ended = mlxcel("run", "--server", address, "-p", "hi")
    assert (ended.code, ended.out, ended.err) == (1, "", "error: too long\n")


def test_an_error_after_the_start_keeps_what_came_before(double, address, mlxcel):
    double.fails_midway = True
    ended = mlxcel("run", "--server", address, "-p", "hi")
    assert (ended.code, ended.out, ended.err) == (1, "Hello\n", "error: the forward failed\n")


def test_a_piped_chat_with_a_failed_turn_ends_with_1(double, address, mlxcel):
    double.answer = lambda body: Refusal(500, "no") if len(double.asked) == 1 else ["Hello"]
    ended = mlxcel("chat", "--server", address, stdin=b"one\ntwo\n")
    assert (ended.code, ended.out, ended.err) == (1, "Hello\n", "error: no\n")
    assert mlxcel("chat", "--server", address).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["run", "-p", "x", "--server", "host:80"], 1, "host:80 is not the address of a server"),
        (["run", "-p", "x", "--server", "http://h:99999"], 1, "http://h:99999 is not the address of a server"),
        (["run", "-p", "x", "--server", "http://h", "-c", "9"], 2, "--ctx-size is decided where the server was"),
        (
            ["run", "-p", "x", "--server", "http://h", "--config", "f"],
            2,
            "--config is decided where the server was",
        ),
        (["chat", "--api-key", "k"], 2, "--api-key is for the server at --server"),
        (["run", "a", "-m", "b", "-p", "x"], 2, "two models are named: a and b"),
        (["run", "-p", "x", "--node-role", "y"], 2, "No such option: --node-role"),
        (["run", "-p", "x", "--draft-kind", "draft"], 1, "draft_kind draft needs a draft_model"),
        (["run", "-p", "x", "--temp", "hot"], 2, "Invalid value for '--temp'"),
        (["run", "-p", "x", "--top-p", "2"], 2, "Invalid value for '--top-p'"),
        (["run", "-p", "x", "-m", "nonesuch"], 1, "no model is known as 'nonesuch'"),
        (["serve", "--port", "70000"], 2, "Invalid value for '--port'"),
        (["serve", "--host", "0.0.0.0"], 1, "refusing to listen on 0.0.0.0"),
        (["ran"], 2, "No such command 'ran'"),
    ],
)
def test_what_a_person_can_mend_is_one_line_and_a_hint(arguments, code, error, mlxcel):
    ended = mlxcel(*arguments)
    assert (ended.code, ended.out) == (code, "")
    first, second = ended.err.splitlines()
    assert first.startswith(f"error: {error}")
    assert second.startswith("hint: ")


@pytest.mark.parametrize("flag", ["-p", "-s", "--stop", "--param"])
def test_an_argument_that_is_no_text_is_wrong_usage(flag, mlxcel):
    ended = mlxcel("run", "-p", "hi", flag, "a=\udcff")
    assert (ended.code, ended.out) == (2, "")
    assert f"'{flag}'" in ended.err
    assert "it is not UTF-8 text: byte 0xff at 2\n" in ended.err


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--log-level", "--log-level is a flag of mlxcel serve"),
        ("--no-warmup", "--no-warmup has not arrived in this version"),
        ("--nonsense", "mlxcel run --help lists what there is"),
    ],
)
def test_an_unknown_flag_is_told_where_it_is_known(flag, hint, mlxcel):
    ended = mlxcel("run", flag, "x")
    assert ended.code == 2
    assert f"hint: {hint}" in ended.err


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_schema_is_sent_as_it_is_written(command, double, address, mlxcel, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object", "properties": {"z": {}, "é": {}}}')
    ended = mlxcel(command, "--server", address, "--json-schema", str(file), stdin=b"hi\n")
    assert ended.code == 0
    asked = double.asked[0][1]["response_format"]
    schema = {"type": "object", "properties": {"z": {}, "é": {}}}
    assert asked == {"type": "json_schema", "json_schema": {"schema": schema}}
    assert list(asked["json_schema"]["schema"]["properties"]) == ["z", "é"]


@pytest.mark.parametrize(
    "written",
    [
        *(None, b"{", b"[]", b"\xff", b"[" * 100_000),
        *(b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": "\\ud83d"}'),
    ],
)
def test_a_schema_that_is_none_ends_the_command_before_a_model_is_loaded(written, mlxcel, tmp_path):
    file = tmp_path / "schema.json"
    if written is not None:
        file.write_bytes(written)
    ended = mlxcel("run", "-m", "nonesuch", "-p", "hi", "--json-schema", str(file))
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"error: the JSON schema {file} ")
    assert ended.err.count("\n") == 1


def test_an_answer_in_this_process_keeps_to_a_schema(tiny, mlxcel, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["red", "green"]}')
    ended = mlxcel("run", "-m", str(tiny), "-p", "hi", "--json-schema", str(file))
    assert ended.code == 0, ended.err
    assert ended.out in ('"red"\n', '"green"\n')


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_a_model_in_this_process_answers_the_same_twice(tiny, mlxcel):
    asked = ["-m", str(tiny), "-p", "hi", "-n", "24", "--temp", "1", "--seed", "3", "--stats"]
    first, second = mlxcel("run", *asked), mlxcel("run", *asked)
    assert first.code == 0, first.err
    assert first.out == second.out != ""
    assert "(cut at 24 tokens by --max-tokens 24" in first.err
    assert "| new: 24 tokens, " in first.err


def test_a_chat_and_a_completion_in_this_process(tiny, mlxcel):
    assert mlxcel("chat", str(tiny), "-n", "4", stdin=b"one\ntwo\n").code == 0
    assert mlxcel("generate", str(tiny), "-n", "4", "-p", "one").code == 0


def test_a_chat_in_this_process_counts_its_tokens(tiny, mlxcel):
    ended = mlxcel("chat", str(tiny), "-n", "4", stdin=b"/tokens\none\n/tokens\n")
    assert ended.code == 0
    counts = re.findall(r"\(the next prompt takes (\d+) of 4096 \(\d%\)", ended.err)
    assert int(counts[0]) < int(counts[1])


def test_a_base_model_in_this_process_continues_the_text(tmp_path, mlxcel):
    base = write_checkpoint(tmp_path / "base")
    write_tokenizer(base, template=None)
    chatted, continued = (mlxcel(c, str(base), "-n", "6", "-p", "Once") for c in ("run", "generate"))
    assert chatted.code == continued.code == 0
    assert chatted.out == continued.out
    assert "no chat template" in chatted.err


@pytest.mark.parametrize("command", ["run", "chat", "generate"])
def test_a_model_that_cannot_load_ends_the_command(command, tmp_path, mlxcel):
    broken = write_checkpoint(tmp_path / "broken")
    (broken / "config.json").write_text('{"model_type": "nonsense"}')
    ended = mlxcel(command, str(broken), stdin=b"one\ntwo\n")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.count("error: ") == 1
    assert "nonsense" in ended.err


@pytest.mark.parametrize("stdin", [b"", b"\n", b"hi\n", None])
def test_a_chat_with_nobody_ends_with_1(stdin, mlxcel):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    ended = mlxcel("chat", "--server", address, stdin=stdin)
    asked_once = mlxcel("run", "--server", address, "-p", "hi", stdin=stdin)
    assert (ended.code, ended.err) == (asked_once.code, asked_once.err)
    assert ended.code == 1
    assert ended.err.startswith(f"error: no server answers at {address}\nhint: ")


def test_a_chat_without_a_stdin_ends(address, mlxcel):
    assert mlxcel("chat", "--server", address, stdin=None).code == 0


def test_a_piped_chat_goes_on_after_a_message_that_is_no_text(address, mlxcel):
    ended = mlxcel("chat", "--server", address, stdin=b"a\xff\nhello\n")
    assert ended.code == 1
    assert "stdin is not UTF-8 text" in ended.err
    assert ended.out
