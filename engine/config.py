"""Every default and bound of the engine, in one frozen dataclass, checked once.

A field's default is the only home of that default: flags, environment, files and help texts read it from
here (`setting_of`). This module knows neither flags nor files.
"""

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from engine.errors import ConfigError
from engine.request import RESERVED_FOR_TEMPLATES, Loops, Sampling
from engine.size import AUTO, Bound, Size

ADAPTER_NAME = "a name has letters, digits, dots, dashes and _, and begins with a letter or a digit"
SPLITS = ("auto", "tensor", "pipeline")
STORAGE_BACKENDS = ("auto", "dense", "paged")
CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")
DRAFT_KINDS = ("auto", "draft", "prompt-lookup", "mtp")
Drafting = Literal["none", "draft", "prompt-lookup", "mtp"]
DRAFT_BLOCK, LOOKUP_ROWS = 7, 2
MOST_BITS = 64
MAX_DRAFT_BLOCK = 31  # with a row's last token, what a recorded step takes
GREEDY = Sampling(temperature=0.0)
LOOPS = (1, 20, 12)  # shortest, longest and count of what is a loop, where only "on" is said
SERVE_SAMPLING = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is said of one field: help text, bounds, further names of the flag, and whether its value is secret."""

    help: str
    minimum: float | None = None
    maximum: float | None = None
    aliases: tuple[str, ...] = ()
    flag: bool = True
    choices: tuple[str, ...] = ()
    secret: bool = False

    def check(self, name: str, value: Any, place: str = "") -> None:
        """Raise ConfigError when `value`, of the field `name`, is no choice, out of the bounds or no number.

        `place` is what the error calls it where that is not its name.
        """
        said = place or name
        if self.choices and value not in self.choices:
            raise ConfigError(name, f"{said} must be one of {', '.join(self.choices)}, not {value}")
        if isinstance(value, (str, Path, tuple)):
            return
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(name, f"{said} must be a finite number, not {value}")
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise ConfigError(name, f"{said} must be a number of at most {MOST_BITS} bits")
        if self.minimum is not None and value < self.minimum:
            raise ConfigError(name, f"{said} must be at least {self.minimum:g}, not {value:g}")
        if self.maximum is not None and value > self.maximum:
            raise ConfigError(name, f"{said} must be at most {self.maximum:g}, not {value:g}")


def setting(
    default: Any,
    help: str,  # noqa: A002 - the word every command-line library uses
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    aliases: tuple[str, ...] = (),
    flag: bool = True,
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """A dataclass field that carries its help text and bounds; `flag=False` keeps it off the command line, and
    `secret` its value out of what is printed.
    """
    said = Setting(help, minimum, maximum, aliases, flag, choices, secret)
    return dataclasses.field(default=default, repr=not secret, metadata={"setting": said})


def setting_of(field: dataclasses.Field[Any]) -> Setting | None:
    """The `Setting` that `field` carries, or None for a field that is not a setting."""
    return field.metadata.get("setting")


def check_bounds(config: Any) -> None:
    """Hold every field of the dataclass instance `config` against its bounds.

    Raises ConfigError naming the first field that is out of them. None means "not given" and passes.
    """
    for field in dataclasses.fields(config):
        said, value = setting_of(field), getattr(config, field.name)
        if said is None or value is None:
            continue
        said.check(field.name, value)


def is_adapter_name(text: str) -> bool:
    """Whether an adapter can have this name, which stands behind a colon in that of a model."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]{0,127}", text, re.ASCII) is not None


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the `num_ranks` that MLX's launcher has started together; `host` is an address at which
    the others reach rank 0.
    """

    rank: int
    num_ranks: int
    host: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine is: its checkpoint, its bounds, its defaults. Lengths and sizes are tokens."""

    AUTO_PARALLEL: ClassVar[int] = 4

    model: Path
    ctx_size: int = setting(0, "context length in tokens; 0: the model's own", minimum=0, aliases=("-c",))
    n_predict: int = setting(
        -1, "new tokens when a request does not say; -1: until the end of sequence or context", minimum=-1,
        aliases=("-n",),
    )  # fmt: skip
    parallel: int = setting(
        -1, "requests that run at once; -1: 4, or 1 where the model family cannot batch", minimum=-1
    )
    max_batch_size: int = setting(0, "rows in one decode step; 0: as many as run at once", minimum=0)
    no_batch: bool = setting(False, "run one request at a time")
    max_queue_depth: int = setting(32, "requests that may wait beyond those that run", minimum=0)
    prefill_chunk_size: int = setting(
        0,
        "prompt tokens in one prefill piece; 0: sized by measured time",
        minimum=0,
        aliases=("--batch-size",),
    )
    prefill_grant_interval: int = setting(
        16, "decode steps between two pieces of a long prompt while others decode", minimum=1
    )
    kv_unified: bool | None = setting(
        None,
        "rows share one context, or each has its part; not given: shared, unless --parallel says how many run",
    )
    kv_cache_budget: Bound = setting(
        AUTO, "most bytes that rows and prompt cache keep; auto: what is free beside the weights; none: no bound"
    )
    kv_admission_watermark: float = setting(
        0.01,
        "share of that which a request leaves free when it starts while others decode",
        minimum=0,
        maximum=0.5,
    )
    enable_preemption: bool = setting(
        False, "let a request of higher priority take the place of one that runs, which goes on later"
    )
    max_batch_prefill: int = setting(4, "prompts whose pieces one forward takes together", minimum=1)
    max_batch_prefill_tokens: int = setting(
        0, "prompt tokens of several prompts in one forward; 0: as many as the piece in force", minimum=0
    )
    mixed_step: int = setting(
        0,
        "tokens of one forward that takes decode rows and prompt pieces together; 0: they take turns",
        minimum=0,
    )
    draft_kind: str = setting(
        "auto",
        "who proposes tokens that one step verifies together; prompt-lookup: what followed the last ones before; "
        "draft: the draft model; mtp: the checkpoint's own extra heads; auto: a draft model, if there is one",
        choices=DRAFT_KINDS,
    )
    draft_model: Path | None = setting(
        None, "a smaller model of the same tokenizer that drafts: a folder, or a name as of MODEL"
    )
    draft_block_size: int | None = setting(
        None,
        f"most draft tokens that one step verifies; not given: {DRAFT_BLOCK}",
        minimum=1,
        maximum=MAX_DRAFT_BLOCK,
    )
    prompt_lookup_max_batch: int | None = setting(
        None,
        f"requests that may run at once for prompt lookup to draft; not given: {LOOKUP_ROWS}",
        minimum=1,
    )
    lookahead: bool | None = setting(
        None, "submit a step before the last is read; None: where it gains", flag=False
    )
    threads: int = setting(
        0, "CPU threads of the compiled kernels; 0: the cores this process may use", minimum=0, maximum=1024,
        aliases=("-t",),
    )  # fmt: skip
    cache_dtype: str = setting(
        "auto",
        "type that keys and values are stored in; auto: float16 where compiled kernels attend, else the model's",
        choices=CACHE_DTYPES,
    )
    decode_storage_backend: str = setting(
        "auto",
        "how rows keep keys and values; paged: in blocks that they share; dense: each in buffers of its own; "
        "auto: paged where more than one request runs at once and the compiled kernels attend",
        choices=STORAGE_BACKENDS,
    )
    no_prompt_cache: bool = setting(False, "keep nothing of one request for the next")
    prompt_cache_bytes: Size = setting(
        Size("2GiB"), "most bytes that the prompt cache keeps (2GiB, 500MB, a number)", minimum=0
    )
    prompt_cache_ttl: int = setting(
        3600, "seconds after which the prompt cache drops what nobody has used", minimum=0
    )
    verify_cache: float = setting(
        0.0,
        "share of prompt cache hits that are computed again from the start and compared; 1: every one",
        minimum=0,
        maximum=1,
    )
    portable: bool = setting(False, "run on MLX's own operations, without the compiled kernels")
    trust_remote_code: bool = setting(False, "let the checkpoint run its own Python code")
    chat_template: Path | None = setting(None, "a Jinja file used in place of the checkpoint's chat template")
    chat_template_args: str = setting(
        "", "a JSON object: arguments that the chat template gets where a request does not say"
    )
    adapter: Path | None = setting(None, "a folder with LoRA or DoRA weights of mlx-lm, applied to the model")
    adapters: tuple[str, ...] = setting(
        (), "NAME=FOLDER of an adapter (LoRA or DoRA of mlx-lm, LoRA of PEFT) that requests may choose; repeatable"
    )
    adapters_may_miss: bool = setting(
        False, "the model is loaded without those of them that cannot be mounted", flag=False
    )
    temp: float | None = setting(None, "default temperature; 0: greedy", minimum=0, maximum=100)
    top_k: int | None = setting(None, "default top-k; 0: off", minimum=0)
    top_p: float | None = setting(None, "default top-p; 1: off", minimum=0, maximum=1)
    min_p: float | None = setting(None, "default min-p; 0: off", minimum=0, maximum=1)
    repeat_penalty: float | None = setting(
        None, "default penalty on recent tokens; 1: off", minimum=0.01, maximum=100
    )
    seed: int | None = setting(None, "default seed; not given: every request draws its own", minimum=0)
    loop_detection: str = setting(
        "off",
        "end answers that go round in circles; MIN,MAX,COUNT: when COUNT times the same MIN to MAX tokens came in "
        f"a row; on: {','.join(map(str, LOOPS))}",
    )
    split: str = setting(
        "auto",
        "how a model is split over the ranks of mlx.launch; tensor: each has a part of every layer; pipeline: "
        "each has some layers; auto: tensor where family and sizes allow it, else pipeline",
        choices=SPLITS,
    )
    fallback_sampling: Sampling = GREEDY
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.parallel == 0:
            raise ConfigError("parallel", "parallel must be -1 (auto) or at least 1, not 0")
        if self.n_predict == 0:
            raise ConfigError("n_predict", "n_predict must be -1 (no bound) or at least 1, not 0")
        if self.no_batch and self.parallel > 1:
            raise ConfigError("no_batch", f"no_batch runs one request at a time, but parallel is {self.parallel}")
        if self.split != "auto" and self.ranks is None:
            raise ConfigError(
                "split",
                f"split {self.split} is for several ranks, and this process is alone",
                hint="mlx.launch -n 2 -- mlxcel serve MODEL starts two",
            )
        _ = self.loops, self.drafting, self.template_arguments, self.mounts  # for what they raise

    @property
    def loops(self) -> Loops | None:
        """When an answer is a loop where a request does not say. Raises ConfigError."""
        if self.loop_detection in ("off", "on"):
            return Loops(*LOOPS) if self.loop_detection == "on" else None
        try:
            shortest, longest, count = map(int, self.loop_detection.split(","))
        except ValueError:
            shortest = longest = count = 0
        if not (1 <= shortest <= longest <= 512 and 2 <= count <= 1000):
            raise ConfigError(
                "loop_detection",
                f"loop_detection must be off, on or MIN,MAX,COUNT (such as 1,20,12), not {self.loop_detection}",
            )
        return Loops(shortest, longest, count)

    @property
    def template_arguments(self) -> dict[str, Any]:
        """What the chat template gets where a request does not say. Raises ConfigError."""
        try:
            arguments = json.loads(self.chat_template_args or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ConfigError(
                "chat_template_args",
                f"chat_template_args must be a JSON object, not {self.chat_template_args[:100]}",
                hint="""such as '{"enable_thinking": false}'""",
            )
        if reserved := sorted(RESERVED_FOR_TEMPLATES & arguments.keys()):
            raise ConfigError("chat_template_args", f"chat_template_args: {reserved[0]} is not anybody's to set")
        return arguments

    @property
    def mounts(self) -> dict[str, Path]:
        """The folders of the adapters that requests may choose, by name. Raises ConfigError."""
        folders: dict[str, Path] = {}
        for said in self.adapters:
            before, equals, behind = said.partition("=")
            folder = Path(behind if equals else before).expanduser()
            name = before if equals else folder.name
            if not is_adapter_name(name) or not str(folder).strip("."):
                raise ConfigError("adapters", f"adapters: {said!r} is not NAME=FOLDER", hint=ADAPTER_NAME)
            if name in folders:
                raise ConfigError("adapters", f"adapters: two are named {name}")
            folders[name] = folder
        if folders and self.adapter is not None:
            raise ConfigError(
                "adapters",
                "adapters are mounted beside a model as it is, and adapter changes all of it",
                hint="leave one of them out",
            )
        if folders and self.ranks is not None:
            raise ConfigError("adapters", "adapters are for one process: a model over several ranks has none")
        return folders

    @property
    def drafting(self) -> Drafting:
        """Who proposes tokens. Raises ConfigError where that does not fit together."""
        kind = self.draft_kind
        if self.draft_model is not None and kind not in ("auto", "draft"):
            raise ConfigError(
                "draft_kind", f"draft_kind {kind} has no use for a draft_model; leave one of them out"
            )
        if kind == "draft" and self.draft_model is None:
            raise ConfigError(
                "draft_model",
                "draft_kind draft needs a draft_model",
                hint="a draft model is a smaller one of the same family",
            )
        if kind == "auto":
            kind = "none" if self.draft_model is None else "draft"
        if kind == "none" and self.draft_block_size is not None:
            raise ConfigError("draft_block_size", "draft_block_size bounds drafts, and nobody drafts")
        if kind != "prompt-lookup" and self.prompt_lookup_max_batch is not None:
            raise ConfigError("prompt_lookup_max_batch", "prompt_lookup_max_batch is for draft_kind prompt-lookup")
        return cast(Drafting, kind)

    def context_length(self, of_model: int) -> int:
        """The context in tokens for a model made for `of_model` of them. Raises ConfigError when more is asked."""
        if self.ctx_size > of_model:
            raise ConfigError(
                "ctx_size",
                f"a context of {self.ctx_size} tokens was asked for, but the model was made for {of_model}",
            )
        return self.ctx_size or of_model

    def slot_context(self, of_model: int, num_slots: int) -> int:
        """The most tokens that one of `num_slots` rows may have, prompt and answer. Raises ConfigError.

        Where rows share a context it is all of it, else each row's part.
        """
        context = self.context_length(of_model)
        if num_slots == 1 or self.shares_context:
            return context
        if context < num_slots:
            raise ConfigError(
                "ctx_size", f"a context of {context} tokens cannot be split over {num_slots} requests"
            )
        return context // num_slots

    def shared_context(self, num_slots: int) -> int | None:
        """The most tokens that all rows together may have, or None: as many as there is memory for."""
        return self.ctx_size or None if num_slots > 1 and self.shares_context else None

    @property
    def shares_context(self) -> bool:
        """Whether rows that run at once share one context."""
        return self.parallel <= 1 if self.kv_unified is None else self.kv_unified

    def num_slots(self, *, batches: bool) -> int:
        """How many rows run at once; `batches` says whether the model family gains from company."""
        if self.no_batch:
            return 1
        if self.parallel > 0:
            return self.parallel
        return self.AUTO_PARALLEL if batches else 1

    def pages_rows(self, *, pageable: bool, num_slots: int) -> bool:
        """Whether rows share blocks, where kernels and family make them `pageable`."""
        wanted = self.decode_storage_backend
        return pageable and (wanted == "paged" or (wanted == "auto" and num_slots > 1))

    def default_sampling(self, checkpoint: Sampling | None) -> Sampling:
        """What a request draws with where it does not say: setting over checkpoint over fallback."""
        base = checkpoint or self.fallback_sampling
        given: dict[str, Any] = {
            name: value
            for name, value in {
                "temperature": self.temp,
                "top_k": self.top_k,
                "top_p": self.top_p,
                "min_p": self.min_p,
                "repetition_penalty": self.repeat_penalty,
                "seed": self.seed,
            }.items()
            if value is not None
        }
        return dataclasses.replace(base, **given)
