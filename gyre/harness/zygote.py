"""The zygote: a process that imports a Python harness once and forks it for every run.

    python -m gyre.harness.zygote FOLDER SOCKET ENTRY_POINT PRELOAD

Started by the Launcher as a child that outlives its gyred. It listens at FOLDER/SOCKET and speaks JSON lines:
`{"start": Spec}` is answered by `{"pid", "start_ticks"}` of the run's keeper, `{"ping": true}` by `{"pid", "live"}`,
what cannot be done by `{"error"}`. A start that is repeated for a run that lives (its answer was lost) starts nothing.

Each run is a keeper (gyre.harness.keeper), so it goes on when the zygote dies, and its exit is on disk whoever is
there. A fork calls the harness's own entry point with its own directory, environment, arguments and output; that the
imports are warm is all that it knows of us.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NoReturn

from gyre.harness import keeper, namespaces

_REQUEST_BYTES = 16 << 20


def main() -> NoReturn:
    folder, name, entry_point, preload = sys.argv[1:]
    entry = load_entry_point(entry_point)
    Preload.read(preload).load()
    gc.collect()
    gc.freeze()
    namespaces.set_name("gyre-zygote")
    Zygote(_listen(folder, name), entry).serve()


@dataclass(frozen=True)
class Preload:
    """What a harness leaves for its first call to a model, done before the fork so that it is done once.

    Another version of the harness may lack some of it: what is not there is passed over.
    """

    modules: tuple[str, ...]
    models: tuple[str, ...]
    """Pydantic models, `module:name`, whose validators would be built on first use."""

    @staticmethod
    def read(path: str) -> Preload:
        with open(path, encoding="utf-8") as file:
            plain = json.load(file)
        return Preload(tuple(plain["modules"]), tuple(plain["models"]))

    def load(self) -> None:
        for module in self.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        for name in self.models:
            with contextlib.suppress(Exception):
                self.find(name).model_rebuild()

    @staticmethod
    def find(name: str) -> Any:
        """The model, or None."""
        module, _, path = name.partition(":")
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        return found


class Zygote:
    def __init__(self, listener: socket.socket, entry: Callable[[], object]) -> None:
        self._listener = listener
        self._entry = entry
        self._keepers: dict[int, str] = {}
        self._buffers: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake_r, wake_w = os.pipe()
        for pipe in (self._wake_r, wake_w):
            os.set_blocking(pipe, False)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake_only)

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._buffers[connection] = b""
                    self._selector.register(connection, selectors.EVENT_READ)
                elif key.fileobj == self._wake_r:
                    os.read(self._wake_r, 4096)
                    self._reap()
                else:
                    self._read(key.fileobj)  # pyright: ignore[reportArgumentType]

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
            lines = (self._buffers[connection] + data).split(b"\n")
            self._buffers[connection] = lines.pop()
            for line in lines:
                connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")
            if data and len(self._buffers[connection]) <= _REQUEST_BYTES:
                return
        except OSError:  # the client went away; what it asked for stands
            pass
        self._selector.unregister(connection)
        del self._buffers[connection]
        connection.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            if "start" in request:
                return self._start(keeper.Spec.from_plain(request["start"]))
            return {"pid": os.getpid(), "live": len(self._keepers)}
        except (OSError, ValueError, KeyError, TypeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _start(self, spec: keeper.Spec) -> dict[str, Any]:
        self._reap()
        for pid, name in self._keepers.items():
            if name == spec.name:
                return {"pid": pid, "start_ticks": keeper.start_ticks(pid)}
        pid = os.fork()
        if pid == 0:
            self._be_keeper(spec)
        self._keepers[pid] = spec.name
        return {"pid": pid, "start_ticks": keeper.start_ticks(pid)}

    def _be_keeper(self, spec: keeper.Spec) -> NoReturn:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for connection in (self._listener, *self._buffers):
            connection.close()
        keeper.keep(spec, lambda: self._harness(spec))

    def _harness(self, spec: keeper.Spec) -> int:
        """In the run's own process: what the console script does."""
        os.environ.clear()
        os.environ.update(spec.env)
        os.environ[keeper.MARK] = spec.name
        sys.argv = list(spec.argv)
        try:
            self._entry()
            return 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._keepers.pop(pid, None)


def _wake_only(number: int, frame: object) -> None:
    """The wake-up pipe does the work; a handler has to be there for it to be written."""


def load_entry_point(entry_point: str) -> Callable[[], object]:
    """The function that `module:function` names."""
    module, _, attribute = entry_point.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _listen(folder: str, name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, name))
    with folder_address(folder, name) as address:
        os.umask(0o077)
        listener.bind(address)
    listener.listen(64)
    return listener


@contextlib.contextmanager
def folder_address(folder: str, name: str) -> Generator[str]:
    """An address of the socket `name` in `folder` that is short, however long the folder's path is."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
