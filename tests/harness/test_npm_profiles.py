"""What the profiles of the harnesses that come from npm tell them, and what they read of their end."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import BadInput
from gyre.harness.profiles import Launch, LaunchContext, Settings, profile
from gyre.harness.said import last_event

from .conftest import Bench

NPM = ("claude-code", "codex", "opencode", "qwen-code")
URL = "http://127.0.0.1:1/run/r1/key"
MODEL = Settings(context_tokens=50_000, max_tokens=1000)


def launched(bench: Bench, name: str, settings: Settings = MODEL, instruction: str = "-x: do 'it'") -> Launch:
    return profile(name).launch(LaunchContext(bench.prepared("r1"), URL, instruction, settings))


def submitted(bench: Bench, name: str, *lines: object) -> bool | None:
    folder = bench.prepared("r1")
    folder.log.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return profile(name).submitted(folder)


@pytest.mark.parametrize("name", NPM)
def test_a_harness_is_given_a_home_of_its_own_the_runs_address_and_the_instruction_as_it_is(
    bench: Bench, name: str
) -> None:
    launch = launched(bench, name)
    home = bench.folder("r1").home
    assert launch.env["HOME"] == str(home)
    told = [*launch.env.values(), *(path.read_text() for path in home.rglob("*") if path.is_file())]
    assert any(URL in text for text in told)
    # An instruction that looks like an option is none.
    assert launch.arguments[-1] == "--prompt=-x: do 'it'" or launch.arguments[-2:] == ("--", "-x: do 'it'")


@pytest.mark.parametrize("name", NPM)
def test_a_harness_that_is_not_installed_is_one_line_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match=rf"harness.profile: '{name}' is not allowed; .* on PATH \(npm install -g .*\)"):
        profile(name).check(Settings())


def test_claude_code_is_told_the_models_context_and_compacts_in_it(bench: Bench) -> None:
    env = launched(bench, "claude-code").env
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "50000"
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "1000"
    without = launched(bench, "claude-code", Settings()).env
    assert not {"CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_MAX_OUTPUT_TOKENS"} & set(without)


def test_codexs_settings_are_toml_with_the_models_context(bench: Bench) -> None:
    home = Path(launched(bench, "codex").env["CODEX_HOME"])
    settings = tomllib.loads((home / "config.toml").read_text())
    assert settings["model_context_window"] == 50_000
    assert settings["model_auto_compact_token_limit"] < 50_000
    assert settings["model_providers"]["gyre"]["base_url"] == f"{URL}/v1"
    assert settings["model_providers"]["gyre"]["stream_idle_timeout_ms"] > 3_600_000


def test_opencodes_settings_have_the_models_context_and_no_timeout(bench: Bench) -> None:
    home = Path(launched(bench, "opencode").env["HOME"])
    settings: dict[str, Any] = json.loads((home / ".config" / "opencode" / "opencode.json").read_text())
    gyre = settings["provider"]["gyre"]
    assert gyre["models"]["policy"]["limit"] == {"context": 50_000, "output": 1000}
    assert gyre["options"]["timeout"] is False


def test_claude_code_has_submitted_when_its_last_result_is_no_error(bench: Bench) -> None:
    good = {"type": "result", "subtype": "success", "is_error": False, "result": "done"}
    assert submitted(bench, "claude-code", "a warning", {"type": "system"}, good)
    assert not submitted(bench, "claude-code", good, {**good, "is_error": True})
    assert not submitted(bench, "claude-code", {**good, "subtype": "error_max_turns"})
    assert not submitted(bench, "claude-code", {"type": "assistant"})


def test_codex_has_submitted_when_its_last_turn_was_completed(bench: Bench) -> None:
    assert submitted(bench, "codex", {"type": "turn.started"}, {"type": "turn.completed"})
    assert not submitted(bench, "codex", {"type": "turn.completed"}, {"type": "turn.started"})
    assert not submitted(bench, "codex", {"type": "turn.completed"}, {"type": "turn.failed"})
    assert not submitted(bench, "codex")


def test_opencode_has_submitted_when_its_last_step_had_nothing_more_to_do(bench: Bench) -> None:
    assert submitted(bench, "opencode", {"type": "step_finish", "part": {"reason": "stop"}})
    assert not submitted(bench, "opencode", {"type": "step_finish", "part": {"reason": "tool-calls"}})
    assert not submitted(bench, "opencode", {"type": "step_finish", "part": {"reason": "stop"}}, {"type": "error"})
    assert not submitted(bench, "opencode", {"type": "step_finish", "part": 3})


def test_qwen_code_has_not_submitted_when_it_calls_an_error_a_success(bench: Bench) -> None:
    good = {"type": "result", "subtype": "success", "is_error": False, "result": "done"}
    assert submitted(bench, "qwen-code", good)
    assert not submitted(bench, "qwen-code", {**good, "result": "half a sentence\n[API Error: terminated]"})
    assert not submitted(bench, "qwen-code", {**good, "is_error": True})
    assert not submitted(bench, "qwen-code", {**good, "result": None, "is_error": None})


@pytest.mark.parametrize("name", NPM)
@pytest.mark.parametrize("line", ["", "{", "[]", "{}", '{"type": 3}', "{" * 100_000, "\0"])
def test_a_log_of_any_shape_is_no_submission(bench: Bench, name: str, line: str) -> None:
    assert submitted(bench, name, line) is False


def test_a_log_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert last_event(tmp_path / "none", "result") is None


def test_a_command_is_filled_with_the_runs_own_values(bench: Bench) -> None:
    command = ("prog", '--json={{"a": 1}}', "{instruction}", "{workspace}/{home}")
    settings = Settings(command=command, env={"BASE": "{base_url}/v1", "OTHER": "{home}/x"})
    launch = launched(bench, "command", settings, instruction="say {home}")
    folder = bench.folder("r1")
    assert launch.program == ("prog",)
    assert launch.arguments == ('--json={"a": 1}', "say {home}", f"{folder.workspace}/{folder.home}")
    assert launch.env["BASE"] == f"{URL}/v1"
    assert launch.env["OTHER"] == f"{folder.home}/x"


def test_a_command_whose_program_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"harness.command: 'no-such-harness' is not allowed; it must be a program on"):
        profile("command").check(Settings(command=("no-such-harness",)))
    profile("command").check(replace(Settings(), command=("sh", "-c", "true")))
