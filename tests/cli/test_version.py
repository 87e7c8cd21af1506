"""Both programs tell their version."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from gyre import __version__
from gyre.cli import gyred
from gyre.cli.gyrectl import app


def test_both_programs_tell_their_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"gyrectl {__version__}\n"
    with pytest.raises(SystemExit) as ended:
        gyred.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"gyred {__version__}\n")
