"""Real harnesses on real runs: each works to its end, sees no error of ours, and leaves a tree that tells the truth.

`bin/test` runs three of the five; `bin/test --interop` all. A scenario's run is one (interop.scenarios says what is done
in it, and meanwhile); every test below looks at another side of all runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from gyre.proxy.generation import STREAM_INTERVAL

from .conftest import Perform
from .scenarios import GO, SCENARIOS, WAITING, Scenario

QUICK = ("mini-swe-agent", "codex", "claude-code")
HARNESSES = (*QUICK, "opencode", "qwen-code")
LACKS = {
    "mini-swe-agent": {"sub-agent", "compaction", "sub-compaction", "nested"},
    "codex": {"nested"},
    "opencode": {"nested"},
    "qwen-code": {"nested"},
}
"""What a harness does not do at all."""
TITLES = {"opencode": 1}
"""Calls for a title that a harness makes at the start of every run."""


def scenarios_of(harness: str) -> tuple[str, ...]:
    return tuple(name for name in SCENARIOS if name not in LACKS.get(harness, set()))


@dataclass(frozen=True)
class Run:
    harness: str
    name: str
    scenario: Scenario
    report: dict[str, Any]

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.report["tree"]["calls"]

    def answers(self, *roles: str) -> dict[tuple[str, str], dict[str, Any]]:
        """What the policy decided to say, once for each prompt."""
        found = self.report["answers"]
        return {(each["decided"], each["prompt"]): each for each in found if not roles or each["role"] in roles}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames:
        harnesses = HARNESSES if metafunc.config.getoption("interop") else QUICK
        pairs = [(harness, name) for harness in harnesses for name in scenarios_of(harness)]
        metafunc.parametrize("run", pairs, indirect=True, ids=["-".join(pair) for pair in pairs], scope="session")


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest, perform: Perform) -> Run:
    harness, name = request.param
    performance = perform(harness, scenarios_of(harness))
    assert name in performance.reports, performance.fault
    return Run(harness, name, SCENARIOS[name], performance.reports[name])


def test_it_ends_by_itself_and_says_that_its_work_is_done(run: Run) -> None:
    end = run.report["exit"]
    assert (end["code"], end["signal"], end["failure"], end["submitted"]) == (0, None, "", True), run.report["log"]


def test_its_workspace_is_right(run: Run) -> None:
    left = {name: text for name, text in run.report["files"].items() if name not in (GO, WAITING, "README.md")}
    assert left == run.scenario.files


def test_it_sees_no_error(run: Run) -> None:
    """And sends nothing twice: each of its requests is a call, each of its calls was answered."""
    http = run.report["http"]
    assert set(http["statuses"]) == {"200"}
    assert (http["error_events"], http["announced_retries"]) == (0, 0)
    assert sum(http["requests"].values()) == http["statuses"]["200"]
    asked = sum(count for name, count in http["requests"].items() if name.startswith("POST"))
    assert asked == len(run.calls) == run.report["trace"]["calls"]
    assert run.report["trace"]["interrupted_calls"] == 0


def test_its_tree_is_sound_and_whole(run: Run) -> None:
    tree = run.report["tree"]
    assert (tree["faults"], tree["unfinished"], run.report["trace"]["faults"]) == ([], [], [])
    assert all(call["delivered"] for call in run.calls)
    assert "unexplained" not in run.report["trace"]["forks"]


def test_its_lineages_have_the_roles_that_they_had(run: Run) -> None:
    expected = Counter(run.scenario.lineages)
    expected["auxiliary"] += TITLES.get(run.harness, 0)
    assert Counter(run.report["tree"]["lineages"]) == +expected


def test_every_answer_stands_in_the_tree_as_the_policy_said_it(run: Run) -> None:
    said = Counter((each["ids"], each["role"]) for each in run.answers().values())
    roles = {"main-summary": "summary", "sub-agent-summary": "summary"}
    kept = Counter((call["ids"], roles.get(call["role"], call["role"])) for call in run.calls)
    assert kept == said
    assert run.report["off_script"] == 0


def test_what_counts_is_what_was_sampled_and_no_token_twice(run: Run) -> None:
    trace = run.report["trace"]
    said = run.answers()
    assert trace["sampled_tokens"] == sum(each["tokens"] for each in said.values())
    assert trace["counted_tokens"] == sum(
        each["tokens"] for each in run.answers("main", "sub-agent", "summary").values()
    )
    sampled = Counter((label, prompt, place) for _, label, prompt, place in run.report["sampled"])
    twice = [key for key, count in sampled.items() if count > 1]
    # What a killed engine had sampled and not told, another one samples again.
    assert len(twice) <= (STREAM_INTERVAL if run.scenario.meanwhile == "kill in an answer" else 0)
    assert len(sampled) == trace["sampled_tokens"]


def test_what_happened_meanwhile_only_made_it_slower(run: Run) -> None:
    trace, acted = run.report["trace"], run.report["acted"]
    match run.scenario.meanwhile:
        case "nothing":
            assert (trace["continued_calls"], acted) == (0, None)
        case "switch in an answer":
            assert (acted["requests"], trace["continued_calls"], trace["prefix_tokens_recomputed"]) == (1, 1, 0)
            assert acted["moved_blocks"] > 0
        case "switch in a tool call":
            assert (acted["requests"], trace["continued_calls"], trace["prefix_tokens_recomputed"]) == (0, 0, 0)
            assert acted["moved_blocks"] > 0
        case "kill in an answer":
            assert trace["continued_calls"] == 1
