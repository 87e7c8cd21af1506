"""`gyrectl top`: the live view of a job that somebody else runs. It only looks, and ends with the job or Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import sys

from rich.console import Console
from rich.live import Live

from gyre.actors.messages_gyrectl import GetStatus, Status
from gyre.cli import client, live
from gyre.errors import Unavailable
from gyre.wire import to_plain

REFRESH_S = 0.5
PLAIN_EVERY_S = 5.0


async def watch(job: client.Job, console: Console, *, as_json: bool) -> None:
    """Show the job until it has ended, or nobody works on it. Raises Unavailable when it does not run.

    One panel on a terminal; elsewhere a line every few seconds, in JSON if so wished. A gyred that is being started
    again is waited for, as long as it is there; of a cluster another one is asked.
    """
    await client.status(job)
    panel = console.is_terminal and not as_json
    with Live(console=console, auto_refresh=False) as view:

        def show(status: Status) -> None:
            if as_json:
                sys.stdout.write(json.dumps(to_plain(status)) + "\n")
                sys.stdout.flush()
            elif panel:
                view.update(live.render(status), refresh=True)
            else:
                console.print(live.plain_line(status), markup=False, highlight=False, soft_wrap=True)

        while True:
            try:
                async with client.asking(job) as node:
                    while True:
                        show(await node.ask(GetStatus(), client.ASK_S, Status))
                        await asyncio.sleep(REFRESH_S if panel else PLAIN_EVERY_S)
            except Unavailable:
                if not await _goes_on(job):
                    return
                await asyncio.sleep(REFRESH_S)


async def _goes_on(job: client.Job) -> bool:
    try:
        return await client.is_running(job)
    except Unavailable:  # the store is away, and the job may well go on
        return True
