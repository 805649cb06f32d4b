"""Grammars that answers keep to: compiled for one tokenizer, and what each row's next token may be.

llguidance does the work; it is loaded with the first grammar that comes. What clients send is bounded before and
while it is compiled. Knows neither logits nor how a grammar came: a mask is bytes, bit i of which (from the least
of each byte on) says whether token i may be drawn.
"""

import copy
import functools
import graphlib
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from typing import Any

from engine.errors import MlxcelError, RequestError, StepFailed
from engine.request import Grammar, Row

MAX_TEXT_BYTES = 64 << 10
MAX_DEPTH = 64
# A number is a multiple of another by an automaton with about as many states; several multiply.
MAX_MULTIPLE, MAX_MULTIPLES = 10_000, 50_000
COMPILE_LIMIT_S = 10.0
MAX_COMPILING = 2
# Compiling recurses by about 10 kB for each rule and subschema; the longest chain in MAX_TEXT_BYTES needs 64 MiB.
STACK_BYTES = 256 << 20
MAX_KEPT = 64  # compiled grammars
MAX_SAID = 500  # characters of a fault of llguidance's that errors repeat

# Every option is said, so that no schema says it. Whitespace is bounded: a model could go on with it for ever.
JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n{1,2}[ \t]{0,20}",
    "coerce_one_of": False,
    "lenient": False,
    "json_allow_general_unicode_escapes": True,
}

Found = tuple[dict[Row, bytes | None], dict[Row, MlxcelError]]  # masks, and why rows have none

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_EMBEDDED = re.compile(r"%json\s*")
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_stack_size_lock = threading.Lock()


class Constraint:
    """One row's place in its grammar. It reads the row's output by itself: nothing of it is lost with storage.

    `matcher` is the row's own, `vocabulary` what it was made for, `param` the request's field. Up to and with the
    tokens `after` what the mask `free` has is allowed, if there are any: from the start or, where there is a token
    `opening`, only if that is the first.
    """

    def __init__(
        self,
        matcher: Any,
        vocabulary: Any,
        param: str,
        *,
        after: Sequence[int] = (),
        opening: int | None = None,
        free: bytes = b"",
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._param = param
        self._after = tuple(after)
        self._opening = opening
        self._waits = bool(after) and opening is None
        self._free = free
        self._num_read = 0

    def allowed(self, output: Sequence[int]) -> bytes:
        """The mask of the token behind `output`.

        Raises RequestError where the grammar has led to a place that nothing goes on from, or that is too complex.
        """
        self._read(output)
        if self._waits:
            return self._free
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            reason = f"after {len(output)} tokens the answer cannot go on: {_said(self._matcher.get_error())}"
            raise RequestError(f"{self._param}: {reason}", param=self._param)
        mask = self._as_text(mask)
        if self._opening is not None and not output:
            opened = bytearray(mask)
            opened[self._opening // 8] |= 1 << self._opening % 8
            return bytes(opened)
        return mask

    def _as_text(self, mask: bytes) -> bytes:
        """`mask`, or the first token of a forced text where llguidance takes that for the special token that is
        written so.
        """
        bits = int.from_bytes(mask, "little")
        if bits.bit_count() != 1 or not self._vocabulary.is_special_token(bits.bit_length() - 1):
            return mask
        forced = self._matcher.compute_ff_bytes()
        if not forced or forced[0] == 0xFF:  # the grammar names the special token itself
            return mask
        first: int = self._vocabulary.greedy_tokenize(forced.decode(errors="ignore"))[0]
        return (1 << first).to_bytes(len(mask), "little")

    def is_over(self, output: Sequence[int]) -> bool:
        """Whether `output` is whole and nothing but an end of sequence may follow."""
        self._read(output)
        return not self._waits and bool(self._matcher.is_stopped())

    def _read(self, output: Sequence[int]) -> None:
        """Follow what was drawn since the last time. Raises StepFailed for a token that was not allowed."""
        while self._num_read < len(output):
            token = output[self._num_read]
            self._num_read += 1
            if self._waits:
                self._waits = tuple(output[: self._num_read][-len(self._after) :]) != self._after
            elif self._num_read == 1 and token == self._opening:
                self._waits = True
            elif not self._matcher.consume_token(token):
                raise StepFailed(f"a token was drawn that {self._param} does not allow")


class Grammars:
    """The compiled grammars of one model; every method may be called from any thread.

    `tokenizer` is the checkpoint's, `end_tokens` are all that end an answer. Nothing is built before the first
    grammar comes.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = sorted(token for token in end_tokens if token < vocab_size)
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()
        self._kept_lock = threading.Lock()
        self._build_lock = threading.Lock()
        self._compiling = threading.Semaphore(MAX_COMPILING)
        self._ids = functools.cache(self._ids_of)

    def compile(self, grammar: Grammar) -> None:
        """Have `grammar` ready for `open`. Raises RequestError that names the request's field and says why."""
        self._ready(grammar)
        if grammar.after:
            self._ids(grammar.after)

    def open(self, grammar: Grammar) -> Constraint:
        """A new row's constraint; quick where `compile` was called before. Raises RequestError."""
        matcher, vocabulary = self._ready(grammar).deep_copy(), self._vocabulary()
        after = self._ids(grammar.after) if grammar.after else ()
        opening = self._ids(grammar.opening) if grammar.opening else ()
        if not after or len(opening) > 1:  # what no single token opens is no block of the model's
            return Constraint(matcher, vocabulary, grammar.param)
        free = self._all_but_ends(len(matcher.compute_bitmask()))
        first = opening[0] if opening else None
        return Constraint(matcher, vocabulary, grammar.param, after=after, opening=first, free=free)

    def _all_but_ends(self, num_bytes: int) -> bytes:
        """A mask of every token that does not end an answer: before the grammar's part has begun, nothing may."""
        free = bytearray(b"\xff" * num_bytes)
        for token in self._end_tokens:
            free[token // 8] &= ~(1 << token % 8)
        return bytes(free)

    def _ready(self, grammar: Grammar) -> Any:
        """A matcher at the grammar's start, never to be moved."""
        key = Grammar(grammar.kind, grammar.text)
        with self._kept_lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        _check_bounds(grammar)
        matcher = self._in_time(grammar)
        with self._kept_lock:
            self._kept[key] = matcher
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _in_time(self, grammar: Grammar) -> Any:
        """Compile on a thread with room for deep recursion, which llguidance does not bound; it cannot be stopped,
        so that one that takes too long is left alone.
        """
        compiled: Future[Any] = Future()

        def work() -> None:
            try:
                compiled.set_result(self._compiled(grammar))
            except BaseException as fault:  # noqa: BLE001 - raised again where the result is taken
                compiled.set_exception(fault)
            finally:
                self._compiling.release()

        late = _refusal(grammar, f"it takes longer than {COMPILE_LIMIT_S:.0f} s to compile")
        if not self._compiling.acquire(timeout=COMPILE_LIMIT_S):
            raise late
        with _stack_size_lock:
            before = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=work, name="mlxcel-grammar", daemon=True).start()
            except BaseException:
                self._compiling.release()
                raise
            finally:
                threading.stack_size(before)
        try:
            return compiled.result(COMPILE_LIMIT_S)
        except TimeoutError:
            raise late from None

    def _compiled(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)  # whose errors would repeat the answer
        try:
            matcher = LLMatcher(self._vocabulary(), _written_for_llguidance(grammar), log_level=0, limits=limits)
        except MlxcelError:
            raise
        except Exception as fault:
            raise _refusal(grammar, str(fault)) from fault
        mask = matcher.compute_bitmask()  # also builds what every row's first step would
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        if not any(mask):
            raise _refusal(grammar, "no text fits it")
        return matcher

    def _vocabulary(self) -> Any:
        with self._build_lock:
            return self._built_vocabulary

    @functools.cached_property
    def _built_vocabulary(self) -> Any:
        """The tokenizer as llguidance has it: the text of every token, and which of them end an answer."""
        from llguidance import LLTokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError("this model's tokenizer is none that answers can be constrained with")
        backend = copy.copy(backend)
        backend.no_padding()
        backend.no_truncation()
        try:
            return LLTokenizer(
                backend.to_str(),
                n_vocab=max(self._vocab_size, backend.get_vocab_size()),
                eos_token=self._end_tokens or None,
            )
        except Exception as fault:
            raise RequestError(
                f"answers cannot be constrained with this model's tokenizer: {_said(str(fault))}"
            ) from fault

    def _ids_of(self, text: str) -> tuple[int, ...]:
        """The token that is written as `text`, or those that `text` is cut into."""
        token = self._tokenizer.get_vocab().get(text)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if token is None else (token,)


class Masks:
    """What rows may draw next, found on a thread of its own while the forward runs."""

    def __init__(self) -> None:
        self._worker: ThreadPoolExecutor | None = None

    def begin(self, rows: Sequence[Row]) -> Callable[[], Found] | None:
        """Begin with those of `rows` that have a constraint; what is returned waits for their masks.

        None where there are no such rows.
        """
        bound = [row for row in rows if row.constraint is not None]
        if not bound:
            return None
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="mlxcel-masks")
        return self._worker.submit(_masks_of, bound).result

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None


def _masks_of(rows: Sequence[Row]) -> Found:
    masks: dict[Row, bytes | None] = {}
    faults: dict[Row, MlxcelError] = {}
    for row in rows:
        try:
            masks[row] = row.constraint.allowed(row.output)
        except MlxcelError as fault:
            faults[row] = fault
    return masks, faults


def _written_for_llguidance(grammar: Grammar) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    match grammar.kind:
        case "json":
            return str(LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS))  # type: ignore[arg-type]
        case "regex":
            # The whole answer has to match, so that anchors at its ends say nothing.
            text = re.sub(r"(?<!\\)((?:\\\\)*)\$\Z", r"\1", grammar.text.removeprefix("^"))
            return str(LLMatcher.grammar_from_regex(text))
        case "cfg" if _is_gbnf(grammar.text):
            return str(LLMatcher.grammar_from_lark(gbnf_to_lark(_with_characters(grammar.text))))
        case "cfg":
            return str(LLMatcher.grammar_from_lark(_with_options(grammar)))


def _is_gbnf(text: str) -> bool:
    return _GBNF_RULE.search(text) is not None


def _with_options(grammar: Grammar) -> str:
    """The Lark text with our options in each schema in it, which would else have its own."""
    written, done = [], 0
    while found := _EMBEDDED.search(grammar.text, done):
        schema, stop = _schema_at(grammar, found.end())
        written += [grammar.text[done : found.end()], json.dumps({**schema, "x-guidance": JSON_OPTIONS})]
        done = stop
    return "".join(written) + grammar.text[done:]


def _with_characters(gbnf: str) -> str:
    r"""The grammar with characters in place of \uXXXX and \UXXXXXXXX, which the conversion gets wrong."""

    def character(escape: re.Match[str]) -> str:
        digits = escape[1] or escape[2]
        if digits is None:
            return escape[0]
        number = int(digits, 16)
        return f"\\x{number:02x}" if number < 0x80 else chr(number)

    return _ESCAPE.sub(character, gbnf)


def _check_bounds(grammar: Grammar) -> None:
    """Refuse what would cost too much to compile. Raises RequestError."""
    size = len(grammar.text.encode(errors="surrogatepass"))
    if size > MAX_TEXT_BYTES:
        raise _refusal(grammar, f"it has {size} bytes and may have {MAX_TEXT_BYTES}")
    multiples: list[int] = []
    for schema in _schemas_in(grammar):
        multiples += _check_schema(grammar, schema)
    if sum(multiples) > MAX_MULTIPLES or math.lcm(*multiples) > MAX_MULTIPLE:
        raise _refusal(grammar, "multipleOf: the numbers have too many digits together")


def _schemas_in(grammar: Grammar) -> Iterator[dict[str, Any]]:
    """The schema that `grammar` is, or those that it holds. Raises RequestError."""
    if grammar.kind == "json":
        yield _schema_at(grammar, 0)[0]
    elif grammar.kind == "cfg" and not _is_gbnf(grammar.text):
        for found in _EMBEDDED.finditer(grammar.text):
            yield _schema_at(grammar, found.end())[0]


def _schema_at(grammar: Grammar, start: int) -> tuple[dict[str, Any], int]:
    """The schema that begins at `start` of the text, and where it ends. Raises RequestError."""
    try:
        schema, stop = json.JSONDecoder().raw_decode(grammar.text, start)
    except (ValueError, RecursionError) as fault:
        raise _refusal(grammar, f"the schema is not JSON: {fault}") from fault
    if not isinstance(schema, dict):
        raise _refusal(grammar, "a schema has to be an object")
    return schema, stop


def _check_schema(grammar: Grammar, schema: dict[str, Any]) -> list[int]:
    """The digits of the numbers that others have to be multiples of. Raises RequestError."""
    multiples = []
    means: dict[int, list[int]] = {}
    for depth, value in _parts(schema):
        if depth > MAX_DEPTH:
            raise _refusal(grammar, f"it is nested deeper than {MAX_DEPTH}")
        if not isinstance(value, dict):
            continue
        multiple = value.get("multipleOf")
        if isinstance(multiple, (int, float)) and 0 < multiple < math.inf:
            _, digits, _ = Decimal(str(multiple)).normalize().as_tuple()
            multiples.append(int("".join(map(str, digits))))
        means[id(value)] = [id(other) for other in _means(value, schema)]
    try:
        graphlib.TopologicalSorter(means).prepare()
    except graphlib.CycleError:
        raise _refusal(grammar, "$ref: a reference leads to itself, so that it means nothing") from None
    return multiples


def _means(part: dict[str, Any], schema: Any) -> Iterator[Any]:
    """The subschemas that all that fits `part` has to fit as well."""
    every = part.get("allOf")
    if isinstance(every, list):
        yield from every
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        target = schema
        for name in reference.split("/")[1:]:
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        yield target


def _parts(value: Any) -> Iterator[tuple[int, Any]]:
    """`value` and everything in it, with its depth."""
    waiting = [(1, value)]
    while waiting:
        depth, part = waiting.pop()
        yield depth, part
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        waiting += [(depth + 1, item) for item in inner]


def _refusal(grammar: Grammar, reason: str) -> RequestError:
    return RequestError(f"{grammar.param}: {_said(reason)}", param=grammar.param)


def _said(text: str) -> str:
    """One line of what llguidance says, which shows the place below the text."""
    return " ".join(text.split())[:MAX_SAID]
