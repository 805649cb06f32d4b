"""Grammars: what may come next, what is refused, and what compiling may cost."""

import json
import threading
from functools import partial

import mlx.core as mx
import pytest
from transformers import PreTrainedTokenizerFast

from engine.errors import RequestError, StepFailed
from engine.request import Grammar, Sampling
from engine.sample import grammar as module
from engine.sample.chain import sample
from engine.sample.grammar import Grammars
from engine.sample.state import Draw, noise_key
from tests.tiny import SPECIALS, VOCAB_SIZE, byte_tokenizer

ENDS = frozenset({256, 258})
ENCODER = byte_tokenizer()
schema = json.dumps


def ids(text):
    return ENCODER.encode(text).ids


def new_grammars():
    return Grammars(PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()), VOCAB_SIZE, ENDS)


@pytest.fixture(scope="module")
def grammars():
    return new_grammars()


def tokens_of(mask):
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1}


def is_free(mask):
    """Whether every token may come but one that ends the answer, of which nothing is there yet."""
    return {i for i in range(VOCAB_SIZE) if i not in tokens_of(mask)} == ENDS


def admits(constraint, text):
    """Whether `text` and then an end may be drawn, token by token."""
    output = []
    for token in ids(text):
        if token not in tokens_of(constraint.allowed(output)):
            return False
        output.append(token)
    return bool(tokens_of(constraint.allowed(output)) & ENDS)


PERSON = schema(
    {
        "type": "object",
        "additionalProperties": False,
        "required": ["name", "age"],
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    }
)
JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws  # a list
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
LANGUAGES = [
    (
        Grammar("json", PERSON),
        ['{"name":"Ann","age":3}', '{\n  "name": "é",\n  "age": -3}'],
        ["{}", '{"age":3}', "x"],
    ),
    (Grammar("json", schema({"type": "object"})), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a":}']),
    (Grammar("regex", "[a-c]+x?"), ["a", "abcx"], ["x", "ax!", ""]),
    (Grammar("regex", "^yes|no$"), ["yes", "no"], ["yesno", "^yes"]),
    (Grammar("regex", r"\$5\$"), ["$5$"], [r"$5\$"]),
    (Grammar("cfg", 'root ::= "yes" | "no"'), ["yes", "no"], ["maybe", "", "yesno"]),
    (Grammar("cfg", r'root ::= "\u0041" [\u00E9\U0001F600] "\\u"'), [r"Aé\u", r"A😀\u"], [r"A\u", "Aé"]),
    (Grammar("cfg", JSON_GBNF), ['{"a": [true, "\\n"]}'], ["[", '{"a": tru}']),
    (Grammar("cfg", 'start: pair ("," pair)*\npair: /[a-z]/ "=" /[0-9]+/'), ["a=1", "a=1,b=22"], ["a=", "a=1,"]),
]


@pytest.mark.parametrize(("grammar", "inside", "outside"), LANGUAGES, ids=str)
def test_what_fits_may_be_drawn_and_nothing_else(grammars, grammar, inside, outside):
    for text in inside:
        assert admits(grammars.open(grammar), text), text
    for text in outside:
        assert not admits(grammars.open(grammar), text), text


def test_every_end_token_is_allowed_once_an_answer_is_whole_and_not_before(grammars):
    constraint = grammars.open(Grammar("regex", "ab?"))
    assert tokens_of(constraint.allowed([])) == {*ids("a")}
    output = ids("a")
    assert tokens_of(constraint.allowed(output)) == {*ids("b"), *ENDS}
    assert not constraint.is_over(output)
    output += ids("b")
    assert constraint.is_over(output)
    assert tokens_of(constraint.allowed(output)) == ENDS


def test_special_tokens_are_no_text(grammars):
    constraint = grammars.open(Grammar("regex", ".*"))
    allowed = tokens_of(constraint.allowed([]))
    assert ENCODER.token_to_id(SPECIALS[1]) not in allowed
    assert allowed >= ENDS


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_end|>b<|endoftext|>", "<|im_start|>"])
def test_a_forced_text_that_is_written_like_a_special_token_is_text(grammars, text):
    constraint = grammars.open(Grammar("json", schema({"const": text})))
    output = []
    while not constraint.is_over(output):
        allowed = tokens_of(constraint.allowed(output))
        assert not allowed & {256, 257, 258}
        output.append(min(allowed))
    assert json.loads(ENCODER.decode(output, skip_special_tokens=False)) == text


def test_a_grammar_may_name_a_special_token(grammars):
    constraint = grammars.open(Grammar("cfg", 'start: <|im_start|> "a"'))
    assert tokens_of(constraint.allowed([])) == {257}
    assert tokens_of(constraint.allowed([257])) == {*ids("a")}


def test_a_schema_in_a_grammar_has_the_same_options(grammars):
    for own in ({}, {"x-guidance": {"whitespace_pattern": "[ \\n]+", "item_separator": ";"}}):
        inner = schema({"type": "array", "items": {"type": "null"}, **own})
        grammar = Grammar("cfg", f'start: "<" list ">" list\nlist: %json {inner}')
        assert admits(grammars.open(grammar), "<[null, null]>[]")
        assert not admits(grammars.open(grammar), "<[\n\n\n\nnull]>[]")
        assert not admits(grammars.open(grammar), "<[null;null]>[]")


def test_a_place_is_found_again_from_the_output_alone(grammars):
    text = ids('{"name": "Ann", "age": 3}')
    stepwise = grammars.open(Grammar("json", PERSON))
    for length in range(len(text)):
        assert stepwise.allowed(text[:length]) == grammars.open(Grammar("json", PERSON)).allowed(text[:length])


def test_a_token_outside_the_grammar_is_a_fault(grammars):
    constraint = grammars.open(Grammar("regex", "ab"))
    with pytest.raises(StepFailed, match="drawn"):
        constraint.is_over(ids("x"))


def test_a_place_that_nothing_goes_on_from_is_told_without_the_answer(grammars):
    constraint = grammars.open(Grammar("cfg", 'start: "zq" loop\nloop: loop', param="g"))
    with pytest.raises(RequestError, match="g: after 2 tokens the answer cannot go on") as fault:
        constraint.allowed(ids("zq"))
    assert fault.value.param == "g"
    assert "zq" not in str(fault.value)


@pytest.mark.parametrize("after", ["</t>", SPECIALS[1]])
def test_what_comes_before_is_free(grammars, after):
    constraint = grammars.open(Grammar("regex", "ab", after=after))
    output = []
    for token in ids(f"x{after[:2]}y{after}"):
        assert is_free(constraint.allowed(output))
        assert not constraint.is_over(output)
        output.append(token)
    assert tokens_of(constraint.allowed(output)) == {*ids("a")}
    output += ids("a")
    assert tokens_of(constraint.allowed(output)) == {*ids("b")}


def test_a_block_that_may_be_opened_is_free_only_if_it_is(grammars):
    grammar = Grammar("regex", "ab", after="</t>", opening=SPECIALS[1])
    [opening] = ids(SPECIALS[1])
    constraint = grammars.open(grammar)
    assert tokens_of(constraint.allowed([])) == {*ids("a"), opening}
    assert tokens_of(constraint.allowed(ids("a"))) == {*ids("b")}
    constraint = grammars.open(grammar)
    thinking = [opening, *ids("hm</t>")]
    for length in range(1, len(thinking)):
        assert is_free(constraint.allowed(thinking[:length]))
    assert tokens_of(constraint.allowed(thinking)) == {*ids("a")}
    unknown = grammars.open(Grammar("regex", "ab", after="</t>", opening="<t>"))
    assert tokens_of(unknown.allowed([])) == {*ids("a")}


@pytest.mark.parametrize("liked", ["\n ", " \n", "\t\n ", "\n"])
def test_whitespace_ends(grammars, liked):
    """A model that likes nothing better than whitespace comes to the end of every gap."""
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    asked = {"properties": {"a": numbers, "b": {"type": "boolean"}}, "required": ["a", "b"]}
    grammar = Grammar("json", schema({"type": "object", "additionalProperties": False, **asked}))
    constraint, output, liking = grammars.open(grammar), [], ids(liked)
    while not constraint.is_over(output):
        allowed = tokens_of(constraint.allowed(output))
        output.append(next((token for token in liking if token in allowed), min(allowed - ENDS)))
        assert len(output) < 400, ENCODER.decode(output)
    assert json.loads(ENCODER.decode(output)).keys() == {"a", "b"}


CIRCLE = {
    "properties": {"x": {"$ref": "#/$defs/a~1b"}},
    "$defs": {"a/b": {"allOf": [{}, {"$ref": "#/$defs/c"}]}, "c": {"$ref": "#/properties/x"}},
}
REFUSED = [
    (Grammar("json", schema({"not": {}}), param="s"), "Unimplemented keys"),
    (Grammar("json", schema({"type": "array", "uniqueItems": True}), param="s"), "uniqueItems"),
    (Grammar("json", schema({"type": "string", "format": "unheard-of"}), param="s"), "Unknown format"),
    (Grammar("json", schema({"$ref": "https://example.invalid/a.json"}), param="s"), "does not fetch"),
    (Grammar("json", schema({"type": "object", "x-guidance": {"odd": 1}}), param="s"), "odd"),
    (Grammar("json", schema({"type": "integer", "minimum": 3, "maximum": 1}), param="s"), "Unsatisfiable"),
    (Grammar("json", schema({"$ref": "#"}), param="s"), None),
    (Grammar("json", schema({"$ref": "#/a", "a": {"$ref": "#/a"}}), param="s"), "to itself"),
    (Grammar("json", schema(CIRCLE), param="s"), "to itself"),
    (Grammar("json", schema({"$ref": "#/$defs/none"}), param="s"), None),
    (Grammar("json", "{", param="s"), "not JSON"),
    (Grammar("json", "[" * 5000, param="s"), None),
    (Grammar("json", schema({"enum": ["x" * module.MAX_TEXT_BYTES]}), param="s"), "bytes"),
    (Grammar("json", schema({"type": "integer", "multipleOf": 1234567}), param="s"), "multipleOf"),
    (Grammar("json", schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 9.91}]}), param="s"), "multipleOf"),
    (Grammar("json", schema({"anyOf": [{"multipleOf": 9970}] * 60}), param="s"), "multipleOf"),
    (Grammar("regex", "(", param="r"), "unclosed group"),
    (Grammar("regex", "(?=a)b", param="r"), "look-around"),
    (Grammar("regex", "(" * 30000 + ")" * 30000, param="r"), None),
    (Grammar("cfg", "start: /[/", param="g"), "unclosed"),
    (Grammar("cfg", 'start: %json {"type": "integer", "multipleOf": 1234567}', param="g"), "multipleOf"),
    (Grammar("cfg", 'start: "a" // %json here', param="g"), "not JSON"),
    (Grammar("cfg", "start: %json true", param="g"), "an object"),
    (Grammar("json", "[]", param="s"), "an object"),
    (Grammar("cfg", "no grammar at all", param="g"), None),
    (Grammar("cfg", "", param="g"), None),
    (Grammar("cfg", 'tree ::= "a"', param="g"), "root"),
    (Grammar("cfg", "root ::= missing", param="g"), "missing"),
    (Grammar("cfg", "root ::= " + "(" * 20000 + '"a"' + ")" * 20000, param="g"), None),
    (Grammar("cfg", "start: " + "(" * 20000 + '"a"' + ")" * 20000, param="g"), "nested"),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "said"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_does_not_compile_is_refused_by_its_field_and_why(grammars, grammar, said):
    for act in (grammars.compile, grammars.open):
        with pytest.raises(RequestError, match=said) as refused:
            act(grammar)
        assert refused.value.param == grammar.param
        message = str(refused.value)
        assert message.startswith(f"{grammar.param}: ")
        assert len(message) < 600
        assert "\n" not in message


def test_references_may_lead_back_from_further_in(grammars):
    tree = {
        "type": "object",
        "properties": {"c": {"type": "array", "items": {"$ref": "#"}}},
        "additionalProperties": False,
    }
    assert admits(grammars.open(Grammar("json", schema(tree))), '{"c":[{"c":[]},{}]}')


def test_depth_is_bounded(grammars):
    def nested(depth):
        inner = {"type": "integer"}
        for _ in range(depth):
            inner = {"type": "array", "items": inner}
        return Grammar("json", schema(inner))

    grammars.compile(nested(module.MAX_DEPTH - 3))
    with pytest.raises(RequestError, match="nested deeper than"):
        grammars.compile(nested(module.MAX_DEPTH))


def items(depth, innermost):
    for _ in range(depth):
        innermost = {"items": innermost}
    return innermost


def chain_of_references():
    links = {str(i): items(55, {"$ref": f"#/$defs/{i + 1}"}) for i in range(100)}
    return schema({"$ref": "#/$defs/0", "$defs": {**links, "100": {}}}, separators=(",", ":"))


def chain_of_rules():
    return "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(4500)) + 'a4500: "x"'


@pytest.mark.parametrize(("kind", "text"), [("json", chain_of_references()), ("cfg", chain_of_rules())])
def test_the_deepest_chains_that_fit_into_the_bound_compile_and_run(kind, text):
    """They would not on a thread of ordinary size, and would end the process."""
    assert 0.85 * module.MAX_TEXT_BYTES < len(text) <= module.MAX_TEXT_BYTES
    grammars = new_grammars()

    def use():
        assert tokens_of(grammars.open(Grammar(kind, text)).allowed([]))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    grammars._kept.clear()


def test_what_takes_too_long_is_refused_and_does_not_stop_others(monkeypatch):
    grammars, gate = new_grammars(), threading.Event()
    compiled = grammars._compiled

    def slowly(grammar):
        if grammar.text == "slow":
            assert gate.wait(30)
        return compiled(grammar)

    monkeypatch.setattr(grammars, "_compiled", slowly)
    monkeypatch.setattr(module, "COMPILE_LIMIT_S", 0.05)
    slow = Grammar("regex", "slow", param="regex")
    with pytest.raises(RequestError, match="takes longer") as refused:
        grammars.compile(slow)
    assert refused.value.param == "regex"
    monkeypatch.setattr(module, "COMPILE_LIMIT_S", 30)
    grammars.compile(Grammar("regex", "quick"))
    monkeypatch.setattr(module, "COMPILE_LIMIT_S", 0.05)
    for _ in range(module.MAX_COMPILING):  # as many as may run are left alone: the next is refused unbegun
        with pytest.raises(RequestError, match="takes longer"):
            grammars.compile(slow)
    gate.set()


def test_a_grammar_is_compiled_once_and_forgotten_when_others_came(monkeypatch):
    grammars, texts = new_grammars(), []
    compiled = grammars._compiled
    monkeypatch.setattr(grammars, "_compiled", lambda grammar: texts.append(grammar.text) or compiled(grammar))
    for grammar in (Grammar("regex", "a"), Grammar("regex", "a", after="x", param="p")):
        grammars.compile(grammar)
        grammars.open(grammar)
    assert texts == ["a"]
    monkeypatch.setattr(module, "MAX_KEPT", 1)
    for text in "aba":
        grammars.compile(Grammar("regex", text))
    assert texts == ["a", "b", "a"]


def test_the_vocabulary_may_be_larger_than_the_tokenizer(grammars):
    padded = Grammars(PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()), 300, ENDS)
    mask = padded.open(Grammar("regex", ".*")).allowed([])
    assert len(mask) * 8 >= 300
    assert max(tokens_of(mask)) < VOCAB_SIZE


def test_a_tokenizer_that_cannot_say_its_tokens_is_refused():
    class Slow:
        def get_vocab(self):
            return {}

    with pytest.raises(RequestError, match="tokenizer"):
        Grammars(Slow(), VOCAB_SIZE, ENDS).compile(Grammar("regex", "a"))


def draw(allowed=None, **sampling):
    return Draw(Sampling(seed=1, **sampling), noise_key(1, 0, 0), allowed=allowed)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 5.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5}], ids=str
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_only_what_a_mask_allows_is_drawn_and_others_do_not_notice(sampling, dtype):
    logits = (mx.random.normal((8, VOCAB_SIZE), key=mx.random.key(0)) * 3).astype(dtype)
    only = {5, 77, 256}
    mask = bytearray(40)
    for token in only:
        mask[token // 8] |= 1 << token % 8
    one = partial(draw, **sampling)
    free = sample(logits, [one()] * 8).tolist()
    drawn = sample(logits, [one(bytes(mask)) if i % 2 else one() for i in range(8)]).tolist()
    assert drawn[::2] == free[::2]
    assert {*drawn[1::2]} <= only
    assert drawn[1::2] == [sample(logits[i : i + 1], [one(bytes(mask))]).item() for i in range(1, 8, 2)]
