"""What a node holds of the runs that it has had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gyre.actors.messages import RunEnded
from gyre.actors.mirror import Mirror
from gyre.actors.node import NodeActor
from gyre.ids import GroupId, NodeId, RunId
from gyre.store.embedded import EmbeddedStore
from gyre.store.records import Keys, RunRecord, RunState
from gyre.store.typed import TypedStore, Versioned

RUN = RunId("t000000-00")
KEYS = Keys("test/small")


def seen(state: RunState, revision: int) -> Versioned[RunRecord]:
    run = RunRecord(RUN, GroupId("t000000"), state, 1, NodeId("a"), None, None, "", None, 0.0, 0.0)
    return Versioned(KEYS.run(RUN), run, 3, revision, 0)


@pytest.mark.parametrize("late", [True, False])
async def test_the_end_of_a_run_is_looked_at_whenever_the_store_tells_of_it(late: bool) -> None:
    """Its place is free at once; that it has settled, and that its journal wants a copy, is known by what the mirror holds."""
    store = EmbeddedStore.open(None)
    runs = Mirror(TypedStore(store), KEYS.root, RunRecord)
    node = SimpleNamespace(_runs=runs, _site=SimpleNamespace(keys=KEYS))
    handle, *_ = NodeActor._handlers[RunEnded]
    live, settled = seen(RunState.LIVE, 7), seen(RunState.SETTLED, 9)
    runs.put(live)
    if late:
        await handle(node, RunEnded(RUN, settled.mod_revision))
        assert runs.records == []
        runs.put(live)  # told of again
        assert runs.records == []
        runs.put(settled)
        assert runs.records == [settled.record]
    else:
        runs.put(settled)
        runs.drop(settled.key, settled.mod_revision)  # looked at
        await handle(node, RunEnded(RUN, settled.mod_revision))
        assert runs.records == []
    await store.close()
