"""The replica's process: an actor around gyre.train.Replica, alive through every switch.

    python -m gyre.actors.replica_process ADDRESS SECRET_FILE CONFIG_JSON

Of a replica of several ranks it is the first one's, and the parent of the others'. Torch work runs in one thread of its own,
one message at a time, so that the process still answers Ping meanwhile. The lineages of a micro-step are had from the
gateway; gradient sums go straight to the core's replica.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from gyre.actors.far import Far, Ways, far_side
from gyre.actors.messages import GetLineages, Lineages, Ok, Ping, Place
from gyre.actors.messages_replica import (
    DropOwnSums,
    DropSums,
    LineageWork,
    LoadSnapshot,
    MergeSums,
    MicroStep,
    MicroStepDone,
    Offload,
    OptimizerStep,
    Ready,
    RunMicroStep,
    ShipSums,
    StageSums,
    StepDone,
    SumsShipped,
)
from gyre.actors.remote import serve
from gyre.actors.runtime import Actor, ActorSystem, handles
from gyre.actors.sums_exchange import SumsExchange
from gyre.config import CheckpointSection, LossSection, OptimizerSection
from gyre.errors import NotLoaded, OthersAway, Refused, Unavailable
from gyre.ids import RunId
from gyre.kv_migrate.greeting import Certificates, SharedSecret
from gyre.kv_migrate.tcp import TcpTransport
from gyre.train.ranked import RankedReplica
from gyre.train.ranks import RankPlace
from gyre.train.replica import Replica, ReplicaConfig
from gyre.trajectory.records import Lineage

T = TypeVar("T")

PEER_S = 60.0
PULL_S = 55.0
"""For another replica's sums to come: it waits a little longer than that for our word."""
GATEWAY_S = 20.0
"""For a gateway to be started anew by its node. Nothing else is done meanwhile; a node that is gone is so by then, and its
runs are run again."""
RETRY_S = 0.2
SETTLE_S = 4.0
"""For the newest checkpoint to come to disk when the process is told to end; it is killed soon after."""


class ReplicaActor(Actor):
    """One replica. Stage and merge come to the core's; everything else from the cell that owns it."""

    def __init__(
        self,
        replica: Replica | RankedReplica,
        thread: ThreadPoolExecutor,
        exchange: SumsExchange,
        ways: Callable[[], Ways],
    ) -> None:
        self._replica = replica
        self._thread = thread
        self._exchange = exchange
        self._ways = ways

    async def _compute(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    @handles(Ping, concurrent=True)
    async def ping(self, _: Ping) -> Ok:
        return Ok()

    @handles(LoadSnapshot)
    async def load(self, message: LoadSnapshot) -> Ready:
        layout_hash = await self._compute(self._replica.load, Path(message.path), message.version)
        return Ready(message.version, layout_hash)

    @handles(RunMicroStep)
    async def run_micro_step(self, message: RunMicroStep) -> MicroStepDone:
        lineages = await self._lineages(message.work, message.gateways)
        return await self._compute(self._replica.run_micro_step, message.work, lineages)

    async def _lineages(self, work: MicroStep, gateways: Mapping[str, Place]) -> list[Lineage]:
        """The micro-step's lineages in its order, fetched run by run."""
        wanted: dict[tuple[RunId, int], list[int]] = {}
        for item in work.lineages:
            wanted.setdefault((item.run, item.attempt), []).append(item.index)
        found: dict[tuple[RunId, int, int], Lineage] = {}
        for (run, attempt), indices in wanted.items():
            answer = await self._ask_gateway(gateways[run], GetLineages(run, attempt, tuple(indices)))
            for lineage in answer.lineages:
                found[run, attempt, lineage.index] = lineage

        def pick(item: LineageWork) -> Lineage:
            lineage = found.get((item.run, item.attempt, item.index))
            if lineage is None:
                raise Refused(f"the gateway does not have lineage {item.index} of {item.run} attempt {item.attempt}")
            return lineage

        return [pick(item) for item in work.lineages]

    async def _ask_gateway(self, gateway: Place, message: GetLineages) -> Lineages:
        """One that is gone is asked again: its node starts it anew."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + GATEWAY_S
        while True:
            try:
                return await self._ways().to(gateway).ask(message, PEER_S, Lineages)
            except Unavailable as error:
                if loop.time() > until_s:  # the asker must not take the gateway's absence for ours
                    raise OthersAway(f"the lineages of {message.run} are not to be had: {error}") from error
            await asyncio.sleep(RETRY_S)

    @handles(ShipSums)
    async def ship(self, message: ShipSums) -> SumsShipped:
        if message.core is None:
            return await self._compute(self._replica.keep, message.transfer)
        sums = await self._compute(self._replica.sums, message.transfer)
        try:
            with self._exchange.offered(sums) as offer:
                await self._ways().to(message.core).ask(offer, PEER_S, Ok)
        except (Unavailable, NotLoaded) as error:  # of the core's replica; the asker must not take it for ours
            raise Refused(f"the core's replica did not take the sums: {error}") from error
        await self._compute(self._replica.zero_sums)
        return SumsShipped(message.transfer, sums.micro_steps, sums.bytes, sums.error)

    @handles(StageSums, concurrent=True)
    async def stage(self, message: StageSums) -> Ok:
        await self._compute(self._replica.require_fitting, message)
        try:
            values = await self._exchange.fetch(message, PULL_S)
        except Unavailable as error:  # the asker must not take its own absence for ours
            raise Refused(f"the sums of transfer {message.transfer} did not come: {error}") from error
        await self._compute(self._replica.stage, message, values)
        return Ok()

    @handles(MergeSums)
    async def merge(self, message: MergeSums) -> Ok:
        await self._compute(self._replica.merge, message.transfer)
        return Ok()

    @handles(DropSums)
    async def drop(self, _: DropSums) -> Ok:
        await self._compute(self._replica.drop)
        return Ok()

    @handles(DropOwnSums)
    async def drop_own(self, _: DropOwnSums) -> Ok:
        await self._compute(self._replica.zero_sums)
        return Ok()

    @handles(OptimizerStep)
    async def step(self, message: OptimizerStep) -> StepDone:
        return await self._compute(self._replica.step, message)

    @handles(Offload)
    async def offload(self, _: Offload) -> Ok:
        await self._compute(self._replica.offload)
        return Ok()


def _made(config: Mapping[str, Any]) -> Replica | RankedReplica:
    replica_config = ReplicaConfig(
        loss=LossSection.model_validate_json(json.dumps(config["loss"])),
        optimizer=OptimizerSection.model_validate_json(json.dumps(config["optimizer"])),
        checkpoint=CheckpointSection.model_validate_json(json.dumps(config["checkpoint"])),
        temperature=float(config["temperature"]),
        micro_batch_tokens=int(config["micro_batch_tokens"]),
        threads=int(config["threads"]),
        sums_dtype=str(config["sums_dtype"]),
    )
    model_dir, checkpoints_dir = Path(config["model_dir"]), Path(config["checkpoints_dir"])
    staging_dir = Path(config["staging_dir"]) if config["staging_dir"] else None
    ranks, device = int(config["ranks"]), int(config["first_device"])
    if ranks > 1:
        return RankedReplica(model_dir, replica_config, checkpoints_dir, staging_dir, ranks, device)
    return Replica(model_dir, replica_config, checkpoints_dir, staging_dir, RankPlace(device=device))


async def run(address: str, secret: str, config: dict[str, Any]) -> None:
    """Serve one replica until SIGTERM."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    with ThreadPoolExecutor(1, "replica") as thread:
        replica = await asyncio.get_running_loop().run_in_executor(thread, _made, config)
        async with AsyncExitStack() as stack:
            if isinstance(replica, RankedReplica):
                stack.callback(replica.close)
            system = await stack.enter_async_context(ActorSystem.running("replica"))
            far = Far(**config["far"]) if config["far"] else None
            greeting = SharedSecret(secret.encode()) if far is None else Certificates(far.credentials)
            transport = await TcpTransport.open(greeting, far.host if far else "127.0.0.1")
            stack.push_async_callback(transport.close)
            exchange = SumsExchange(transport)
            actor = system.spawn("replica", lambda: ReplicaActor(replica, thread, exchange, lambda: ways))
            ways = Ways(secret, await stack.enter_async_context(far_side(far, actor)))
            stack.push_async_callback(ways.close)
            async with serve(actor, address, secret):
                await stopped.wait()
                await asyncio.to_thread(replica.end_checkpoints, SETTLE_S)


def main() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    address, secret_file, config = sys.argv[1:]
    asyncio.run(run(address, Path(secret_file).read_text(encoding="ascii").strip(), json.loads(config)))


if __name__ == "__main__":
    main()
