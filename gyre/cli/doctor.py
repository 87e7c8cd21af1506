"""`gyrectl doctor`: looks at what a job stands on, changes nothing, and says of each thing how it is and how to mend it.

With a job: its store, clock, port, disk, harness, versions; of a cluster's, the other nodes too, as this one reaches
them. Without one: the machine. Judgement is gyre.cli.findings'.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import platform
import shutil
import socket
import sqlite3
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gyre import __version__
from gyre.actors.messages import Place
from gyre.actors.messages_gyrectl import GetVersion, Version
from gyre.actors.node_config import NodeConfig
from gyre.actors.peers import Peers
from gyre.actors.runtime import LocalRef
from gyre.actors.snapshot_folders import held_by
from gyre.cli import client, findings
from gyre.cli.findings import Finding, State
from gyre.config import JobSpec
from gyre.errors import BadInput, GyreError, Refused
from gyre.harness.confine import choose
from gyre.harness.profiles import Settings, profile
from gyre.ids import NodeId
from gyre.jobdir import JobDir
from gyre.kv_migrate import choice as transports
from gyre.store.open import keys_for
from gyre.store.records import JobRecord, JobState, NodeRecord
from gyre.store.typed import versioned

if TYPE_CHECKING:
    from gyre.store.etcd.store import EtcdStore

PKI = Path("pki")
PORT_S = 2.0
PEER_S = 5.0


async def examine(job: JobDir | None) -> list[Finding]:
    """Every finding, of the machine alone where there is no job."""
    found = examine_installation()
    if job is None:
        return [*found, *examine_certificates(PKI), examine_sandbox("auto"), examine_disk(Path.cwd(), 0)]
    try:
        spec, base = client.read_spec(job), _base(job)
    except BadInput as error:
        return [*found, Finding("job", State.FAULT, str(error), "name another folder with --dir")]
    config = NodeConfig.load(job.node_file)
    membership, node = config.membership, config.name if config.membership else None
    held = membership.credentials if membership else None
    found += examine_certificates(PKI, *((held.ca, held.certificate) if held else ()))
    url, running = client.store_url(job), client.gyred_of(job) is not None
    found += await examine_etcd(url, spec.job.name) if url.startswith("etcd:") else [_embedded(job)]
    if running:
        found += await _gyred(job, node)
    elif (gone := findings.gyred_gone(await _state(job), node, fell=job.gyred_file.exists())) is not None:
        found.append(gone)
    found += await _cluster(job, spec, base)
    found.append(_port(spec, running=running))
    found.append(examine_disk(job.root, _snapshot_bytes(job)))
    found.append(examine_sandbox(spec.harness.confine))
    found.append(_harness(spec, base))
    return list({(each.what, each.found): each for each in found}.values())  # one certificate, named twice


def _base(job: JobDir) -> Path:
    try:
        return Path(tomllib.loads(job.node_file.read_text(encoding="utf-8"))["node"]["base"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput("node.toml", str(job.node_file), f"it must be as gyrectl up wrote it ({error!r})") from error


# ---------------------------------------------------------------------------------------------- the store


def _embedded(job: JobDir) -> Finding:
    """SQLite's own check of the file; beside a gyred that writes to it, since a reader disturbs nobody."""
    try:
        with closing(sqlite3.connect(f"file:{job.store}?mode=ro", uri=True, timeout=5.0)) as db:
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        verdict = str(error)
    verdict = " ".join(verdict.splitlines())
    if verdict != "ok":
        mend = "the job cannot go on with it: put a copy of the file back, or begin again in another folder"
        return Finding("store", State.FAULT, f"{job.store}: {verdict}", mend)
    return Finding("store", State.OK, f"{job.store} is whole")


async def examine_etcd(url: str, name: str | None) -> list[Finding]:
    """Each endpoint by itself, and the certificates of the URL. `name`: of the job that it should know."""
    from gyre.store.etcd.address import EtcdAddress
    from gyre.store.etcd.store import EtcdStore

    try:
        address = EtcdAddress.parse(url)
    except BadInput as error:
        return [Finding("store", State.FAULT, str(error), "mend store in node.toml")]
    found: list[Finding] = []
    for endpoint in address.endpoints:
        store = EtcdStore(replace(address, endpoints=(endpoint,)), read_only=True)
        try:
            job = await store.get(keys_for(url, name or "none").job)
        except GyreError as error:
            mend = "see that it runs (etcdctl endpoint health) and that this node reaches it"
            found.append(Finding("store", State.FAULT, f"{endpoint}: {error}", mend))
        else:
            began = "; the job has begun" if job and versioned(job, JobRecord) else "; it knows no such job yet"
            answers = Finding("store", State.OK, f"{endpoint} answers{began if name else ''}")
            found.append(findings.quota(endpoint, await _alarms(store)) or answers)
        finally:
            await store.close()
    return found + examine_certificates(*(path for path in (address.ca, address.cert) if path is not None))


async def _alarms(store: EtcdStore) -> list[str]:
    """The alarms that etcd has raised. Where only its root may know them, none are."""
    from gyre.store.etcd.api import message_class, method

    try:
        answer = await store.client.ask(method("Maintenance", "Alarm"), message_class("AlarmRequest")())
    except GyreError:
        return []
    kinds = message_class("AlarmMember").DESCRIPTOR.fields_by_name["alarm"].enum_type.values_by_number
    return sorted({str(kinds[each.alarm].name) for each in answer.alarms})


def examine_certificates(*places: Path) -> list[Finding]:
    """Those at `places`, each a file or a folder of them."""
    files = (sorted(place.glob("*.pem")) if place.is_dir() else [place] for place in places)
    paths = list({path.resolve(): path for some in files for path in some if path.exists()}.values())
    if not paths:
        return []
    try:
        from gyre import pki
    except ImportError:
        return [Finding("certificate", State.WARNING, "cannot be read", "pip install 'gyre[cluster]'")]
    found: list[Finding] = []
    for each in paths:
        try:
            read = pki.read(each)
        except GyreError as error:
            found.append(Finding("certificate", State.FAULT, str(error), "put the right file there"))
            continue
        ca = read.kind is pki.Kind.CA
        found.append(findings.certificate(each, read.name, read.left(datetime.now(UTC)), ca=ca))
    return found


# ---------------------------------------------------------------------------------------------- the node


async def _state(job: JobDir) -> JobState | None:
    try:
        async with client.reading(job) as (store, keys):
            found = await store.get(keys.job, JobRecord)
    except GyreError:  # told by the finding of the store
        return None
    return None if found is None else found.record.state


async def _gyred(job: JobDir, node: NodeId | None) -> list[Finding]:
    try:
        there = await client.version(job)
    except GyreError as error:
        return [findings.gyred_silent(str(error), node, job.logs)]
    ours = (("gyre", __version__), ("Python", platform.python_version()))
    return [
        Finding("gyred", State.OK, "it runs and answers"),
        findings.versions(ours, (("gyre", there.gyre), ("Python", there.python)), node),
        findings.clock(there.unix_s - time.time(), "gyred"),
    ]


async def _cluster(job: JobDir, spec: JobSpec, base: Path) -> list[Finding]:
    """The other nodes as they answer, and whether they could go on. Nothing where the node is alone."""
    config = NodeConfig.load(job.node_file)
    membership = config.membership
    if membership is None:
        return []
    try:
        async with client.reading(job) as (store, keys):
            nodes = [item.record for item in (await store.range(keys.nodes, NodeRecord)).items]
    except GyreError:  # told by the finding of the store
        return []
    others = [node for node in nodes if node.node != config.name]
    running = client.gyred_of(job) is not None
    found = findings.nodes(config.name, {node.node: node.trouble for node in nodes}, running=running)
    try:
        async with Peers(f"{config.name}/doctor", membership.credentials, _nobody) as peers:
            found += await examine_nodes(peers, [Place(node.node, node.address) for node in others])
    except GyreError as error:
        found.append(Finding("peer", State.FAULT, str(error), "mend ca, certificate and key in node.toml"))
    folder = base / spec.checkpoint.dir if spec.checkpoint.dir else None
    checkpoints = findings.checkpoints(folder, len(nodes), there=folder is not None and folder.is_dir())
    stand = await client.copies(job, config.name) if spec.journal.copies else None
    copies = findings.copies(stand, len(nodes)) if stand is not None else None
    return [*found, *(each for each in (checkpoints, copies) if each is not None)]


async def examine_nodes(peers: Peers, nodes: Sequence[Place]) -> list[Finding]:
    """Each of these gyreds, as it answers: its versions, and its clock."""
    ours = (("gyre", __version__), ("Python", platform.python_version()))
    told: dict[str, tuple[tuple[str, str], ...] | str] = {}
    clocks: list[Finding] = []

    async def ask(node: Place) -> None:
        try:
            asked_s = time.time()
            there = await peers.ref(node.process, node.address, "node").ask(GetVersion(), PEER_S, Version)
        except GyreError as error:
            told[node.process] = f"{node.address} does not answer: {error}"
            return
        told[node.process] = (("gyre", there.gyre), ("Python", there.python))
        clocks.append(findings.clock(there.unix_s - (asked_s + time.time()) / 2, node.process))

    await asyncio.gather(*(ask(node) for node in nodes))
    return [*findings.peers(ours, told), *clocks]


def _nobody(actor: str) -> LocalRef:
    raise Refused(f"{actor!r} is not here: gyrectl doctor serves nothing")


def _port(spec: JobSpec, *, running: bool) -> Finding:
    """The gateway's: taken by it while the job runs, free before it is started."""
    host, port = spec.server.host, spec.server.port
    if port == 0:
        return Finding("port", State.OK, f"any free one of {host} is used")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(PORT_S)
        taken = probe.connect_ex((host, port)) == 0
    if running and not taken:
        return Finding("port", State.FAULT, f"nothing listens on {host}:{port}", "logs/gateway.log says why")
    if taken and not running:
        mend = "end what listens there, or set another server.port"
        return Finding("port", State.FAULT, f"{host}:{port} is taken, and not by this job", mend)
    return Finding("port", State.OK, f"{host}:{port} is {'served' if running else 'free'}")


def examine_disk(place: Path, snapshot_bytes: int) -> Finding:
    usage = shutil.disk_usage(place)
    return findings.disk(place, usage.free, usage.total, snapshot_bytes)


def _snapshot_bytes(job: JobDir) -> int:
    """Of the newest one."""
    held = held_by(job)
    return sum(file.stat().st_size for file in held[max(held)].iterdir()) if held else 0


def examine_sandbox(confine: str) -> Finding:
    if confine == "unconfined":
        mend = "install bubblewrap or allow user namespaces, and leave --unconfined out"
        return Finding("sandbox", State.WARNING, "the job lets its runs act as you", mend)
    return _passes("sandbox", lambda: f"runs are confined by {choose('auto')}")


def _harness(spec: JobSpec, base: Path) -> Finding:
    name = spec.harness.profile

    def look() -> str:
        profile(name).check(Settings.of(spec, base))
        return f"{name} is installed"

    return _passes("harness", look)


def _passes(what: str, look: Callable[[], str]) -> Finding:
    """What `look` found; the error that it raises says the mend itself."""
    try:
        return Finding(what, State.OK, look())
    except GyreError as error:
        return Finding(what, State.FAULT, str(error))


def examine_installation() -> list[Finding]:
    """What a replica needs, and what would carry KV blocks. It is looked for and not loaded."""
    found: list[Finding] = []
    for module, package in (("torch", "torch"), ("megatron", "megatron-core")):
        if importlib.util.find_spec(module) is None:
            found.append(Finding(module, State.FAULT, "is not installed", "pip install 'gyre[train]'"))
        else:
            found.append(Finding(module, State.OK, f"{package} {importlib.metadata.version(package)}"))
    return [*found, _transfer()]


def _transfer() -> Finding:
    """A device that is not used is worth a word."""
    host = transports.look(transports.AUTO)
    chosen = transports.choose(transports.AUTO, host)
    if host.devices and chosen.kind is transports.Kind.TCP:
        return Finding("transfer", State.WARNING, chosen.reason, "KV blocks move over TCP until then")
    return Finding("transfer", State.OK, chosen.reason)
