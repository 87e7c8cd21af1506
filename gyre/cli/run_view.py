"""A run as text: `gyrectl run list`, `tree` and `replay` as pure functions of what was read.

Each view has a twin of plain dicts for `--json`; both say the same.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as Drawing

from gyre.cli.run_fates import Fate
from gyre.cli.run_files import RunFile, Words
from gyre.cli.run_output import visible
from gyre.ids import CallId, GroupId
from gyre.store.records import RunRecord
from gyre.trajectory.records import LineageRole
from gyre.trajectory.replay import Account, Replay, ReplayedCall, Use

_ROLE_COLOURS = {
    LineageRole.MAIN: "bold",
    LineageRole.MAIN_SUMMARY: "magenta",
    LineageRole.SUB_AGENT: "cyan",
    LineageRole.SUB_AGENT_SUMMARY: "magenta",
    LineageRole.AUXILIARY: "dim",
}
_LIKELY = ((-0.1, "green"), (-0.7, "yellow"), (-2.3, "dark_orange"))
"""Log-probs down to which a token has the colour; below all of them it is red."""


# ------------------------------------------------------------------------------------------------ list


def run_rows(files: Iterable[RunFile], runs: Iterable[RunRecord], tasks: Mapping[GroupId, str]) -> list[dict[str, Any]]:
    """Every run of the job, by name and attempt, and what its journal here says, where this node has one.

    What a record says (`run_state`, `node`, …) stands with the attempt that it is of; an earlier attempt's journal has none.
    """
    left = {(run.run, run.attempt): run for run in runs}
    rows: list[dict[str, Any]] = []
    for file in files:
        opened = file.run.opened
        rows.append(listed(file) | _record(left.pop((opened.run, opened.attempt), None), tasks))
    for record in left.values():
        place = {"run": record.run, "attempt": record.attempt, "group": record.group}
        rows.append(_NO_JOURNAL | place | _record(record, tasks))
    return sorted(rows, key=lambda row: (row["run"], row["attempt"]))


_NO_JOURNAL = {
    **dict.fromkeys(("profile", "state", "copy_of", "damaged", "failure"), ""),
    **dict.fromkeys(("calls", "delivered_calls", "tokens", "sampled_tokens")),
}


def _record(record: RunRecord | None, tasks: Mapping[GroupId, str]) -> dict[str, Any]:
    if record is None:
        return dict.fromkeys(("run_state", "node", "task", "outcome", "reward"))
    return {
        "run_state": record.state.value,
        "node": record.node,
        "task": tasks.get(record.group),
        "outcome": record.outcome.value if record.outcome else None,
        "reward": record.reward,
    }


def listed(file: RunFile) -> dict[str, Any]:
    """What a row says of the run's journal."""
    run, tree = file.run, file.run.tree
    return {
        "run": run.opened.run,
        "attempt": run.opened.attempt,
        "group": run.opened.group,
        "profile": run.opened.profile,
        "state": "open" if file.place.open else "closed",
        "copy_of": file.place.copy_of,
        "damaged": file.damage,
        "failure": "" if run.closed is None else run.closed.failure,
        "calls": len(run.calls),
        "delivered_calls": tree.delivered_calls,
        "tokens": tree.tokens,
        "sampled_tokens": tree.sampled_tokens,
    }


def list_view(rows: Iterable[Mapping[str, Any]]) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("run", "left"),
        ("attempt", "right"),
        ("is", "left"),
        ("node", "left"),
        ("task", "left"),
        ("reward", "right"),
        ("journal", "left"),
        ("harness", "left"),
        ("calls", "right"),
        ("tokens", "right"),
        ("sampled", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify="left" if justify == "left" else "right")
    for row in rows:
        note = "; ".join(filter(None, (row["failure"], row["damaged"])))
        table.add_row(
            Text(visible(row["run"])),
            str(row["attempt"]),
            row["outcome"] or row["run_state"] or "-",
            Text(visible(row["node"] or "-")),
            Text(visible(row["task"] or "-")),
            "-" if row["reward"] is None else f"{row['reward']:.3f}",
            (row["state"] or "-") + (f", copy of {visible(row['copy_of'])}" if row["copy_of"] else ""),
            Text(visible(row["profile"] or "-")),
            *(
                ("-", "-", "-")
                if row["calls"] is None
                else (
                    f"{row['delivered_calls']} of {row['calls']}",
                    f"{row['tokens']:,}",
                    f"{row['sampled_tokens']:,}",
                )
            ),
            Text(visible(note), style="red"),
        )
    return table


# ------------------------------------------------------------------------------------------------ tree


def tree_plain(file: RunFile, j_max: int, fate: Fate) -> dict[str, Any]:
    accounts = file.run.accounts(j_max)
    return {
        **listed(file),
        **fate_plain(fate),
        "not_trained": fate.not_trained,
        "j_max": j_max,
        "counted_tokens": sum(account.counted_tokens for account in accounts.values()),
        "faults": list(file.run.tree.check()),
        "calls": [_call_plain(file.run.calls[call], account, fate) for call, account in accounts.items()],
    }


def fate_plain(fate: Fate) -> dict[str, Any]:
    return {"purpose": fate.purpose, "outcome": fate.outcome, "reward": fate.reward, "step": fate.step}


def tree_view(file: RunFile, j_max: int, fate: Fate) -> RenderableType:
    """The run's tree: a thread goes down in one column, what branches off it is drawn a level deeper."""
    run = file.run
    accounts = run.accounts(j_max)
    head = listed(file)
    counted = sum(account.counted_tokens for account in accounts.values())
    drawing = Drawing(
        Text.assemble(
            (visible(run.opened.run), "bold"),
            f"  attempt {run.opened.attempt}, {head['state']}, {visible(run.opened.profile)}: {len(run.calls)} calls, "
            f"{head['tokens']:,} tokens, {head['sampled_tokens']:,} sampled, {counted:,} counted (j_max {j_max})",
        ),
        guide_style="dim",
    )
    children: dict[CallId | None, list[CallId]] = {}
    for call, account in accounts.items():
        children.setdefault(account.parent, []).append(call)
    for first in children.get(None, ()):
        _draw_thread(drawing, first, run, accounts, children)
    became = [_fate_line(fate)] if fate.purpose else []
    faults = [Text(visible(fault), style="red") for fault in run.tree.check()]
    return Group(*became, drawing, *faults)


def _fate_line(fate: Fate) -> Text:
    line = Text(visible(fate.outcome or "not settled"))
    if fate.reward is not None:
        line.append(f", reward {fate.reward:.3f}")
    if fate.step is not None:
        return line.append(f": trained in step {fate.step}", style="green")
    return line.append(f": nothing of it is trained, for {visible(fate.not_trained)}", style="yellow")


def _draw_thread(
    drawing: Drawing,
    call: CallId | None,
    run: Replay,
    accounts: Mapping[CallId, Account],
    children: Mapping[CallId | None, Sequence[CallId]],
) -> None:
    while call is not None:
        added = drawing.add(_call_line(run.calls[call], accounts[call]))
        following = children.get(call, ())
        role = run.calls[call].role
        onward = next((each for each in following if run.calls[each].role is role), None)
        for branch in following:
            if branch != onward:
                _draw_thread(added, branch, run, accounts, children)
        call = onward


def _call_line(call: ReplayedCall, account: Account) -> Text:
    line = Text.assemble(
        (f"#{call.started.seq} ", "bold"),
        (call.role.value, _ROLE_COLOURS[call.role]),
        f"  {account.prompt_tokens:,} prompt",
        (f" (+{account.new_prompt_tokens:,})", "dim"),
        f", {account.sampled_tokens:,} sampled",
    )
    if call.versions:
        low, high = min(call.versions), max(call.versions)
        line.append(f" at v{low}" if low == high else f" at v{low} to v{high}", style="dim")
    line.append("  ")
    if account.use in (Use.COUNTED, Use.PARTLY_COUNTED):
        line.append(f"{account.counted_tokens:,} counted in lineage {account.lineage}", style="green")
        if account.context_in:
            line.append(f", context in {', '.join(map(str, account.context_in))}", style="dim")
    else:
        line.append(f"not trained: {account.use.value}", style="yellow")
    if call.fork is not None:
        line.append(f"  fork: {call.fork.value}", style="dim")
    return line


def _call_plain(call: ReplayedCall, account: Account, fate: Fate) -> dict[str, Any]:
    return {
        "call": call.id,
        "seq": call.started.seq,
        "parent": account.parent,
        "role": call.role.value,
        "thread": str(call.request.get("thread", "")),
        "dialect": call.started.dialect,
        "started_unix_s": call.started.started_unix_s,
        "finish": call.finish,
        "prompt_tokens": account.prompt_tokens,
        "new_prompt_tokens": account.new_prompt_tokens,
        "sampled_tokens": account.sampled_tokens,
        "counted_tokens": account.counted_tokens,
        "use": account.use.value,
        "lineage": account.lineage,
        "step": fate.trained_in(account.lineage),
        "context_in": list(account.context_in),
        "fork": None if call.fork is None else call.fork.value,
        "lowest_version": min(call.versions, default=None),
        "highest_version": max(call.versions, default=None),
    }


# ------------------------------------------------------------------------------------------------ replay


def replay_plain(run: Replay, call: ReplayedCall, words: Words | None) -> dict[str, Any]:
    """One call, whole: token ids as they were sent and sampled."""
    prompt = run.prompt_ids(call)
    return {
        "run": run.opened.run,
        "attempt": run.opened.attempt,
        "call": call.id,
        "seq": call.started.seq,
        "role": call.role.value,
        "dialect": call.started.dialect,
        "started_unix_s": call.started.started_unix_s,
        "finish": call.finish,
        "delivered": call.id in run.tree and run.tree.delivered(call.id),
        "max_tokens": call.started.max_tokens,
        "request": call.request.get("body", {}),
        "prompt_ids": list(prompt),
        "prompt_text": None if words is None else words.text(prompt),
        "output": [
            {"id": token, "text": None if text is None else text, "logprob": logprob, "version": version}
            for token, text, logprob, version in zip(
                call.output, pieces(call.output, words), call.logprobs, call.versions, strict=True
            )
        ],
    }


def replay_view(run: Replay, call: ReplayedCall, words: Words | None, *, whole_prompt: bool) -> RenderableType:
    """A call as text: its prompt (or what is new in it), its answer coloured by likelihood, and then token by token."""
    prompt = run.prompt_ids(call)
    skipped = 0
    if not whole_prompt and call.started.base is not None:
        skipped = run.tree.end_tokens(call.started.base)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(call.started.started_unix_s))
    ending = call.finish or "no end on record"
    what = f"prompt, {len(prompt):,} tokens" + (f", of which {skipped:,} are the call before it" if skipped else "")
    return Group(
        Text.assemble(
            (visible(f"#{call.started.seq} {call.id}"), "bold"),
            f"  {call.role.value}, {began} UTC, {visible(ending)}",
        ),
        Text(what, style="dim"),
        Text(_shown(prompt[skipped:], words)),
        Text(f"output, {len(call.output):,} tokens", style="dim"),
        _coloured(call, words),
        _token_table(call, words),
    )


def pieces(token_ids: Sequence[int], words: Words | None) -> list[str | None]:
    """Each token's text; of a character that several tokens make, the last of them has it and the others are empty."""
    if words is None:
        return [None] * len(token_ids)
    texts: list[str | None] = []
    pending: list[int] = []
    for token in token_ids:
        pending.append(token)
        text = words.text(pending)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < 4:
            texts.append("")
            continue
        texts.append(text)
        pending = []
    return texts


def _shown(token_ids: array[int], words: Words | None) -> str:
    return " ".join(map(str, token_ids)) if words is None else visible(words.text(token_ids))


def _coloured(call: ReplayedCall, words: Words | None) -> Text:
    out = Text()
    for token, text, logprob in zip(call.output, pieces(call.output, words), call.logprobs, strict=True):
        out.append(f"{token} " if text is None else visible(text), style=_colour(logprob))
    return out


def _token_table(call: ReplayedCall, words: Words | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("place", "token", "log-prob", "version"):
        table.add_column(name, justify="right")
    table.add_column("text")
    rows = zip(call.output, call.logprobs, call.versions, pieces(call.output, words), strict=True)
    for place, (token, logprob, version, text) in enumerate(rows):
        shown = Text("" if text is None else repr(text)[1:-1], style=_colour(logprob))
        table.add_row(str(place), str(token), f"{logprob:.4f}", str(version), shown)
    return table


def _colour(logprob: float) -> str:
    return next((colour for least, colour in _LIKELY if logprob >= least), "red")
