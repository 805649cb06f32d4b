"""What the rest of the process may know of an engine, in plain values: its model, and what its slots do."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from engine.language import Language
from engine.request import Embedding, Request, Sampling, Storable

if TYPE_CHECKING:
    from engine.engine import Engine


@dataclass(frozen=True, slots=True)
class ServedModel(Language):
    """What the rest of the process may know of the loaded model; safe to use from any thread.

    `lacks` says why a prompt of so many tokens could never be stored, or None. `embedding` is what an embedding is
    where a request does not say, None where the model gives none; `continues`: it continues prompts.
    """

    context_length: int
    default_sampling: Sampling
    num_slots: int
    notes: tuple[str, ...]
    storable: Storable
    lacks: Callable[[int], str | None]
    cuts_at_turns: bool = False
    storage_backend: str = "dense"
    embedding: Embedding | None = None
    continues: bool = True

    @classmethod
    def speaking(cls, language: Language, **said: Any) -> "ServedModel":
        """The model of this language; `said` are all further fields."""
        return cls(**{field.name: getattr(language, field.name) for field in fields(language)}, **said)

    @classmethod
    def of_engine(cls, engine: "Engine") -> "ServedModel":
        """That of `engine`, once it is loaded; called on its thread."""
        return cls.speaking(
            engine.language,
            context_length=engine.context_length,
            default_sampling=engine.default_sampling,
            num_slots=engine.num_slots,
            notes=engine.notes,
            storable=engine.storable,
            lacks=engine.memory.lacks,
            cuts_at_turns=engine.cuts_at_turns,
            storage_backend=engine.storage_backend,
            embedding=engine.pooler.embedding,
            continues=engine.continues,
        )


@dataclass(frozen=True, slots=True)
class Slot:
    """What one slot does now: the request in it, and how far that is. `task` numbers all requests.

    `stored_tokens` of the prompt are there, `cached_tokens` of them from the prompt cache.
    """

    task: int
    request: Request
    stored_tokens: int
    cached_tokens: int
    decoded_tokens: int
    remaining_tokens: int
