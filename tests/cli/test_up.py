"""What `gyrectl up` makes of its options and folders, before anything is started."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre.cli.gyrectl import app
from gyre.cli.up import Options, prepare
from gyre.config import FileError
from gyre.errors import BadInput
from gyre.jobdir import JobDir
from gyre.store.open import open_store
from gyre.store.records import JobRecord, JobState, Keys
from gyre.store.typed import TypedStore

JOB = """
[job]
name = "demo"
steps = 3
[model]
path = "builtin:tiny"
[sampling]
max_tokens = 24
[tasks]
source = "builtin:chores"
heldout = 4
[harness]
config = "builtin:chores"
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(JOB, encoding="utf-8")
    return path


def options(job: Path, **changes: object) -> Options:
    return Options(**{"job": job, "overrides": {}, "resume": False, "report": None, "folder": None, **changes})


async def end_job(folder: Path, state: JobState) -> None:
    store = open_store(f"sqlite://{JobDir(folder).store}")
    record = JobRecord("demo", "{}", state, "", 0, 0, None, None, 0.0, 0.0)
    await TypedStore(store).put(Keys("demo").job, record)
    await store.close()


def test_a_job_gets_its_folder_beside_where_one_stands(job_file: Path, tmp_path: Path) -> None:
    job, spec = prepare(options(job_file))
    assert job.root == tmp_path / "runs" / "demo"
    assert json.loads(job.job_file.read_text()) == json.loads(spec.to_json())
    assert job.secret_file.stat().st_mode & 0o777 == 0o600
    assert job.sockets.stat().st_mode & 0o777 == 0o700


def test_an_unfinished_job_is_not_overwritten_but_resumed(job_file: Path) -> None:
    first, _ = prepare(options(job_file, overrides={"job.seed": 5}))
    with pytest.raises(BadInput, match="--resume"):
        prepare(options(job_file))
    again, spec = prepare(options(job_file, resume=True, overrides={"job.steps": 9}))
    assert again == first
    assert (spec.job.seed, spec.job.steps) == (5, 9)  # what it was begun with, but for what is asked now


def test_what_is_staged_in_shared_memory_is_of_the_job_that_goes_on_and_of_no_other(job_file: Path) -> None:
    job, _ = prepare(options(job_file))
    job.staging.mkdir(mode=0o700)
    try:
        prepare(options(job_file, resume=True))
        assert job.staging.is_dir()
        job.job_file.unlink()
        assert prepare(options(job_file))[0] == job
        assert not job.staging.exists()
    finally:
        job.clear_staging()


def test_a_job_that_has_ended_is_left_in_peace(job_file: Path, tmp_path: Path) -> None:
    first, _ = prepare(options(job_file))
    asyncio.run(end_job(first.root, JobState.FINISHED))
    second, _ = prepare(options(job_file))
    assert second.root == tmp_path / "runs" / "demo-2"
    with pytest.raises(BadInput, match="a job has ended there"):
        prepare(options(job_file, folder=first.root))


@pytest.mark.parametrize("report", ["no/such/folder.json", "."])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_made(job_file: Path, report: str) -> None:
    refused = CliRunner().invoke(app, ["up", str(job_file), "--report", report])
    assert refused.exit_code == 2
    assert not (job_file.parent / "runs").exists()


@pytest.mark.parametrize("content", ["", "garbage", "{}"])
def test_a_damaged_job_folder_is_named_in_one_line(job_file: Path, content: str) -> None:
    job, _ = prepare(options(job_file))
    job.job_file.write_text(content)
    with pytest.raises(BadInput, match=r"job\.json"):
        prepare(options(job_file, resume=True))


def test_there_is_nothing_to_resume(job_file: Path) -> None:
    with pytest.raises(BadInput, match="no unfinished job"):
        prepare(options(job_file, resume=True))


def test_a_folder_that_cannot_be_written_is_named(job_file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(BadInput, match=r"job\.dir"):
        prepare(options(job_file, folder=tmp_path / "taken" / "job"))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("builtin:tiny", "builtin:huge", "model.path: 'builtin:huge' is not allowed; one of builtin:tiny"),
        ("builtin:tiny", "no/such", "model.path: 'no/such' is not allowed"),
        ("builtin:chores", "no/such", "no/such"),
        ("[sampling]", "renderer = 'nope'\n[sampling]", "nope"),
        ("max_tokens = 24", "max_tokens = 4096", "sampling.max_tokens: 4096 is not allowed"),
        ("[harness]", "[harness]\nprofile = 'cursor'", "harness.profile: 'cursor' is not allowed; one of "),
        (
            "[tasks]",
            "[server]\nhost = '192.0.2.1'\nport = 4000\n[tasks]",
            "server.port: 4000 on '192.0.2.1' is not allowed",
        ),
    ],
)
def test_what_a_job_names_must_be_there(job_file: Path, old: str, new: str, line: str) -> None:
    job_file.write_text(JOB.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(FileError) as error:
        prepare(options(job_file))
    assert any(line in fault for fault in error.value.faults)


def test_check_says_ok_or_what_is_wrong_with_exit_code_2(job_file: Path) -> None:
    good = CliRunner().invoke(app, ["config", "check", str(job_file)])
    assert (good.exit_code, good.output.strip()) == (0, "job.toml: ok")
    job_file.write_text(JOB.replace("steps = 3", "steps = 0"), encoding="utf-8")
    bad = CliRunner().invoke(app, ["config", "check", str(job_file)])
    assert bad.exit_code == 2


@pytest.mark.parametrize("command", ["status", "stop", "report", "trace"])
def test_a_question_about_no_job_is_answered_in_one_line(command: str, job_file: Path) -> None:
    result = CliRunner().invoke(app, [command, "--dir", str(job_file.parent)])
    assert result.exit_code == 2
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_job_that_does_not_run_does_not_answer(job_file: Path) -> None:
    job, _ = prepare(options(job_file))
    assert CliRunner().invoke(app, ["status", "--dir", str(job.root)]).exit_code == 1
