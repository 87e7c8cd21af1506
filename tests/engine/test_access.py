"""Who may use an engine: with a secret file, only who sends the key made of it; to all others it says that it is up, no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from gyre.engine.access import http_key
from gyre.engine.client import Chunk, EngineClient, EngineRefused, GenerateRequest
from gyre.engine.records import Loads
from gyre.kv_migrate.manifest import Manifest

from .processes import LIMIT_S, EngineProcess, engine_process
from .tiny_models import make_model

SECRET = "the-secret-of-one-job-0123456789"
KEY = http_key(SECRET)
PROMPT = list(range(5, 45))

ENDPOINTS: dict[str, tuple[str, Any]] = {
    "/generate": ("POST", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}),
    "/abort_request": ("POST", {"abort_all": True}),
    "/pause_generation": ("POST", {"mode": "abort"}),
    "/continue_generation": ("POST", {}),
    "/update_weights_from_disk": ("POST", {"model_path": "", "weight_version": "9", "abort_all_requests": True}),
    "/update_weight_version": ("POST", {"new_version": "9"}),
    "/flush_cache": ("POST", {}),
    "/release_memory_occupation": ("POST", {}),
    "/resume_memory_occupation": ("POST", {}),
    "/kv/lack": ("POST", {"token_ids": PROMPT, "version": 1}),
    "/kv/pull": ("POST", {"source": "127.0.0.1:1", "manifest": Manifest("t", 1, "m", 1, "x", ()).to_json()}),
    "/model_info": ("GET", None),
    "/v1/loads": ("GET", None),
}

WRONG: dict[str, str | None] = {
    "nothing": None,
    "an empty key": "Bearer ",
    "another key": "Bearer another-secret-of-another-job-01",
    "a part of the key": f"Bearer {KEY[:-1]}",
    "more than the key": f"Bearer {KEY}0",
    "the secret itself": f"Bearer {SECRET}",
    "the bare key": KEY,
    "another scheme": f"Basic {KEY}",
    "no text": "Bearer \u00e9\u00e9",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "secret").write_text(f"{SECRET}\n")
    model = make_model(folder / "m", "llama")
    with engine_process(folder / "run", model, "--secret-file", str(folder / "secret")) as process:
        yield process


@pytest.fixture
async def client(engine: EngineProcess) -> AsyncIterator[EngineClient]:
    async with EngineClient(engine.url, key=KEY) as client:
        yield client


async def answer(engine: EngineProcess, path: str, given: str | None) -> tuple[int, Any]:
    method, body = ENDPOINTS[path]
    if path == "/update_weights_from_disk":
        body = {**body, "model_path": str(engine.model)}
    headers = {} if given is None else {"Authorization": given}
    async with (
        asyncio.timeout(LIMIT_S),
        aiohttp.ClientSession() as session,
        session.request(method, engine.url + path, json=body, headers=headers) as response,
    ):
        text = await response.text()
        return response.status, await response.json() if text.startswith("{") else text


async def chunks_of(client: EngineClient, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in client.generate(request)]


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG.keys())
async def test_without_the_key_every_endpoint_answers_401_and_nothing_changes(
    engine: EngineProcess, client: EngineClient, given: str | None
) -> None:
    # Paused before it comes, so that it is there for as long as all of them take, however quick the engine is.
    await client.pause("in_place")
    live = asyncio.create_task(
        chunks_of(client, GenerateRequest("live", PROMPT, 400, temperature=0.0, ignore_eos=True, version=1))
    )
    async with asyncio.timeout(LIMIT_S):
        while True:
            if (await client.loads()).waiting:
                break
            await asyncio.sleep(0.01)
        for path in ENDPOINTS:
            assert await answer(engine, path, given) == (401, {"error": {"message": "Unauthorized"}}), path
        assert await client.loads() == Loads(running=0, waiting=1), "the live request is not touched"
        await client.resume()
        chunks = await live
    assert chunks[-1].finish is not None
    assert chunks[-1].finish.kind == "length"
    assert sum(len(chunk.token_ids) for chunk in chunks) == 400
    assert (await client.info()).version == 1
    assert (await client.kv_lack(PROMPT, 1)).missing == (), "its KV is still there"


async def test_what_is_no_endpoint_is_not_told_either(engine: EngineProcess) -> None:
    async with aiohttp.ClientSession() as session:
        for method, path in (("GET", "/"), ("GET", "/nothing"), ("GET", "/generate"), ("POST", "/health")):
            async with session.request(method, engine.url + path) as response:
                assert response.status == 401, path


async def test_health_says_to_everybody_that_the_engine_is_up_and_no_more(engine: EngineProcess) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/health") as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_a_client_without_the_key_is_refused(engine: EngineProcess) -> None:
    for key in ("", "another-secret-of-another-job-01"):
        async with EngineClient(engine.url, key=key) as client:
            await client.health()
            for call in (client.abort_all, client.pause, client.release_memory, client.info, client.loads):
                with pytest.raises(EngineRefused) as refusal:
                    await call()
                assert refusal.value.status == 401
            with pytest.raises(EngineRefused) as refusal:
                await anext(client.generate(GenerateRequest("r", PROMPT, 4)))
            assert refusal.value.status == 401


async def test_with_the_key_everything_works(engine: EngineProcess, client: EngineClient) -> None:
    async with asyncio.timeout(LIMIT_S):
        await client.abort_all()
        await client.pause()
        await client.resume()
        await client.release_memory()
        await client.resume_memory()
        await client.update_weights(str(engine.model), 2)
        assert (await client.info()).version == 2
        await client.update_weights(str(engine.model), 1)
        await client.flush_cache()
        request = GenerateRequest("r", PROMPT, 20, temperature=0.0, ignore_eos=True, version=1)
        chunks = [chunk async for chunk in client.generate(request)]
        assert sum(len(chunk.token_ids) for chunk in chunks) == 20
        assert (await client.loads()).running == 0
        lack = await client.kv_lack(PROMPT, 1)
        assert (lack.blocks, lack.missing) == (2, ())


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_the_key_opens_each_endpoint(engine: EngineProcess, client: EngineClient, path: str) -> None:
    try:
        status, said = await answer(engine, path, f"Bearer {KEY}")
        assert status == 200, said
    finally:
        await client.resume()
        await client.resume_memory()
        await client.update_weights(str(engine.model), 1)
