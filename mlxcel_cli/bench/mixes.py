"""The conversations that a load is made of, drawn from a seed: the same seed gives the same texts."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

NUM_TURNS = 4
LONG_EVERY = 4
QUESTIONS = (
    "Tell me a long story about a fox and a crow.",
    "Explain how a lighthouse works, step by step.",
    "Describe a market in the morning, with all that is sold.",
    "Write a letter from a sailor to his sister.",
)
FOLLOW_UP = "Go on."
WORDS = [
    *("the", "old", "river", "runs", "under", "a", "stone", "bridge", "where", "boats", "wait", "for", "grain"),
    *("and", "salt", "while", "children", "count", "birds", "on", "every", "roof", "merchants", "argue", "about"),
    *("price", "of", "copper", "before", "evening", "comes", "with", "wind", "from", "northern", "hills"),
    *("carrying", "smoke", "bread", "apples", "letters", "news", "ships", "that", "left", "harbour", "long"),
]


class Mix(StrEnum):
    """What the requests have in common."""

    CHAT = "chat"
    SHARED_PREFIX = "shared-prefix"
    MULTI_TURN = "multi-turn"
    LONG_PROMPT = "long-prompt"


LONG_WORDS = {Mix.CHAT: 0, Mix.SHARED_PREFIX: 400, Mix.MULTI_TURN: 0, Mix.LONG_PROMPT: 700}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system text, and what the person says in each turn."""

    system: str
    turns: tuple[str, ...]


def conversations(mix: Mix, num_requests: int, seed: str, num_words: int | None = None) -> list[Conversation]:
    """Conversations of `num_requests` requests together; `num_words` is the length of what is long in the mix.

    chat: short, each with a system text of its own. shared-prefix: one long system text for all. multi-turn: four
    turns each, every turn with the ones before. long-prompt: short ones, and every fourth has a long question.
    """
    import random  # the command line names mixes without drawing any

    draw = random.Random(f"{seed}-{mix}")
    length = LONG_WORDS[mix] if num_words is None else num_words
    shared = _words(draw, length)
    made: list[Conversation] = []
    for number in range(-(-num_requests // NUM_TURNS) if mix is Mix.MULTI_TURN else num_requests):
        name = f"{draw.randrange(10**6):06}"
        system = f"You are storyteller {name}. Be vivid."
        question = draw.choice(QUESTIONS)
        if mix is Mix.SHARED_PREFIX:
            made.append(Conversation(f"{seed} {shared}", (f"{question} ({name})",)))
        elif mix is Mix.MULTI_TURN:
            num_turns = min(NUM_TURNS, num_requests - NUM_TURNS * number)
            made.append(Conversation(system, (question, *[FOLLOW_UP] * (num_turns - 1))))
        elif mix is Mix.LONG_PROMPT and number % LONG_EVERY == LONG_EVERY - 1:
            made.append(Conversation(system, (f"{_words(draw, length)}\n{question}",)))
        else:
            made.append(Conversation(system, (question,)))
    return made


def _words(draw: "random.Random", count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))
