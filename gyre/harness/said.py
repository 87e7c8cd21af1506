"""What a harness said of its end: the last of the JSON lines that it printed.

Read as something that a sampled command may have written: bounded in size, and of any shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

_TAIL_BYTES = 8 << 20


def events(log: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects among the log's last lines, newest first."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        if not line.startswith(b"{"):
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield cast("dict[str, Any]", event)


def last_event(log: Path, *kinds: str) -> dict[str, Any] | None:
    """The newest whose `type` is one of these, or None."""
    return next((event for event in events(log) if event.get("type") in kinds), None)
