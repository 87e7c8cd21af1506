"""What mini-swe-agent leaves for its first call to the model: how mini_swe_agent_preload.json is made.

    python tests/harness/list_lazy_work.py PRELOAD.json > NEW.json

Preloads what the file names, does one run of the harness against a chosen chat server in this process, and prints the
file with what was still imported, and which pydantic models were still built, on the way.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre.harness import zygote
from gyre.harness.profiles import config_path
from gyre.harness.profiles.mini_swe_agent import PROFILE

ANSWERS = ("```\necho hello\n```", "```\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```")


def main(preload: str) -> None:
    from chat_server import chat_server

    known = zygote.Preload.read(preload)
    assert PROFILE.fork_server is not None
    with tempfile.TemporaryDirectory() as folder, chat_server(ANSWERS) as chat:
        os.chdir(folder)
        os.environ.update(PROFILE.fork_server.env, MSWEA_CONFIGURED="true", MSWEA_GLOBAL_CONFIG_DIR=folder, HOME=folder)
        os.environ.update(OPENAI_API_BASE=f"{chat.base_url}/v1", OPENAI_API_KEY="unused")
        entry_point()
        known.load()
        sys.argv = ["mini", "--yolo", "--exit-immediately", "--model", "openai/policy", "--task=say hello"]
        sys.argv += ["--config", str(config_path("builtin:chores", Path())), "--output", "trajectory.json"]
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
            watched()
        assert json.loads(Path("trajectory.json").read_text())["info"]["exit_status"] == "Submitted"
        new = json.loads(Path("lazy.json").read_text())
    print(json.dumps({key: [*getattr(known, key), *new[key]] for key in ("modules", "models")}, indent=0))


def watched() -> None:
    """The harness's entry point; what was done on the way that can be done before is in lazy.json in its home."""
    entry = entry_point()
    modules, models = set(sys.modules), built_models()
    try:
        entry()
    finally:
        new_modules = sorted(name for name in set(sys.modules) - modules if sys.modules[name].__spec__ is not None)
        new = {"modules": new_modules, "models": sorted(built_models() - models)}
        Path(os.environ["HOME"], "lazy.json").write_text(json.dumps(new))


def entry_point() -> Callable[[], object]:
    assert PROFILE.fork_server is not None
    return zygote.load_entry_point(PROFILE.fork_server.entry_point)


def built_models() -> set[str]:
    """The importable pydantic models whose validators are built, as `module:name`."""
    from pydantic import BaseModel

    found: dict[type[Any], None] = {BaseModel: None}
    waiting: list[type[Any]] = [BaseModel]
    while waiting:
        for model in waiting.pop().__subclasses__():
            if model not in found:
                found[model] = None
                waiting.append(model)
    names = {f"{model.__module__}:{model.__qualname__}": model for model in found if model.__pydantic_complete__}
    return {name for name, model in names.items() if zygote.Preload.find(name) is model}


if __name__ == "__main__":
    main(*sys.argv[1:])
