"""The live view of a running job: a pure function from the node's Status to something rich can print."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gyre.actors.messages_gyrectl import CellStatus, Status
from gyre.cli.report import Report
from gyre.store.records import Role

_BARS = " ▁▂▃▄▅▆▇█"
_COLOURS = {Role.ROLLOUT: "blue", Role.TRAIN: "dark_orange", Role.FAILED: "red"}


AWAY = "the state store does not answer: this is as last heard; gyrectl doctor says more"


def sparkline(values: tuple[float, ...]) -> str:
    """Rewards in [0, 1] as one character each."""
    return "".join(_BARS[min(8, max(0, round(value * 8)))] for value in values)


def _count(value: int | None) -> str:
    return "–" if value is None else str(value)


def _cell(cell: CellStatus) -> Text:
    colour = _COLOURS.get(cell.role, "yellow")
    return Text.assemble(
        (f"{cell.cell}{'*' if cell.core else ''} ", "bold"),
        (cell.role.value, colour),
        (f"  v{cell.version}  {cell.in_flight} in flight", "dim"),
    )


def render(status: Status) -> RenderableType:
    """The live view: step, mean reward, water level, each cell's role, switches so far."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    done, total = (
        (status.heldout_done, status.heldout_total)
        if status.phase.startswith("held-out")
        else (status.step, status.steps)
    )
    progress = Table.grid(padding=(0, 1))
    progress.add_row(Text(f"{done}/{total}"), ProgressBar(total=max(1, total), completed=done, width=40))
    rows.add_row(status.phase if status.phase.startswith("held-out") else "step", progress)
    reward = "–" if status.mean_reward is None else f"{status.mean_reward:.3f}"
    rows.add_row("mean reward", Text.assemble((reward, "bold"), "  ", (sparkline(status.rewards), "green")))
    held = [
        f"{label} {value:.3f}"
        for label, value in (("before", status.heldout_before), ("after", status.heldout_after))
        if value is not None
    ]
    if held:
        rows.add_row("held out", Text(", ".join(held)))
    rows.add_row(
        "water level",
        Text(
            f"{status.queued + status.live}  ({status.queued} queued, {status.live} live)   micro-steps {status.micro_steps_done}/{status.micro_steps}"
        ),
    )
    rows.add_row("cells", Group(*(_cell(cell) for cell in status.cells)))
    rows.add_row(
        "switches", Text(f"{_count(status.rollout_to_train)} to train, {_count(status.train_to_rollout)} back")
    )
    rows.add_row(
        "calls",
        Text(
            f"{status.calls:,} calls, {status.sampled_tokens:,} tokens, longest extra silence {status.max_silence_s * 1000:.0f} ms"
        ),
    )
    if not status.store_answers:
        rows.add_row("", Text(AWAY, style="yellow"))
    if status.phase == "paused":
        rows.add_row("", Text("paused: gyrectl job resume launches runs again", style="yellow"))
    for event in status.events[-4:]:
        rows.add_row("", Text(event, style="dim", overflow="ellipsis", no_wrap=True))
    title = f"gyre  {status.job}  {status.active_s:.0f} s  snapshot v{status.version}"
    return Panel(rows, title=title, title_align="left", border_style="blue")


def plain_line(status: Status) -> str:
    """The same in one line, for a terminal that is none."""
    roles = " ".join(f"{cell.cell}={cell.role.value}" for cell in status.cells)
    reward = "-" if status.mean_reward is None else f"{status.mean_reward:.3f}"
    progress = (
        f"{status.heldout_done}/{status.heldout_total}"
        if status.phase.startswith("held-out")
        else f"{status.step}/{status.steps}"
    )
    return (
        f"[{status.active_s:6.1f} s] {status.phase} {progress}  reward {reward}  water level {status.queued + status.live}  {roles}  "
        f"switches {_count(status.rollout_to_train)}/{_count(status.train_to_rollout)}"
        f"{'' if status.store_answers else f'  ({AWAY})'}"
    )


def summary(report: Report, html: str) -> RenderableType:
    """The last thing a job prints."""

    def reward(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f}"

    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column()
    for label, value in (
        (
            "held-out reward",
            f"{reward(report.heldout_reward_before)} before, {reward(report.heldout_reward_after)} after",
        ),
        ("steps", f"{report.steps}  (snapshot version {report.snapshot_version})"),
        ("runs", f"{report.runs_total}, interrupted by a switch: {report.runs_interrupted}"),
        ("calls", f"{report.calls:,}"),
        ("tokens", f"{report.sampled_tokens:,} sampled, {report.counted_tokens:,} counted"),
        (
            "role switches",
            f"{report.switches['rollout_to_train']} to train, {report.switches['train_to_rollout']} to rollout",
        ),
        ("longest extra silence", f"{report.max_silence_s * 1000:.0f} ms"),
        ("prefix tokens recomputed", f"{report.prefix_tokens_recomputed:,}"),
        ("time", f"{report.wall_s:.0f} s"),
        ("report", html),
    ):
        rows.add_row(label, value)
    return Panel(rows, title="summary", title_align="left", border_style="green")
