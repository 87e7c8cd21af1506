"""`python -m kv_migrate.pages LAYOUT PAGES WIDTH SETTINGS`: one scheduler's pages in a process that tests may kill and stop.

It writes its address, epoch and layout and then does what it is told, one line each:
`write N`: page N, whose content N stands for, is in the pool and named. `rewrite N`: SGLang frees page N and writes another one
to its place, without asking anybody. `clear`: the pool forgets all and its memory is written over.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from gyre.kv_migrate.hicache_settings import HicacheSettings
from gyre.kv_migrate.host_pages import HostPages
from gyre.kv_migrate.page_exchange import PageExchange
from kv_migrate.host_pool import PAGE_SLOTS, TorchPool, slots

T = TypeVar("T")
OTHER = 1000
"""Added to a page's number: what stands in its place later."""


def names(token_ids: Any, version: int) -> list[bytes]:
    """The names of the pages 0, 1, …, of the prefix 0, 0, 0, 0, 1, 1, 1, 1, …"""
    return [page_name(number, version) for number in token_ids[PAGE_SLOTS - 1 :: PAGE_SLOTS]]


def page_name(number: int, version: int = 1) -> bytes:
    return version.to_bytes(16, "big") + number.to_bytes(16, "big")


class Scheduler:
    """A host pool, and the exchange of its pages."""

    def __init__(
        self, settings: HicacheSettings, layout: str, pages: int, width: int = 8, rank: int = 0, ranks: int = 1
    ) -> None:
        self.orders = f"http://{settings.orders}"
        self.pool = TorchPool(layout, pages, width=width)
        self.exchange = PageExchange(settings, HostPages(self.pool), PAGE_SLOTS, names, rank, ranks)
        self.where: dict[int, int] = {}

    def write(self, number: int, version: int = 1) -> None:
        taken = self.pool.alloc(1)
        self.where[number] = int(taken[0]) // PAGE_SLOTS
        self.pool.write(self.where[number], number)
        self.exchange.written([page_name(number, version)], taken)

    def rewrite(self, number: int) -> None:
        page = self.where.pop(number)
        self.pool.free(slots([page]))
        self.pool.write(page, number + OTHER)

    def clear(self) -> None:
        self.pool.clear()
        for page in range(self.pool.pages):
            self.pool.write(page, OTHER)

    def tell(self, words: str) -> None:
        word, *numbers = words.split()
        match word:
            case "write":
                for number in numbers:
                    self.write(int(number))
            case "rewrite":
                for number in numbers:
                    self.rewrite(int(number))
            case "clear":
                self.clear()
            case _:
                raise AssertionError(words)

    def introduce(self) -> tuple[str, int, str]:
        loop = self.exchange._loop  # pyright: ignore[reportPrivateUsage]
        about = asyncio.run_coroutine_threadsafe(self.exchange.about(), loop).result()
        return about["address"], about["epoch"], about["layout"]

    async def on_its_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """As the orders' server would do it."""
        loop = self.exchange._loop  # pyright: ignore[reportPrivateUsage]
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def main() -> None:
    layout, pages, width, settings = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    scheduler = Scheduler(HicacheSettings.read(settings), layout, pages, width)
    print(json.dumps(scheduler.introduce()), flush=True)
    for line in sys.stdin:
        scheduler.tell(line)
        print("done", flush=True)


if __name__ == "__main__":
    main()
