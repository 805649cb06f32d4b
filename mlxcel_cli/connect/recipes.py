"""The clients that are known here. Each entry follows the client's own documentation, whose address it carries."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxcel_cli import config
from mlxcel_cli.connect.endpoint import KEY_VARIABLE, Endpoint
from mlxcel_cli.connect.recipe import Content, File, Kind, Recipe

PROVIDER = "mlxcel"
CONTEXT_TOKENS = 8192  # where the server does not say


def _exports(**values: str) -> list[str]:
    """Lines for a shell; what begins with $ is left to it to expand."""
    return [
        f'export {name}="{value}"' if value.startswith("$") else f"export {name}={shlex.quote(value)}"
        for name, value in values.items()
    ]


def _shell_key(to: Endpoint) -> str:
    """The key as a word of a command."""
    return f'"{to.shell_key}"' if to.needs_key else to.shell_key


def _curl(to: Endpoint) -> Sequence[str]:
    body = {"model": to.model, "messages": [{"role": "user", "content": "Hello"}]}
    key = [f'  -H "Authorization: Bearer ${KEY_VARIABLE}" \\'] if to.needs_key else []
    said = shlex.quote(json.dumps(body, ensure_ascii=False))
    return [f"curl {shlex.quote(to.api + '/chat/completions')} \\", *key, f"  --json {said}"]


def _openai(to: Endpoint) -> Sequence[str]:
    return [*_exports(OPENAI_BASE_URL=to.api, OPENAI_API_KEY=to.shell_key), _asked_for(to)]


def _anthropic(to: Endpoint) -> Sequence[str]:
    return [*_exports(ANTHROPIC_BASE_URL=to.root, ANTHROPIC_API_KEY=to.shell_key), _asked_for(to)]


def _asked_for(to: Endpoint) -> str:
    return f"# in Python and JavaScript the SDK reads both; ask for model={json.dumps(to.model)}"


def _claude_environment(to: Endpoint) -> dict[str, str]:
    """Everything but the key. Without the last two it sends fields that only Anthropic's own models know."""
    return {
        "ANTHROPIC_BASE_URL": to.root,
        "ANTHROPIC_MODEL": to.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": to.model,
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "CLAUDE_CODE_EFFORT_LEVEL": "auto",
    }


def _claude(to: Endpoint) -> Sequence[str]:
    return [
        "# or, for one shell:",
        *_exports(ANTHROPIC_AUTH_TOKEN=to.shell_key, **_claude_environment(to)),
        "claude",
    ]


def _claude_file(to: Endpoint) -> Content:
    environment = _claude_environment(to)
    if to.needs_key:
        return {"apiKeyHelper": f"printenv {KEY_VARIABLE}", "env": environment}
    return {"env": {**environment, "ANTHROPIC_AUTH_TOKEN": "unused"}}


def _codex_file(to: Endpoint) -> Content:
    provider: dict[str, Any] = {"name": PROVIDER, "base_url": to.api, "wire_api": "responses"}
    if to.needs_key:
        provider["env_key"] = KEY_VARIABLE
    return {
        "model": to.model,
        "model_provider": PROVIDER,
        "web_search": "disabled",  # it and agents of agents are tools that only OpenAI's server runs
        **({"model_context_window": to.context_tokens} if to.context_tokens else {}),
        "agents": {"enabled": False},
        "model_providers": {PROVIDER: provider},
    }


def _aider_file(to: Endpoint) -> Content:
    return {"openai-api-base": to.api, "model": f"openai/{to.model}"}


def _continue_file(to: Endpoint) -> Content:
    model = {"name": f"{PROVIDER} {to.model}", "provider": "openai", "model": to.model, "apiBase": to.api}
    if to.needs_key:
        model["apiKey"] = "${{ secrets.%s }}" % KEY_VARIABLE  # noqa: UP031 - braces are the client's own
    return {"models": [model]}


def _continue(to: Endpoint) -> Sequence[str]:
    if not to.needs_key:
        return []
    return [f"echo {KEY_VARIABLE}=${KEY_VARIABLE} >> ~/.continue/.env  # it reads keys there"]


def _open_webui(to: Endpoint) -> Sequence[str]:
    told = _exports(OPENAI_API_BASE_URL=to.api, OPENAI_API_KEY=to.shell_key)
    return [
        *told,
        "open-webui serve --port 3000  # it reads them when it starts for the first time",
        "# or in Docker, on this machine's network:",
        "docker run -d --network=host -e PORT=3000 -e OPENAI_API_BASE_URL -e OPENAI_API_KEY \\",
        "  -v open-webui:/app/backend/data --name open-webui ghcr.io/open-webui/open-webui:main",
    ]


def _librechat_file(to: Endpoint) -> Content:
    endpoint = {
        "name": PROVIDER,
        "apiKey": f"${{{KEY_VARIABLE}}}" if to.needs_key else "unused",
        "baseURL": to.api,
        "models": {"default": [to.model], "fetch": True},
        "titleConvo": True,
        "titleModel": to.model,
        "modelDisplayLabel": PROVIDER,
    }
    return {"endpoints": {"custom": [endpoint]}}


def _zed_file(to: Endpoint) -> Content:
    capabilities = {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": True}
    model = {"name": to.model, "display_name": f"{PROVIDER} {to.model}"}
    tokens = {"max_tokens": to.context_tokens or CONTEXT_TOKENS}
    provider = {"api_url": to.api, "available_models": [{**model, **tokens, "capabilities": capabilities}]}
    return {"language_models": {"openai_compatible": {PROVIDER: provider}}}


def _zed(to: Endpoint) -> Sequence[str]:
    if to.needs_key:
        return [f"# Zed reads the key from {KEY_VARIABLE}, or from its agent's settings"]
    return [f"{KEY_VARIABLE}=unused zed  # it wants a key to be set"]


def _cline(to: Endpoint) -> Sequence[str]:
    key = f"the value of {KEY_VARIABLE}" if to.needs_key else "unused"
    address, model = shlex.quote(to.api), shlex.quote(to.model)
    return [
        "In Cline's settings:",
        "  API Provider  OpenAI Compatible",
        f"  Base URL      {to.api}",
        f"  API Key       {key}",
        f"  Model ID      {to.model}",
        *([f"  Context       {to.context_tokens} tokens"] if to.context_tokens else []),
        "or, for its command line:",
        f"  cline auth -p openai-compatible -b {address} -m {model} -k {_shell_key(to)}",
    ]


def _llm_file(to: Endpoint) -> Content:
    model = {"model_id": PROVIDER, "model_name": to.model, "api_base": to.api}
    return [{**model, **({"api_key_name": PROVIDER} if to.needs_key else {})}]


def _llm(to: Endpoint) -> Sequence[str]:
    key = [f'llm keys set {PROVIDER} --value "${KEY_VARIABLE}"'] if to.needs_key else []
    return [*key, f"llm -m {PROVIDER} 'Hello'"]


def _llm_place() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library/Application Support/io.datasette.llm/extra-openai-models.yaml"
    return config.config_home() / "io.datasette.llm/extra-openai-models.yaml"


def _opencode_file(to: Endpoint) -> Content:
    options = {"baseURL": to.api, **({"apiKey": f"{{env:{KEY_VARIABLE}}}"} if to.needs_key else {})}
    limit = {"limit": {"context": to.context_tokens, "output": to.context_tokens}} if to.context_tokens else {}
    models = {to.model: {"name": to.model, **limit}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": PROVIDER, "options": options, "models": models}
    return {"provider": {PROVIDER: provider}}


RECIPES = (
    Recipe("curl", "curl", "https://curl.se/docs/manpage.html", _curl),
    Recipe("openai", "OpenAI SDK", "https://github.com/openai/openai-python", _openai),
    Recipe("anthropic", "Anthropic SDK", "https://platform.claude.com/docs/en/api/client-sdks", _anthropic),
    Recipe(
        *("claude", "Claude Code", "https://code.claude.com/docs/en/llm-gateway", _claude),
        File(lambda: Path.home() / ".claude/settings.json", Kind.JSON, _claude_file),
    ),
    Recipe(
        *("codex", "Codex CLI 0.134 or later", "https://developers.openai.com/codex/config-advanced"),
        lambda to: [f"codex --profile {PROVIDER}"],
        File(lambda: Path.home() / f".codex/{PROVIDER}.config.toml", Kind.TOML, _codex_file),
    ),
    Recipe(
        *("aider", "aider", "https://aider.chat/docs/llms/openai-compat.html"),
        lambda to: [*_exports(OPENAI_API_KEY=to.shell_key), "aider"],
        File(lambda: Path.home() / ".aider.conf.yml", Kind.YAML, _aider_file),
    ),
    Recipe(
        *(
            "continue",
            "Continue",
            "https://docs.continue.dev/customize/model-providers/top-level/openai",
            _continue,
        ),
        File(
            lambda: Path.home() / ".continue/config.yaml",
            Kind.YAML,
            _continue_file,
            beginning={"name": "Local", "version": "1.0.0", "schema": "v1"},
        ),
    ),
    Recipe(
        *("open-webui", "Open WebUI", "https://docs.openwebui.com/reference/env-configuration", _open_webui),
        instead="Open WebUI keeps connections in a database of its own",
    ),
    Recipe(
        *("librechat", "LibreChat"),
        "https://www.librechat.ai/docs/configuration/librechat_yaml/object_structure/custom_endpoint",
        lambda to: ["# LibreChat reads it when it starts"],
        File(lambda: Path("librechat.yaml"), Kind.YAML, _librechat_file, is_made=False),
    ),
    Recipe(
        *("zed", "Zed", "https://zed.dev/docs/ai/use-api-access#openai-compatible", _zed),
        File(lambda: config.config_home() / "zed/settings.json", Kind.JSON, _zed_file),
    ),
    Recipe(
        *("cline", "Cline", "https://docs.cline.bot/provider-config/openai-compatible", _cline),
        instead="Cline keeps its settings in the editor",
    ),
    Recipe(
        *("llm", "llm", "https://llm.datasette.io/en/stable/other-models.html", _llm),
        File(_llm_place, Kind.YAML, _llm_file),
    ),
    Recipe(
        *("opencode", "opencode", "https://opencode.ai/docs/config"),
        lambda to: [f"opencode --model {shlex.quote(f'{PROVIDER}/{to.model}')}"],
        File(
            lambda: config.config_home() / "opencode/opencode.json",
            Kind.JSON,
            _opencode_file,
            beginning={"$schema": "https://opencode.ai/config.json"},
        ),
    ),
)
