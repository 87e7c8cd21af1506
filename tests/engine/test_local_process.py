"""The local engine as a process: starting, ending, dying, and what its HTTP surface says to bad input."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gyre.engine.client import Chunk, EngineClient, EngineGone, EngineRefused, GenerateRequest

from .processes import END_S, LIMIT_S, EngineProcess, engine_command, engine_process
from .tiny_models import make_model

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m", "llama")


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with engine_process(tmp_path_factory.mktemp("run"), model) as process:
        yield process


@pytest.fixture
async def client(shared: EngineProcess) -> AsyncIterator[EngineClient]:
    async with EngineClient(shared.url) as client:
        yield client


def endless(rid: str) -> GenerateRequest:
    return GenerateRequest(rid, PROMPT, 2000, temperature=0.0, ignore_eos=True)


async def read_until(
    client: EngineClient, request: GenerateRequest, count: int, then: Callable[[], None], chunks: list[Chunk]
) -> None:
    """Adds all chunks to `chunks`; `then()` is called once `count` tokens have come."""
    called = False
    async with asyncio.timeout(LIMIT_S):
        async for chunk in client.generate(request):
            chunks.append(chunk)
            if not called and sum(len(item.token_ids) for item in chunks) >= count:
                called = True
                then()


async def test_a_terminated_engine_ends_its_streams_with_what_they_have_and_exits_cleanly(
    model: Path, tmp_path: Path
) -> None:
    with engine_process(tmp_path, model) as process:
        async with EngineClient(process.url) as client:
            chunks: list[Chunk] = []
            await read_until(client, endless("r"), 10, lambda: process.signal(signal.SIGTERM), chunks)
        assert chunks[-1].finish is not None
        assert chunks[-1].finish.kind == "abort"
        assert process.process.wait(END_S) == 0
        assert process.log.read_text().count("\n") == 1, "nothing but the line that says it serves"


async def test_a_killed_engine_is_gone_and_what_it_sent_is_kept(model: Path, tmp_path: Path) -> None:
    with engine_process(tmp_path, model) as process:
        async with EngineClient(process.url) as client:
            chunks: list[Chunk] = []
            with pytest.raises(EngineGone):
                await read_until(client, endless("r"), 5, lambda: process.signal(signal.SIGKILL), chunks)
            assert sum(len(chunk.token_ids) for chunk in chunks) >= 5
            for call in (client.health, client.info, client.abort_all):
                with pytest.raises(EngineGone):
                    await call()


async def test_a_frozen_engine_is_gone_after_the_silence_that_is_allowed(shared: EngineProcess) -> None:
    async with EngineClient(shared.url, silence_s=0.5, control_s=0.5) as client:
        try:
            with pytest.raises(EngineGone, match="no answer in time"):
                await read_until(client, endless("frozen"), 5, lambda: shared.signal(signal.SIGSTOP), [])
            with pytest.raises(EngineGone, match="no answer in time"):
                await client.health()
        finally:
            shared.signal(signal.SIGCONT)
    async with EngineClient(shared.url) as client:
        await client.health()


async def test_a_seed_is_honoured_over_http(client: EngineClient) -> None:
    def request(rid: str, seed: int) -> GenerateRequest:
        return GenerateRequest(rid, PROMPT, 20, seed=seed, ignore_eos=True)

    answers = [
        [token async for chunk in client.generate(request(rid, seed)) for token in chunk.token_ids]
        for rid, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert answers[0] == answers[1] != answers[2]


async def test_memory_is_not_released_under_a_request_and_the_engine_lives_on(client: EngineClient) -> None:
    stream = client.generate(endless("busy"))
    await anext(stream)
    with pytest.raises(EngineRefused) as refusal:
        await client.release_memory()
    assert refusal.value.status == 409
    assert (await anext(stream)).finish is None
    await stream.aclose()


async def test_a_released_engine_refuses_requests_until_it_has_weights_again(client: EngineClient, model: Path) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (await client.loads()).running:  # noqa: ASYNC110 - of the test before, in another process
            await asyncio.sleep(0.02)
    await client.release_memory()
    with pytest.raises(EngineRefused, match="released"):
        await anext(client.generate(endless("r")))
    await client.resume_memory()
    with pytest.raises(EngineRefused, match="update its weights"):
        await anext(client.generate(endless("r1")))
    await client.update_weights(str(model), 1)
    assert (await anext(client.generate(endless("r2")))).token_ids


async def test_a_live_rid_is_not_given_twice(client: EngineClient) -> None:
    stream = client.generate(endless("twice"))
    await anext(stream)
    with pytest.raises(EngineRefused, match="live request"):
        await anext(client.generate(endless("twice")))
    assert (await anext(stream)).finish is None
    await stream.aclose()


BAD_BODIES: dict[str, tuple[str, Any]] = {
    "input_ids": ("/generate", {}),
    "at least one token": ("/generate", {"input_ids": []}),
    "list of token ids": ("/generate", {"input_ids": [1, "2"]}),
    "token ids are below": ("/generate", {"input_ids": [100000]}),
    "max_new_tokens": ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}),
    "temperature": ("/generate", {"input_ids": [1], "sampling_params": {"temperature": -1}}),
    "top_p": ("/generate", {"input_ids": [1], "sampling_params": {"top_p": 0}}),
    "top_k": ("/generate", {"input_ids": [1], "sampling_params": {"top_k": 0}}),
    "sampling_params.json_schema": ("/generate", {"input_ids": [1], "sampling_params": {"json_schema": "{}"}}),
    "body.lora_path": ("/generate", {"input_ids": [1], "lora_path": "x"}),
    "body": ("/generate", [1, 2]),
    "rid": ("/abort_request", {}),
    "mode": ("/pause_generation", {"mode": "later"}),
    "model_path": ("/update_weights_from_disk", {}),
    "new_version": ("/update_weight_version", {"new_version": "seven"}),
    "tags": ("/release_memory_occupation", {"tags": ["all"]}),
}


@pytest.mark.parametrize("named", BAD_BODIES)
async def test_a_body_that_is_wrong_is_answered_400_in_one_line_that_names_the_field(
    shared: EngineProcess, client: EngineClient, named: str
) -> None:
    path, body = BAD_BODIES[named]
    async with aiohttp.ClientSession() as session, session.post(shared.url + path, json=body) as response:
        assert response.status == 400
        message = (await response.json())["error"]["message"]
    assert named in message
    assert "\n" not in message
    await client.health()


async def test_a_body_that_is_not_json_is_answered_400(shared: EngineProcess) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{shared.url}/generate", data=b"\xff{") as response,
    ):
        assert response.status == 400
        assert "JSON" in (await response.json())["error"]["message"]


async def test_an_answer_that_is_not_streamed_comes_whole(shared: EngineProcess) -> None:
    nothing = {"lora_path": None, "return_hidden_states": False}
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}, **nothing}
    async with aiohttp.ClientSession() as session, session.post(f"{shared.url}/generate", json=body) as response:
        answer = await response.json()
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == 9
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 9}
    assert answer["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 9}]


async def test_the_version_can_be_renamed_without_new_weights(shared: EngineProcess, client: EngineClient) -> None:
    async with aiohttp.ClientSession() as session:
        for version in ("8", "1"):
            async with session.post(f"{shared.url}/update_weight_version", json={"new_version": version}) as response:
                assert response.status == 200
            assert (await client.info()).version == int(version)


def refused_start(*command: str) -> str:
    """What an engine that does not start says; it must not take long and must not show a stack."""
    ended = subprocess.run(
        command, capture_output=True, timeout=60, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_a_port_in_use_is_one_line(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused_start(*engine_command(model, "--version", "0", "--port", str(port)))
    assert f"127.0.0.1:{port}" in said
    assert said.count("\n") == 1


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    said = refused_start(*engine_command(tmp_path / "none", "--version", "0"))
    assert "config.json" in said
    assert said.count("\n") == 1


def test_a_short_secret_is_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("short")
    said = refused_start(*engine_command(model, "--version", "0", "--secret-file", str(tmp_path / "secret")))
    assert "at least 16 bytes" in said
    assert said.count("\n") == 1


def test_the_client_loads_no_torch() -> None:
    code = "import sys, gyre.engine.client, gyre.kv_migrate.prefix; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
