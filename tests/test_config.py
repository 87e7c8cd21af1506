"""The job file: every fault is one line that names the key, the value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.config import FileError, JobSpec, load_job

GOOD = """
[job]
name = "demo"
steps = 3
[model]
path = "builtin:tiny"
[tasks]
source = "builtin:chores"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def faults(folder: Path, text: str) -> list[str]:
    with pytest.raises(FileError) as error:
        load_job(write(folder, text))
    return error.value.faults


def test_a_short_job_file_is_enough(tmp_path: Path) -> None:
    spec = load_job(write(tmp_path, GOOD))
    assert (spec.job.steps, spec.batch.group_size, spec.batch.j_max, spec.loss.kind) == (3, 16, 5, "gspo")


def test_a_spec_survives_its_json(tmp_path: Path) -> None:
    spec = load_job(write(tmp_path, GOOD + "[optimizer]\nbetas = [0.9, 0.98]\n"))
    assert JobSpec.from_json(spec.to_json()) == spec


def test_the_shipped_quickstart_is_valid() -> None:
    spec = load_job(Path(__file__).parents[1] / "gyre/demo/quickstart.toml")
    assert spec.job.name == "quickstart"


def test_a_command_may_have_placeholders_and_doubled_braces_of_its_own(tmp_path: Path) -> None:
    text = """[harness]
profile = "command"
command = ["prog", "--json={{\\"a\\": 1}}", "{instruction}"]
env = { URL = "{base_url}/v1", "npm_config.x" = "${{HOME}}" }
"""
    harness = load_job(write(tmp_path, GOOD + text)).harness
    assert harness.command == ("prog", '--json={{"a": 1}}', "{instruction}")
    assert harness.env == {"URL": "{base_url}/v1", "npm_config.x": "${{HOME}}"}


@pytest.mark.parametrize("text", ["{Instruction}", "{instruction.x}", "{}", "${HOME}", "{", "}", "{{instruction}"])
def test_a_brace_that_is_neither_a_placeholders_nor_doubled_is_named(tmp_path: Path, text: str) -> None:
    for rest in (f"command = ['prog', '{text}']", f"command = ['prog']\nenv = {{ X = '{text}' }}"):
        found = faults(tmp_path, GOOD + f"[harness]\nprofile = 'command'\n{rest}\n")
        assert len(found) == 1
        wrong = text.removeprefix("$") if text != "{{instruction}" else "}"
        assert f"is not allowed; {wrong} is no placeholder; there are {{base_url}}" in found[0]
        assert found[0].endswith("a brace itself is {{ or }}")


@pytest.mark.parametrize("name", ["", "A=B", "{home}", "A B"])
def test_a_name_that_no_variable_can_have_is_refused(tmp_path: Path, name: str) -> None:
    text = f"[harness]\nprofile = 'command'\ncommand = ['prog']\nenv = {{ '{name}' = 'x' }}\n"
    (found,) = faults(tmp_path, GOOD + text)
    assert f"harness.env: {{{name!r}: 'x'}} is not allowed; {name!r} is no variable's name" in found


@pytest.mark.parametrize("name", ["PATH", "HOME", "GYRE_RUN"])
def test_variables_that_are_the_runs_own_are_refused(tmp_path: Path, name: str) -> None:
    text = f"[harness]\nprofile = 'command'\ncommand = ['prog']\nenv = {{ {name} = 'x' }}\n"
    (found,) = faults(tmp_path, GOOD + text)
    assert found.endswith(f"the variable {name} is the run's own, and no job sets it")


def test_the_profile_command_has_no_use_for_a_configuration_file(tmp_path: Path) -> None:
    (found,) = faults(tmp_path, GOOD + "[harness]\nprofile = 'command'\ncommand = ['prog']\nconfig = 'x.yaml'\n")
    assert found.endswith("the profile command has no use for config; name the file in command")


def test_options_replace_the_files_values_and_are_validated_like_them(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert load_job(path, {"job.steps": 9, "job.seed": 4}).job.steps == 9
    with pytest.raises(FileError, match=r"job\.steps: 0 is not allowed"):
        load_job(path, {"job.steps": 0})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("steps = 3", "steps = 0"), "job.steps: 0 is not allowed; input should be greater than or equal to 1"),
        (("steps = 3", "steps = '3'"), "job.steps: '3' is not allowed; input should be a valid integer"),
        (("steps = 3", ""), "job.steps: required, and not there"),
        (('"demo"', '"De mo"'), "job.name: 'De mo' is not allowed; string should match pattern"),
        (("steps = 3", "steps = 3\nstep = 4"), "job.step: no such key; allowed here: dir, name, seed, steps"),
        (("[tasks]", "[cell]\n[tasks]"), "cell: no such key; allowed here: batch, cells, checkpoint, engine, harness,"),
        (("steps = 3", "steps = 3\n[loss]\nkind = 'ppo'"), "loss.kind: 'ppo' is not allowed; input should be 'gspo'"),
        (
            ("steps = 3", "steps = 3\n[optimizer]\nbetas = [0.9, 1.0]"),
            "optimizer.betas.1: 1.0 is not allowed; input should be less than 1",
        ),
        (
            ("steps = 3", "steps = 3\n[journal]\nfsync = 'never'"),
            "journal.fsync: 'never' is not allowed; input should be 'call'",
        ),
        (
            ("steps = 3", "steps = 3\n[journal]\ncopies = 2"),
            "journal.copies: 2 is not allowed; input should be less than or equal to 1",
        ),
        (
            ("steps = 3", "steps = 3\n[checkpoint]\nkeep = 0"),
            "checkpoint.keep: 0 is not allowed; input should be greater than or equal to 1",
        ),
        (
            ("steps = 3", "steps = 3\n[checkpoint]\nevery_steps = 1.5"),
            "checkpoint.every_steps: 1.5 is not allowed; input should be a valid integer",
        ),
        (
            ("steps = 3", "steps = 3\n[limits]\nrun_s = -1.0"),
            "limits.run_s: -1.0 is not allowed; input should be greater than 0",
        ),
        (
            ("steps = 3", "steps = 3\n[engine]\nkind = 'sglang'"),
            "engine: the kind sglang needs python",
        ),
        (
            ("steps = 3", "steps = 3\n[engine]\ntensor_parallel = 2"),
            "engine: tensor_parallel: for the kind sglang alone",
        ),
        (
            ("steps = 3", "steps = 3\n[engine]\nkv_transport = 'rdma'"),
            "engine.kv_transport: 'rdma' is not allowed; input should be 'auto', 'tcp', 'mooncake' or 'mooncake-tcp'",
        ),
        (
            ("steps = 3", "steps = 3\n[engine]\nkind = 'sglang'\npython = 'p'\nkv_transport = 'mooncake'"),
            "engine: kv_transport: the kind sglang moves KV only with moves_kv = true",
        ),
        (
            ("steps = 3", "steps = 3\n[engine]\nkind = 'sglang'\npython = 'p'\noptions = ['--port=1']"),
            "engine.options: ['--port=1'] is not allowed; --port is set by Gyre",
        ),
    ],
)
def test_a_fault_is_one_line_that_names_key_value_and_allowed(
    tmp_path: Path, change: tuple[str, str], line: str
) -> None:
    found = faults(tmp_path, GOOD.replace(*change))
    assert len(found) == 1
    assert found[0].startswith(line)
    assert "\n" not in found[0]


def test_every_fault_is_named_not_only_the_first(tmp_path: Path) -> None:
    assert len(faults(tmp_path, GOOD.replace("steps = 3", "steps = 0\nseed = -1\nx = 1"))) == 3


def test_what_is_no_toml_and_what_is_no_file(tmp_path: Path) -> None:
    assert faults(tmp_path, "[job\n")[0].startswith("is not TOML")
    with pytest.raises(FileError, match="cannot be read"):
        load_job(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = " + "[" * 3000, "is not TOML that can be read: it is nested too deep"),
        (GOOD.replace("steps = 3", "steps = " + "9" * 5000), "is not TOML"),
        (GOOD.replace("builtin:chores", "a\\u0000b"), "tasks.source: a NUL character is not allowed"),
        (GOOD + '"a\\nb: fake" = 1\n', "tasks.'a\\nb: fake': no such key"),
        (GOOD + "[optimizer]\nlr = inf\n", "optimizer.lr: inf is not allowed; input should be a finite number"),
        (GOOD + "[cells]\ncount = 999\n", "cells.count: 999 is not allowed; input should be less than or equal to 64"),
        (GOOD + "[cells]\nblock_tokens = 1000\ncache_tokens = 256\n", "cells: "),
        (
            GOOD + "[telemetry]\notlp_endpoint = 'not a url'\n",
            "telemetry.otlp_endpoint: 'not a url' is not allowed; give http://",
        ),
        (
            GOOD + "[harness]\nprofile = 'command'\ncommand = ['prog', '{instruction}', '{task}']\n",
            "harness.command: ['prog', '{instruction}', '{task}'] is not allowed; {task} is no placeholder; there are {base",
        ),
        (
            GOOD + "[harness]\nprofile = 'command'\ncommand = ['prog']\nenv = { URL = '{url}' }\n",
            "harness.env: {'URL': '{url}'} is not allowed; {url} is no placeholder; there are {base_url}, {instruction}, ",
        ),
        (GOOD + "[harness]\nprofile = 'command'\n", "harness: "),
        (GOOD + "[harness]\ncommand = ['prog']\n", "harness: "),
    ],
)
def test_hostile_files_get_one_line_too(tmp_path: Path, text: str, line: str) -> None:
    found = faults(tmp_path, text)
    assert len(found) == 1
    assert found[0].startswith(line)
    assert "\n" not in found[0]
