"""What mini-swe-agent leaves for its first call to the model: how mini_swe_agent_preload.json is made.

    python tests/harness/list_lazy_work.py PRELOAD.json > NEW.json

Preloads what the file names, does one run of the harness against a chosen chat server in this process, and prints the
file with what was still imported, and which pydantic models were still built, on the way.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from chat_server import chat_server
from pydantic import BaseModel

from gyre.demo import builtin
from gyre.harness import zygote
from gyre.harness.profiles.mini_swe_agent import PROFILE

ANSWERS = ("```\necho hello\n```", "```\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```")


def main(preload: str) -> None:
    known = zygote.Preload.read(preload)
    assert PROFILE.fork_server is not None
    with tempfile.TemporaryDirectory() as folder, chat_server(ANSWERS) as chat:
        os.chdir(folder)
        os.environ.update(PROFILE.fork_server.env, MSWEA_CONFIGURED="true", MSWEA_GLOBAL_CONFIG_DIR=folder)
        os.environ.update(OPENAI_API_BASE=f"{chat.base_url}/v1", OPENAI_API_KEY="unused")
        module, _, attribute = PROFILE.fork_server.entry_point.partition(":")
        entry = getattr(importlib.import_module(module), attribute)
        known.load()
        modules, models = set(sys.modules), set(built_models())
        sys.argv = ["mini", "--yolo", "--exit-immediately", "--model", "openai/policy"]
        sys.argv += ["--config", str(builtin.path("builtin:chores"))]
        sys.argv += ["--output", f"{folder}/trajectory.json", "--task=say hello"]
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
            entry()
        assert json.loads(Path(folder, "trajectory.json").read_text())["info"]["exit_status"] == "Submitted"
        new_modules = sorted(name for name in set(sys.modules) - modules if sys.modules[name].__spec__ is not None)
        new_models = sorted(set(built_models()) - models)
    print(json.dumps({"modules": [*known.modules, *new_modules], "models": [*known.models, *new_models]}, indent=0))


def built_models() -> Iterator[str]:
    """The importable pydantic models whose validators are built, as `module:name`."""
    found: list[type[BaseModel]] = [BaseModel]
    for model in found:
        found.extend(each for each in model.__subclasses__() if each not in found)
        name = f"{model.__module__}:{model.__qualname__}"
        if model.__pydantic_complete__ and model is not BaseModel and zygote.Preload.find(name) is model:
            yield name


if __name__ == "__main__":
    main(*sys.argv[1:])
