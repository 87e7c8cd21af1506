"""`gyrectl run export`: the runs of a job as two tables, calls and lineages (docs/export.md has every column).

JSONL is always written; Parquet too where pyarrow is installed. One run after another, so that a job of any length
fits in memory. A file appears under its name when it is whole.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre.cli.run_fates import Fate, Fates
from gyre.cli.run_files import RunFile, Words
from gyre.cli.run_output import strict_json
from gyre.errors import BadInput
from gyre.trajectory.replay import Account, Replay, ReplayedCall, tokens_of
from gyre.trajectory.selection import describe

Row = dict[str, Any]

CALLS: dict[str, str] = {
    "run": "string",
    "attempt": "int32",
    "group": "string",
    "profile": "string",
    "open": "bool",
    "purpose": "string",
    "outcome": "string",
    "reward": "double",
    "step": "int32",
    "call": "string",
    "seq": "int32",
    "parent": "string",
    "base": "string",
    "role": "string",
    "thread": "string",
    "dialect": "string",
    "started_unix_s": "double",
    "finish": "string",
    "delivered": "bool",
    "use": "string",
    "lineage": "int32",
    "fork": "string",
    "max_tokens": "int32",
    "prompt_tokens": "int32",
    "new_prompt_tokens": "int32",
    "sampled_tokens": "int32",
    "counted_tokens": "int32",
    "lowest_version": "int32",
    "highest_version": "int32",
    "suffix_ids": "int32[]",
    "output_ids": "int32[]",
    "logprobs": "float[]",
    "versions": "int32[]",
    "output_text": "string",
    "request": "string",
}
LINEAGES: dict[str, str] = {
    "run": "string",
    "attempt": "int32",
    "lineage": "int32",
    "role": "string",
    "step": "int32",
    "tokens": "int32",
    "counted_tokens": "int32",
    "lowest_version": "int32",
    "token_ids": "int32[]",
    "counted": "bool[]",
    "logprobs": "float[]",
    "versions": "int32[]",
}


@dataclass
class Written:
    runs: int = 0
    calls: int = 0
    lineages: int = 0
    parquet: bool = False
    files: list[Path] = field(default_factory=list[Path])


def write_export(files: Iterable[RunFile], j_max: int, fates: Fates, words: Words | None, out: Path) -> Written:
    """Write the tables to `out`. Raises BadInput where they cannot be written there."""
    written = Written(parquet=importlib.util.find_spec("pyarrow") is not None)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            add_call = _table(stack, out, "calls", CALLS, written)
            add_lineage = _table(stack, out, "lineages", LINEAGES, written)
            for file in files:
                fate = fates.of(file.run.opened.run, file.run.opened.attempt)
                calls, lineages = call_rows(file, j_max, fate, words), lineage_rows(file.run, j_max, fate)
                add_call(calls)
                add_lineage(lineages)
                written.runs += 1
                written.calls += len(calls)
                written.lineages += len(lineages)
        for path in written.files:
            _draft(path).replace(path)
    except OSError as error:
        raise BadInput("--out", str(out), f"a folder that can be written ({error.strerror or error})") from error
    finally:
        for path in written.files:
            _draft(path).unlink(missing_ok=True)
    return written


def call_rows(file: RunFile, j_max: int, fate: Fate, words: Words | None) -> list[Row]:
    run = file.run
    accounts = run.accounts(j_max)
    return [_call_row(file, run.calls[call], account, fate, words) for call, account in accounts.items()]


def lineage_rows(run: Replay, j_max: int, fate: Fate) -> list[Row]:
    rows: list[Row] = []
    for lineage in run.selected(j_max):
        token_ids, counted, logprobs, versions = lineage.arrays()
        info = describe(lineage)
        rows.append(
            {
                "run": lineage.run,
                "attempt": lineage.attempt,
                "lineage": lineage.index,
                "role": lineage.role.value,
                "step": fate.trained_in(lineage.index),
                "tokens": info.tokens,
                "counted_tokens": info.counted_tokens,
                "lowest_version": info.lowest_version,
                "token_ids": token_ids.tolist(),
                "counted": [flag == 1 for flag in counted],
                "logprobs": logprobs.tolist(),
                "versions": versions.tolist(),
            }
        )
    return rows


def _call_row(file: RunFile, call: ReplayedCall, account: Account, fate: Fate, words: Words | None) -> Row:
    run, started = file.run, call.started
    return {
        "run": run.opened.run,
        "attempt": run.opened.attempt,
        "group": run.opened.group,
        "profile": run.opened.profile,
        "open": file.place.open,
        "purpose": fate.purpose or None,
        "outcome": fate.outcome or None,
        "reward": fate.reward,
        "step": fate.trained_in(account.lineage),
        "call": call.id,
        "seq": started.seq,
        "parent": account.parent,
        "base": started.base,
        "role": call.role.value,
        "thread": str(call.request.get("thread", "")),
        "dialect": started.dialect,
        "started_unix_s": started.started_unix_s,
        "finish": call.finish,
        "delivered": call.id in run.tree and run.tree.delivered(call.id),
        "use": account.use.value,
        "lineage": account.lineage,
        "fork": None if call.fork is None else call.fork.value,
        "max_tokens": started.max_tokens,
        "prompt_tokens": account.prompt_tokens,
        "new_prompt_tokens": account.new_prompt_tokens,
        "sampled_tokens": account.sampled_tokens,
        "counted_tokens": account.counted_tokens,
        "lowest_version": min(call.versions, default=None),
        "highest_version": max(call.versions, default=None),
        "suffix_ids": tokens_of(started.suffix).tolist(),
        "output_ids": call.output.tolist(),
        "logprobs": call.logprobs.tolist(),
        "versions": call.versions.tolist(),
        "output_text": None if words is None else words.text(call.output),
        "request": strict_json(call.request.get("body", {})),
    }


# ------------------------------------------------------------------------------------------------ files


def _table(
    stack: ExitStack, out: Path, name: str, columns: dict[str, str], written: Written
) -> Callable[[list[Row]], None]:
    """Opens the table's files; returns what adds rows to them."""
    lines_path = out / f"{name}.jsonl"
    written.files.append(lines_path)
    lines = stack.enter_context(_draft(lines_path).open("w", encoding="utf-8"))
    add_to_parquet = None
    if written.parquet:
        written.files.append(out / f"{name}.parquet")
        add_to_parquet = _parquet(stack, out / f"{name}.parquet", columns)

    def add(rows: list[Row]) -> None:
        for row in rows:
            lines.write(strict_json(row) + "\n")
        if add_to_parquet is not None and rows:
            add_to_parquet(rows)

    return add


def _parquet(stack: ExitStack, path: Path, columns: dict[str, str]) -> Callable[[list[Row]], None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {
        "string": pa.string(),
        "int32": pa.int32(),
        "double": pa.float64(),
        "float": pa.float32(),
        "bool": pa.bool_(),
    }

    def kind(name: str) -> Any:
        return pa.list_(kinds[name[:-2]]) if name.endswith("[]") else kinds[name]

    schema = pa.schema([(name, kind(type_name)) for name, type_name in columns.items()])
    writer = stack.enter_context(pq.ParquetWriter(str(_draft(path)), schema, compression="zstd"))
    return lambda rows: writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def _draft(path: Path) -> Path:
    return path.with_suffix(f"{path.suffix}.draft")
