"""Harness profiles: how each harness is started on a run, how its calls look, and what it says of its end.

A profile is a record, not a class to inherit: a function from a launch context to a command line and an environment,
and a few facts. The harness itself is never changed. `profile(name)` finds one (docs/harness-profiles.md).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gyre.config import JobSpec
from gyre.errors import BadInput
from gyre.harness.wire import GENERIC, Wire
from gyre.harness.workspace import RunFolder

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Settings:
    """What a job says of its harness."""

    config: Path | None = None
    """The profile's own configuration file."""
    command: tuple[str, ...] = ()
    """Of the profile `command`: what to run."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the profile `command`: what its environment has beside the usual."""
    context_tokens: int = 0
    """The model's context, so that the harness compacts in time; 0: it is not told."""
    max_tokens: int = 0
    """The most tokens of one answer; 0: it is not told."""

    @staticmethod
    def of(spec: JobSpec, base: Path) -> Settings:
        """Those of a job whose file lies in `base`."""
        return Settings(
            config=config_path(spec.harness.config, base),
            command=tuple(spec.harness.command),
            env=dict(spec.harness.env),
            context_tokens=spec.model.context_tokens,
            max_tokens=spec.sampling.max_tokens,
        )


@dataclass(frozen=True)
class LaunchContext:
    """What a harness is started on."""

    folder: RunFolder
    base_url: str
    """`http://127.0.0.1:<port>/run/<run>/<key>`: the harness appends its dialect's path."""
    instruction: str
    settings: Settings = field(default_factory=Settings)

    def environment(self, **more: str) -> dict[str, str]:
        """The run's whole environment."""
        return {**clean_environment(self.folder.home), **more}


@dataclass(frozen=True)
class Launch:
    """A harness's command line and whole environment. It starts in the workspace. `program` is looked up on PATH."""

    program: tuple[str, ...]
    arguments: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class ForkServer:
    """A Python harness whose imports cost seconds: it is imported once, and forked for every run.

    `entry_point` is that of its console script (`module:function`); a fork calls it with the launch's argv.
    """

    entry_point: str
    preload: Path
    """A JSON list of modules that the harness would import later, on its first use of them."""
    env: Mapping[str, str]
    """What must be set when it is imported."""


@dataclass(frozen=True)
class Profile:
    name: str
    launch: Callable[[LaunchContext], Launch]
    submitted: Callable[[RunFolder], bool | None]
    """Whether the harness, now ended, said that its work was done; None where it does not tell."""
    wire: Wire = GENERIC
    """What its requests look like, and how an answer may be held back from it."""
    program: str = ""
    """The executable that must be on PATH; empty: none."""
    install: str = ""
    """The command that installs it."""
    module: str = ""
    """The Python module that must be installed; empty: none."""
    extra: str = ""
    """The extra of this package that installs it."""
    fork_server: ForkServer | None = None
    config_required: bool = False

    def check(self, settings: Settings) -> None:
        """Raises BadInput, in one line, when the harness is not installed or its configuration cannot be read."""
        if self.module and importlib.util.find_spec(self.module) is None:
            raise BadInput("harness.profile", self.name, f"it must be installed (pip install 'gyre[{self.extra}]')")
        if self.program and shutil.which(self.program) is None:
            raise BadInput("harness.profile", self.name, f"{self.program} must be on PATH ({self.install})")
        if settings.command and shutil.which(settings.command[0]) is None:
            raise BadInput("harness.command", settings.command[0], "it must be a program on PATH, or its absolute path")
        config = settings.config
        if config is None:
            if self.config_required:
                raise BadInput("harness.config", "", f"the profile {self.name} needs a configuration file")
        elif not (config.is_file() and os.access(config, os.R_OK)):
            raise BadInput("harness.config", str(config), "it must be builtin:chores or a file that can be read")


def clean_environment(home: Path) -> dict[str, str]:
    """An environment built from nothing, so that it carries no secret; only PATH is the node's."""
    return {
        "PATH": os.environ.get("PATH", _DEFAULT_PATH),
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
    }


def profile(name: str) -> Profile:
    """The profile of that name. Raises BadInput that names those there are."""
    from gyre.harness.profiles import claude_code, codex, command, mini_swe_agent, opencode, qwen_code, scripted

    modules = (claude_code, codex, command, mini_swe_agent, opencode, qwen_code, scripted)
    known = {module.PROFILE.name: module.PROFILE for module in modules}
    if name not in known:
        raise BadInput("harness.profile", name, f"one of {', '.join(sorted(known))}")
    return known[name]


def config_path(config: str, base_dir: Path) -> Path | None:
    """The file that `harness.config` names: builtin, or relative to the job file's folder; None where it is empty."""
    if not config:
        return None
    if config.startswith("builtin:"):
        from gyre.demo import builtin

        return builtin.path("harness.config", config)
    return (base_dir / config).resolve()
