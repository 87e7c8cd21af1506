"""Bodies that are nearly right, in each dialect: they are understood, or refused with a Fault. GYRE_FUZZ=long tries many."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.actors.messages import OpenRun
from gyre.ids import GroupId, RunId
from gyre.proxy.bodies import json_body
from gyre.proxy.conversation import request_digest
from gyre.proxy.dialects.dialect import Dialect
from gyre.proxy.dialects.spoken import Spoken
from gyre.proxy.faults import Fault, FaultKind
from gyre.proxy.rendering import Rendering
from gyre.proxy.session import Session

from .conftest import StartProxy
from .mutations import BODIES, mutated

LONG = os.environ.get("GYRE_FUZZ") == "long"
fuzzed = settings(
    max_examples=20_000 if LONG else 150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SPOKEN = Spoken()
DIALECTS: dict[str, Dialect] = {
    "chat/completions": SPOKEN.chat,
    "responses": SPOKEN.responses,
    "messages": SPOKEN.anthropic,
}
CONTEXT_TOKENS = 100_000


@pytest.fixture(scope="module")
def rendering(model_dir: Path) -> Rendering:
    return Rendering(model_dir, thinking=True)


@pytest.mark.parametrize("path", list(BODIES))
def test_the_bodies_are_right_before_they_are_changed(path: str) -> None:
    conversation = DIALECTS[path].parse(BODIES[path])
    assert len(conversation.messages) >= 6
    assert len(conversation.tools) == (3 if path == "responses" else 1)
    assert conversation.max_tokens == 50


def refusal(work: Callable[[], object]) -> Fault | None:
    """The fault that the work ends in; whatever else it raises is raised."""
    try:
        work()
    except Fault as fault:
        return fault
    return None


@pytest.mark.parametrize("path", list(BODIES))
@fuzzed
@given(random=st.randoms(use_true_random=False))
def test_a_changed_body_begins_a_call_or_is_refused(path: str, rendering: Rendering, random: Random) -> None:
    opened = OpenRun(RunId("r"), GroupId("g"), 1, "key", "scripted", 1.0, 400)
    session = Session(opened, rendering, SPOKEN.by_name())
    data = json.dumps(mutated(BODIES[path], random)).encode()
    dialect = DIALECTS[path]

    def begin() -> None:
        body = json_body(data, CONTEXT_TOKENS)
        digest = request_digest(dialect.name, body)
        session.begin(dialect.parse(body), body, digest, dialect, {}, CONTEXT_TOKENS, 0.0)

    fault = refusal(begin)
    if fault is not None:
        assert fault.kind is FaultKind.BAD_REQUEST
        assert "\n" not in str(fault)
        assert dialect.fault(fault)[0] == 400


@fuzzed
@given(data=st.binary(max_size=200), path=st.sampled_from(list(BODIES)))
def test_anything_at_all_is_json_or_refused(data: bytes, path: str) -> None:
    fault = refusal(lambda: DIALECTS[path].parse(json_body(data, CONTEXT_TOKENS)))
    assert fault is not None
    assert fault.kind is FaultKind.BAD_REQUEST


async def test_over_http_every_changed_body_has_an_answer_in_its_dialects_form(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "ok")
    await proxy.open("r")
    random = Random(7)

    async def ask(path: str) -> int:
        data = json.dumps(mutated(BODIES[path], random)).encode()
        if random.random() < 0.2:
            data = data[: random.randrange(len(data))] + bytes([random.randrange(256)])
        async with proxy.http.post(f"{proxy.base('r')}/v1/{path}", data=data) as response:
            text = await response.text()
            if response.status != 200:
                answer = json.loads(text)
                assert answer["error"]["message"]
                assert (answer.get("type") == "error") == (path == "messages")
            return response.status

    for _ in range(500 if LONG else 10):
        statuses = await asyncio.gather(*(ask(path) for path in BODIES for _ in range(10)))
        assert set(statuses) <= {200, 400}
    assert 200 in statuses
    assert (await proxy.close("r")).interrupted_calls == 0
