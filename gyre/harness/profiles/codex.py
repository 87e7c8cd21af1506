"""Codex, unmodified: its own `codex exec`, on the OpenAI Responses dialect. Tried with 0.171.0.

It keeps what was finished of a stream that was cut, so answers reach it whole. It waits for the headers as long as it
takes, and for what comes after them as long as `stream_idle_timeout_ms` says. Its sub-agents are lost when its main
thread ends before them.
"""

from __future__ import annotations

import json

from gyre.harness.profiles import Launch, LaunchContext, Profile
from gyre.harness.said import last_event
from gyre.harness.wire import Hold, Wire
from gyre.harness.workspace import RunFolder

WIRE = Wire(
    thread_headers=("thread-id",),
    sub_agent_headers=("x-openai-subagent", "x-codex-parent-thread-id"),
    summary_headers=(("x-codex-turn-metadata", r'"request_kind"\s*:\s*"compaction"'),),
    summary=(r"you are performing a context checkpoint compaction",),
    hold=Hold(headers_s=600.0),
)

_PATIENCE_MS = 24 * 3600 * 1000
_COMPACT_AT = 0.9
"""Of the model's context."""


def settings_file(context: LaunchContext) -> str:
    """Its config.toml. A JSON string is one of TOML."""
    limits = ""
    if context.settings.context_tokens:
        limits = (
            f"model_context_window = {context.settings.context_tokens}\n"
            f"model_auto_compact_token_limit = {int(context.settings.context_tokens * _COMPACT_AT)}\n"
        )
    return (
        'model = "policy"\n'
        'model_provider = "gyre"\n'
        f"{limits}"
        'approval_policy = "never"\n'
        'sandbox_mode = "danger-full-access"\n'
        "check_for_update_on_startup = false\n"
        "[analytics]\nenabled = false\n"
        "[model_providers.gyre]\n"
        'name = "gyre"\n'
        f"base_url = {json.dumps(context.base_url + '/v1')}\n"
        'env_key = "GYRE_KEY"\n'
        'wire_api = "responses"\n'
        f"stream_idle_timeout_ms = {_PATIENCE_MS}\n"
        "stream_max_retries = 100\n"
        "request_max_retries = 100\n"
    )


def launch(context: LaunchContext) -> Launch:
    folder = context.folder.home / ".codex"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(settings_file(context), encoding="utf-8")
    arguments = ("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    env = context.environment(CODEX_HOME=str(folder), GYRE_KEY="unused")
    return Launch(("codex",), (*arguments, "--", context.instruction), env)


def submitted(folder: RunFolder) -> bool:
    """Whether its last turn was completed."""
    last = last_event(folder.log, "turn.completed", "turn.failed", "turn.started", "error")
    return last is not None and last["type"] == "turn.completed"


PROFILE = Profile(
    name="codex",
    launch=launch,
    submitted=submitted,
    wire=WIRE,
    program="codex",
    install="npm install -g @openai/codex",
)
