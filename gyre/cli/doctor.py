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
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gyre import __version__
from gyre.actors.messages_gyrectl import GetVersion, Version
from gyre.actors.node_config import Membership, NodeConfig
from gyre.actors.peers import Peers
from gyre.actors.runtime import LocalRef
from gyre.cli import client, findings
from gyre.cli.findings import Finding, State
from gyre.config import JobSpec
from gyre.errors import BadInput, GyreError, Refused
from gyre.harness.confine import choose
from gyre.harness.profiles import Settings, profile
from gyre.jobdir import JobDir
from gyre.kv_migrate import choice as transports
from gyre.store.open import keys_for
from gyre.store.records import JobRecord, NodeRecord
from gyre.store.typed import versioned
from gyre.train.snapshot import list_snapshots

if TYPE_CHECKING:
    from gyre.store.etcd.store import EtcdStore

PKI = Path("pki")
PORT_S = 2.0
PEER_S = 5.0


async def examine(job: JobDir | None) -> list[Finding]:
    """Every finding, of the machine alone where there is no job."""
    found = [*_training(), _transfer()]
    if job is None:
        return [*found, *_certificates(PKI), _sandbox("auto"), _disk(Path.cwd(), 0)]
    try:
        spec, base = client.read_spec(job), _base(job)
    except BadInput as error:
        return [*found, Finding("job", State.FAULT, str(error), "name another folder with --dir")]
    membership = NodeConfig.load(job.node_file).membership
    held = membership.credentials if membership else None
    found += _certificates(PKI, *((held.ca, held.certificate) if held else ()))
    url, running = client.store_url(job), client.gyred_of(job) is not None
    found += await _etcd(url, spec) if url.startswith("etcd:") else [_embedded(job)]
    if running:
        found += await _gyred(job)
    found += await _cluster(job, spec, base)
    found.append(_port(spec, running=running))
    found.append(_disk(job.root, _snapshot_bytes(job)))
    found.append(_sandbox(spec.harness.confine))
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


async def _etcd(url: str, spec: JobSpec) -> list[Finding]:
    """Each endpoint by itself, and the certificates of the URL."""
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
            job = await store.get(keys_for(url, spec.job.name).job)
        except GyreError as error:
            mend = "see that it runs (etcdctl endpoint health) and that this node reaches it"
            found.append(Finding("store", State.FAULT, f"{endpoint}: {error}", mend))
        else:
            began = "the job has begun" if job and versioned(job, JobRecord) else "it knows no such job yet"
            answers = Finding("store", State.OK, f"{endpoint} answers; {began}")
            found.append(findings.quota(endpoint, await _alarms(store)) or answers)
        finally:
            await store.close()
    return found + _certificates(*(path for path in (address.ca, address.cert) if path is not None))


async def _alarms(store: EtcdStore) -> list[str]:
    """The alarms that etcd has raised. Where only its root may know them, none are."""
    from gyre.store.etcd.api import message_class, method

    try:
        answer = await store.client.ask(method("Maintenance", "Alarm"), message_class("AlarmRequest")())
    except GyreError:
        return []
    kinds = message_class("AlarmMember").DESCRIPTOR.fields_by_name["alarm"].enum_type.values_by_number
    return sorted({str(kinds[each.alarm].name) for each in answer.alarms})


def _certificates(*places: Path) -> list[Finding]:
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


async def _gyred(job: JobDir) -> list[Finding]:
    try:
        there = await client.version(job)
    except GyreError as error:
        mend = f"its log says what it is at ({job.logs / 'gyred.log'}); gyrectl up JOB --resume starts a new one"
        return [Finding("gyred", State.FAULT, f"it lives and does not answer: {error}", mend)]
    ours = (("gyre", __version__), ("Python", platform.python_version()))
    return [
        Finding("gyred", State.OK, "it runs and answers"),
        findings.versions(ours, (("gyre", there.gyre), ("Python", there.python))),
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
    found = await _peers(config, membership, others)
    folder = base / spec.checkpoint.dir if spec.checkpoint.dir else None
    checkpoints = findings.checkpoints(folder, len(nodes), there=folder is not None and folder.is_dir())
    stand = await client.copies(job, config.name) if spec.journal.copies else None
    copies = findings.copies(stand, len(nodes)) if stand is not None else None
    return [*found, *(each for each in (checkpoints, copies) if each is not None)]


async def _peers(config: NodeConfig, membership: Membership, others: list[NodeRecord]) -> list[Finding]:
    ours = (("gyre", __version__), ("Python", platform.python_version()))
    told: dict[str, tuple[tuple[str, str], ...] | str] = {}
    clocks: list[Finding] = []

    async def ask(node: NodeRecord) -> None:
        try:
            asked_s = time.time()
            there = await peers.ref(node.node, node.address, "node").ask(GetVersion(), PEER_S, Version)
        except GyreError as error:
            told[node.node] = f"{node.address} does not answer: {error}"
            return
        told[node.node] = (("gyre", there.gyre), ("Python", there.python))
        clocks.append(findings.clock(there.unix_s - (asked_s + time.time()) / 2, node.node))

    try:
        async with Peers(f"{config.name}/doctor", membership.credentials, _nobody) as peers:
            await asyncio.gather(*(ask(node) for node in others))
    except GyreError as error:
        return [Finding("peer", State.FAULT, str(error), "mend ca, certificate and key in node.toml")]
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


def _disk(place: Path, snapshot_bytes: int) -> Finding:
    usage = shutil.disk_usage(place)
    return findings.disk(place, usage.free, usage.total, snapshot_bytes)


def _snapshot_bytes(job: JobDir) -> int:
    """Of the newest one."""
    kept = list_snapshots(job.snapshots)
    return sum(file.stat().st_size for file in max(kept)[1].iterdir()) if kept else 0


def _sandbox(confine: str) -> Finding:
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


def _training() -> list[Finding]:
    """What a replica needs. It is looked for and not loaded."""
    found: list[Finding] = []
    for module, package in (("torch", "torch"), ("megatron", "megatron-core")):
        if importlib.util.find_spec(module) is None:
            found.append(Finding(module, State.FAULT, "is not installed", "pip install 'gyre[train]'"))
        else:
            found.append(Finding(module, State.OK, f"{package} {importlib.metadata.version(package)}"))
    return found


def _transfer() -> Finding:
    """What would carry KV blocks; a device that is not used is worth a word."""
    host = transports.look(transports.AUTO)
    chosen = transports.choose(transports.AUTO, host)
    if host.devices and chosen.kind is transports.Kind.TCP:
        return Finding("transfer", State.WARNING, chosen.reason, "KV blocks move over TCP until then")
    return Finding("transfer", State.OK, chosen.reason)
