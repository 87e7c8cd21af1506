"""What gyre.actors.remote promises, over real sockets; where survival is promised, against real killed processes."""

from __future__ import annotations

import asyncio
import hmac
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.actors import frames, handshake
from gyre.actors.inspection import ActorList, ListActors
from gyre.actors.remote import RemoteRef, Server, connect, serve
from gyre.actors.runtime import ActorFailed, ActorStopped, ActorSystem, LocalRef, MailboxFull
from gyre.errors import BadInput, GyreError, Refused, Unavailable
from gyre.wire import pack_any

from .peer_actor import (
    ERRORS,
    AnswerOddly,
    Echo,
    Fail,
    Gate,
    Keep,
    Kept,
    Peer,
    Undeclared,
    Wait,
)

SECRET = "between us"
LIMIT_S = 30.0


@pytest.fixture
async def gate() -> Gate:
    return Gate()


@pytest.fixture
async def peer(gate: Gate) -> AsyncIterator[LocalRef]:
    async with ActorSystem.running("test") as system:
        yield system.spawn("peer", lambda: Peer(gate), mailbox_messages=100)


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/peer.sock" if request.param == "unix" else "tcp:127.0.0.1:0"


@pytest.fixture
async def server(peer: LocalRef, address: str) -> AsyncIterator[Server]:
    async with serve(peer, address, SECRET) as server:
        yield server


@pytest.fixture
async def remote(server: Server) -> AsyncIterator[RemoteRef]:
    async with connect(server.address, SECRET) as remote:
        yield remote


# ------------------------------------------------------------------------------------------------ tell and ask


async def test_an_ask_is_answered_across_the_connection(remote: RemoteRef) -> None:
    assert await remote.ask(Echo(b"hello"), LIMIT_S, Echo) == Echo(b"hello")


async def test_messages_of_one_reference_arrive_in_order_tells_and_asks_alike(remote: RemoteRef) -> None:
    asks: list[asyncio.Task[Kept]] = []
    for number in range(60):
        if number % 3:
            remote.tell(Keep(number))
        else:
            asks.append(asyncio.create_task(remote.ask(Keep(number), LIMIT_S, Kept)))
            await asyncio.sleep(0)
    kept = await remote.ask(Keep(60), LIMIT_S, Kept)
    assert kept.numbers == tuple(range(61))
    assert [(await ask).numbers[-1] for ask in asks] == list(range(0, 60, 3))


async def test_a_slow_answer_does_not_hold_up_the_others_and_each_asker_gets_its_own(
    remote: RemoteRef, gate: Gate
) -> None:
    slow = [asyncio.create_task(remote.ask(Wait(number), LIMIT_S, Wait)) for number in range(5)]
    assert [await remote.ask(Echo(b"%d" % number), LIMIT_S, Echo) for number in range(5)] == [
        Echo(b"%d" % number) for number in range(5)
    ]
    assert not any(ask.done() for ask in slow)
    gate.open()
    assert [await ask for ask in slow] == [Wait(number) for number in range(5)]


async def test_large_messages_pass_both_ways(remote: RemoteRef) -> None:
    data = os.urandom(1 << 20) * 24
    assert (await remote.ask(Echo(data), LIMIT_S, Echo)).data == data


async def test_a_message_over_the_limit_is_refused_before_it_is_sent(
    remote: RemoteRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert frames.MAX_FRAME_BYTES == 256 * 1024 * 1024
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100_000)
    too_large = Echo(bytes(100_000))
    with pytest.raises(BadInput, match="message size in bytes"):
        await remote.ask(too_large, LIMIT_S, Echo)
    with pytest.raises(BadInput, match="message size in bytes"):
        remote.tell(too_large)
    assert await remote.ask(Echo(b"the connection is well"), LIMIT_S, Echo)


async def test_what_is_no_record_cannot_be_sent(remote: RemoteRef) -> None:
    with pytest.raises(TypeError, match="not declared"):
        await remote.ask(Undeclared(), LIMIT_S, Echo)


async def test_a_remote_actor_is_not_mistaken_for_one_that_answers_otherwise(remote: RemoteRef) -> None:
    with pytest.raises(BadInput, match="a Kept is expected"):
        await remote.ask(Echo(b""), LIMIT_S, Kept)


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("kind", sorted(ERRORS))
async def test_an_error_arrives_as_the_kind_it_was_with_its_words(remote: RemoteRef, kind: str) -> None:
    with pytest.raises(GyreError) as met:
        await remote.ask(Fail(kind), LIMIT_S, Echo)
    assert (type(met.value), str(met.value)) == (type(ERRORS[kind]()), str(ERRORS[kind]()))


async def test_bad_input_keeps_its_field_and_what_is_allowed(remote: RemoteRef) -> None:
    with pytest.raises(BadInput) as met:
        await remote.ask(Fail("BadInput"), LIMIT_S, Echo)
    assert (met.value.field, met.value.allowed) == ("port", "1 to 65535 are allowed")


async def test_an_error_of_a_kind_only_the_peer_knows_arrives_as_the_nearest_known(remote: RemoteRef) -> None:
    with pytest.raises(Unavailable, match="the engine is down"):
        await remote.ask(Fail("EngineDown"), LIMIT_S, Echo)


async def test_a_failure_of_the_actor_is_told_and_the_connection_stays(remote: RemoteRef) -> None:
    await remote.ready(LIMIT_S)
    before = remote.incarnation
    with pytest.raises(ActorFailed, match="unforeseen"):
        await remote.ask(Fail("ValueError"), LIMIT_S, Echo)
    with pytest.raises(ActorFailed, match="cannot be sent"):
        await remote.ask(AnswerOddly(), LIMIT_S, Echo)
    assert await remote.ask(Echo(b""), LIMIT_S, Echo)
    assert remote.incarnation == before


async def test_an_actor_that_has_ended_is_told_from_one_that_is_slow(remote: RemoteRef, peer: LocalRef) -> None:
    await remote.ready(LIMIT_S)
    await peer.stop()
    with pytest.raises(ActorStopped):
        await remote.ask(Echo(b""), LIMIT_S, Echo)


async def test_the_deadline_travels_and_is_kept_on_both_sides(remote: RemoteRef, peer: LocalRef) -> None:
    with pytest.raises(Unavailable, match=r"did not answer Echo within 0\.1 s"):
        await remote.ask(Echo(b"", 20.0), 0.1, Echo)
    assert await remote.ask(Echo(b"the connection is well"), LIMIT_S, Echo)


async def test_an_answer_that_comes_too_late_is_not_taken_for_another(remote: RemoteRef) -> None:
    with pytest.raises(Unavailable):
        await remote.ask(Echo(b"late", 0.1), 0.05, Echo)
    assert await remote.ask(Echo(b"next", 0.2), LIMIT_S, Echo) == Echo(b"next", 0.2)


# ------------------------------------------------------------------------------------------------ who may come


async def test_another_secret_is_refused_and_nothing_of_it_is_delivered(server: Server, remote: RemoteRef) -> None:
    async with connect(server.address, "a guess") as stranger:
        with pytest.raises(Refused, match="the shared secrets differ"):
            await stranger.ask(Keep(1), LIMIT_S, Kept)
        with pytest.raises(Refused, match="the shared secrets differ"):
            await stranger.ready(LIMIT_S)
    assert await remote.ask(Keep(2), LIMIT_S, Kept) == Kept((2,))


async def test_a_server_that_does_not_know_the_secret_gets_no_message(tmp_path: Path) -> None:
    got: list[bytes] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in ([handshake.PROTOCOL, "", "me", b"n" * 16], [b"p" * 32]):
            data = msgpack.packb(reply)
            writer.write(len(data).to_bytes(4, "big") + data)
            got.append(await reader.read(4096))
        got.append(await reader.read(4096))
        writer.close()

    path = tmp_path / "impostor.sock"
    async with await asyncio.start_unix_server(impostor, path), connect(f"unix:{path}", SECRET) as remote:
        with pytest.raises(Refused, match="does not know the shared secret"):
            await remote.ask(Echo(b"confidential"), LIMIT_S, Echo)
    assert SECRET.encode() not in b"".join(got)
    assert b"confidential" not in b"".join(got)


async def test_a_peer_of_another_protocol_is_refused_and_both_sides_say_it_in_one_line(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newer, ours = handshake.PROTOCOL + 1, handshake.PROTOCOL
    reader, writer = await _open(server.address)
    await _read(reader)
    _write(writer, [newer, "a shape", "of its own"])
    assert await _read(reader) == ["refused", f"the peer speaks protocol {ours}, we speak {newer}"]
    assert await reader.read() == b""
    writer.close()
    assert f"closed: the peer was refused: the peer speaks protocol {newer}, we speak {ours}" in caplog.text

    told: asyncio.Queue[object] = asyncio.Queue()

    async def future(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _write(writer, [newer, "another shape"])
        told.put_nowait(await _read(reader))
        writer.close()

    path = tmp_path / "newer.sock"
    async with await asyncio.start_unix_server(future, path), connect(f"unix:{path}", SECRET) as remote:
        with pytest.raises(Refused, match=f"the peer speaks protocol {newer}, we speak {ours}"):
            await remote.ready(LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            assert await told.get() == ["refused", f"the peer speaks protocol {ours}, we speak {newer}"]


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (2**31).to_bytes(4, "big") + b"x",
        (3).to_bytes(4, "big") + b"\xc1\xc1\xc1",
        (1).to_bytes(4, "big") + msgpack.packb(7),
        b"",
    ],
)
async def test_junk_instead_of_a_greeting_ends_only_its_own_connection(
    server: Server, remote: RemoteRef, junk: bytes
) -> None:
    reader, writer = await _open(server.address)
    writer.write(junk)
    writer.write_eof()
    async with asyncio.timeout(LIMIT_S):
        await reader.read()
    writer.close()
    assert await remote.ask(Echo(b"well"), LIMIT_S, Echo) == Echo(b"well")


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (
            (frames.MAX_FRAME_BYTES + 1).to_bytes(4, "big") + b"x" * 1_000_000,
            f"a frame of {frames.MAX_FRAME_BYTES + 1} bytes is over the limit of {frames.MAX_FRAME_BYTES}",
        ),
        ((1).to_bytes(4, "big") + msgpack.packb(7), "a frame has a wrong shape"),
        ((5).to_bytes(4, "big") + msgpack.packb(["a", 1, 2]), "a frame has a wrong shape"),
        ((3).to_bytes(4, "big") + b"\xc1\xc1\xc1", "a frame is not msgpack"),
    ],
)
async def test_a_friend_who_sends_a_frame_too_large_or_misshapen_is_told_why_and_cut_off(
    server: Server, junk: bytes, reason: str
) -> None:
    reader, writer = await _friend(server)
    writer.write(junk)
    async with asyncio.timeout(LIMIT_S):
        bye = await _read(reader)
        assert (bye[0], bye[4]) == (frames.BYE, reason.encode())
        assert await reader.read() == b""
    writer.close()


async def test_a_body_that_is_no_message_is_answered_as_bad_input(server: Server) -> None:
    reader, writer = await _friend(server)
    _write(writer, [frames.ASK, 1, 5.0, "", msgpack.packb(["no such record", {}])])
    kind, number, _, _, body = await _read(reader)
    assert (kind, number) == (frames.ERROR, 1)
    assert isinstance(body, bytes)
    assert "no such record" in str(frames.unpack_error(body))
    writer.close()


async def test_a_unix_socket_is_its_owners_only_and_goes_with_its_server(peer: LocalRef, tmp_path: Path) -> None:
    path = tmp_path / "peer.sock"
    async with serve(peer, f"unix:{path}", SECRET):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


async def test_an_address_in_use_is_refused_and_its_owner_goes_on(server: Server, peer: LocalRef) -> None:
    with pytest.raises(Refused, match=r"in use|already served"):
        await serve(peer, server.address, SECRET).start()
    async with connect(server.address, SECRET) as remote:
        assert await remote.ready(LIMIT_S) == server.incarnation


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("tcp:192.0.2.1:80", "loopback"),
        ("tcp:example.org:80", "loopback"),
        ("tcp:0.0.0.0:80", "loopback"),
        ("tcp:127.0.0.1:99999", "are allowed"),
        ("tcp:127.0.0.1", "are allowed"),
        ("unix:relative", "are allowed"),
        ("unix:/" + "x" * 200, "at most 107 bytes"),
        ("http://127.0.0.1", "are allowed"),
        ("", "are allowed"),
        ("tls:192.0.2.1:80", "between processes of a machine"),
    ],
)
async def test_an_address_that_cannot_be_is_refused_in_one_line(peer: LocalRef, bad: str, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        connect(bad, SECRET)
    with pytest.raises(BadInput, match=named):
        serve(peer, bad, SECRET)


async def test_an_empty_secret_is_refused(peer: LocalRef) -> None:
    with pytest.raises(BadInput, match="must not be empty"):
        connect("tcp:127.0.0.1:1", "")
    with pytest.raises(BadInput, match="must not be empty"):
        serve(peer, "tcp:127.0.0.1:0", "")


# ------------------------------------------------------------------------------------------------ coming and going


async def test_where_nobody_listens_an_ask_fails_at_once_and_a_tell_is_dropped(tmp_path: Path) -> None:
    async with connect(f"unix:{tmp_path}/nobody.sock", SECRET) as remote:
        remote.tell(Keep(1))
        with pytest.raises(Unavailable, match="cannot be reached"):
            await remote.ask(Keep(2), LIMIT_S, Kept)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await remote.ready(0.2)
        assert remote.incarnation == ""


async def test_ready_waits_for_a_peer_that_is_still_starting(peer: LocalRef, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/peer.sock"
    async with connect(address, SECRET) as remote:
        ready = asyncio.create_task(remote.ready(LIMIT_S))
        await asyncio.sleep(0.2)
        async with serve(peer, address, SECRET) as server:
            assert await ready == server.incarnation == remote.incarnation


async def test_the_next_use_connects_anew_and_the_new_life_is_told_from_the_old(peer: LocalRef, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/peer.sock"
    async with connect(address, SECRET) as remote:
        async with serve(peer, address, SECRET) as first:
            assert await remote.ready(LIMIT_S) == first.incarnation
            waiting = asyncio.create_task(remote.ask(Echo(b"", 20.0), LIMIT_S, Echo))
            await remote.ask(Keep(1), LIMIT_S, Kept)
        with pytest.raises(Unavailable, match="broke before the answer"):
            await waiting
        async with serve(peer, address, SECRET) as second, connect(address, SECRET, first.incarnation) as faithful:
            assert await remote.ask(Keep(2), LIMIT_S, Kept) == Kept((1, 2))
            assert remote.incarnation == second.incarnation != first.incarnation
            with pytest.raises(Refused, match=f"{first.incarnation} is wanted"):
                await faithful.ask(Keep(3), LIMIT_S, Kept)
        assert await peer.ask(Keep(4), 1.0, Kept) == Kept((1, 2, 4))


async def test_what_waits_to_be_sent_is_bounded(server: Server) -> None:
    async with connect(server.address, SECRET) as remote:
        for number in range(1000):
            remote.tell(Keep(number))
        with pytest.raises(MailboxFull, match="waiting to be sent"):
            remote.tell(Keep(1000))


async def test_a_full_mailbox_of_the_peer_is_told_to_an_ask(remote: RemoteRef, peer: LocalRef, gate: Gate) -> None:
    await gate.block(peer)
    for number in range(100):
        peer.tell(Keep(number))
    with pytest.raises(MailboxFull, match="test/peer has 100 messages waiting"):
        await remote.ask(Keep(100), LIMIT_S, Kept)
    gate.open()
    assert await remote.ask(Echo(b""), LIMIT_S, Echo)


async def test_one_who_asks_and_takes_no_answers_costs_bounded_memory_and_hurts_nobody_else(
    server: Server, remote: RemoteRef, peer: LocalRef
) -> None:
    reader, writer = await _friend(server)
    body = pack_any(Echo(bytes(64 * 1024)))
    for number in range(1500):  # 96 MB of answers that nobody reads
        _write(writer, [frames.ASK, number, 1000.0, "", body])
        if number % 20 == 0:
            assert await remote.ask(Echo(b"well"), LIMIT_S, Echo) == Echo(b"well")
    handled = (await peer.ask(ListActors(), LIMIT_S, ActorList)).actors[0].totals.handled
    assert handled < 500  # 4 MB of ours, and what the kernel's buffers take
    answers = 0
    async with asyncio.timeout(LIMIT_S):
        while answers < 1500:
            kind, _, _, _, told = await _read(reader)
            assert kind == frames.ANSWER or b"waiting" in told or b"wait until" in told  # type: ignore[operator]
            answers += 1
    writer.close()


async def test_one_who_takes_nothing_at_all_is_cut_off(
    server: Server, remote: RemoteRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.actors.pipe.STALL_S", 0.2)
    reader, writer = await _friend(server)
    body = pack_any(Echo(bytes(1 << 20)))
    for number in range(40):
        _write(writer, [frames.ASK, number, 1000.0, "", body])
    await asyncio.sleep(1.0)

    async def read_all() -> None:
        while True:
            await _read(reader)

    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(read_all(), LIMIT_S)
    writer.close()
    assert await remote.ask(Echo(b"well"), LIMIT_S, Echo) == Echo(b"well")


async def test_more_asks_at_a_time_than_are_allowed_end_the_connection(tmp_path: Path) -> None:
    async with ActorSystem.running("test") as system:
        peer = system.spawn("peer", lambda: Peer(Gate()), mailbox_messages=5000)
        async with serve(peer, f"unix:{tmp_path}/peer.sock", SECRET) as server:
            reader, writer = await _friend(server)
            body = pack_any(Wait(1))
            for number in range(2001):
                _write(writer, [frames.ASK, number, 1000.0, "", body])
            async with asyncio.timeout(LIMIT_S):
                frame = await _read(reader)
            assert frame[0] == frames.BYE
            assert b"more than 1000 asks at a time" in frame[4]  # type: ignore[operator]
            writer.close()
            async with connect(server.address, SECRET) as remote:
                assert await remote.ask(Echo(b"well"), LIMIT_S, Echo) == Echo(b"well")


async def test_an_asker_sends_no_more_than_the_peer_may_have_in_hand_and_the_rest_waits_its_turn(
    tmp_path: Path,
) -> None:
    gate = Gate()
    async with ActorSystem.running("test") as system:
        peer = system.spawn("peer", lambda: Peer(gate), mailbox_messages=5000)

        async def beside() -> int:
            return (await peer.ask(ListActors(), LIMIT_S, ActorList)).actors[0].beside

        async with (
            serve(peer, f"unix:{tmp_path}/peer.sock", SECRET) as server,
            connect(server.address, SECRET) as remote,
        ):
            await remote.ready(LIMIT_S)
            asks = [asyncio.create_task(remote.ask(Wait(number), LIMIT_S, Wait)) for number in range(1900)]
            async with asyncio.timeout(LIMIT_S):
                while (await beside()) < 1000:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert await beside() == 1000
            gate.open()
            assert [await ask for ask in asks] == [Wait(number) for number in range(1900)]


@given(cut=st.integers(0, 900), asks=st.integers(1, 4))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_a_connection_cut_at_any_byte_repeats_nothing_and_loses_only_what_was_under_way(
    peer: LocalRef, tmp_path_factory: pytest.TempPathFactory, cut: int, asks: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    async with serve(peer, f"unix:{folder}/peer.sock", SECRET) as server, Cut(server.address, folder, cut) as relay:
        before = (await peer.ask(Keep(-1), LIMIT_S, Kept)).numbers
        async with connect(relay.address, SECRET) as remote:
            tried = await asyncio.gather(
                *(remote.ask(Keep(number), LIMIT_S, Kept) for number in range(asks)), return_exceptions=True
            )
            assert all(isinstance(each, Kept | Unavailable) for each in tried)
            relay.cut_after_bytes = None
            with suppress(Unavailable):  # it may be this one that meets the cut
                await remote.ask(Keep(100), LIMIT_S, Kept)
            assert (await remote.ask(Keep(101), LIMIT_S, Kept)).numbers[-1] == 101
        kept = (await peer.ask(Keep(102), LIMIT_S, Kept)).numbers[len(before) :]
        answered = [number for number, each in enumerate(tried) if isinstance(each, Kept)]
        assert list(kept) == sorted(set(kept))
        assert set(answered) <= set(kept)


class Cut:
    """A relay that ends connections once so many bytes have passed, both ways together; None: no more."""

    def __init__(self, address: str, folder: Path, cut_after_bytes: int) -> None:
        self.address = f"unix:{folder}/cut.sock"
        self.cut_after_bytes: int | None = cut_after_bytes
        self._behind = address.removeprefix("unix:")

    async def __aenter__(self) -> Cut:
        self._server = await asyncio.start_unix_server(self._accepted, self.address.removeprefix("unix:"))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(4096):
                left = self.cut_after_bytes
                sink.write(data if left is None else data[:left])
                if left is not None:
                    self.cut_after_bytes = max(0, left - len(data))
                    if len(data) >= left:
                        return

        far_reader, far_writer = await asyncio.open_unix_connection(self._behind)
        relays = [asyncio.ensure_future(each) for each in (relay(reader, far_writer), relay(far_reader, writer))]
        await asyncio.wait(relays, return_when=asyncio.FIRST_COMPLETED)
        for each in relays:
            each.cancel()
        for end in (writer, far_writer):
            end.close()


async def test_after_close_everything_that_waits_is_told(server: Server) -> None:
    async with connect(server.address, SECRET) as remote:
        waiting = asyncio.create_task(remote.ask(Echo(b"", 20.0), LIMIT_S, Echo))
        await remote.ask(Echo(b""), LIMIT_S, Echo)
    with pytest.raises(Unavailable, match="closed"):
        await waiting
    with pytest.raises(Unavailable, match="was closed"):
        remote.tell(Keep(1))


async def test_an_asker_that_is_gone_before_its_turn_has_nothing_done_for_it(
    server: Server, remote: RemoteRef, peer: LocalRef, gate: Gate
) -> None:
    async with connect(server.address, SECRET) as leaving:
        await leaving.ready(LIMIT_S)
        await gate.block(peer)
        asked = asyncio.create_task(leaving.ask(Keep(1), LIMIT_S, Kept))
        await asyncio.sleep(0.1)
    with pytest.raises(Unavailable):
        await asked
    with pytest.raises(Unavailable):  # by now the server has seen the other connection end
        await remote.ask(Echo(b""), 0.5, Echo)
    gate.open()
    assert await remote.ask(Keep(2), LIMIT_S, Kept) == Kept((2,))


# ------------------------------------------------------------------------------------------------ other processes

_PEER_PROGRAM = textwrap.dedent(
    """
    import asyncio, sys
    from dataclasses import dataclass
    from gyre.actors.remote import serve
    from gyre.actors.runtime import Actor, ActorSystem, handles
    from gyre.wire import record

    @record("test_remote.keep")
    @dataclass(frozen=True)
    class Keep:
        number: int

    @record("test_remote.kept")
    @dataclass(frozen=True)
    class Kept:
        numbers: tuple[int, ...]

    class Peer(Actor):
        def __init__(self):
            self.kept = []

        @handles(Keep)
        async def keep(self, message):
            if message.number < 0:
                await asyncio.sleep(60)
            self.kept.append(message.number)
            return Kept(tuple(self.kept))

    async def main():
        async with ActorSystem.running("other") as system:
            async with serve(system.spawn("peer", Peer), sys.argv[1], "between us"):
                await asyncio.sleep(60)

    asyncio.run(main())
    """
)


@asynccontextmanager
async def other_process(address: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    with subprocess.Popen((sys.executable, "-c", _PEER_PROGRAM, address)) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_a_peer_killed_in_the_middle_of_an_ask_is_noticed_at_once_and_its_successor_found(
    tmp_path: Path,
) -> None:
    address = f"unix:{tmp_path}/peer.sock"
    async with connect(address, SECRET) as remote:
        async with other_process(address) as process:
            first = await remote.ready(LIMIT_S)
            assert await remote.ask(Keep(1), LIMIT_S, Kept) == Kept((1,))
            waiting = asyncio.create_task(remote.ask(Keep(-1), 1000.0, Kept))
            await asyncio.sleep(0.1)
            process.send_signal(signal.SIGKILL)
            with pytest.raises(Unavailable, match="broke before the answer"):
                await waiting
        assert Path(f"{tmp_path}/peer.sock").exists()  # what a killed process leaves; the next one replaces it
        async with other_process(address):
            second = await remote.ready(LIMIT_S)
            assert await remote.ask(Keep(2), LIMIT_S, Kept) == Kept((2,))
        assert first != second


async def test_a_peer_that_is_stopped_costs_an_asker_its_deadline_and_no_more(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/peer.sock"
    async with other_process(address) as process, connect(address, SECRET) as remote:
        await remote.ready(LIMIT_S)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(Unavailable, match="did not answer Keep within"):
            await remote.ask(Keep(1), 0.2, Kept)
        process.send_signal(signal.SIGCONT)
        assert (await remote.ask(Keep(2), LIMIT_S, Kept)).numbers[-1] == 2


# ------------------------------------------------------------------------------------------------ by hand


async def _open(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, port = address.removeprefix("tcp:").split(":")
    return await asyncio.open_connection(host, int(port), family=socket.AF_INET)


async def _friend(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has been let in, to speak on it by hand."""
    reader, writer = await _open(server.address)
    _, _, incarnation, nonce = await _read(reader)
    assert incarnation == server.incarnation
    assert isinstance(nonce, bytes)
    ours = b"o" * 16
    proof = hmac.digest(SECRET.encode(), b"client" + nonce + ours, "sha256")
    _write(writer, [handshake.PROTOCOL, "", "a friend", ours, proof])
    assert await _read(reader) == [hmac.digest(SECRET.encode(), b"server" + nonce + ours, "sha256")]
    return reader, writer


def _write(writer: asyncio.StreamWriter, plain: object) -> None:
    data = msgpack.packb(plain)
    assert data is not None
    writer.write(len(data).to_bytes(4, "big") + data)


async def _read(reader: asyncio.StreamReader) -> list[object]:
    length = int.from_bytes(await reader.readexactly(4), "big")
    return list(msgpack.unpackb(await reader.readexactly(length)))
