"""What gyre.actors.peers promises: real TLS over loopback, certificates of gyre.pki, real killed processes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre import pki
from gyre.actors import handshake
from gyre.actors.inspection import ActorList, ListActors
from gyre.actors.messages_gyrectl import PauseJob
from gyre.actors.peers import Peers, keeps_own
from gyre.actors.pipe import HANDSHAKE_S
from gyre.actors.runtime import Actor, ActorSystem, Died, LocalRef, handles
from gyre.credentials import Credentials
from gyre.errors import BadInput, Refused, Unavailable

from .peer_actor import Echo, Gate, Keep, Kept, Peer, Wait

LIMIT_S = 30.0
ANYWHERE = "tls:127.0.0.1:0"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    pki.init(folder, "lab", 30)
    for node in ("a", "b", "c"):
        pki.issue(folder, node, pki.Kind.NODE, 10)
    pki.issue(folder, "ada", pki.Kind.CLIENT, 10)
    return folder


def credentials(folder: Path, name: str, ca: Path | None = None) -> Credentials:
    return Credentials(ca or folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")


class Node:
    """One process's worth: a system with two actors, and its connections."""

    def __init__(self, peers: Peers, system: ActorSystem, refs: dict[str, LocalRef], gate: Gate) -> None:
        self.peers = peers
        self.system = system
        self.refs = refs
        self.gate = gate

    @property
    def address(self) -> str:
        return self.peers.address


@asynccontextmanager
async def node(folder: Path, name: str, *, address: str = ANYWHERE, ca: Path | None = None) -> AsyncIterator[Node]:
    gate = Gate()
    async with ActorSystem.running(name) as system:
        refs = {actor: system.spawn(actor, lambda: Peer(gate), mailbox_messages=100) for actor in ("core", "other")}

        def find(actor: str) -> LocalRef:
            if actor not in refs:
                raise Refused(f"{name} has no actor {actor!r}")
            return refs[actor]

        async with Peers(name, credentials(folder, name, ca), find, address) as peers:
            yield Node(peers, system, refs, gate)


# ------------------------------------------------------------------------------------------------ one connection a pair


async def test_all_actors_of_both_nodes_are_reached_over_one_connection(authority: Path) -> None:
    async with node(authority, "a") as a, node(authority, "b") as b, Counting(b.address) as proxy:
        core, other = (a.peers.ref("b", proxy.address, actor) for actor in ("core", "other"))
        assert await core.ask(Keep(1), LIMIT_S, Kept) == Kept((1,))
        assert await other.ask(Keep(2), LIMIT_S, Kept) == Kept((2,))
        back = b.peers.ref("a", a.address, "core")
        assert await back.ask(Keep(3), LIMIT_S, Kept) == Kept((3,))
        assert core.incarnation == b.peers.incarnation
        assert back.incarnation == a.peers.incarnation
        assert proxy.connections == 1
        assert [info.name for info in (await core.ask(ListActors(), LIMIT_S, ActorList)).actors] == [
            "b/core",
            "b/other",
        ]


async def test_who_connect_to_each_other_at_the_same_moment_keep_one_connection_and_lose_nothing(
    authority: Path,
) -> None:
    async with node(authority, "a") as a, node(authority, "b") as b:
        to_b = [a.peers.ref("b", b.address, "core").ask(Echo(b"%d" % n), LIMIT_S, Echo) for n in range(20)]
        to_a = [b.peers.ref("a", a.address, "core").ask(Echo(b"%d" % n), LIMIT_S, Echo) for n in range(20)]
        answers = await asyncio.gather(*to_b, *to_a)
        assert answers == [Echo(b"%d" % n) for n in range(20)] * 2
        links = [a.peers._pairs["b"].channel.open_link, b.peers._pairs["a"].channel.open_link]
        assert all(link is not None for link in links)


@given(st.text("abc", min_size=1), st.text("abc", min_size=1), st.floats(0, 100))
@settings(deadline=None)
def test_of_two_connections_made_at_the_same_moment_exactly_one_is_kept(one: str, other: str, for_s: float) -> None:
    kept = [
        keeps_own(one, other, dialing=True, dialed_for_s=None),
        keeps_own(other, one, dialing=True, dialed_for_s=None),
    ]
    assert sum(kept) == (one != other)
    assert not keeps_own(one, other, dialing=False, dialed_for_s=None)
    assert not keeps_own(one, other, dialing=False, dialed_for_s=for_s + HANDSHAKE_S)


async def test_a_large_message_passes_while_the_other_side_sends_one_too(authority: Path) -> None:
    data = bytes(12 << 20)
    async with node(authority, "a") as a, node(authority, "b") as b:
        to_b, to_a = a.peers.ref("b", b.address, "core"), b.peers.ref("a", a.address, "core")
        await to_b.ready(LIMIT_S)
        answers = await asyncio.gather(*(ref.ask(Echo(data), LIMIT_S, Echo) for ref in (to_b, to_a) for _ in range(2)))
        assert all(answer.data == data for answer in answers)


async def test_an_actor_that_is_not_served_is_refused_by_name(authority: Path) -> None:
    async with node(authority, "a") as a, node(authority, "b") as b:
        with pytest.raises(Refused, match="b has no actor 'nobody'"):
            await a.peers.ref("b", b.address, "nobody").ask(Echo(b""), LIMIT_S, Echo)


async def test_a_person_with_a_clients_certificate_asks_nodes_as_often_as_they_like(authority: Path) -> None:
    async with node(authority, "b") as b, asker(authority, "ada") as first, asker(authority, "ada") as second:
        for peers in (first, second, first):
            assert (await peers.ref("b", b.address, "core").ask(ListActors(), LIMIT_S, ActorList)).actors
            with pytest.raises(Refused, match="Echo is not for people: ada shows a person's certificate"):
                await peers.ref("b", b.address, "core").ask(Echo(b"x"), LIMIT_S, Echo)


async def test_an_order_goes_on_under_the_name_in_the_persons_certificate(authority: Path) -> None:
    class Clerk(Actor):
        @handles(PauseJob)
        async def pause(self, message: PauseJob) -> PauseJob:
            return message

    async with ActorSystem.running("b") as system, asker(authority, "ada") as ada:
        clerk = system.spawn("node", Clerk)
        async with Peers("b", credentials(authority, "b"), lambda _: clerk, ANYWHERE) as b:
            ordered = PauseJob(paused=True, by="somebody else")
            told = await ada.ref("b", b.address, "node").ask(ordered, LIMIT_S, PauseJob)
            assert told == PauseJob(paused=True, by="ada")


@asynccontextmanager
async def asker(folder: Path, name: str) -> AsyncIterator[Peers]:
    def nobody(actor: str) -> LocalRef:
        raise Refused(f"{name} serves no {actor!r}")

    async with Peers(name, credentials(folder, name), nobody) as peers:
        yield peers


# ------------------------------------------------------------------------------------------------ incarnations


async def test_a_message_to_a_life_of_a_node_that_is_over_is_refused(authority: Path) -> None:
    async with node(authority, "a") as a:
        async with node(authority, "b") as first:
            address, life = first.address, first.peers.incarnation
            ref = a.peers.ref("b", address, "core", life)
            assert await ref.ask(Keep(1), LIMIT_S, Kept) == Kept((1,))
        async with node(authority, "b", address=address) as second:
            current = a.peers.ref("b", address, "core")
            await current.ready(LIMIT_S)
            with pytest.raises(Refused, match=f"b is incarnation {second.peers.incarnation}, and {life} is wanted"):
                await ref.ask(Keep(2), LIMIT_S, Kept)
            with pytest.raises(Refused, match=f"{life} is wanted"):
                await ref.ready(LIMIT_S)
            ref.tell(Keep(3))
            assert await current.ask(Keep(4), LIMIT_S, Kept) == Kept((4,))


async def test_a_node_that_comes_back_first_takes_the_place_of_its_former_life(authority: Path) -> None:
    async with node(authority, "b") as b:
        async with node(authority, "a") as a:
            await a.peers.ref("b", b.address, "core").ready(LIMIT_S)
        async with node(authority, "a") as again:
            await again.peers.ref("b", b.address, "core").ready(LIMIT_S)
            back = b.peers.ref("a", again.address, "core")
            assert await back.ask(Echo(b"x"), LIMIT_S, Echo) == Echo(b"x")
            assert back.incarnation == again.peers.incarnation


# ------------------------------------------------------------------------------------------------ certificates


async def test_a_certificate_that_names_another_node_is_refused_on_both_sides(
    authority: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("pem", "key"):
        (tmp_path / f"a.{kind}").write_bytes((authority / f"c.{kind}").read_bytes())
    async with node(authority, "b") as b, node(authority, "a") as a:
        with pytest.raises(Refused, match=r"tls:.* refused us: its certificate names 'b', and 'c' is expected"):
            await a.peers.ref("c", b.address, "core").ask(Echo(b""), LIMIT_S, Echo)
    async with node(authority, "b") as b, node(tmp_path, "a", ca=authority / "ca.pem") as impostor:
        with pytest.raises(Refused, match="its certificate names 'c', and it calls itself 'a'"):
            await impostor.peers.ref("b", b.address, "core").ask(Echo(b""), LIMIT_S, Echo)
    assert "a connection of c is closed: the peer was refused: its certificate names 'c'" in caplog.text


async def test_two_processes_with_one_name_are_noticed(authority: Path) -> None:
    async with node(authority, "b") as b, node(authority, "b") as twin:
        with pytest.raises(Refused, match="it calls itself 'b', which is this node's name"):
            await twin.peers.ref("b", b.address, "core").ready(LIMIT_S)


async def test_a_certificate_of_another_authority_is_one_clear_line_on_both_sides(
    authority: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pki.init(tmp_path, "elsewhere", 30)
    pki.issue(tmp_path, "a", pki.Kind.NODE, 10)
    async with node(authority, "b") as b:
        async with node(tmp_path, "a") as stranger:
            with pytest.raises(Refused, match=r"tls:\S+ is not trusted: its certificate is not accepted: self-signed"):
                await stranger.peers.ref("b", b.address, "core").ask(Keep(1), LIMIT_S, Kept)
        caplog.clear()
        async with node(tmp_path, "a", ca=authority / "ca.pem") as stranger:
            line = r"tls:\S+ does not accept our certificate \S+a.pem: .*unknown ca"
            with pytest.raises(Refused, match=line):
                await stranger.peers.ref("b", b.address, "core").ask(Keep(1), LIMIT_S, Kept)
        (server_line,) = [line for line in caplog.messages if "a stranger" in line]
        assert server_line.startswith("a connection of a stranger is closed: its certificate is not accepted: ")
        assert "\n" not in server_line
        assert await b.refs["core"].ask(Keep(2), LIMIT_S, Kept) == Kept((2,))


async def test_an_expired_certificate_is_one_clear_line_and_heals_when_it_is_renewed(
    authority: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ca.pem", "ca.key", "b.pem", "b.key"):
        (tmp_path / name).write_bytes((authority / name).read_bytes())
    long_ago = datetime.now(UTC) - timedelta(days=5)
    pki.issue(tmp_path, "a", pki.Kind.NODE, 2, now=long_ago)
    async with node(tmp_path, "b") as b, node(tmp_path, "a") as a:
        ref = a.peers.ref("b", b.address, "core")
        with pytest.raises(Refused, match=r"does not accept our certificate \S+a.pem: .*certificate expired"):
            await ref.ask(Keep(1), LIMIT_S, Kept)
        assert "its certificate is not accepted: certificate has expired" in caplog.text
        back = b.peers.ref("a", a.address, "core")
        with pytest.raises(Refused, match="is not trusted: its certificate is not accepted: certificate has expired"):
            await back.ask(Keep(1), LIMIT_S, Kept)
        pki.issue(tmp_path, "a", pki.Kind.NODE, 2, renew=True)
        assert await healed(ref.ask, Keep(2)) == Kept((2,))
        assert await healed(back.ask, Keep(3)) == Kept((3,))


async def healed(ask: object, message: object, reply: type[object] = Kept) -> object:
    """The answer, once it is given again."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await ask(message, LIMIT_S, reply)  # type: ignore[operator]
            except (Refused, Unavailable):
                await asyncio.sleep(0.05)


async def test_a_clients_certificate_cannot_be_used_to_serve(authority: Path) -> None:
    ada = Peers("ada", credentials(authority, "ada"), lambda _: pytest.fail("nobody asks"), ANYWHERE)
    async with node(authority, "a") as a, ada:
        with pytest.raises(Refused, match=r"is not trusted: .*(purpose|certificate)"):
            await a.peers.ref("ada", ada.address, "core").ask(Echo(b""), LIMIT_S, Echo)


async def test_who_shows_no_certificate_gets_nowhere(authority: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with node(authority, "b") as b:
        host, port = b.address.removeprefix("tls:").split(":")
        context = ssl.create_default_context(cafile=str(authority / "ca.pem"))
        context.check_hostname = False
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        with pytest.raises(ssl.SSLError):
            await reader.readexactly(1)
        writer.close()
        plain_reader, plain_writer = await asyncio.open_connection(host, int(port))
        plain_writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in await plain_reader.read()
        plain_writer.close()
    assert "peer did not return a certificate" in caplog.text
    assert "http request" in caplog.text


async def test_what_is_said_is_encrypted(authority: Path) -> None:
    async with node(authority, "a") as a, node(authority, "b") as b, Counting(b.address) as proxy:
        secret = b"the weights of version seven"
        assert await a.peers.ref("b", proxy.address, "core").ask(Echo(secret), LIMIT_S, Echo) == Echo(secret)
        assert len(proxy.seen) > 100
        assert secret not in proxy.seen


@pytest.mark.parametrize("broken", ["ca.pem", "a.pem", "a.key"])
async def test_a_file_that_cannot_be_used_is_named(authority: Path, tmp_path: Path, broken: str) -> None:
    for name in ("ca.pem", "a.pem", "a.key"):
        (tmp_path / name).write_bytes((authority / name).read_bytes())
    (tmp_path / broken).write_text("not PEM")
    with pytest.raises(BadInput, match=broken):
        await Peers("a", credentials(tmp_path, "a"), lambda _: pytest.fail("nobody asks")).start()
    (tmp_path / broken).unlink()
    with pytest.raises(BadInput, match=rf"{broken}' is not allowed; it must be a file"):
        await Peers("a", credentials(tmp_path, "a"), lambda _: pytest.fail("nobody asks")).start()


async def test_only_addresses_between_machines_are_taken(authority: Path) -> None:
    async with node(authority, "a") as a:
        with pytest.raises(BadInput, match="`tls:host:port` is allowed"):
            a.peers.ref("b", "tcp:127.0.0.1:1", "core")


# ------------------------------------------------------------------------------------------------ versions and limits


async def test_a_peer_of_another_protocol_is_one_clear_line_on_both_sides(
    authority: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, newer = handshake.PROTOCOL, handshake.PROTOCOL + 1
    said = tmp_path / "b.log"
    async with node(authority, "a") as a, other_node(authority, "b", newer, said) as (_, address):
        with pytest.raises(Refused, match=f"the peer speaks protocol {newer}, we speak {ours}"):
            await a.peers.ref("b", address, "core").ready(LIMIT_S)
        line = f"a connection of a is closed: the peer refuses us: the peer speaks protocol {ours}, we speak {newer}"
        async with asyncio.timeout(LIMIT_S):
            while line not in said.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_peer_that_cannot_be_reached_is_tried_again_after_a_growing_pause(authority: Path) -> None:
    async with node(authority, "a") as a:
        async with node(authority, "b") as b:
            address = b.address
        ref = a.peers.ref("b", address, "core")
        with pytest.raises(Unavailable, match=r"cannot be reached: .*Connect call failed"):
            await ref.ask(Echo(b""), LIMIT_S, Echo)
        with pytest.raises(Unavailable, match=r"cannot be reached: .*failed.* \(tried again in 0\.\d s\)"):
            await ref.ask(Echo(b""), LIMIT_S, Echo)
        async with node(authority, "b", address=address):
            await ref.ready(LIMIT_S)
            assert await ref.ask(Echo(b"x"), LIMIT_S, Echo) == Echo(b"x")


# ------------------------------------------------------------------------------------------------ death


class Mourner(Actor):
    """Watches what it is given, and writes down who died of what."""

    def __init__(self) -> None:
        self.died: asyncio.Queue[Died] = asyncio.Queue()

    @handles(Died)
    async def on_died(self, message: Died) -> None:
        self.died.put_nowait(message)


@asynccontextmanager
async def mourner(system: ActorSystem) -> AsyncIterator[Mourner]:
    actor = Mourner()
    ref = system.spawn("mourner", lambda: actor)
    await ref.ask(ListActors(), LIMIT_S, ActorList)
    await asyncio.sleep(0)
    yield actor
    await ref.stop()


async def test_a_watched_actor_of_another_node_has_died_when_it_ends(authority: Path) -> None:
    async with node(authority, "a") as a, node(authority, "b") as b, mourner(a.system) as mourning:
        core, other = (a.peers.ref("b", b.address, actor) for actor in ("core", "other"))
        mourning.watch(core)
        mourning.watch(other)
        await core.ask(Echo(b""), LIMIT_S, Echo)
        await b.refs["core"].stop()
        async with asyncio.timeout(LIMIT_S):
            assert await mourning.died.get() == Died("b/core", "it was stopped")
        mourning.watch(core)
        async with asyncio.timeout(LIMIT_S):
            assert (await mourning.died.get()).name == "b/core"
        mourning.unwatch(other)
        await other.ask(Echo(b""), LIMIT_S, Echo)
        await b.refs["other"].stop()
        with pytest.raises(Unavailable):
            await other.ask(Echo(b""), LIMIT_S, Echo)
        assert mourning.died.empty()


async def test_a_watched_actor_has_died_when_its_process_is_killed_or_cannot_be_reached(
    authority: Path,
) -> None:
    async with node(authority, "a") as a, mourner(a.system) as mourning:
        async with other_node(authority, "b") as (process, address):
            ref = a.peers.ref("b", address, "core")
            mourning.watch(ref)
            await ref.ask(Keep(1), LIMIT_S, Kept)
            assert mourning.died.empty()
            process.send_signal(signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S):
                died = await mourning.died.get()
            assert (died.name, died.reason.partition(":")[0]) == ("b/core", "the connection to b ended")
        mourning.watch(ref)
        async with asyncio.timeout(LIMIT_S):
            assert "cannot be reached" in (await mourning.died.get()).reason


_NODE_PROGRAM = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from gyre.actors import handshake
    from gyre.credentials import Credentials
    from gyre.actors.peers import Peers
    from gyre.actors.runtime import ActorSystem
    from tests.actors.peer_actor import Gate, Peer

    async def main(folder, name):
        async with ActorSystem.running(name) as system:
            ref = system.spawn("core", lambda: Peer(Gate()))
            credentials = Credentials(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
            async with Peers(name, credentials, lambda _: ref, "tls:127.0.0.1:0") as peers:
                print(peers.address, flush=True)
                await asyncio.sleep(60)

    handshake.PROTOCOL = int(sys.argv[3])
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
    """
)


@asynccontextmanager
async def other_node(
    folder: Path, name: str, protocol: int = handshake.PROTOCOL, said: Path = Path(os.devnull)
) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    argv = (sys.executable, "-c", _NODE_PROGRAM, str(folder), name, str(protocol))
    root = Path(__file__).parents[2]
    with (
        said.open("w") as errors,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=root) as process,
    ):
        try:
            assert process.stdout is not None
            yield process, (await asyncio.to_thread(process.stdout.readline)).strip()
        finally:
            process.kill()


async def test_a_node_killed_in_the_middle_of_an_ask_is_noticed_at_once(authority: Path) -> None:
    async with node(authority, "a") as a, other_node(authority, "b") as (process, address):
        ref = a.peers.ref("b", address, "core")
        await ref.ready(LIMIT_S)
        waiting = asyncio.create_task(ref.ask(Wait(1), 1000.0, Wait))
        await ref.ask(Echo(b""), LIMIT_S, Echo)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(Unavailable, match="broke before the answer"):
            await waiting


async def test_a_node_that_is_stopped_costs_an_asker_its_deadline_and_is_not_taken_for_dead(authority: Path) -> None:
    async with (
        node(authority, "a") as a,
        other_node(authority, "b") as (process, address),
        mourner(a.system) as mourning,
    ):
        ref = a.peers.ref("b", address, "core")
        mourning.watch(ref)
        await ref.ready(LIMIT_S)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(Unavailable, match="did not answer Keep within"):
            await ref.ask(Keep(1), 0.2, Kept)
        process.send_signal(signal.SIGCONT)
        assert (await ref.ask(Keep(2), LIMIT_S, Kept)).numbers[-1] == 2
        assert mourning.died.empty()


_CUT_OFF_PROGRAM = textwrap.dedent(
    """
    import asyncio, subprocess, sys
    from pathlib import Path
    from gyre.actors import address
    from tests.actors.test_peers import LIMIT_S, Echo, mourner, node

    def loopback(state):
        subprocess.run(("ip", "link", "set", "lo", state), check=True)

    async def main(folder):
        async with node(folder, "a") as a, node(folder, "b") as b, mourner(a.system) as mourning:
            ref = a.peers.ref("b", b.address, "core")
            mourning.watch(ref)
            assert await ref.ask(Echo(b"x"), LIMIT_S, Echo)
            loopback("down")
            try:
                async with asyncio.timeout(LIMIT_S):
                    died = await mourning.died.get()
            finally:
                loopback("up")
            print(died.name, died.reason, flush=True)
            await ref.ready(LIMIT_S)
            assert await ref.ask(Echo(b"y"), LIMIT_S, Echo) == Echo(b"y")
            print("healed", flush=True)

    address._SILENT_S = 4
    loopback("up")
    asyncio.run(main(Path(sys.argv[1])))
    """
)


async def test_a_node_that_is_cut_off_has_died_though_nobody_asks_it_and_it_is_found_again(authority: Path) -> None:
    own_network = ("unshare", "--user", "--map-root-user", "--net")
    process = await asyncio.create_subprocess_exec(
        *(*own_network, sys.executable, "-c", _CUT_OFF_PROGRAM, str(authority)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    out, err = await asyncio.wait_for(process.communicate(), 3 * LIMIT_S)
    assert process.returncode == 0, err.decode()
    died, healed = out.decode().splitlines()
    assert died.startswith("b/core the connection to b ended: ")
    assert healed == "healed"


# ------------------------------------------------------------------------------------------------ a cut connection


class Counting:
    """A TCP relay that counts connections, sees what passes, and cuts the next one after so many bytes."""

    def __init__(self, address: str) -> None:
        self._host, port = address.removeprefix("tls:").split(":")
        self._port = int(port)
        self.connections = 0
        self.seen = bytearray()
        self.cut_after_bytes: int | None = None
        self._relays: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"tls:127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Counting:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for relay in tuple(self._relays):
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        passed = 0

        async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal passed
            while data := await source.read(4096):
                self.seen += data
                if self.cut_after_bytes is not None:
                    data = data[: max(0, self.cut_after_bytes - passed)]
                    passed += len(data)
                    sink.write(data)
                    if passed >= self.cut_after_bytes:
                        return
                else:
                    sink.write(data)

        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        relays = [asyncio.ensure_future(relay(reader, far_writer)), asyncio.ensure_future(relay(far_reader, writer))]
        self._relays.update(relays)
        try:
            await asyncio.wait(relays, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in relays:
                task.cancel()
            for end in (writer, far_writer):
                end.close()


async def test_a_connection_cut_at_any_byte_loses_no_more_than_what_was_under_way_and_repeats_nothing(
    authority: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with node(authority, "a") as a, node(authority, "b") as b, Counting(b.address) as relay:
        core = a.peers.ref("b", relay.address, "core")
        await core.ask(Keep(-1), LIMIT_S, Kept)
        whole = len(relay.seen)
        answered = [-1]
        for number, cut in enumerate(range(0, whole + 800, 97)):
            await a.peers._pairs["b"].channel.link.close("the test begins anew")  # type: ignore[union-attr]
            relay.cut_after_bytes = cut
            for again in range(3):
                try:
                    kept = await core.ask(Keep(number * 3 + again), LIMIT_S, Kept)
                except (Unavailable, Refused):
                    break
                answered.append(number * 3 + again)
                assert kept.numbers[-1] == number * 3 + again
            relay.cut_after_bytes = None
            await healed(core.ask, Echo(b""), Echo)
        kept = await healed(core.ask, Keep(10**6))
        assert len(set(kept.numbers)) == len(kept.numbers)
        assert list(kept.numbers) == sorted(kept.numbers)
        assert set(answered) <= set(kept.numbers)
