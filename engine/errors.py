"""The tree of what can go wrong in the engine.

A person's fault is a type below `UserError`, whose message can be shown as it is; a fault of ours is an
`EngineFault` or an assertion. Which HTTP status or exit code a type becomes is decided elsewhere.

    MlxcelError
    ├── UserError
    │   ├── ConfigError             a setting out of its bounds
    │   ├── ModelError              the checkpoint: unknown, incomplete, unreadable
    │   │   ├── ModelNotFound
    │   │   ├── ModelIncomplete
    │   │   ├── UnsupportedModel
    │   │   ├── UntrustedCode
    │   │   ├── AdapterError
    │   │   │   └── AdapterTaken
    │   │   └── FetchFailed
    │   └── RequestError            one request
    │       ├── ContextLengthExceeded
    │       ├── NeverFits
    │       ├── AdapterNotFound
    │       ├── NoChatTemplate
    │       ├── NoEmbeddings
    │       ├── EmbeddingsOnly
    │       └── TemplateFailed
    └── EngineFault
        ├── QueueFull               too many requests wait already
        ├── StepFailed              a forward or sampler raised: its rows end
        └── EngineStopped           the loop is gone or going
"""

NO_BACKEND = "on Linux the backend is an extra of the package that is installed: mlxcel[cpu] or mlxcel[cuda]"


def words_of(fault: BaseException, most: int = 200) -> str:
    """What an error that is none of ours says, in one line of at most so many characters; its type if nothing."""
    return " ".join(str(fault).split())[:most] or type(fault).__name__


class MlxcelError(Exception):
    """Anything this project raises on purpose. `hint` is one line on what to do next, or empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UserError(MlxcelError):
    """Something the person asked for cannot be done; the message says what and why."""


class ConfigError(UserError):
    """A setting is unknown, of the wrong kind or out of its bounds. `setting` is its field's name."""

    def __init__(self, setting: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.setting = setting


class ModelError(UserError):
    """A checkpoint cannot be used."""


class ModelNotFound(ModelError):
    """No checkpoint is known by this name and no such path exists."""


class ModelIncomplete(ModelError):
    """A checkpoint's files are not all there, or do not match what its index says."""


class UnsupportedModel(ModelError):
    """The checkpoint is whole, but nothing here can run or import it."""


class UntrustedCode(ModelError):
    """The checkpoint asks to run its own Python and that was not allowed."""


class AdapterError(ModelError):
    """An adapter cannot be mounted beside the model, or not under this name."""


class AdapterTaken(AdapterError):
    """An adapter is mounted under this name already."""


class FetchFailed(ModelError):
    """A checkpoint could not be fetched by any of the ways tried."""


class RequestError(UserError):
    """One request asks for something that cannot be done. `param` names the field, or is empty."""

    def __init__(self, message: str, *, param: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextLengthExceeded(RequestError):
    """The prompt does not fit into the context, with the `num_new` tokens that have to follow it."""

    def __init__(
        self,
        prompt_tokens: int,
        context_tokens: int,
        *,
        param: str = "messages",
        at_least: bool = False,
        num_new: int = 1,
    ) -> None:
        super().__init__(
            f"the prompt has {'at least ' if at_least else ''}{prompt_tokens} tokens and the context holds "
            f"{context_tokens}" + (", the prompt and at least one new token included" if num_new else ""),
            param=param,
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class NeverFits(RequestError):
    """The prompt could not be stored even if nothing else were; the message has the arithmetic."""

    def __init__(self, message: str, *, param: str = "messages") -> None:
        super().__init__(message, param=param, hint="see --kv-cache-budget, and of several models --models-memory")


class AdapterNotFound(RequestError):
    """No adapter is mounted under this name, or no longer."""


class NoChatTemplate(RequestError):
    """The checkpoint is a base model: it has no chat template."""


class NoEmbeddings(RequestError):
    """The model gives no embeddings."""


class EmbeddingsOnly(RequestError):
    """The model gives embeddings and continues nothing."""


class TemplateFailed(RequestError):
    """The chat template refused these messages."""


class EngineFault(MlxcelError):
    """The engine cannot serve this request; the request itself is fine."""


class QueueFull(EngineFault):
    """As many requests wait as are allowed to."""


class StepFailed(EngineFault):
    """A forward or the sampler raised; every row of that call ends with this."""


class EngineStopped(EngineFault):
    """The engine's loop has ended or is ending."""
