"""What a cell's role machine (gyre.sched.role) knows, hears and orders: its state, its events and its actions.

The cell's actor makes the events and carries out the actions; each action names the event that it is answered by.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gyre.store.records import Role


class Stage(StrEnum):
    """What the cell waits for. Each is a span of the switch."""

    DRAIN = "drain"
    RELEASE = "release"
    LOAD = "load"
    FINISH = "finish"
    SHIP = "ship"
    UNLOAD = "unload"
    RESUME = "resume"
    WEIGHTS = "weights"
    ENGINE = "engine"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class CellState:
    """What is known of a cell. The first state is that of one whose engine and replica have not been heard of.

    A new gyred begins with the epoch, token and desired role of the store, tells the authoritative version, and then
    what became of the two children: `EngineUp` / `ReplicaUp` for one it adopted, `EngineDied` / `ReplicaDied` for one
    that is not there (the machine starts it).
    """

    role: Role = Role.RESUMING
    desired: Role = Role.ROLLOUT
    """The role last ordered."""
    goal: Role = Role.ROLLOUT
    """Where the cell is heading; other than `desired` when a stage failed on the way there."""
    epoch: int = 0
    token: int = 0
    traceparent: str = ""
    stage: Stage | None = Stage.ENGINE
    serial: int = 0
    """Grows with every stage that begins or ends."""
    authoritative: int = -1
    engine_up: bool = False
    engine_version: int = -1
    released: bool = False
    drained: bool = False
    """No request is with the engine, and none can come."""
    engine_tries: int = 0
    replica_up: bool = False
    replica_version: int = -1
    """-1 while it holds no parameters."""
    replica_tries: int = 0
    claiming: bool = False
    busy: bool = False
    """A micro-step is in progress."""
    holding: bool = False
    """Claims or gradient sums may be with the replica."""

    @property
    def routing(self) -> bool:
        return self.role is Role.ROLLOUT

    @property
    def settled(self) -> bool:
        """Where it was to go, or given up: nothing happens any more until the next event from outside."""
        return self.role is Role.FAILED or (self.role is self.goal and self.stage is None)


# ---------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class DesiredRole:
    """The leader's order."""

    role: Role
    epoch: int
    token: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class AuthoritativeVersion:
    version: int


@dataclass(frozen=True, slots=True)
class Drained:
    pass


@dataclass(frozen=True, slots=True)
class Released:
    pass


@dataclass(frozen=True, slots=True)
class Loaded:
    """The replica holds `version`; also when the core's has just made it by an optimizer step."""

    version: int


@dataclass(frozen=True, slots=True)
class MicroStepBegan:
    pass


@dataclass(frozen=True, slots=True)
class MicroStepEnded:
    pass


@dataclass(frozen=True, slots=True)
class SumsShipped:
    pass


@dataclass(frozen=True, slots=True)
class Unloaded:
    pass


@dataclass(frozen=True, slots=True)
class Resumed:
    pass


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    version: int


@dataclass(frozen=True, slots=True)
class EngineUp:
    """The engine serves: started, or adopted with `version` in it (-1: unknown) or its memory released."""

    version: int = -1
    released: bool = False


@dataclass(frozen=True, slots=True)
class EngineDied:
    reason: str = "the engine died"


@dataclass(frozen=True, slots=True)
class ReplicaUp:
    """The replica answers, and holds no parameters that may be trained on."""


@dataclass(frozen=True, slots=True)
class ReplicaDied:
    reason: str = "the replica died"


@dataclass(frozen=True, slots=True)
class StageFailed:
    stage: Stage
    reason: str


@dataclass(frozen=True, slots=True)
class StageTimedOut:
    stage: Stage


Event = (
    DesiredRole
    | AuthoritativeVersion
    | Drained
    | Released
    | Loaded
    | MicroStepBegan
    | MicroStepEnded
    | SumsShipped
    | Unloaded
    | Resumed
    | WeightsLoaded
    | EngineUp
    | EngineDied
    | ReplicaUp
    | ReplicaDied
    | StageFailed
    | StageTimedOut
)


# ---------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class StopRouting:
    """The gateways send the engine nothing more."""


@dataclass(frozen=True, slots=True)
class OpenRouting:
    """The gateways may send the engine requests again."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop what is in flight and carry it on elsewhere, with its KV if `move`. -> Drained."""

    move: bool


@dataclass(frozen=True, slots=True)
class ReleaseEngine:
    """The engine frees weights and KV memory; its process stays. -> Released."""


@dataclass(frozen=True, slots=True)
class ResumeEngine:
    """The engine takes its memory back, without weights. -> Resumed."""


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """The engine loads snapshot `version`. -> WeightsLoaded."""

    version: int


@dataclass(frozen=True, slots=True)
class LoadReplica:
    """The replica takes the parameters of snapshot `version`; sums it still has are dropped. -> Loaded."""

    version: int


@dataclass(frozen=True, slots=True)
class AllowClaims:
    """From now on the cell may claim micro-steps (-> MicroStepBegan, MicroStepEnded) and ship their sums."""


@dataclass(frozen=True, slots=True)
class StopClaims:
    """Claim no more. What is claimed and done will still be shipped."""


@dataclass(frozen=True, slots=True)
class AbandonClaims:
    """Claim no more, and give every id that is not shipped back to the ledger."""


@dataclass(frozen=True, slots=True)
class ShipSums:
    """Ship the gradient sums that are left, if any. -> SumsShipped."""


@dataclass(frozen=True, slots=True)
class OffloadReplica:
    """The replica gives its memory back; its process stays. -> Unloaded."""


@dataclass(frozen=True, slots=True)
class RestartEngine:
    """Kill what is left of the engine and start it. -> EngineUp."""


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Kill what is left of the engine; the next action waits until it is dead."""


@dataclass(frozen=True, slots=True)
class RestartReplica:
    """Kill what is left of the replica and start it. -> ReplicaUp."""


@dataclass(frozen=True, slots=True)
class StopReplica:
    """Kill what is left of the replica; the next action waits until it is dead."""


@dataclass(frozen=True, slots=True)
class Report:
    """The role the cell now has, and why, when something went wrong."""

    role: Role
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """An order that is not followed, and why."""

    reason: str


Action = (
    StopRouting
    | OpenRouting
    | Drain
    | ReleaseEngine
    | ResumeEngine
    | LoadWeights
    | LoadReplica
    | AllowClaims
    | StopClaims
    | AbandonClaims
    | ShipSums
    | OffloadReplica
    | RestartEngine
    | StopEngine
    | RestartReplica
    | StopReplica
    | Report
    | Refuse
)
Turn = tuple[CellState, tuple[Action, ...]]
