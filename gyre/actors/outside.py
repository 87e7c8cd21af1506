"""What a node's actors use of the world that is no actor and no store: clocks, connections, engines, evaluators.

A site has one. A simulation gives its sites another, and the same actors live in a world of its making.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gyre.actors.remote import RemoteRef, connect
from gyre.harness import keeper
from gyre.harness.confine import Sandbox
from gyre.harness.evaluate import Evaluation, RunInfo, evaluate
from gyre.harness.tasks import Task
from gyre.harness.workspace import RunFolder

if TYPE_CHECKING:
    from gyre.engine.client import EngineClient


ROOM_BYTES = 1 << 20
"""Less than this, and a run cannot begin."""


class Outside:
    def unix_s(self) -> float:
        """The wall clock, for people and for what outlives a process. It may jump."""
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def no_room(self, folder: Path) -> str:
        """Why no run can be put into `folder`; empty where one can."""
        return await asyncio.to_thread(_no_room, folder)

    def connect(self, address: str, secret: str) -> RemoteRef:
        return connect(address, secret)

    def engine(self, url: str, key: str, kind: str) -> EngineClient:
        """A client for the engine's owner; `kind` is the job file's."""
        from gyre.engine.client import EngineClient  # brings httptools, which gyred need not wait for when it starts
        from gyre.engine.sglang.control import SglangClient

        return SglangClient(url, key=key) if kind == "sglang" else EngineClient(url, key=key)

    async def evaluate(
        self, task: Task, folder: RunFolder, info: RunInfo, limit_s: float, sandbox: Sandbox, hidden: Sequence[Path]
    ) -> Evaluation:
        return await evaluate(task, folder, info, limit_s, sandbox, hidden)

    async def end_marked(self, mark: str) -> None:
        """End every process that bears `mark` (gyre.harness.keeper)."""
        await asyncio.to_thread(keeper.end_marked, mark)


def _no_room(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or error}"
    return ""
