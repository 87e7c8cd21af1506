"""What every command has: an example in its help, and JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
import typer

from gyre.cli.gyrectl import app

WITHOUT_JSON = {"up", "run export"}
"""What they say are files, which the first writes with `--report`."""


def commands(group: click.Command, *before: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in getattr(group, "commands", {}).items():
        if hasattr(command, "commands"):
            yield from commands(command, *before, name)
        else:
            yield " ".join((*before, name)), command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example(name: str) -> None:
    assert f"gyrectl {name}" in (COMMANDS[name].help or "")


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - WITHOUT_JSON))
def test_a_command_answers_programs_in_json(name: str) -> None:
    assert "--json" in {option for parameter in COMMANDS[name].params for option in parameter.opts}
