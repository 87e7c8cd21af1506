"""What a request is told that cannot be answered: in its dialect's form, with nothing recorded, other runs unhurt."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gyre.actors.messages import CloseRun, GetLineages, OpenRun
from gyre.errors import BadInput, Refused
from gyre.ids import GroupId, RunId
from gyre.proxy.gateway import Gateway

from .conftest import Proxy, StartProxy

HELLO = [{"role": "user", "content": "hello"}]
OPENAI = {"model": "m", "messages": HELLO}
ANTHROPIC = {"model": "m", "max_tokens": 5, "messages": HELLO}


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> Proxy:
    proxy = await start_proxy(lambda head: "hi", request_bytes=4096)
    await proxy.open("r")
    return proxy


def with_message(body: dict[str, Any], **message: Any) -> dict[str, Any]:
    return {**body, "messages": [message]}


OPENAI_FAULTS = [
    ({"model": "m"}, "messages: an array is expected, not null"),
    ({"messages": HELLO}, "model: this field is required"),
    ({**OPENAI, "messages": []}, "messages: at least one message is expected"),
    ({**OPENAI, "messages": "hello"}, "messages: an array is expected, not a string"),
    ({**OPENAI, "messages": ["hello"]}, "messages[0]: an object is expected, not a string"),
    (with_message(OPENAI, role="robot", content="x"), "messages[0].role: 'robot' is not allowed"),
    (with_message(OPENAI, role="user"), "messages[0].content: this field is required"),
    (with_message(OPENAI, role="user", content=7), "messages[0].content: an array is expected, not a number"),
    (
        with_message(OPENAI, role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[0].content[0].type: 'image_url' is not supported; this model reads text only",
    ),
    (with_message(OPENAI, role="tool", content="x"), "messages[0].tool_call_id: this field is required"),
    (
        with_message(OPENAI, role="assistant", tool_calls=[{"id": "1"}]),
        "messages[0].tool_calls[0].function: an object is expected, not null",
    ),
    ({**OPENAI, "max_tokens": -1}, "max_tokens: -1 is not allowed; at least 1"),
    ({**OPENAI, "max_tokens": "many"}, "max_tokens: a whole number is expected, not a string"),
    ({**OPENAI, "stream": "yes"}, "stream: true or false is expected, not a string"),
    ({**OPENAI, "n": 2}, "n: only 1 is supported"),
    ({**OPENAI, "stop": ["a"] * 17}, "stop: 17 strings are not allowed; at most 16"),
    ({**OPENAI, "tools": [{"type": "web_search"}]}, "tools[0].type: 'web_search' is not supported"),
    (["hello"], "the body is not a JSON object"),
]
ANTHROPIC_FAULTS = [
    ({"model": "m", "messages": HELLO}, "max_tokens: this field is required"),
    ({**ANTHROPIC, "max_tokens": 0}, "max_tokens: 0 is not allowed; at least 1"),
    ({**ANTHROPIC, "messages": []}, "messages: at least one message is expected"),
    ({**ANTHROPIC, "system": 5}, "system: an array is expected, not a number"),
    (with_message(ANTHROPIC, role="tool", content="x"), "messages.0.role: 'tool' is not allowed"),
    (
        with_message(ANTHROPIC, role="user", content=[{"type": "image", "source": {}}]),
        "messages.0.content.0.type: 'image' is not supported; this model reads text only",
    ),
    (
        with_message(ANTHROPIC, role="user", content=[{"type": "tool_result"}]),
        "messages.0.content.0.tool_use_id: this field is required",
    ),
    ({**ANTHROPIC, "tools": [{"name": "x"}]}, "tools.0.input_schema: this field is required"),
    *(
        (
            {**ANTHROPIC, "tools": [{"type": "web_search_20250305", "name": "search"}, {"type": kind, "name": "x"}]},
            f"tools.1.type: {kind!r} is not supported; offer it as a tool with an input_schema",
        )
        for kind in ("bash_20250124", "computer_20250124", "text_editor_20250728", "memory_20250818")
    ),
]


async def test_a_body_of_a_wrong_shape_is_named_in_openais_form(proxy: Proxy) -> None:
    for body, message in OPENAI_FAULTS:
        status, answer = await proxy.post("r", "chat/completions", body)
        assert status == 400, body
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"].startswith(message), answer
        named = message.partition(": ")
        assert answer["error"]["param"] == (named[0] if named[1] else None)
    assert (await proxy.close("r")).tree_tokens == 0
    assert not proxy.engines["a"].requests


async def test_a_body_of_a_wrong_shape_is_named_in_anthropics_form(proxy: Proxy) -> None:
    for body, message in ANTHROPIC_FAULTS:
        status, answer = await proxy.post("r", "messages", body)
        assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error"), body
        assert answer["error"]["message"].startswith(message), answer
    assert not proxy.engines["a"].requests


@pytest.mark.parametrize("data", [b"", b"{", b"hello", b'{"model": "\xff\xfe"}', b"[" * 3000, b'{"a": ' * 600])
async def test_a_body_that_is_not_json_is_a_bad_request_in_either_form(proxy: Proxy, data: bytes) -> None:
    for path, kind in (("chat/completions", "invalid_request_error"), ("messages", "invalid_request_error")):
        async with proxy.http.post(f"{proxy.base('r')}/v1/{path}", data=data) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == kind


LONG_WORD = "x" * 3000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", with_message(OPENAI, role=LONG_WORD, content="x")),
        ("chat/completions", with_message(OPENAI, role="user", content=[{"type": LONG_WORD}])),
        ("chat/completions", {**OPENAI, "tools": [{"type": LONG_WORD}]}),
        ("chat/completions", {**OPENAI, "tool_choice": LONG_WORD}),
        ("messages", with_message(ANTHROPIC, role=LONG_WORD, content="x")),
        ("messages", with_message(ANTHROPIC, role="user", content=[{"type": LONG_WORD}])),
        ("messages", with_message(ANTHROPIC, role="assistant", content=[{"type": LONG_WORD}])),
        ("messages", {**ANTHROPIC, "tools": [{"name": "x", "type": "bash_" + LONG_WORD}]}),
        ("responses", {"model": "m", "input": [{"type": LONG_WORD}]}),
        ("responses", {"model": "m", "input": [{"role": LONG_WORD, "content": "x"}]}),
        ("responses", {"model": "m", "input": [{"role": "user", "content": [{"type": LONG_WORD}]}]}),
    ],
)
async def test_a_fault_says_the_beginning_only_of_what_was_said(proxy: Proxy, path: str, body: dict[str, Any]) -> None:
    status, answer = await proxy.post("r", path, body)
    assert status == 400
    assert " is not " in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 200


async def test_text_that_no_tokenizer_can_take_is_a_bad_request(proxy: Proxy) -> None:
    data = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}'
    async with proxy.http.post(f"{proxy.base('r')}/v1/chat/completions", data=data) as response:
        assert response.status == 400
        message = (await response.json())["error"]["message"]
    assert message == (
        "messages: they cannot be rendered for this model (a text has half of a surrogate pair, which is no character)"
    )
    assert (await proxy.chat("r", HELLO))["content"] == "hi"


async def test_a_body_over_the_limit_is_too_large(proxy: Proxy) -> None:
    large = {**OPENAI, "messages": [{"role": "user", "content": "x" * 5000}]}
    status, answer = await proxy.post("r", "chat/completions", large)
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
    status, answer = await proxy.post("r", "messages", {**large, "max_tokens": 5})
    assert (status, answer["error"]["type"]) == (413, "request_too_large")


async def test_a_wrong_key_or_run_is_unauthorized_and_records_nothing(proxy: Proxy) -> None:
    await proxy.open("other")
    right = proxy.keys["r"]
    for run, key in (("r", "wrong"), ("r", proxy.keys["other"]), ("nobody", right), ("..", right), ("r%2Fx", right)):
        url = f"{proxy.gateway.base_url}/run/{run}/{key}/v1/chat/completions"
        async with proxy.http.post(url, json=OPENAI) as response:
            assert response.status == 401
            assert (await response.json())["error"]["code"] == "invalid_api_key"
    async with proxy.http.post(f"{proxy.gateway.base_url}/v1/chat/completions", json=OPENAI) as response:
        assert response.status == 401
    assert not proxy.engines["a"].requests
    assert (await proxy.close("r")).tree_tokens == 0


async def test_an_unknown_endpoint_is_not_found(proxy: Proxy) -> None:
    status, answer = await proxy.post("r", "embeddings", OPENAI)
    assert (status, answer["error"]["message"]) == (404, "POST embeddings: no such endpoint")


async def test_a_closed_run_takes_no_more_calls_and_says_so(proxy: Proxy) -> None:
    await proxy.chat("r", HELLO)
    first = await proxy.close("r")
    status, answer = await proxy.post("r", "chat/completions", OPENAI)
    assert (status, answer["error"]["code"]) == (410, "run_closed")
    status, answer = await proxy.post("r", "messages", ANTHROPIC)
    assert (status, answer["error"]["type"]) == (410, "invalid_request_error")
    assert await proxy.close("r") == first


async def test_closing_what_is_not_open_is_refused(proxy: Proxy) -> None:
    with pytest.raises(Refused, match="no such run is open"):
        await proxy.close("nobody")
    with pytest.raises(Refused, match="attempt 1 is open, not 2"):
        await proxy.close("r", attempt=2)


async def test_lineages_are_had_by_index_of_closed_runs_only(proxy: Proxy) -> None:
    await proxy.chat("r", HELLO)
    with pytest.raises(Refused, match="no closed run"):
        proxy.gateway.lineages(GetLineages(RunId("r"), 1, (0,)))
    trace = await proxy.close("r")
    (lineage,) = proxy.gateway.lineages(GetLineages(RunId("r"), 1, (0,))).lineages
    token_ids, counted, logprobs, versions = lineage.arrays()
    assert len(token_ids) == trace.lineages[0].tokens == trace.tree_tokens
    assert sum(counted) == trace.counted_tokens == len("hi") + 1
    assert {round(logprob, 6) for logprob, flag in zip(logprobs, counted, strict=True) if flag} == {-0.25}
    assert {version for version, flag in zip(versions, counted, strict=True) if flag} == {0}
    with pytest.raises(Refused, match="no lineage 1"):
        proxy.gateway.lineages(GetLineages(RunId("r"), 1, (1,)))


async def test_a_later_attempt_discards_the_earlier_and_an_earlier_one_is_refused(proxy: Proxy) -> None:
    await proxy.chat("r", HELLO)
    old = proxy.base("r")
    await proxy.open("r", attempt=2)
    async with proxy.http.post(f"{old}/v1/chat/completions", json=OPENAI) as response:
        assert response.status == 401
    with pytest.raises(Refused, match="attempt 1 is over; attempt 2 is open"):
        await proxy.gateway.open_run(OpenRun(RunId("r"), GroupId("g"), 1, "k", "scripted", 1.0, 10))
    with pytest.raises(Refused, match="attempt 2 is open, not 1"):
        await proxy.close("r", attempt=1)
    await proxy.chat("r", HELLO)
    trace = await proxy.close("r", attempt=2)
    assert (trace.attempt, trace.calls) == (2, 1)


async def test_opening_again_is_nothing_and_with_other_settings_refused(proxy: Proxy) -> None:
    order = proxy.session("r").opened
    await proxy.gateway.open_run(order)
    with pytest.raises(Refused, match="open with other settings"):
        await proxy.gateway.open_run(OpenRun(RunId("r"), GroupId("g"), 1, "other", "scripted", 1.0, 10))
    await proxy.gateway.close_run(CloseRun(RunId("r"), 1))
    with pytest.raises(Refused, match="it is closed"):
        await proxy.gateway.open_run(order)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 200])
async def test_a_run_name_that_is_no_file_name_is_refused(proxy: Proxy, name: str) -> None:
    with pytest.raises(BadInput, match=r"^run: "):
        await proxy.gateway.open_run(OpenRun(RunId(name), GroupId("g"), 1, "k", "scripted", 1.0, 10))


async def test_a_port_in_use_is_said_in_one_line(proxy: Proxy, start_proxy: StartProxy) -> None:
    port = int(proxy.gateway.base_url.rpartition(":")[2])
    with pytest.raises(BadInput, match=f"^server.port: {port} is not allowed; .*another process listens there$"):
        await start_proxy(lambda head: "hi", port=port)


async def test_a_model_folder_without_a_tokenizer_or_with_an_unknown_family_is_named(
    proxy: Proxy, tmp_path: Any, model_dir: Any
) -> None:
    from dataclasses import replace

    config = proxy.gateway.config
    with pytest.raises(BadInput, match=r"^model.path: .*tokenizer.json"):
        Gateway(replace(config, model_dir=tmp_path / "none"))
    with pytest.raises(BadInput, match=r"^model.renderer: 'nonsense' is not allowed"):
        Gateway(replace(config, renderer="nonsense"))
    with pytest.raises(BadInput, match=r"^model.renderer: 'kimi-k2' is not allowed; it does not fit"):
        Gateway(replace(config, renderer="kimi-k2"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    (other / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(BadInput, match="model type 'bert' has no renderer of its own"):
        Gateway(replace(config, model_dir=other))


async def test_metrics_count_the_calls_and_are_for_who_has_their_key(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "hi", metrics_key="the-key")
    await proxy.open("r")
    await proxy.chat("r", HELLO)
    for shown in ({}, {"Authorization": f"Bearer {proxy.keys['r']}"}, {"Authorization": "Bearer "}):
        async with proxy.http.get(f"{proxy.gateway.base_url}/metrics", headers=shown) as response:
            assert response.status == 401
            assert "gyre_" not in await response.text()
    key = {"Authorization": "Bearer the-key"}
    async with proxy.http.get(f"{proxy.gateway.base_url}/metrics", headers=key) as response:
        text = await response.text()
    assert 'gyre_calls_total{dialect="openai-chat",end="stop"} 1.0' in text
    assert "gyre_sampled_tokens_total 3.0" in text
    assert "gyre_open_runs 1.0" in text


async def test_one_runs_calls_do_not_wait_for_anothers(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "slow" * 50 if "slow" in head else "hi", token_s=0.01)
    await proxy.open("r1")
    await proxy.open("r2")
    slow = asyncio.create_task(proxy.chat("r1", [{"role": "user", "content": "slow"}]))
    await proxy.until_sampled("a", 1)
    assert (await proxy.chat("r2", HELLO))["content"] == "hi"
    assert not slow.done()
    await slow
