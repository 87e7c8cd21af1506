# pyright: basic
"""Another rank than the first of a replica, in a process of its own: it does what the first rank's process tells it to.

    python -m gyre.train.rank_process FD

The pipe FD brings calls, the making of its Replica first, and takes how each ended (gyre.train.ranked). When it closes, this
process ends, whatever it is doing.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

from gyre.errors import GyreError
from gyre.train.ranked import Outcome, outcome_of

log = logging.getLogger("gyre.train.rank")

T = TypeVar("T")
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def main() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    pipe: Connection[Outcome, Call | None] = Connection(int(sys.argv[1]))
    calls: SimpleQueue[Call] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, calls), daemon=True).start()
    replica = _run(pipe, *calls.get())
    while True:
        method, args = calls.get()
        _run(pipe, method, (replica, *args))


def _run(pipe: Connection[Outcome, Call | None], call: Callable[..., T], args: tuple[Any, ...]) -> T | None:
    try:
        result = call(*args)
    except Exception as error:
        if not isinstance(error, GyreError):
            log.exception("%s has failed", call.__qualname__)
        pipe.send(outcome_of(error))
        return None
    pipe.send(None)
    return result


def _listen(pipe: Connection[Outcome, Call | None], calls: SimpleQueue[Call]) -> None:
    """In a thread of its own: the other may wait in a collective for ranks that are gone."""
    try:
        while (call := pipe.recv()) is not None:
            calls.put(call)
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
