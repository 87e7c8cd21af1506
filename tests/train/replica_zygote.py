"""Starts the replica processes of test_replica_process, which kills them: a fork for each line, with torch loaded once.

python replica_zygote.py
<- {"argv": [ADDRESS, SECRET_FILE, CONFIG_JSON], "log": FILE}, one line
-> the pid, one line
"""

from __future__ import annotations

import json
import os
import signal
import sys

from gyre.actors import replica_process


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are nobody's zombies
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log, stream.fileno())
            sys.argv[1:] = order["argv"]
            try:
                if order["before"]:
                    module = (sys.executable, "-m", "gyre.actors.replica_process")
                    os.execvp(order["before"][0], [*order["before"], *module, *order["argv"]])
                replica_process.main()
            finally:
                os._exit(1 if sys.exc_info()[0] else 0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
