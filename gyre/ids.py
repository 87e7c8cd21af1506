"""Identifiers. Each kind has a type of its own, so that a run's id cannot be passed where a cell's is meant."""

from __future__ import annotations

from typing import NewType

NodeId = NewType("NodeId", str)
CellId = NewType("CellId", str)
TaskId = NewType("TaskId", str)
GroupId = NewType("GroupId", str)
RunId = NewType("RunId", str)
CallId = NewType("CallId", str)
SwitchId = NewType("SwitchId", str)
MicroStepId = NewType("MicroStepId", str)
