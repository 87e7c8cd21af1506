"""Two real SGLang engines on CPU whose pages move by our plug-in, each in processes that tests may kill and stop."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gyre.engine.access import http_key
from gyre.engine.ports import free_port
from gyre.kv_migrate.choice import Kind
from gyre.kv_migrate.hicache_settings import HicacheSettings, hicache_flags

from .servers import PYTHON

SECRET = "a secret of the engines"
PAGE_TOKENS = 16
RANKS = int(os.environ.get("GYRE_SGLANG_RANKS", "1"))
"""Of each engine. With 2 the same tests run on tensor parallel engines; on two cores they take three times as long."""
BOOT_S = 400.0
_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--grammar-backend", "none", "--skip-tokenizer-init", "--sleep-on-idle"),
    *("--page-size", str(PAGE_TOKENS), "--max-running-requests", "32", "--mem-fraction-static", "0.3"),
    *("--skip-server-warmup", "--log-level", "info", "--random-seed", "7"),
)


@dataclass
class Engine:
    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def processes(self) -> list[int]:
        """All that it has."""
        return list(session(self.process.pid))

    def schedulers(self) -> list[int]:
        """The processes that sample; the one that answers HTTP is another."""
        found = [process for process, command in session(self.process.pid).items() if is_scheduler(command)]
        assert len(found) == RANKS, f"{self.name} has {len(found)} scheduler processes"
        return found

    def end(self) -> None:
        """All of its processes, also those that are stopped."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def session(leader: int) -> dict[int, bytes]:
    """The processes of a session, and their command lines."""
    found: dict[int, bytes] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(folder.name)) == leader:
                found[int(folder.name)] = (folder / "cmdline").read_bytes()
    return found


def is_scheduler(command: bytes) -> bool:
    return command.startswith(b"sglang::scheduler")


def start(
    name: str,
    model: Path,
    version: int,
    folder: Path,
    *flags: str,
    transport: str = Kind.TCP,
    store: Sequence[str] = (),
    beside: Sequence[Path] = (),
) -> Engine:
    """Begin to start one; `ready` waits for it. Its pages move by our plug-in over `transport`, or by what the options
    `store` name; what these need lies `beside`."""
    port, orders = free_port("127.0.0.1", 1), free_port("127.0.0.1", RANKS)
    secret = folder / "secret"
    secret.write_text(SECRET, encoding="utf-8")
    # A machine under load may well be silent for seconds, and half of it is the wait for pages that are yet to be written.
    settings = HicacheSettings(
        str(secret), f"127.0.0.1:{orders}", model="the weights", transport=transport, silence_s=20.0
    )
    command = [
        *("nice", "-n", "5", str(PYTHON), "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--weight-version", str(version), "--host", "127.0.0.1", "--port", str(port)),
        *("--api-key", http_key(SECRET), "--tp", str(RANKS), *_FLAGS, *flags),
        *(store or hicache_flags(settings, PAGE_TOKENS)),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parents[2], *beside))),
        "OMP_NUM_THREADS": "1",
        **({"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(RANKS)))} if RANKS > 1 else {}),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # it would compile the sampling with seeds, for half a minute and with a compiler
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    return Engine(name, port, process, log)


def ready(engine: Engine) -> None:
    """Until it answers. Fails with the end of its log when it does not."""
    until_s = time.monotonic() + BOOT_S
    ask = urllib.request.Request(f"{engine.url}/model_info", headers={"Authorization": f"Bearer {http_key(SECRET)}"})
    while True:
        try:
            with urllib.request.urlopen(ask, timeout=5):
                return
        except (OSError, urllib.error.URLError):
            gone = engine.process.poll() is not None
            if gone or time.monotonic() > until_s:
                tail = engine.log.read_text(encoding="utf-8", errors="replace")[-4000:]
                raise AssertionError(f"{engine.name} {'ended' if gone else 'is not ready'}:\n{tail}") from None
            time.sleep(0.25)
