"""Claude Code, unmodified: its own `claude -p`, on the Anthropic Messages dialect. Tried with 2.1.220.

A stream that is cut after text ends it. Headers that do not come for five minutes are no harm: it sends an equal
request, which joins the call, up to 15 times.
"""

from __future__ import annotations

from gyre.harness.profiles import Launch, LaunchContext, Profile
from gyre.harness.said import last_event
from gyre.harness.wire import Hold, Wire
from gyre.harness.workspace import RunFolder

WIRE = Wire(
    thread_headers=("x-claude-code-agent-id",),
    sub_agent_headers=("x-claude-code-agent-id",),
    sub_agent_system=("cc_is_subagent=true",),
    summary=(r"your task is to create a detailed summary of the conversation",),
    auxiliary=(r"generate a (?:short |concise |brief )*title", r"isNewTopic"),
    server_lines=(r"^x-anthropic-billing-header:[^\n]*\n*",),
    volatile=(r"^gitStatus:(?:.|\n)*?(?=\n\n#|\Z)",),
    hold=Hold(headers_s=600.0),
)

_SHORTEST_COMPACTION_WINDOW_TOKENS = 100_000
"""It takes a smaller one for this."""
_PATIENCE_MS = str(24 * 3600 * 1000)


def launch(context: LaunchContext) -> Launch:
    arguments = ("--print", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions")
    settings = context.settings
    limits: dict[str, str] = {}
    if settings.context_tokens:
        limits["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(settings.context_tokens)
        window = max(settings.context_tokens, _SHORTEST_COMPACTION_WINDOW_TOKENS)
        limits["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(window)
    if settings.max_tokens:
        limits["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(settings.max_tokens)
    env = context.environment(
        ANTHROPIC_BASE_URL=context.base_url,
        ANTHROPIC_API_KEY="unused",
        ANTHROPIC_MODEL="policy",
        ANTHROPIC_SMALL_FAST_MODEL="policy",
        IS_SANDBOX="1",  # else it refuses to work unattended as root
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_ATTRIBUTION_HEADER="0",
        DISABLE_TELEMETRY="1",
        DISABLE_ERROR_REPORTING="1",
        DISABLE_AUTOUPDATER="1",
        API_TIMEOUT_MS=_PATIENCE_MS,
        CLAUDE_STREAM_IDLE_TIMEOUT_MS=_PATIENCE_MS,
        CLAUDE_ENABLE_STREAM_WATCHDOG="0",
        CLAUDE_ENABLE_BYTE_WATCHDOG="0",
        CLAUDE_CODE_MAX_RETRIES="15",
        CLAUDE_CODE_PRINT_BG_WAIT_CEILING_MS=_PATIENCE_MS,
        **limits,
    )
    return Launch(("claude",), (*arguments, "--", context.instruction), env)


def submitted(folder: RunFolder) -> bool:
    """Whether its last word is a result, and no error."""
    result = last_event(folder.log, "result")
    return result is not None and result.get("subtype") == "success" and result.get("is_error") is False


PROFILE = Profile(
    name="claude-code",
    launch=launch,
    submitted=submitted,
    wire=WIRE,
    program="claude",
    install="npm install -g @anthropic-ai/claude-code",
)
