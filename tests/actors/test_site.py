"""What a node tells people, and at which level of its log."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from .stand_ins import a_site

ROOT = Path(__file__).parents[2]
PLACEHOLDERS = re.compile(r"\b(?:NODE|CELL|NAME|RUN|ADDRESS|N|X|snapshot N)\b|…|/actor|15 s")
FEW = 8
"""Characters that say too little of a line."""


async def test_alarms_stay_where_only_warnings_are_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = a_site(tmp_path)
    with caplog.at_level(logging.INFO, "gyred"):
        site.say("all is well")
        site.warn("b is gone")
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.INFO, "all is well"),
        (logging.WARNING, "b is gone"),
    ]
    assert [event.split(" ", 1)[1] for event in site.events] == ["all is well", "b is gone"]


def alarms() -> list[str]:
    """The lines of the table of alarms, but for those that are for information."""
    _, _, rest = (ROOT / "docs/operations.md").read_text().partition("| line in gyred's log |")
    rows = [row for row in rest.split("\n\n")[0].splitlines()[2:] if "| (info" not in row]
    return [found for row in rows for found in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


@pytest.mark.parametrize("alarm", alarms())
def test_each_alarm_of_the_documentation_is_a_warning_at_least(alarm: str) -> None:
    lines = [
        line for file in (ROOT / "gyre").rglob("*.py") for line in file.read_text().splitlines() if _words(alarm, line)
    ]
    assert lines
    assert not [line for line in lines if re.search(r"\.say\(|log\.info\(", line)]


def _words(alarm: str, line: str) -> bool:
    """Whether `line` says the alarm, whatever stands in its fields: one of the parts that are the same in each log."""
    parts = [part.strip(" :;(),") for part in PLACEHOLDERS.split(alarm)]
    telling = [part for part in parts if len(part) >= FEW] or [max(parts, key=len)]
    return any(part in line for part in telling)
