"""`gyred`: the light daemon of a node. It owns the node's actors and child processes, and computes nothing itself.

    gyred --config node.toml

Exit codes: 0 the job ended or gyred was told to stop; 2 bad input; 3 the job has a gyred; anything else is a crash, after
which the next gyred adopts the children that this one left.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from gyre.actors.node import NodeConfig, run_node
from gyre.errors import BadInput, GyreError
from gyre.store.protocol import StoreLocked

TAKEN = 3


def main(argv: list[str] | None = None) -> int:
    """The console script."""
    parser = argparse.ArgumentParser(prog="gyred", description="The daemon of one Gyre node.")
    parser.add_argument("--config", type=Path, required=True, metavar="NODE.toml", help="the node's configuration")
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    try:
        asyncio.run(run_node(NodeConfig.load(args.config)))
    except StoreLocked as error:
        logging.getLogger("gyred").error("%s", error)
        return TAKEN
    except BadInput as error:
        logging.getLogger("gyred").error("%s", error)
        return 2
    except GyreError as error:
        logging.getLogger("gyred").error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
