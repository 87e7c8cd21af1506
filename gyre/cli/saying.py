"""How the operator's commands speak: one error is one line, records are a table for people and JSON for programs.

Exit codes: 0 done; 1 refused, or nothing answered; 2 bad input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from gyre.errors import BadInput, GyreError

T = TypeVar("T")
Row = Mapping[str, Any]
"""One record, by the name of its columns; what stands in it goes into JSON as it is."""

Dir = Annotated[Path | None, typer.Option("--dir", help="The job's folder; default: the newest one under runs/.")]
Cluster = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="The file that says how a cluster is reached (gyrectl.toml), from any machine; default: $GYRE_CLUSTER.",
    ),
]
NodeFile = Annotated[
    Path | None,
    typer.Option(
        "--node", metavar="NODE.toml", help="The file of a node of a cluster, on that node; no job is needed."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask whether you are sure.")]

_PIPED_WIDTH = 240


def done(work: Callable[[], Awaitable[T]]) -> T:
    """What `work` comes to. An error that a person can mend ends the program with one line."""

    async def main() -> T:
        return await work()

    try:
        return asyncio.run(main())
    except GyreError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(str(error), style="red", markup=False)
        raise typer.Exit(2 if isinstance(error, BadInput) else 1) from error


def say(line: str, *, as_json: bool = False, **fields: Any) -> None:
    """What was done: the line, or the fields as JSON."""
    if as_json:
        print_json(fields)
    else:
        console().print(line, markup=False)


def tell(line: str) -> None:
    """How far a command is that takes long, beside what it says at its end."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(line, style="dim", markup=False)


def show_rows(rows: Sequence[Row], columns: Sequence[str], *, as_json: bool) -> None:
    """A table of these columns; in JSON all of the fields."""
    if as_json:
        print_json(list(rows))
        return
    table = Table(box=None, pad_edge=False)
    for column in columns:
        numbers = all(isinstance(row[column], int | float) for row in rows)
        table.add_column(column.replace("_unix_s", ""), justify="right" if numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(shown(column, row[column]) for column in columns))
    console().print(table)


def show_row(row: Row, *, as_json: bool) -> None:
    if as_json:
        print_json(row)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    for column, value in row.items():
        grid.add_row(column.replace("_unix_s", "").replace("_", " "), shown(column, value))
    console().print(grid)


def shown(column: str, value: Any) -> str:
    """A value for people. Times are UTC."""
    if column.endswith("_unix_s") and value:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(value))
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3f}"
        case list() | tuple():
            return " ".join(map(str, value)) or "-"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case dict():
            return "\n".join(f"{key}  {shown('', of)}" for key, of in value.items()) or "-"  # pyright: ignore[reportUnknownVariableType]
        case _:
            return str(value)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def console() -> Console:
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
