"""etcd for the tests: real servers on loopback, alone or three with TLS and users, that may be killed and frozen."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gyre.engine.ports import free_port
from gyre.errors import Refused, Unavailable
from gyre.store.etcd.address import EtcdAddress
from gyre.store.etcd.api import Message, message_class, method
from gyre.store.etcd.client import EtcdClient
from gyre.store.protocol import prefix_end

from .authority import Authority

START_S = 60.0
TOKEN_S = 2
"""How long a user's token lives unused."""
USER, PASSWORD = "gyre", "the password of tests"
CLUSTER = "test"
PREFIXES = ("/", f"gyre.receipts/{CLUSTER}/")
"""What the ordinary user may read and write: the tests' keys, and the store's receipts."""
FLAGS = ("--unsafe-no-fsync", "--bcrypt-cost", "4", "--logger", "zap", "--log-level", "warn")


@dataclass
class Member:
    """One server. Its ports and its data stay its own through every restart."""

    command: list[str | Path]
    endpoint: str
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        with self.log.open("ab") as log:
            # setpriv: a server ends with the tests, however they end.
            command = ["setpriv", "--pdeathsig", "KILL", *self.command]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)
        if number is signal.SIGKILL:
            self.process.wait(timeout=START_S)


def ports(count: int) -> list[int]:
    """Free ones, all different, that the kernel gives to no connection meanwhile."""
    first = free_port("127.0.0.1", count)
    return list(range(first, first + count))


def members(server: Path, folder: Path, count: int, scheme: str, flags: tuple[str | Path, ...]) -> list[Member]:
    folder.mkdir(parents=True, exist_ok=True)
    free = ports(2 * count)
    clients, peers = free[:count], free[count:]
    everybody = ",".join(f"m{n}={scheme}://127.0.0.1:{peers[n]}" for n in range(count))
    made: list[Member] = []
    for n in range(count):
        client, peer = f"{scheme}://127.0.0.1:{clients[n]}", f"{scheme}://127.0.0.1:{peers[n]}"
        command: list[str | Path] = [
            *(server, "--name", f"m{n}", "--data-dir", folder / f"m{n}", *FLAGS, *flags),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", everybody),
        ]
        made.append(Member(command, f"127.0.0.1:{clients[n]}", folder / f"m{n}.log"))
    return made


@dataclass
class PlainEtcd:
    """A server alone, without TLS and users."""

    member: Member

    @staticmethod
    def make(server: Path, folder: Path, *flags: str) -> PlainEtcd:
        return PlainEtcd(members(server, folder, 1, "http", flags)[0])

    @property
    def url(self) -> str:
        return f"etcd://{self.member.endpoint}/{CLUSTER}"


@dataclass
class EtcdCluster:
    """Three members. They and their clients prove themselves with certificates of `authority`; users are on."""

    members: list[Member]
    authority: Authority
    password_file: Path
    users_made: bool = False

    @staticmethod
    def make(server: Path, folder: Path) -> EtcdCluster:
        authority = Authority.make(folder)
        for name in ("node1", "root"):  # etcd takes the name in a certificate for the user, where none is given
            authority.issue(name)
        cert, key = authority.issue("member")
        password_file = folder / "password"
        password_file.write_text(f"{PASSWORD}\n")
        secure = (
            *("--client-cert-auth", "--trusted-ca-file", authority.ca, "--cert-file", cert, "--key-file", key),
            *("--peer-client-cert-auth", "--peer-trusted-ca-file", authority.ca),
            *("--peer-cert-file", cert, "--peer-key-file", key, "--auth-token-ttl", str(TOKEN_S)),
        )
        return EtcdCluster(members(server, folder, 3, "https", secure), authority, password_file)

    def url(self, user: str = USER, certificate: str = "node1", endpoints: str = "") -> str:
        """The URL of all members, or of `endpoints`."""
        everybody = ",".join(member.endpoint for member in self.members)
        folder = self.authority.folder
        files = f"ca={self.authority.ca}&cert={folder}/{certificate}.pem&key={folder}/{certificate}.key"
        who = f"&user={user}&password_file={self.password_file}" if user else ""
        return f"etcd://{endpoints or everybody}/{CLUSTER}?{files}{who}"

    def root_url(self, endpoints: str = "") -> str:
        return self.url("", "root", endpoints)

    def at(self, endpoint: str) -> Member:
        return next(member for member in self.members if member.endpoint == endpoint)

    async def leader(self) -> Member:
        """The member that leads now."""
        for member in self.members:
            async with client(self.root_url(member.endpoint)) as root:
                status = await root.ask(method("Maintenance", "Status"), message_class("StatusRequest")())
            if status.leader == status.header.member_id:
                return member
        raise AssertionError("no member leads")

    async def heal(self) -> None:
        """Every member runs and answers again, whatever was done to it."""
        for member in self.members:
            if member.running:
                member.signal(signal.SIGCONT)
            else:
                member.start()
        if not self.users_made:
            async with client(self.url("")) as nobody:
                await answering(nobody)
                await _make_users(nobody)
            self.users_made = True
        for member in self.members:
            async with client(self.root_url(member.endpoint)) as root:
                await answering(root)

    def end(self) -> None:
        for member in self.members:
            if member.running:
                member.signal(signal.SIGKILL)


@asynccontextmanager
async def client(url: str) -> AsyncGenerator[EtcdClient, None]:
    opened = EtcdClient(EtcdAddress.parse(url))
    try:
        yield opened
    finally:
        await opened.close()


async def answering(asked: EtcdClient) -> None:
    """Wait until a read that all members agree on is answered."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                await asked.ask(method("KV", "Range"), message_class("RangeRequest")(key=b"/"))
                return
            except Unavailable:
                continue


async def wipe(asked: EtcdClient) -> None:
    """Delete every key."""
    request = message_class("DeleteRangeRequest")(key=b"\0", range_end=b"\0")
    await asked.ask(method("KV", "DeleteRange"), request)


async def give_space(asked: EtcdClient, revision: int) -> None:
    """What an operator does about NOSPACE (docs/operations.md): compact up to the revision, defragment, disarm."""
    compact = message_class("CompactionRequest")(revision=revision, physical=True)
    await asked.ask_once(method("KV", "Compact"), compact, 30)
    await asked.ask_once(method("Maintenance", "Defragment"), message_class("DefragmentRequest")(), 30)
    alarms = await asked.ask(method("Maintenance", "Alarm"), message_class("AlarmRequest")())
    for alarm in alarms.alarms:
        disarm = message_class("AlarmRequest")(action=2, memberID=alarm.memberID, alarm=alarm.alarm)
        await asked.ask(method("Maintenance", "Alarm"), disarm)


def permission(role: str, prefix: str) -> Message:
    """The request that lets a role read and write the keys under a prefix."""
    request = message_class("AuthRoleGrantPermissionRequest")(name=role)
    request.perm.permType = 2
    request.perm.key, request.perm.range_end = prefix.encode(), prefix_end(prefix)
    return request


async def add_user(asked: EtcdClient, user: str, prefixes: tuple[str, ...]) -> None:
    """A user with a role of the same name."""

    async def ask(name: str, request: Message) -> None:
        try:
            await asked.ask(method("Auth", name), request)
        except Refused as error:
            if "already exists" not in str(error):  # made by an earlier try, whose answer was late
                raise

    await ask("RoleAdd", message_class("AuthRoleAddRequest")(name=user))
    for prefix in prefixes:
        await ask("RoleGrantPermission", permission(user, prefix))
    await ask("UserAdd", message_class("AuthUserAddRequest")(name=user, password=PASSWORD))
    await ask("UserGrantRole", message_class("AuthUserGrantRoleRequest")(user=user, role=user))


async def _make_users(nobody: EtcdClient) -> None:
    await add_user(nobody, "root", ())
    await add_user(nobody, USER, PREFIXES)
    await nobody.ask_once(method("Auth", "AuthEnable"), message_class("AuthEnableRequest")(), START_S)
