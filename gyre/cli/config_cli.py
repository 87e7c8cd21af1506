"""`gyrectl config …`: a file that people write, looked at before anything is begun with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gyre.actors.node_check import load_node
from gyre.cli.check import check_job
from gyre.cli.cluster_file import ClusterFile
from gyre.cli.saying import AsJson, done, say
from gyre.config import FileError, load_job, read_toml

config_app = typer.Typer(help="Look at the files that people write.", no_args_is_help=True)


@config_app.command()
def check(
    file: Annotated[Path, typer.Argument(help="A job file, a node.toml, or a gyrectl.toml.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Validate a job file, a node.toml or a gyrectl.toml: each fault is one line naming the key, the value and what is allowed.

    gyrectl config check job.toml
    """

    async def work() -> None:
        plain = read_toml(file)
        if "node" in plain:
            load_node(file)
        elif "cluster" in plain:
            ClusterFile.load(file)
        elif faults := check_job(load_job(file), file.parent):
            raise FileError(file, faults)

    done(work)
    say(f"{file.name}: ok", as_json=as_json, file=str(file), ok=True)
