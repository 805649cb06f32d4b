"""Chat templates for tiny checkpoints: of models that think, that call tools, or that speak in channels."""

from collections.abc import Sequence
from pathlib import Path

from tests.tiny import VOCAB_SIZE, write_checkpoint, write_tokenizer

_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}{% set tool_call = c.function %}"
    '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
_TURN = "<|im_start|>{{ m.role }}\n THOUGHT {{ m.content }}" + _CALLS + "<|im_end|>\n"
_THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\nOPENING{% endif %}"
_ALL = _TOOLS + "{% for m in messages %}" + _TURN + "{% endfor %}" + _OPENING

PLAIN = _ALL.replace(" THOUGHT ", "").replace("OPENING", "")
# Keeps reasoning in history, and opens a thought itself or, when told not to think, an empty one.
THINKING = _ALL.replace(" THOUGHT ", _THOUGHT).replace(
    "OPENING", "{% if not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
# As THINKING, but the model opens its thoughts.
THINKS_ITSELF = _ALL.replace(" THOUGHT ", _THOUGHT).replace("OPENING", "")
FORGETS = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
_REFUSES = "{{ raise_exception('System message must be at the beginning') }}"
FIRST_SYSTEM = PLAIN.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}" + _REFUSES + "{% endif %}",
)
NO_SYSTEM = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
CODER = PLAIN.replace("<tool_call>\n{", "<tool_call>\n<function=x></function>{")
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{{ tools or '' }}{% if reasoning_effort %}Reasoning: {{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)


def checkpoint(folder: Path, template: str, more: Sequence[str] = ()) -> Path:
    """A tiny checkpoint with this template, and with `more` special tokens."""
    write_checkpoint(folder, "gemma3_text", vocab_size=VOCAB_SIZE + len(more))
    write_tokenizer(folder, template, more)
    return folder
