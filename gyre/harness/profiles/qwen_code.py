"""qwen-code, unmodified: its own `qwen -p`, on the OpenAI Chat dialect. Tried with 0.15.10.

It takes a stream that ends without content for success, so headers are never sent before the answer is there; its own
limit of two minutes on them is set to a day. A call that failed for good it reports as a result, and ends with 0:
`submitted` reads what the result says. It compacts at 70 % of the context and keeps its last two tool calls as they were.
"""

from __future__ import annotations

import json
from typing import Any

from gyre.harness.profiles import Launch, LaunchContext, Profile
from gyre.harness.said import last_event
from gyre.harness.wire import Hold, Wire
from gyre.harness.workspace import RunFolder

WIRE = Wire(
    sub_agent_system=(r"you are a general-purpose agent",),
    summary=(r"summarizes internal chat history",),
    hold=Hold(headers_s=24 * 3600.0),
)

_PATIENCE_MS = 24 * 3600 * 1000


def settings_file(context: LaunchContext) -> dict[str, Any]:
    """Its settings.json."""
    generation: dict[str, Any] = {"timeout": _PATIENCE_MS, "maxRetries": 10}
    if context.settings.context_tokens:
        generation["contextWindowSize"] = context.settings.context_tokens
    return {
        "telemetry": {"enabled": False},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"disableAutoUpdate": True, "disableUpdateNag": True, "enableAutoUpdate": False},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": "policy", "generationConfig": generation},
    }


def launch(context: LaunchContext) -> Launch:
    folder = context.folder.home / ".qwen"
    folder.mkdir(exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings_file(context)), encoding="utf-8")
    env = context.environment(OPENAI_BASE_URL=f"{context.base_url}/v1", OPENAI_API_KEY="unused", OPENAI_MODEL="policy")
    arguments = ("--yolo", "--output-format", "stream-json", f"--prompt={context.instruction}")
    return Launch(("qwen",), arguments, env)


def submitted(folder: RunFolder) -> bool:
    """Whether its last word is a result that is no error, neither by its mark nor by its text."""
    result = last_event(folder.log, "result")
    if result is None or result.get("is_error") is not False:
        return False
    return "[API Error" not in str(result.get("result", ""))


PROFILE = Profile(
    name="qwen-code",
    launch=launch,
    submitted=submitted,
    wire=WIRE,
    program="qwen",
    install="npm install -g @qwen-code/qwen-code",
)
