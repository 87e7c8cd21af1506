"""`gyrectl top`: the live view of a job that somebody else runs. It only looks, and ends with the job or Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import sys

from rich.console import Console
from rich.live import Live

from gyre.cli import client, live
from gyre.errors import Unavailable
from gyre.jobdir import JobDir
from gyre.wire import to_plain

REFRESH_S = 0.5
PLAIN_EVERY_S = 5.0


async def watch(job: JobDir, console: Console, *, as_json: bool) -> None:
    """Show the job until its gyred has ended. Raises Unavailable when it does not run.

    One panel on a terminal; elsewhere a line every few seconds, in JSON if so wished. A gyred that is being started
    again is waited for, as long as it is there.
    """
    status = await client.status(job)
    panel = console.is_terminal and not as_json
    with Live(console=console, auto_refresh=False) as view:
        while True:
            if as_json:
                sys.stdout.write(json.dumps(to_plain(status)) + "\n")
                sys.stdout.flush()
            elif panel:
                view.update(live.render(status), refresh=True)
            else:
                console.print(live.plain_line(status), markup=False, highlight=False, soft_wrap=True)
            await asyncio.sleep(REFRESH_S if panel else PLAIN_EVERY_S)
            while True:
                try:
                    status = await client.status(job)
                    break
                except Unavailable:
                    if client.gyred_of(job) is None:
                        return
                    await asyncio.sleep(REFRESH_S)
