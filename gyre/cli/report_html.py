"""`report.html`: one self-contained page with the reward curve and the timeline of the cells' roles.

Pure: built from the same `Books` and `Report` as the JSON. No script, no font and no picture is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gyre.cli.report import Books, Report
from gyre.ids import CellId
from gyre.store.records import Role, RunState, StepRecord, SwitchRecord

_WIDTH, _LEFT, _RIGHT = 920, 52, 16
_PLOT = _WIDTH - _LEFT - _RIGHT

_STYLE = """
:root { --ink:#1d2433; --soft:#6a7385; --line:#dfe3ea; --paper:#ffffff; --card:#f6f7f9;
        --rollout:#2f7ed8; --train:#e0792b; --switch:#b9bfca; --good:#1f9d66; }
@media (prefers-color-scheme: dark) {
  :root { --ink:#e8ebf1; --soft:#9aa4b6; --line:#323a49; --paper:#151a23; --card:#1d2430;
          --rollout:#5aa2f0; --train:#f0964e; --switch:#5c6576; --good:#43c389; } }
* { box-sizing:border-box } body { margin:0; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
main { max-width:980px; margin:0 auto; padding:36px 24px 60px } h1 { font-size:24px; margin:0 0 2px }
h2 { font-size:16px; margin:36px 0 10px } p.sub { color:var(--soft); margin:0 0 24px }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:10px }
.card { background:var(--card); border-radius:10px; padding:12px 14px } .card b { display:block; font-size:21px;
  font-variant-numeric:tabular-nums } .card span { color:var(--soft); font-size:12.5px }
svg { width:100%; height:auto; display:block } svg text { fill:var(--soft); font:11.5px system-ui,sans-serif }
table { border-collapse:collapse; width:100%; font-size:13px; font-variant-numeric:tabular-nums }
th,td { text-align:right; padding:5px 8px; border-bottom:1px solid var(--line); white-space:nowrap } td.wide { white-space:normal } th:first-child,td:first-child { text-align:left }
th { color:var(--soft); font-weight:500 } .key { display:inline-block; width:10px; height:10px; border-radius:3px; margin:0 5px 0 14px }
"""


def render(name: str, books: Books, report: Report) -> str:
    """The whole page as HTML text."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>Gyre: {escape(name)}</title><style>{_STYLE}</style><main>"
        f"<h1>{escape(name)}</h1><p class=sub>{_subtitle(books, report)}</p>{_cards(report)}"
        f"<h2>Reward</h2>{_reward_curve(books.steps, report)}"
        f"<h2>What each cell did{_legend()}</h2>{_timeline(books)}"
        f"<h2>Steps</h2>{_steps_table(books.steps)}<h2>Switches</h2>{_switch_table(books.switches, _begin(books))}</main></html>"
    )


def _subtitle(books: Books, report: Report) -> str:
    state = books.job.state.value if books.job else "unknown"
    return f"{state}, {report.steps} steps, snapshot version {report.snapshot_version}, {report.wall_s:.0f} s, seed {report.seed}"


def _cards(report: Report) -> str:
    def reward(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    cards = [
        (
            f"{reward(report.heldout_reward_before)} → {reward(report.heldout_reward_after)}",
            "held-out reward, before → after",
        ),
        (f"{report.runs_total:,}", "runs"),
        (f"{report.calls:,}", "model calls"),
        (f"{report.sampled_tokens:,}", "tokens sampled"),
        (f"{report.counted_tokens:,}", "tokens counted"),
        (f"{report.switches['rollout_to_train']} / {report.switches['train_to_rollout']}", "switches to train / back"),
        (f"{report.runs_interrupted}", "runs interrupted by a switch"),
        (f"{report.max_silence_s * 1000:.0f} ms", "longest extra silence"),
        (f"{report.prefix_tokens_recomputed:,}", "prefix tokens recomputed"),
    ]
    return (
        "<div class=cards>"
        + "".join(f"<div class=card><b>{value}</b><span>{label}</span></div>" for value, label in cards)
        + "</div>"
    )


def _reward_curve(steps: Sequence[StepRecord], report: Report) -> str:
    height, top, bottom = 260, 12, 30
    count = max(len(steps), 1)

    def x(step: float) -> float:
        return _LEFT + _PLOT * step / count

    def y(reward: float) -> float:
        return top + (height - top - bottom) * (1 - min(1.0, max(0.0, reward)))

    parts = [f"<svg viewBox='0 0 {_WIDTH} {height}' role=img aria-label='Reward by step'>"]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f"<line x1={_LEFT} x2={_WIDTH - _RIGHT} y1={y(tick):.1f} y2={y(tick):.1f} stroke='var(--line)'/>")
        parts.append(f"<text x={_LEFT - 8} y={y(tick) + 4:.1f} text-anchor=end>{tick:.2f}</text>")
    every = max(1, count // 14)
    parts += [f"<text x={x(k):.1f} y={height - 10} text-anchor=middle>{k}</text>" for k in range(0, count + 1, every)]
    points = " ".join(f"{x(step.step - 0.5):.1f},{y(step.mean_reward):.1f}" for step in steps)
    parts.append(
        f"<polyline points='{points}' fill=none stroke='var(--rollout)' stroke-width=2.5 stroke-linejoin=round />"
    )
    parts += [
        f"<circle cx={x(s.step - 0.5):.1f} cy={y(s.mean_reward):.1f} r=3.5 fill='var(--rollout)'/>" for s in steps
    ]
    held = [(0.0, report.heldout_reward_before), (float(count), report.heldout_reward_after)]
    known = [(x(at), y(value), value) for at, value in held if value is not None]
    if len(known) == 2:
        (x0, y0, _), (x1, y1, _) = known
        parts.append(
            f"<line x1={x0:.1f} y1={y0:.1f} x2={x1:.1f} y2={y1:.1f} stroke='var(--good)' stroke-width=2 stroke-dasharray='5 5'/>"
        )
    for at, level, value in known:
        anchor = "start" if at < _WIDTH / 2 else "end"
        parts.append(f"<circle cx={at:.1f} cy={level:.1f} r=5 fill='var(--good)'/>")
        parts.append(
            f"<text x={at + (9 if anchor == 'start' else -9):.1f} y={level - 8:.1f} text-anchor={anchor}>held out {value:.2f}</text>"
        )
    parts.append("</svg>")
    return "".join(parts)


def _legend() -> str:
    keys = (("rollout", "rollout"), ("train", "train"), ("switch", "in a switch"))
    return "".join(
        f"<span class=key style='background:var(--{color})'></span><small>{label}</small>" for color, label in keys
    )


def role_spans(
    cell: CellId, switches: Sequence[SwitchRecord], begin_s: float, end_s: float
) -> list[tuple[str, float, float]]:
    """The cell's time as (`rollout` | `train` | `switch`, from, to) in unix seconds; cells begin in rollout."""
    spans: list[tuple[str, float, float]] = []
    at, role = begin_s, "rollout"
    for switch in (s for s in switches if s.cell == cell):
        spans.append((role, at, switch.started_unix_s))
        spans.append(("switch", switch.started_unix_s, switch.ended_unix_s))
        at, role = switch.ended_unix_s, "train" if switch.end is Role.TRAIN else "rollout"
    spans.append((role, at, end_s))
    return [(role, start, end) for role, start, end in spans if end > start]


def _begin(books: Books) -> float:
    return min((run.started_unix_s for run in books.runs if run.started_unix_s > 0), default=0.0)


def _timeline(books: Books) -> str:
    begin = _begin(books)
    ends = [run.ended_unix_s for run in books.runs if run.state is RunState.SETTLED] + [
        s.finished_unix_s for s in books.steps
    ]
    end = max(ends, default=begin)
    if end <= begin:
        return "<p class=sub>Nothing ran.</p>"
    row, gap = 26, 8
    cells = [spec.cell for spec in books.cells]
    height = len(cells) * (row + gap) + 40

    def x(at: float) -> float:
        return _LEFT + _PLOT * (at - begin) / (end - begin)

    parts = [f"<svg viewBox='0 0 {_WIDTH} {height}' role=img aria-label='Roles of the cells over time'>"]
    for index, cell in enumerate(cells):
        top = index * (row + gap)
        parts.append(f"<text x={_LEFT - 8} y={top + row / 2 + 4} text-anchor=end>{escape(cell)}</text>")
        for role, start, stop in role_spans(cell, books.switches, begin, end):
            width = max(x(stop) - x(start), 0.6)
            parts.append(
                f"<rect x={x(start):.2f} y={top} width={width:.2f} height={row} fill='var(--{role})'>"
                f"<title>{escape(cell)} {role} {start - begin:.1f}–{stop - begin:.1f} s</title></rect>"
            )
    bottom = len(cells) * (row + gap)
    for step in books.steps:
        at = x(step.finished_unix_s)
        parts.append(
            f"<line x1={at:.1f} x2={at:.1f} y1=0 y2={bottom} stroke='var(--ink)' stroke-opacity=.35 stroke-dasharray='2 3'/>"
        )
    for share in range(0, 11, 2):
        at = begin + (end - begin) * share / 10
        parts.append(f"<text x={x(at):.1f} y={bottom + 18} text-anchor=middle>{at - begin:.0f} s</text>")
    parts.append("</svg>")
    measured = sum(run.trace is not None for run in books.runs if run.group.startswith(("a", "b")))
    note = (
        f"Dotted lines: an optimizer step. The first and last stretch also measured {measured} held-out runs."
        if measured
        else ""
    )
    return "".join(parts) + f"<p class=sub>{note}</p>"


def _steps_table(steps: Sequence[StepRecord]) -> str:
    head = "<tr><th>step<th>mean reward<th>runs<th>tokens trained<th>micro-steps<th>cells<th>loss<th>grad norm<th>clip fraction</tr>"
    rows = [
        f"<tr><td>{s.step}<td>{s.mean_reward:.3f}<td>{s.scored_runs}<td>{s.counted_tokens:,}<td>{s.micro_steps}"
        f"<td>{escape(' '.join(s.cells))}<td>{s.metrics.get('loss', 0.0) + 0.0:.1e}<td>{s.metrics.get('grad_norm', 0.0):.3f}"
        f"<td>{s.metrics.get('clip_fraction', 0.0):.3f}</tr>"
        for s in steps
    ]
    return f"<table>{head}{''.join(rows)}</table>"


def _switch_table(switches: Sequence[SwitchRecord], begin: float) -> str:
    head = "<tr><th>cell<th>at<th>from → to<th>took<th>stages<th>requests moved<th>KV blocks<th>longest silence</tr>"
    rows: list[str] = []
    for s in switches:
        stages = ", ".join(f"{stage.stage} {stage.seconds * 1000:.0f} ms" for stage in s.stages)
        rows.append(
            f"<tr><td>{escape(s.cell)}<td>{s.started_unix_s - begin:.1f} s<td>{s.start.value} → {s.end.value}"
            f"<td>{(s.ended_unix_s - s.started_unix_s) * 1000:.0f} ms<td class=wide>{escape(stages)}<td>{s.moved_requests}"
            f"<td>{s.moved_blocks}<td>{s.max_silence_s * 1000:.0f} ms</tr>"
        )
    return f"<table>{head}{''.join(rows)}</table>"
