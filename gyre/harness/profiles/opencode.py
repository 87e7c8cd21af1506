"""opencode, unmodified: its own `opencode run`, on the OpenAI Chat dialect. Tried with 1.18.33.

It asks for a title before its first call. What is left of a stream that was cut stays in its history, so answers reach
it whole. Its own limit of five minutes on an answer is switched off.
"""

from __future__ import annotations

import json
from typing import Any

from gyre.harness.profiles import Launch, LaunchContext, Profile
from gyre.harness.said import last_event
from gyre.harness.wire import Hold, Wire
from gyre.harness.workspace import RunFolder

WIRE = Wire(
    thread_headers=("x-session-id",),
    sub_agent_headers=("x-parent-session-id",),
    summary=(r"you are a context summarization agent",),
    auxiliary=(r"title generator", r"generate a (?:short |concise |brief )*title"),
    hold=Hold(headers_s=240.0),
)

_OUTPUT_TOKENS = 32_000
_CONTEXT_TOKENS = 200_000


def settings_file(context: LaunchContext) -> dict[str, Any]:
    """Its opencode.json."""
    settings = context.settings
    context_tokens = settings.context_tokens or _CONTEXT_TOKENS
    output_tokens = min(settings.max_tokens or _OUTPUT_TOKENS, context_tokens // 2)
    return {
        "$schema": "https://opencode.ai/config.json",
        "autoupdate": False,
        "share": "disabled",
        "permission": {"edit": "allow", "bash": "allow", "webfetch": "allow", "external_directory": "allow"},
        "model": "gyre/policy",
        "small_model": "gyre/policy",
        "provider": {
            "gyre": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "gyre",
                "options": {"baseURL": f"{context.base_url}/v1", "apiKey": "unused", "timeout": False},
                "models": {
                    "policy": {
                        "name": "policy",
                        "tool_call": True,
                        "reasoning": True,
                        "limit": {"context": context_tokens, "output": output_tokens},
                    }
                },
            }
        },
    }


def launch(context: LaunchContext) -> Launch:
    folder = context.folder.home / ".config" / "opencode"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "opencode.json").write_text(json.dumps(settings_file(context)), encoding="utf-8")
    env = context.environment(
        OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_DISABLE_LSP_DOWNLOAD="1",
    )
    return Launch(("opencode",), ("run", "--format", "json", "--", context.instruction), env)


def submitted(folder: RunFolder) -> bool:
    """Whether its last step ended because the policy had nothing more to do."""
    last = last_event(folder.log, "step_finish", "error")
    if last is None or last["type"] != "step_finish":
        return False
    part = last.get("part")
    return isinstance(part, dict) and part.get("reason") == "stop"


PROFILE = Profile(
    name="opencode",
    launch=launch,
    submitted=submitted,
    wire=WIRE,
    program="opencode",
    install="npm install -g opencode-ai",
)
