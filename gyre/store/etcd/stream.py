"""The one stream of watches that a process has with etcd: it carries any number of them.

A watch begins by a request on the stream and is told by the number that etcd gives it. etcd answers requests in their
order, and tells a watch nothing before it has answered. When the stream ends, all of its watches hear why; whoever goes
on begins again, on the next stream.

A watch that does not take what comes is ended, so that the others need not wait for it: what it has it still gives, and
then it has to begin again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from gyre.errors import GyreError
from gyre.store.etcd import messages
from gyre.store.etcd.api import Message, method
from gyre.store.etcd.client import EOF, EtcdClient, Unanswered
from gyre.store.etcd.status import Failure, failure
from gyre.store.protocol import Compacted, StoreClosed

SILENT_S = 4.0
"""A member that is frozen says nothing, like one that has nothing to say: after so long its endpoint is checked. So long
that the renewals of a node's lease are answered in between: they tell as much, and a stream ends as soon as anything of
its client finds its endpoint silent."""
UNTAKEN = 1000
"""Answers that a watch may have waiting."""


class Watched:
    """What etcd answers for one watch, in order. The first answer says that it is made, and has no events."""

    def __init__(self) -> None:
        self._answers: deque[Message] = deque()
        self._came = asyncio.Event()
        self._end: GyreError | None = None

    async def next(self) -> Message:
        """Raises why the watch has ended, after its last answer: Unanswered where it may begin again."""
        while not self._answers:
            if self._end is not None:
                raise self._end
            self._came.clear()
            await self._came.wait()
        return self._answers.popleft()

    @property
    def ended(self) -> bool:
        return self._end is not None

    @property
    def untaken(self) -> int:
        return len(self._answers)

    def put(self, answer: Message) -> None:
        self._answers.append(answer)
        self._came.set()

    def end(self, error: GyreError) -> None:
        self._end = self._end or error
        self._came.set()


class Streams:
    """The stream of now: opened for the first watch, closed after the last, and another after one that has failed."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self._now: _Stream | None = None
        self._open: set[_Stream] = set()
        self._closed = False
        client.left = self._left

    @contextmanager
    def watch(self, prefix: str, revision: int) -> Generator[Watched]:
        if self._closed:
            raise StoreClosed("the state store is closed")
        stream = self._now
        if stream is None or stream.over or stream.endpoint not in ("", self._client.endpoint):
            stream = self._now = _Stream(self._client)
            stream.task.add_done_callback(lambda _, done=stream: self._open.discard(done))
            self._open.add(stream)
        watched = stream.begin(prefix, revision)
        try:
            yield watched
        finally:
            stream.leave(watched)

    def _left(self, endpoint: str) -> None:
        for stream in tuple(self._open):
            if stream.endpoint == endpoint:
                stream.end(Unanswered(f"etcd at {endpoint} was left for another"))

    async def close(self) -> None:
        """End every watch with StoreClosed."""
        self._closed = True
        streams = tuple(self._open)
        for stream in streams:
            stream.end(StoreClosed("the state store is closed"))
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)


class _Stream:
    """`endpoint` is empty until it is open; `over` says that it takes no more watches."""

    def __init__(self, client: EtcdClient) -> None:
        self.endpoint = ""
        self.over = False
        self._client = client
        self._token = ""
        self._requests: asyncio.Queue[Message] = asyncio.Queue()
        self._asked: deque[Watched] = deque()
        """Begun, and not answered yet."""
        self._made: dict[int, Watched] = {}
        self.task = asyncio.get_running_loop().create_task(self._run(), name="watch etcd")

    def begin(self, prefix: str, revision: int) -> Watched:
        watched = Watched()
        self._asked.append(watched)
        self._requests.put_nowait(messages.watch_request(prefix, revision))
        return watched

    def leave(self, watched: Watched) -> None:
        watched.end(Unanswered("the watch was left"))  # one that is not made yet is cancelled when it is
        number = next((number for number, made in self._made.items() if made is watched), None)
        if number is not None:
            self._cancel(number)
        if not self._made and all(asked.ended for asked in self._asked):
            self.end(Unanswered("nobody watches any more"))

    def end(self, error: GyreError) -> None:
        """All of its watches hear `error`, unless they have heard another."""
        self.over = True
        for watched in (*self._asked, *self._made.values()):
            watched.end(error)
        self.task.cancel()

    def _cancel(self, number: int) -> None:
        del self._made[number]
        self._requests.put_nowait(messages.end_watch_request(number))

    async def _run(self) -> None:
        """Until it fails, or is ended."""
        try:
            await self._talk()
        except GyreError as error:
            self.end(error)
        finally:
            self.end(Unanswered("the stream of watches has ended"))

    async def _talk(self) -> None:
        client = self._client
        self.endpoint, self._token, call = await client.stream(method("Watch", "Watch"))
        reading: asyncio.Future[Any] = asyncio.ensure_future(call.read())
        writing = asyncio.ensure_future(self._write(call))
        try:
            while True:
                while not reading.done():
                    await asyncio.wait({reading, writing}, timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED)
                    if writing.done():
                        writing.result()
                    if not reading.done():
                        await client.check(self.endpoint, SILENT_S)
                answer = reading.result()
                if answer is EOF:
                    raise client.leave(self.endpoint, "the stream of watches ended")
                client.heard(self.endpoint)
                self._take(answer)
                reading = asyncio.ensure_future(call.read())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await client.stream_ended(call, self.endpoint, self._token) from None
        except asyncio.CancelledError:
            client.raise_if_closed()
            raise
        finally:
            call.cancel()
            reading.cancel()
            writing.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        """By one task, for grpc takes one at a time, and one that is cancelled ends the call."""
        while True:
            await call.write(await self._requests.get())

    def _take(self, answer: Message) -> None:
        number = answer.watch_id
        if answer.created:
            watched = self._asked.popleft()
            if not answer.canceled:
                self._made[number] = watched
            if watched.ended:  # its reader has left meanwhile
                if not answer.canceled:
                    self._cancel(number)
                return
        elif (watched := self._made.get(number)) is None:
            return
        if answer.compact_revision:
            self._made.pop(number, None)
            watched.end(Compacted(answer.compact_revision))
        elif answer.canceled:
            self._made.pop(number, None)
            kind = failure("", answer.cancel_reason)
            resumes = kind in (Failure.OTHER, Failure.UNANSWERED)
            error = self._client.error(
                Failure.UNANSWERED if resumes else kind, answer.cancel_reason, self.endpoint, self._token
            )
            watched.end(error)
            if isinstance(error, Unanswered):  # as it will be with the others of this stream
                raise error
        else:
            watched.put(answer)
            if watched.untaken >= UNTAKEN:
                self._cancel(number)
                watched.end(Unanswered("the watch does not keep up"))
