"""mini-swe-agent, unmodified: its own `mini` entry point, on the OpenAI Chat dialect. Tried with 2.4.6.

It has one thread and no compaction: a run that outgrows the model's context ends there. It never streams, and its
client sends an equal request after 600 s without an answer, which joins the call.

Importing it costs seconds (it loads litellm), so it is forked from a zygote. `mini_swe_agent_preload.json` lists what
it leaves for its first call to a model; tests/harness/list_lazy_work.py makes that list.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gyre.harness.profiles import ForkServer, Launch, LaunchContext, Profile
from gyre.harness.wire import Wire
from gyre.harness.workspace import RunFolder

WIRE = Wire()

_TRAJECTORY_BYTES = 256 << 20
_IMPORT_ENV = {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks a public host for prices when it starts
}


def trajectory(folder: RunFolder) -> Path:
    return folder.home / "trajectory.json"


def launch(context: LaunchContext) -> Launch:
    arguments = ["--yolo", "--exit-immediately", "--cost-limit", "0", "--model", "openai/policy"]
    if context.settings.config is not None:
        arguments += ["--config", str(context.settings.config)]
    arguments += ["--output", str(trajectory(context.folder)), f"--task={context.instruction}"]
    env = context.environment(
        **_IMPORT_ENV,
        MSWEA_CONFIGURED="true",
        MSWEA_GLOBAL_CONFIG_DIR=str(context.folder.home / ".config"),
        OPENAI_API_BASE=f"{context.base_url}/v1",
        OPENAI_API_KEY="unused",
    )
    return Launch((sys.executable, "-m", "minisweagent.run.mini"), tuple(arguments), env)


def submitted(folder: RunFolder) -> bool:
    """Whether the agent handed its work in (it may also stop at a limit, or by an error)."""
    try:
        path = trajectory(folder)
        if path.stat().st_size > _TRAJECTORY_BYTES:
            return False
        info = json.loads(path.read_text(encoding="utf-8"))["info"]
        return bool(info["exit_status"] == "Submitted")
    except (OSError, ValueError, KeyError, TypeError):
        return False  # it was ended before it wrote one


PROFILE = Profile(
    name="mini-swe-agent",
    launch=launch,
    submitted=submitted,
    wire=WIRE,
    module="minisweagent",
    extra="demo",
    fork_server=ForkServer(
        entry_point="minisweagent.run.mini:app",
        preload=Path(__file__).with_name("mini_swe_agent_preload.json"),
        env=_IMPORT_ENV,
    ),
)
