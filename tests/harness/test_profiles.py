"""Profiles: found by name, checked before a job begins, and told to the person in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gyre.errors import BadInput
from gyre.harness.profiles import LaunchContext, Settings, clean_environment, config_path, profile
from gyre.harness.workspace import RunFolder
from gyre.ids import RunId


def test_an_unknown_profile_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        BadInput,
        match=r"harness.profile: 'claude' is not allowed; one of claude-code, codex, command, mini-swe-agent, opencode, qwen-code, scripted",
    ):
        profile("claude")


def test_the_profile_command_fills_in_its_placeholders_and_undoubles_braces(tmp_path: Path) -> None:
    settings = Settings(command=("prog", "{{{instruction}}}"), env={"X": "${{HOME}} {home}"})
    folder = RunFolder.of(tmp_path, RunId("r"), 1)
    found = profile("command").launch(LaunchContext(folder, "http://b", "{{a}} task", settings))
    assert found.arguments == ("{{{a}} task}",)
    assert found.env["X"] == f"${{HOME}} {folder.home}"


def test_a_harness_that_is_not_installed_is_one_line_with_the_command_that_installs_it() -> None:
    missing = replace(profile("mini-swe-agent"), module="no_such_harness")
    with pytest.raises(
        BadInput, match=r"'mini-swe-agent' is not allowed; it must be installed \(pip install 'gyre\[demo\]'\)"
    ):
        missing.check(Settings())


def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    profile("mini-swe-agent").check(Settings())
    profile("mini-swe-agent").check(Settings(config_path("builtin:chores", tmp_path)))
    with pytest.raises(BadInput, match=r"harness.config: .*none.yaml' is not allowed"):
        profile("mini-swe-agent").check(Settings(config_path("none.yaml", tmp_path)))
    with pytest.raises(BadInput, match=r"harness.config: '' is not allowed; the profile scripted needs"):
        profile("scripted").check(Settings())


def test_a_configuration_is_builtin_or_taken_from_the_job_files_folder(tmp_path: Path) -> None:
    assert config_path("", tmp_path) is None
    assert config_path("my/mini.yaml", tmp_path) == tmp_path / "my" / "mini.yaml"
    builtin = config_path("builtin:chores", tmp_path)
    assert builtin is not None
    assert builtin.is_file()
    with pytest.raises(BadInput):
        config_path("builtin:none", tmp_path)


def test_a_runs_environment_carries_nothing_of_the_nodes_but_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/opt/tools/bin:/usr/bin")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@host")
    context = LaunchContext(RunFolder.of(tmp_path, RunId("r1"), 1), "http://127.0.0.1:1", "go")
    env = context.environment(MORE="1")
    assert env == {**clean_environment(context.folder.home), "MORE": "1"}
    assert env["PATH"] == "/opt/tools/bin:/usr/bin"
    assert set(env) == {"PATH", "HOME", "LANG", "TERM", "NO_COLOR", "MORE"}
