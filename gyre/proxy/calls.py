"""One call of a run, as the session holds it and as the journal's first record of it has it.

`started(call, …)` makes that record when the request is taken in; `call_of` makes the same call of it after a death.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gyre.ids import CallId
from gyre.proxy.conversation import Answer
from gyre.proxy.json_text import exact, load
from gyre.proxy.roles import Part, ThreadKey
from gyre.proxy.sampling import Cached
from gyre.trajectory.forks import Circumstances
from gyre.trajectory.journal import CallStarted

_RENDERED = frozenset({"messages", "system", "tools", "input", "instructions"})
"""Fields of a body that its prompt's tokens hold, and that the journal need not repeat."""


_CIRCUMSTANCES = fields(Circumstances)


@dataclass(slots=True)
class Call:
    """One call, from its request on. The tokens of an ended call are in the tree and nowhere else."""

    id: CallId
    seq: int
    digest: bytes
    """Of its thread's name and its body: what a retry has in common with it."""
    dialect: str
    started_unix_s: float
    chain: bytes
    """Where its prompt ends among the run's prompts (gyre.proxy.recognition)."""
    part: Part
    circumstances: Circumstances
    base: CallId | None
    suffix: array[int]
    max_tokens: int
    stop: tuple[str, ...]
    seed: int | None
    output: array[int] = field(default_factory=lambda: array("i"))
    """What was sampled so far, until the call has ended; so are the next two."""
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("i"))
    answer: Answer | None = None
    cached: Cached | None = None
    """Where its prompt and output were computed last."""
    answered_s: float = 0.0
    """When its answer was whole, by this process's clock."""


def started(call: Call, body: Mapping[str, Any]) -> CallStarted:
    """The journal's record of a call that begins. Fields of the body that nobody here knows are kept in it."""
    request = {
        "chain": call.chain.hex(),
        "thread": call.part.thread.name,
        "opening": call.part.thread.opening.hex(),
        "circumstances": {known.name: getattr(call.circumstances, known.name) for known in _CIRCUMSTANCES},
        "stop": list(call.stop),
        "seed": call.seed,
        "body": {key: value for key, value in body.items() if key not in _RENDERED},
    }
    return CallStarted(
        call=call.id,
        seq=call.seq,
        started_unix_s=call.started_unix_s,
        dialect=call.dialect,
        digest=call.digest,
        role=call.part.role,
        base=call.base,
        suffix=call.suffix.tobytes(),
        max_tokens=call.max_tokens,
        request=exact(request),
    )


def call_of(entry: CallStarted) -> Call:
    """The call that a journal's record began."""
    request = load(entry.request)
    suffix = array("i")
    suffix.frombytes(entry.suffix)
    return Call(
        id=entry.call,
        seq=entry.seq,
        digest=entry.digest,
        dialect=entry.dialect,
        started_unix_s=entry.started_unix_s,
        chain=bytes.fromhex(request["chain"]),
        part=Part(entry.role, ThreadKey(request["thread"], bytes.fromhex(request["opening"]))),
        circumstances=Circumstances(**request["circumstances"]),
        base=entry.base,
        suffix=suffix,
        max_tokens=entry.max_tokens,
        stop=tuple(request["stop"]),
        seed=request["seed"],
    )
