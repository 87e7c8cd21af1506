"""Requests that are wrong in ways no shape shows: sampling values, encodings, paths; and what is a retry, what is not."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest

from gyre.proxy import bodies
from gyre.proxy.conversation import request_digest

from .conftest import Proxy, StartProxy

HELLO = [{"role": "user", "content": "hello"}]
OPENAI: dict[str, Any] = {"model": "m", "messages": HELLO}
ANTHROPIC: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": HELLO}
BODIES = {"chat/completions": OPENAI, "messages": ANTHROPIC}


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> Proxy:
    proxy = await start_proxy(lambda head: "0123456789", request_bytes=16384)
    await proxy.open("r")
    return proxy


async def post_raw(proxy: Proxy, path: str, data: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    url = f"{proxy.base('r')}/v1/{path}"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    # The client would else decode and encode on its own account.
    async with proxy.http.post(url, data=data, headers=named) as response:
        return response.status, await response.json()


def assert_form(path: str, answer: dict[str, Any], kind: str = "invalid_request_error") -> None:
    """The fault is in the form of the dialect that has `path`."""
    assert answer["error"]["type"] == kind, answer
    assert ("code" in answer["error"]) == (path == "chat/completions"), answer
    assert (answer.get("type") == "error") == (path != "chat/completions"), answer


# ------------------------------------------------------------------------------------------ sampling values


@pytest.mark.parametrize(("seed", "asked"), [(0, 0), (7, 7), (2**63 - 1, 2**63 - 1), (-1, 2**63 - 1), (-(2**63), 0)])
async def test_a_seed_of_the_dialect_reaches_the_engine_in_its_own_range(proxy: Proxy, seed: int, asked: int) -> None:
    await proxy.chat("r", HELLO, seed=seed)
    (request,) = proxy.engines["a"].requests
    assert request["sampling_params"]["sampling_seed"] == asked


async def test_without_a_seed_each_request_has_one_of_its_own(proxy: Proxy) -> None:
    for text in ("one", "two", "three"):
        await proxy.chat("r", [{"role": "user", "content": text}], seed=None)
    seeds = [request["sampling_params"]["sampling_seed"] for request in proxy.engines["a"].requests]
    assert len(set(seeds)) == 3, seeds
    assert all(0 <= seed < 2**63 for seed in seeds), seeds


SAMPLING_FAULTS = [
    ("chat/completions", "seed", 2**63, "seed: 9223372036854775808 is not allowed; at most"),
    ("chat/completions", "seed", 2**80, "seed: 1208925819614629174706176 is not allowed; at most"),
    ("chat/completions", "seed", -(2**63) - 1, "seed: -9223372036854775809 is not allowed; at least"),
    ("chat/completions", "seed", 1.5, "seed: a whole number is expected, not a number"),
    ("chat/completions", "seed", True, "seed: a whole number is expected, not a boolean"),
    ("chat/completions", "temperature", "hot", "temperature: a number is expected, not a string"),
    ("chat/completions", "temperature", -0.1, "temperature: -0.1 is not allowed; a number from 0 to 2"),
    ("chat/completions", "temperature", 2.1, "temperature: 2.1 is not allowed; a number from 0 to 2"),
    ("chat/completions", "temperature", False, "temperature: a number is expected, not a boolean"),
    ("chat/completions", "top_p", 1.01, "top_p: 1.01 is not allowed; a number from 0 to 1"),
    ("chat/completions", "top_p", [], "top_p: a number is expected, not an array"),
    ("chat/completions", "top_p", float("nan"), "the body is not JSON: NaN is no value of JSON"),
    ("messages", "temperature", 1.1, "temperature: 1.1 is not allowed; a number from 0 to 1"),
    ("messages", "temperature", {}, "temperature: a number is expected, not an object"),
    ("messages", "top_p", -1, "top_p: -1 is not allowed; a number from 0 to 1"),
    ("messages", "temperature", float("inf"), "the body is not JSON: Infinity is no value of JSON"),
]


async def test_a_bad_sampling_value_is_the_harnesss_fault_and_interrupts_nothing(proxy: Proxy) -> None:
    for path, field, value, message in SAMPLING_FAULTS:
        status, answer = await proxy.post("r", path, {**BODIES[path], field: value})
        assert status == 400, (field, value)
        assert_form(path, answer)
        assert answer["error"]["message"].startswith(message), answer
    assert not proxy.engines["a"].requests
    trace = await proxy.close("r")
    assert (trace.calls, trace.interrupted_calls) == (0, 0)


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" * 400 + ".0"])
async def test_a_number_too_large_for_a_float_is_refused_wherever_it_stands(
    proxy: Proxy, path: str, number: str
) -> None:
    for field in ('"temperature": N', '"tools": [{"x": {"maximum": N}}]', '"metadata": {"x": [N]}'):
        data = json.dumps(BODIES[path]).encode()[:-1] + f", {field.replace('N', number)}}}".encode()
        status, answer = await post_raw(proxy, path, data)
        assert status == 400
        assert_form(path, answer)
        assert answer["error"]["message"] == f"the body is not JSON: {number[:40]} is too large a number"


async def test_sampling_values_at_the_edge_are_taken(proxy: Proxy) -> None:
    for path, most in (("chat/completions", 2), ("messages", 1)):
        for temperature in (0, 0.5, most, None):
            body = {**BODIES[path], "temperature": temperature, "top_p": 1, "max_tokens": 2**70}
            assert (await proxy.post("r", path, body))[0] == 200
    sent = [request["sampling_params"] for request in proxy.engines["a"].requests]
    assert {(sampling["temperature"], sampling["max_new_tokens"]) for sampling in sent} == {(1.0, 200)}


# ------------------------------------------------------------------------------------------ bodies


def packed(body: dict[str, Any], encoding: str) -> bytes:
    data = json.dumps(body).encode()
    if encoding == "gzip":
        return gzip.compress(data)
    wbits = -zlib.MAX_WBITS if encoding == "raw" else zlib.MAX_WBITS
    packer = zlib.compressobj(wbits=wbits)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "name"), [("gzip", "gzip"), ("gzip", "GZIP"), ("zlib", "deflate"), ("raw", "deflate")]
)
async def test_a_packed_body_is_read(proxy: Proxy, encoding: str, name: str) -> None:
    for path, body in BODIES.items():
        assert (await post_raw(proxy, path, packed(body, encoding), Content_Encoding=name))[0] == 200


WRONGLY_PACKED = [
    ("gzip", b"{}"),
    ("gzip", b""),
    ("gzip", json.dumps(OPENAI).encode()),
    ("gzip", packed(OPENAI, "gzip")[:-9]),
    ("gzip", packed(OPENAI, "gzip") + b"more"),
    ("gzip", packed(OPENAI, "gzip")[:-8] + b"\0" * 8),
    ("deflate", b"{}"),
    ("deflate", packed(OPENAI, "zlib")[:-6]),
    ("deflate", b"\xff" * 20),
    ("gzip, gzip", packed(OPENAI, "gzip")),
    ("br", b"{}"),
    ("zstd", b"{}"),
    ("x" * 500, b"{}"),
]


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_body_that_is_not_packed_as_it_says_is_a_bad_request(proxy: Proxy, path: str) -> None:
    for encoding, data in WRONGLY_PACKED:
        status, answer = await post_raw(proxy, path, data, Content_Encoding=encoding)
        assert status == 400, (encoding, data)
        assert_form(path, answer)
    assert (await proxy.chat("r", HELLO))["content"] == "0123456789"


async def test_a_body_is_packed_twice_at_most(proxy: Proxy) -> None:
    for names in ("gzip, gzip", "identity, gzip, , gzip"):
        data = gzip.compress(packed(OPENAI, "gzip"))
        assert (await post_raw(proxy, "chat/completions", data, Content_Encoding=names))[0] == 200
    data = gzip.compress(gzip.compress(packed(OPENAI, "gzip")))
    status, answer = await post_raw(proxy, "chat/completions", data, Content_Encoding="gzip, gzip, gzip")
    assert status == 400
    assert answer["error"]["message"] == "Content-Encoding: 3 encodings are not allowed; at most 2"


async def test_a_small_body_that_unpacks_to_a_large_one_is_too_large(proxy: Proxy) -> None:
    status, answer = await post_raw(proxy, "messages", gzip.compress(b" " * 10_000_000), Content_Encoding="gzip")
    assert status == 413
    assert_form("messages", answer, "request_too_large")


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_body_that_breaks_off_is_a_bad_request(
    proxy: Proxy, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "READ_S", 0.5)
    port = int(proxy.gateway.base_url.rpartition(":")[2])
    head = f"POST /run/r/{proxy.keys['r']}/v1/{path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"2\r\n{}\r\n")
    await writer.drain()
    await asyncio.sleep(0.1)  # so that the handler is in the middle of the body
    writer.write(b"nonsense\r\n")
    async with asyncio.timeout(10):
        head_lines, _, _ = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n\r\n")
        length = next(
            int(line[15:]) for line in head_lines.split(b"\r\n") if line.lower().startswith(b"content-length:")
        )
        answer = json.loads(await reader.readexactly(length))
    assert head_lines.startswith(b"HTTP/1.1 400")
    assert_form(path, answer)
    writer.close()


@pytest.mark.parametrize("levels", [150, 250, 600, 900, 950, 990, 2000])
async def test_a_body_is_read_or_refused_at_every_depth(proxy: Proxy, levels: int) -> None:
    deep = b"[" * levels + b"]" * levels
    for path, body in BODIES.items():
        data = json.dumps(body).encode()[:-1] + b', "metadata": ' + deep + b"}"
        status, answer = await post_raw(proxy, path, data)
        assert status == (200 if levels < 200 else 400)
        if status == 400:
            assert_form(path, answer)


@pytest.mark.parametrize(
    "arguments", ["[" * 600 + "]" * 600, "[" * 950 + "]" * 950, "[" * 5000, '{"x": "\\ud800"}', "\ud800"]
)
async def test_arguments_that_cannot_be_read_hurt_nobody(proxy: Proxy, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [*HELLO, turn, {"role": "tool", "tool_call_id": "c", "content": "no"}]
    status, answer = await proxy.post("r", "chat/completions", {"model": "m", "messages": messages})
    assert status in (200, 400)
    if status == 400:
        assert_form("chat/completions", answer)
    assert (await proxy.chat("r", HELLO))["content"] == "0123456789"
    assert (await proxy.close("r")).interrupted_calls == 0


async def test_text_that_no_tokenizer_can_take_is_a_bad_request_in_every_turn(proxy: Proxy) -> None:
    for role in ("user", "assistant"):
        messages = [*HELLO, {"role": role, "content": "\ud800"}, {"role": "user", "content": "x"}]
        for path, body in BODIES.items():
            status, answer = await proxy.post("r", path, {**body, "messages": messages})
            assert status == 400
            assert_form(path, answer)
    assert (await proxy.close("r")).interrupted_calls == 0


# ------------------------------------------------------------------------------------------ paths

PATHS = [
    "/run/r//v1/messages",
    "/run//key/v1/messages",
    "/run/r/wrong/v1/messages",
    "/run/r/wrong/messages",
    "/run/r/wrong/v1/messages/count_tokens",
    "/run/r/wrong/v1/messages/",
    "/run/../v1/messages",
    "/run/r/../../v1/messages",
    "/run/r%2Fx/y/v1/messages",
    "/run/r/%00/v1/messages",
    "/run/r/%ff/v1/messages",
    "/v1/messages",
    "/messages",
]


@pytest.mark.parametrize("path", PATHS)
async def test_the_paths_end_says_in_whose_form_a_fault_is(proxy: Proxy, path: str) -> None:
    port = int(proxy.gateway.base_url.rpartition(":")[2])
    for end, kind in (("messages", "authentication_error"), ("chat/completions", "invalid_request_error")):
        raw = path.replace("messages", end).replace("completions/count_tokens", "completions")
        head = f"POST {raw} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode())
        async with asyncio.timeout(10):
            status, _, rest = (await reader.read()).partition(b"\r\n")
        assert status.startswith(b"HTTP/1.1 401"), (raw, rest)
        assert_form(end, json.loads(rest.partition(b"\r\n\r\n")[2]), kind)
        writer.close()


# ------------------------------------------------------------------------------------------ retries


def test_a_request_repeats_only_one_of_its_own_dialect() -> None:
    chat, anthropic, again = (request_digest(name, ANTHROPIC) for name in ("chat", "anthropic", "chat"))
    assert chat == again
    assert chat != anthropic


async def test_the_same_body_in_the_other_dialect_is_another_call(proxy: Proxy) -> None:
    _, first = await proxy.post("r", "chat/completions", ANTHROPIC)
    _, other = await proxy.post("r", "messages", ANTHROPIC)
    assert first["id"].startswith("chatcmpl-")
    assert other["id"].startswith("msg_")
    assert (await proxy.post("r", "messages", ANTHROPIC))[1]["id"] == other["id"]
    assert len(proxy.engines["a"].requests) == 2


async def test_more_tokens_for_an_answer_that_was_cut_and_delivered_is_a_new_call(proxy: Proxy) -> None:
    for path, body in BODIES.items():
        engine = proxy.engines["a"]
        engine.requests.clear()
        _, first = await proxy.post("r", path, {**body, "max_tokens": 4})
        assert (await proxy.post("r", path, {**body, "max_tokens": 4}))[1]["id"] == first["id"]
        assert len(engine.requests) == 1
        _, more = await proxy.post("r", path, {**body, "max_tokens": 100})
        assert more["id"] != first["id"]
        assert "0123456789" in json.dumps(more)
        # This one ended by itself: nothing more is to be had.
        assert (await proxy.post("r", path, {**body, "max_tokens": 150}))[1]["id"] == more["id"]
        assert len(engine.requests) == 2


async def test_more_tokens_than_the_run_or_the_context_allows_are_no_reason_for_a_new_call(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(lambda head: "0123456789" * 20, context_tokens=100)
    for run, limit in (("r", 6), ("long", 1000)):
        await proxy.open(run, max_tokens=limit)
        _, first = await proxy.post(run, "chat/completions", OPENAI)
        assert first["choices"][0]["finish_reason"] == "length"
        _, more = await proxy.post(run, "chat/completions", {**OPENAI, "max_tokens": 500})
        assert more["id"] == first["id"]


async def test_a_cut_answer_that_reached_nobody_is_had_by_a_retry_that_asks_for_more(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "0123456789")
    engine = proxy.engines["a"]
    engine.held.clear()
    await proxy.open("r")
    first = asyncio.create_task(proxy.post("r", "chat/completions", {**OPENAI, "max_tokens": 4}))
    await proxy.until_sampled("a", 0)
    second = asyncio.create_task(proxy.post("r", "chat/completions", {**OPENAI, "max_tokens": 100}))
    await asyncio.sleep(0.1)
    engine.held.set()
    answers = await asyncio.gather(first, second)
    assert answers[0] == answers[1]
    assert len(engine.requests) == 1
