"""Calls to an etcd cluster: several endpoints, one asked at a time; deadlines; TLS; a user's token.

Every call has a deadline of its own (CALL_S). An endpoint that does not answer in time, or cannot be reached, is left
for the next one by everything of this client, its watches too: a member that is frozen keeps its connections open, and
only its silence tells. What is asked again stops after PATIENCE_S with Unavailable.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

# gyred forks to start its children. grpc's own handlers of a fork, on by default, can abort the child before it is one.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

import grpc
import grpc.aio

from gyre.errors import BadInput, GyreError, Unavailable
from gyre.store.etcd.address import EtcdAddress
from gyre.store.etcd.api import Message, Method, message_class, method
from gyre.store.etcd.status import Failure, error_of, failure
from gyre.store.protocol import StoreClosed, StoreRefuses

T = TypeVar("T")

CALL_S = 1.0
"""How long one endpoint has for one call."""
PATIENCE_S = 6.0
"""How long a call is tried on all endpoints together: an election of etcd's own, and a little more."""
_PAUSES_S = (0.0, 0.05, 0.2, 0.5)
"""Before the second, the third … try; the last is repeated."""
REFUSED_S = 0.5
"""A password that etcd has refused is not shown to it again for so long: it hashes each slowly, and everybody here waits."""
_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
"""What a stream gives when it is over; grpc's module makes the name at run time."""


class Answered(GyreError):
    """etcd's definite answer was no, for a reason that the caller of the client has to judge."""

    def __init__(self, kind: Failure, text: str) -> None:
        super().__init__(f"etcd: {text}")
        self.kind = kind


class Unanswered(Unavailable):
    """No definite answer: what was asked may have been carried out, may be yet, or never."""


class EtcdClient:
    """See the module. Use it from one event loop; the channels open when they are first needed."""

    def __init__(self, address: EtcdAddress) -> None:
        self.address = address
        self._files = self._read_files()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._retired: list[grpc.aio.Channel] = []
        self._current = random.randrange(len(address.endpoints))
        self._token: str | None = None
        self._password = address.password
        self._refusal: tuple[float, str, str] | None = None
        """When etcd refused our user last, with which password, and in which words."""
        self._token_lock = asyncio.Lock()
        self._heard_s: dict[str, float] = {}
        self._checks: dict[str, asyncio.Lock] = {}
        self.left: Callable[[str], None] = lambda _: None
        """Told of an endpoint that is left for another."""
        self.closed = asyncio.Event()

    @property
    def token(self) -> str | None:
        """The user's token of now; None before the first and when it has ended."""
        return self._token

    @property
    def endpoint(self) -> str:
        """The endpoint that is asked now."""
        return self.address.endpoints[self._current]

    async def close(self) -> None:
        self.closed.set()
        channels = [*self._retired, *self._channels.values()]
        self._retired, self._channels = [], {}
        for channel in channels:
            await channel.close()

    # ------------------------------------------------------------------------------------------------------- calls

    async def ask(self, of: Method, request: Message) -> Message:
        """A call that may be carried out more than once, tried until it is answered."""
        return await self.patiently(lambda: self.ask_once(of, request))

    async def patiently(self, attempt: Callable[[], Awaitable[T]], patience_s: float = PATIENCE_S) -> T:
        """`attempt`, and again while it raises Unanswered, for no longer than `patience_s`; then Unavailable."""
        loop = asyncio.get_running_loop()
        patience_s = min(patience_s, PATIENCE_S)
        give_up_s = loop.time() + patience_s
        tries = 0
        while True:
            try:
                return await attempt()
            except Unanswered as error:
                pause_s = _PAUSES_S[min(tries, len(_PAUSES_S) - 1)]
                tries += 1
                if loop.time() + pause_s >= give_up_s:
                    raise Unavailable(f"{error} (tried {tries} times)") from error
            await asyncio.sleep(pause_s)

    async def ask_once(self, of: Method, request: Message, timeout_s: float = CALL_S) -> Message:
        """One try on the endpoint of now. Raises Unanswered, Answered, or what a person must mend."""
        token = await self._user_token()
        endpoint = self.endpoint
        try:
            response = await self._call(endpoint, of, request, timeout_s, token)
        except grpc.aio.AioRpcError as error:
            raise self._error(error.code().name, error.details(), endpoint, token) from None
        self.heard(endpoint)
        return response

    async def _call(self, endpoint: str, of: Method, request: Message, timeout_s: float, token: str) -> Message:
        channel = self._channel(endpoint)
        metadata = (("token", token),) if token else ()
        try:
            if not of.streams:
                call = channel.unary_unary(of.path, of.encode, of.decode)
                return await call(request, timeout=timeout_s, metadata=metadata)
            stream = channel.stream_stream(of.path, of.encode, of.decode)(timeout=timeout_s, metadata=metadata)
            try:
                await stream.write(request)
                answer = await stream.read()
            except asyncio.InvalidStateError:  # it had failed before it could be written to
                raise self.leave(endpoint, await stream.details()) from None
            finally:
                stream.cancel()
            if answer is EOF:
                raise self.leave(endpoint, "the stream ended without an answer")
            return answer
        except asyncio.CancelledError:
            self.raise_if_closed()
            raise

    def raise_if_closed(self) -> None:
        """Raise StoreClosed in a task that nobody cancels: grpc raises CancelledError out of a channel that is closed."""
        task = asyncio.current_task()
        if self.closed.is_set() and not (task and task.cancelling()):
            raise StoreClosed("the state store is closed") from None

    def _error(self, code: str, details: str | None, endpoint: str, token: str) -> GyreError:
        text = details or code
        return self.error(failure(code, text), text, endpoint, token)

    def error(self, kind: Failure, text: str, endpoint: str, token: str) -> GyreError:
        """The error to raise for a failure; the endpoint and the token are given up where it says so."""
        match kind:
            case Failure.UNANSWERED:
                return self.leave(endpoint, text)
            case Failure.TOKEN:
                self.forget_token(token)
                return Unanswered(f"etcd at {endpoint}: {text}")
            case Failure.DENIED | Failure.FULL | Failure.OTHER:
                return error_of(kind, text, self.address.user, self.address.cluster)
            case _:
                return Answered(kind, text)

    def leave(self, endpoint: str, text: str) -> GyreError:
        """Ask another endpoint from now on, unless that has happened already; the error to raise."""
        if self.closed.is_set():
            return StoreClosed("the state store is closed")
        self._heard_s.pop(endpoint, None)
        if endpoint == self.endpoint:
            self._current = (self._current + 1) % len(self.address.endpoints)
            self._renew_files()
            if endpoint != self.endpoint:
                self.left(endpoint)
        return Unanswered(f"etcd at {endpoint} does not answer: {text}")

    # ----------------------------------------------------------------------------------------------------- streams

    async def stream(self, of: Method) -> tuple[str, str, Any]:
        """A bidirectional call: the endpoint, the token, the call. etcd ends it when the member has no leader."""
        token = await self._user_token()
        metadata = (("hasleader", "true"), *((("token", token),) if token else ()))
        endpoint = self.endpoint
        call = self._channel(endpoint).stream_stream(of.path, of.encode, of.decode)(metadata=metadata)
        return endpoint, token, call

    async def stream_ended(self, call: Any, endpoint: str, token: str) -> GyreError:
        """The error to raise for a call of `stream` that has failed."""
        return self._error((await call.code()).name, await call.details(), endpoint, token)

    def heard(self, endpoint: str) -> None:
        """The endpoint has just answered something."""
        self._heard_s[endpoint] = asyncio.get_running_loop().time()

    async def check(self, endpoint: str, silent_s: float) -> None:
        """Raise Unanswered unless the endpoint has answered anything within the last `silent_s`, or does now."""
        async with self._checks.setdefault(endpoint, asyncio.Lock()):
            if asyncio.get_running_loop().time() - self._heard_s.get(endpoint, float("-inf")) < silent_s:
                return
            key = f"/gyre/{self.address.cluster}/".encode()
            request = message_class("RangeRequest")(key=key, serializable=True, keys_only=True, limit=1)
            try:
                await self._call(endpoint, method("KV", "Range"), request, CALL_S, self._token or "")
            except grpc.aio.AioRpcError as error:
                text = error.details() or ""
                if failure(error.code().name, text) is Failure.UNANSWERED:
                    raise self.leave(endpoint, text) from None
            self.heard(endpoint)

    # --------------------------------------------------------------------------------------------- users and files

    async def _user_token(self) -> str:
        if not self.address.user:
            return ""
        async with self._token_lock:
            if self._token is None:
                self._token = await self._new_token()
            return self._token

    async def _new_token(self) -> str:
        """With the password as it is now: it may have been changed since. Raises StoreRefuses."""
        with suppress(BadInput):  # its file is being replaced; the one we have is as good as before
            self._password = self.address.password_now()
        now_s = asyncio.get_running_loop().time()
        if self._refusal is not None:
            refused_s, password, words = self._refusal
            if password == self._password and now_s < refused_s + REFUSED_S:
                raise StoreRefuses(words)
        try:
            return await self.patiently(self._authenticate)
        except StoreRefuses as error:
            self._refusal = asyncio.get_running_loop().time(), self._password, str(error)
            raise

    async def _authenticate(self) -> str:
        request = message_class("AuthenticateRequest")(name=self.address.user, password=self._password)
        endpoint = self.endpoint
        try:
            # A password is hashed slowly on purpose, so this call has longer than others.
            answer = await self._call(endpoint, method("Auth", "Authenticate"), request, 3 * CALL_S, "")
        except grpc.aio.AioRpcError as error:
            raise self._error(error.code().name, error.details(), endpoint, "") from None
        return answer.token

    def forget_token(self, token: str) -> None:
        """This token has ended; the next call gets another."""
        if self._token == token:
            self._token = None

    def _read_files(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        address = self.address
        return address.read(address.ca), address.read(address.key), address.read(address.cert)

    def _renew_files(self) -> None:
        """Use certificates that were renewed since, for every connection that is opened from now on."""
        try:
            files = self._read_files()
        except BadInput:
            return  # they are being replaced; those we have are as good as before
        if files != self._files:
            self._files = files
            self._retired += self._channels.values()
            self._channels = {}

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if self.closed.is_set():
            raise StoreClosed("the state store is closed")
        if endpoint not in self._channels:
            ca, key, cert = self._files
            if ca is None:
                channel = grpc.aio.insecure_channel(endpoint, _OPTIONS)
            else:
                channel = grpc.aio.secure_channel(endpoint, grpc.ssl_channel_credentials(ca, key, cert), _OPTIONS)
            self._channels[endpoint] = channel
        return self._channels[endpoint]
