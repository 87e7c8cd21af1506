"""Death watch: who is told of an end, and whose ends are waited for."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from gyre.actors.reference import Served
    from gyre.actors.runtime import Ref

K = TypeVar("K", bound=Hashable)


class Watchers:
    """Those who wait for one end. Each is told once, with the reason."""

    def __init__(self) -> None:
        self._calls: dict[object, Callable[[str], None]] = {}
        self._reason: str | None = None

    def add(self, call: Callable[[str], None]) -> Callable[[], None]:
        """Told at once when the end has come already. Returns what takes it back."""
        if self._reason is not None:
            call(self._reason)
            return lambda: None
        key = object()
        self._calls[key] = call

        def take_back() -> None:
            self._calls.pop(key, None)

        return take_back

    def ended(self, reason: str) -> None:
        self._reason = reason
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            call(reason)


class Watches(Generic[K]):
    """The ends that one side waits for, each under a key of its own."""

    def __init__(self) -> None:
        self._take_back: dict[K, Callable[[], None]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._take_back

    def __len__(self) -> int:
        return len(self._take_back)

    def begin(self, key: K, ref: Ref | Served, died: Callable[[str], None]) -> None:
        """`died` is called once, and not after `end`. A watch that is there already stays the only one."""

        def once(reason: str) -> None:
            self._take_back.pop(key, None)
            died(reason)

        if key not in self._take_back:
            self._take_back[key] = lambda: None
            take_back = ref.on_end(once)
            if key in self._take_back:  # it has not ended already
                self._take_back[key] = take_back

    def end(self, key: K) -> None:
        self._take_back.pop(key, lambda: None)()

    def end_all(self) -> None:
        for key in tuple(self._take_back):
            self.end(key)
