"""Random transactions, reads, watches and compactions against a model of etcd's revisions in plain Python."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.store.embedded import EmbeddedStore
from gyre.store.protocol import Compacted, Compare, Delete, Get, KeyValue, Put, Txn, commit

from .conformance import take, told

KEY = st.sampled_from(["/a", "/a/b", "/a0", "/b", "/bé", "/c"])
VALUE = st.binary(max_size=3)
COMPARE = st.one_of(
    st.builds(Compare.created, KEY, st.integers(0, 12), st.sampled_from(["==", "!=", "<", ">"])),
    st.builds(Compare.modified, KEY, st.integers(0, 12), st.sampled_from(["==", "!=", "<", ">"])),
    st.builds(Compare.value, KEY, VALUE, st.sampled_from(["==", "!=", "<", ">"])),
)


@st.composite
def txns(draw: st.DrawFn) -> Txn:
    keys = draw(st.lists(KEY, unique=True, max_size=4))
    cut = draw(st.integers(0, len(keys)))
    return Txn(
        tuple(draw(st.lists(COMPARE, max_size=1))),
        tuple(Put(key, draw(VALUE)) for key in keys[:cut]),
        tuple(Delete(key) for key in keys[cut:]),
        tuple(Get(key) for key in draw(st.lists(KEY, max_size=2))),
    )


@dataclass
class Model:
    """Every revision's whole content, kept for ever."""

    revision: int
    states: dict[int, dict[str, KeyValue]] = field(default_factory=dict)
    events: list[tuple[str, str, bytes, int]] = field(default_factory=list)

    @property
    def now(self) -> dict[str, KeyValue]:
        return self.states.get(self.revision, {})

    def holds(self, compare: Compare) -> bool:
        kv = self.now.get(compare.key)
        if compare.target == "value":
            if kv is None:
                return False
            left: object = kv.value
        else:
            left = 0 if kv is None else kv.create_revision if compare.target == "create_revision" else kv.mod_revision
        return bool(
            {
                "==": left == compare.operand,
                "!=": left != compare.operand,
                "<": left < compare.operand,  # type: ignore[operator]
                ">": left > compare.operand,  # type: ignore[operator]
            }[compare.op]
        )

    def apply(self, txn: Txn) -> bool:
        if not all(self.holds(compare) for compare in txn.compares):
            return False
        state, revision = dict(self.now), self.revision + 1
        events: list[tuple[str, str, bytes, int]] = []
        for put in txn.puts:
            old = state.get(put.key)
            created, version = (old.create_revision, old.version + 1) if old else (revision, 1)
            state[put.key] = KeyValue(put.key, put.value, created, revision, version, 0)
            events.append(("put", put.key, put.value, revision))
        for delete in txn.deletes:
            if state.pop(delete.key, None) is not None:
                events.append(("delete", delete.key, b"", revision))
        if events:
            self.revision, self.states[revision] = revision, state
            self.events += events
        return True

    def range(self, prefix: str, revision: int) -> list[KeyValue]:
        state = self.states.get(revision, {})
        return [state[key] for key in sorted(state, key=str.encode) if key.startswith(prefix)]


async def _play(script: list[Txn], compact_after: int, prefix: str, limit: int) -> None:
    store = EmbeddedStore.open(None)
    start = (await store.range("/")).revision
    model = Model(start)
    compacted = 0
    try:
        async with aclosing(store.watch(prefix, start + 1)) as live:
            seen: list[tuple[str, str, bytes, int]] = []
            for place, txn in enumerate(script):
                succeeded = model.apply(txn)
                result = await commit(store, txn)
                assert (result.succeeded, result.revision) == (succeeded, model.revision)
                assert result.gets == tuple(model.now.get(get.key) for get in txn.gets)
                expected = [event for event in model.events if event[1].startswith(prefix)]
                seen += told(await take(live, len(expected) - len(seen)))
                assert seen == expected
                if place == compact_after and model.revision > start:
                    compacted = (start + model.revision + 1) // 2
                    await store.compact(compacted)

        for revision in range(start, model.revision + 1):
            if revision < compacted:
                with pytest.raises(Compacted):
                    await store.range(prefix, revision=revision)
                continue
            found: list[KeyValue] = []
            more = True
            while more:
                after = found[-1].key if found else ""
                page = await store.range(prefix, revision=revision, limit=limit, after=after)
                found += page.items
                more = page.more
            assert found == model.range(prefix, revision)
            async with aclosing(store.watch(prefix, revision)) as again:
                expected = [event for event in model.events if event[1].startswith(prefix) and event[3] >= revision]
                assert told(await take(again, len(expected))) == expected
        assert list((await store.range(prefix)).items) == model.range(prefix, model.revision)
    finally:
        await store.close()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(txns(), max_size=12),
    st.integers(0, 12),
    st.sampled_from(["/", "/a", "/a/", "/b", "/none"]),
    st.integers(1, 3),
)
def test_the_store_does_what_the_model_does(script: list[Txn], compact_after: int, prefix: str, limit: int) -> None:
    asyncio.run(_play(script, compact_after, prefix, limit))
