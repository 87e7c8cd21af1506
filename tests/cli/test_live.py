"""The live view shows what a person watching a job asks for."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from gyre.actors.messages_gyrectl import CellStatus, Status
from gyre.cli.live import plain_line, render, sparkline
from gyre.ids import CellId
from gyre.store.records import Role

STATUS = Status(
    job="demo",
    state="running",
    phase="training",
    reason="",
    step=3,
    steps=12,
    version=3,
    mean_reward=0.4375,
    rewards=(0.0, 0.5, 1.0),
    heldout_before=0.25,
    heldout_after=None,
    heldout_done=32,
    heldout_total=32,
    queued=5,
    live=8,
    settled=100,
    groups_ready=2,
    micro_steps_done=1,
    micro_steps=4,
    cells=(
        CellStatus(CellId("c0"), True, Role.TRAIN, 3, 0, 10, 11, ""),
        CellStatus(CellId("c1"), False, Role.ROLLOUT, 3, 6, 12, 13, ""),
    ),
    rollout_to_train=3,
    train_to_rollout=2,
    calls=1234,
    sampled_tokens=9876,
    max_silence_s=0.042,
    pids={"gateway": 9},
    base_url="http://127.0.0.1:1",
    active_s=61.5,
    events=("12:00:00 step 3: mean reward 0.438",),
    store_answers=True,
)


def shown(status: Status) -> str:
    console = Console(width=110, force_terminal=False)
    with console.capture() as capture:
        console.print(render(status))
    return capture.get()


def test_step_reward_water_level_roles_and_switches_are_there() -> None:
    text = shown(STATUS)
    for part in (
        "3/12",
        "0.438",
        "before 0.250",
        "13",
        "5 queued, 8 live",
        "train",
        "rollout",
        "3 to train, 2 back",
        "42 ms",
    ):
        assert part in text


def test_a_held_out_phase_shows_its_own_progress() -> None:
    assert "10/32" in shown(replace(STATUS, phase="held-out before", heldout_done=10))


def test_one_line_serves_where_there_is_no_terminal() -> None:
    line = plain_line(STATUS)
    assert "\n" not in line
    assert "c0=train c1=rollout" in line


def test_rewards_become_bars() -> None:
    assert sparkline((0.0, 0.5, 1.0)) == " ▄█"


def test_that_the_store_is_away_is_said_and_what_is_not_known_is_no_number() -> None:
    away = replace(
        STATUS, store_answers=False, mean_reward=None, rewards=(), rollout_to_train=None, train_to_rollout=None
    )
    for text in (shown(away), plain_line(away)):
        assert "the state store does not answer: this is as last heard" in text
        assert "None" not in text
    assert "– to train, – back" in shown(away)
    assert "the state store" not in shown(STATUS) + plain_line(STATUS)
