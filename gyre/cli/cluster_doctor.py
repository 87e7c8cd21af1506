"""`gyrectl doctor` of a cluster, job or not: from afar by a person's file, and of one node by that node's own.

etcd, the certificates, and every node as it answers are looked at from both; on a node also what gyred stands on there.
"""

from __future__ import annotations

import errno
import shutil
import socket
from pathlib import Path

from gyre.actors.address import Address, TcpAddress, parse
from gyre.actors.messages import Place
from gyre.actors.node_check import check_node
from gyre.actors.node_config import NodeConfig
from gyre.actors.peers import Peers
from gyre.cli import client, findings
from gyre.cli.cluster_file import member, seen_from
from gyre.cli.cluster_job import ClusterJob, NoJob, nobody
from gyre.cli.doctor import (
    PKI,
    examine_certificates,
    examine_disk,
    examine_etcd,
    examine_installation,
    examine_nodes,
    examine_sandbox,
)
from gyre.cli.findings import Finding, State
from gyre.errors import GyreError
from gyre.store.records import CellSpecRecord, JobRecord, JobState, NodeRecord

SHARED_MEMORY = Path("/dev/shm")


async def examine_cluster(job: ClusterJob) -> list[Finding]:
    """Every finding of what can be seen from here; what is on a node's disk is its own doctor's to say."""
    held = job.file.credentials
    found = [*await examine_etcd(job.file.store, None), *examine_certificates(held.ca, held.certificate)]
    seen, places = await _nodes(job)
    found += seen
    try:
        async with job.connections() as peers:
            found += await examine_nodes(peers, places)
    except GyreError as error:
        found.append(Finding("peer", State.FAULT, str(error), f"mend ca, certificate and key in {job.file.path}"))
    return _once(found)


async def examine_node(path: Path) -> list[Finding]:
    """Every finding of what the node in the file stands on, and of the cluster as it sees it. Raises BadInput."""
    config, membership = member(path)
    held, faults = membership.credentials, check_node(config)
    found = [*examine_installation(), examine_sandbox("auto")]
    found += [Finding("node", State.FAULT, fault, f"mend it in {path}") for fault in faults]
    found += [*examine_certificates(PKI, held.ca, held.certificate), *await examine_etcd(config.store, None)]
    place = parse(membership.address)
    found += [*_port(config, place), examine_disk(_there(config.job.root), 0)]
    if membership.snapshot_memory_bytes:
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
        found.append(findings.shared_memory(SHARED_MEMORY, free_bytes, membership.snapshot_memory_bytes))
    seen, places = await _nodes(ClusterJob(seen_from(path)))
    found += seen
    if _listens(place) and config.name not in {each.process for each in places}:
        places.append(Place(config.name, membership.address))
    if not faults:
        async with Peers(f"{config.name}/doctor", held, nobody) as peers:
            found += await examine_nodes(peers, places)
    return _once(found)


async def _nodes(job: ClusterJob) -> tuple[list[Finding], list[Place]]:
    """What the cluster's records say of its nodes, and where those are reached that are there, with a job or without."""
    found: list[Finding] = []
    places: dict[str, Place] = {}
    try:
        places = {each.node: Place(each.node, each.address) for each in await client.waiting(job)}
        async with client.reading(job) as (store, keys):
            nodes = [item.record for item in (await store.range(keys.nodes, NodeRecord)).items]
            specs = [item.record for item in (await store.range(keys.cells, CellSpecRecord)).items]
            held = await store.get(keys.job, JobRecord)
            name = keys.root.rstrip("/").rpartition("/")[2]
    except NoJob as error:
        found.append(Finding("job", State.OK, str(error)))
    except GyreError as error:
        found.append(Finding("node", State.FAULT, str(error), "mend what is said of the store"))
        return found, []
    else:
        if held is None or held.record.state not in (JobState.FINISHED, JobState.FAILED):
            found += findings.absent(name, [spec.node for spec in specs], [node.node for node in nodes])
        found += findings.troubles({node.node: node.trouble for node in nodes})
        places |= {node.node: Place(node.node, node.address) for node in nodes}
    return found, [places[node] for node in sorted(places)]


def _port(config: NodeConfig, place: Address) -> list[Finding]:
    """The node's: its gyred listens there, with a job and without; else it is free, and at an address of this machine."""
    if _listens(place):
        return [Finding("port", State.OK, f"{place} is served")]
    found = findings.silent(config.name)
    try:
        place.bind().close()
    except GyreError as error:
        mend = "set node.address to one of this machine's, with a free port"
        return [found, Finding("port", State.FAULT, str(error), mend)]
    return [found, Finding("port", State.OK, f"{place} is free")]


def _listens(place: Address) -> bool:
    """Whether somebody does. It is not connected to: a gyred warns of who connects and leaves without a word."""
    assert isinstance(place, TcpAddress)
    with socket.socket(socket.AF_INET6 if ":" in place.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((place.host, place.port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _there(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())


def _once(found: list[Finding]) -> list[Finding]:
    """One certificate may be named twice."""
    return list({(each.what, each.found): each for each in found}.values())
