"""What a tokenizer says of a model's language: tokens, chat template, markup, calls, grammars. No arrays."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from engine.sample.grammar import Grammars
from engine.text.filter import Markup
from engine.text.template import ChatTemplate
from engine.text.tokens import Tokens, tokens_of
from engine.text.toolcalls import ToolCalls


@dataclass(frozen=True, slots=True)
class Language:
    """All that is needed to turn messages into ids and ids into an answer, without any weights."""

    tokens: Tokens
    template: ChatTemplate
    markup: Markup
    tool_calls: ToolCalls
    grammars: Grammars

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        vocab_size: int,
        end_tokens: Set[int],
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> "Language":
        """That of mlx-lm's `tokenizer`; `vocab_size` are the rows of the logits, `end_tokens` end a sequence, and
        the template gets `template_arguments` where a request does not say. Raises ConfigError for those that it
        does not ask for.
        """
        template = ChatTemplate.of(tokenizer, template_arguments)
        markup = Markup.of(tokenizer, template.source)
        return cls(
            tokens_of(tokenizer, vocab_size),
            template,
            markup,
            ToolCalls.of(tokenizer, markup),
            Grammars(tokenizer, vocab_size, frozenset(end_tokens)),
        )
