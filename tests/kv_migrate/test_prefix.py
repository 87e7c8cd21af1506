"""Moving a prefix between two engines: what continues is what would have been, and nothing wrong is ever cached."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from aiohttp import web
from engine.processes import engine_command, engine_process
from engine.tiny_models import FAMILIES, make_model

from gyre.engine.access import http_key
from gyre.engine.client import Chunk, EngineClient, EngineRefused, GenerateRequest
from gyre.engine.local.core import EngineConfig, EngineCore
from gyre.engine.local.kv_exchange import KvExchange
from gyre.engine.local.server import EngineServer
from gyre.kv_migrate.asking import Line, open_transfer
from gyre.kv_migrate.choice import Kind
from gyre.kv_migrate.conversation import Acknowledge, Fetch, Granted
from gyre.kv_migrate.greeting import SharedSecret
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.prefix import move_prefix
from gyre.kv_migrate.tcp import TcpTransport
from kv_migrate.peers import between, certificates, need

torch.set_num_threads(1)

SECRET = b"a secret of the engines"
BLOCK = 16
LIMIT_S = 120.0


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int


@asynccontextmanager
async def serving(
    model: Path,
    *,
    version: int = 1,
    secret: bytes | None = SECRET,
    block_tokens: int = BLOCK,
    cache_tokens: int = 16384,
) -> AsyncIterator[EngineClient]:
    """A whole engine behind real sockets, in this process."""
    core = EngineCore(EngineConfig(model, version, block_tokens, cache_tokens, prompt_tokens_per_step=64))
    exchange = None if secret is None else KvExchange(await TcpTransport.open(SharedSecret(secret)), "tcp")
    server = EngineServer(core, exchange, secret or b"")
    runner = web.AppRunner(server.application(), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with EngineClient(f"http://127.0.0.1:{port}", key=(secret or b"").decode()) as client:
            yield client
    finally:
        await server.close()
        await runner.cleanup()
        if exchange is not None:
            await exchange.close()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m", request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m", "llama")


def prompt(length: int, salt: int = 0) -> list[int]:
    return [3 + (7 * i + i * i + salt * 13) % 300 for i in range(length)]


def whole_blocks(tokens: int) -> int:
    """Tokens of a sequence that can come from the cache: its last token is always computed."""
    return (tokens - 1) // BLOCK * BLOCK


def request(ids: list[int], max_new_tokens: int, *, version: int = 1, seed: int | None = None) -> GenerateRequest:
    temperature = 0.0 if seed is None else 1.0
    rid = uuid.uuid4().hex
    return GenerateRequest(rid, ids, max_new_tokens, temperature, seed=seed, version=version, ignore_eos=True)


async def sample(engine: EngineClient, wanted: GenerateRequest, stop_after: int | None = None) -> Answer:
    """The whole answer, or what there is once `stop_after` tokens have come and the request was aborted."""
    chunks: list[Chunk] = []

    async def stop() -> None:
        # Without a first token to wait for: a moment after the engine has the request, while it reads the prompt.
        if stop_after == 0:
            while not (await engine.loads()).running:  # noqa: ASYNC110 - the engine's state
                await asyncio.sleep(0)
        else:
            await enough.wait()
        await engine.abort(wanted.rid)

    enough = asyncio.Event()
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        stopping = None if stop_after is None else tasks.create_task(stop())
        async for chunk in engine.generate(wanted):
            chunks.append(chunk)
            if stop_after and sum(len(item.token_ids) for item in chunks) >= stop_after:
                enough.set()
        if stopping is not None and not enough.is_set():
            stopping.cancel()
    return Answer(
        [token for chunk in chunks for token in chunk.token_ids],
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        chunks[-1].cached_tokens,
    )


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "sampled with a seed"])
async def test_requests_stopped_anywhere_and_continued_elsewhere_are_as_if_never_stopped(
    model: Path, seeded: bool
) -> None:
    """Stopped on A at random points, during the prompt too, moved together, continued on B."""
    noise, total = random.Random(3), 120
    continued: list[int] = []

    async def stopped_and_continued(source: EngineClient, target: EngineClient, whole: Answer, index: int) -> None:
        ids, seed = prompts[index], index if seeded else None
        stop_after = noise.choice([0, 1, 15, 16, 17, 40])
        start = await sample(source, request(ids, total, seed=seed), stop_after)
        if len(start.token_ids) == total:  # on a busy machine the word to stop may come too late
            assert start.token_ids == whole.token_ids
            return
        continued.append(index)
        so_far = ids + start.token_ids
        report = await move_prefix(source, target, so_far, 1, LIMIT_S)
        if start.token_ids:
            # Stopped while it read its prompt, it leaves the blocks it had come to; else all of them.
            assert report.reason == ""
        rest = await sample(target, request(so_far, total - len(start.token_ids), seed=seed))
        assert start.token_ids + rest.token_ids == whole.token_ids
        assert start.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        if start.token_ids:
            assert rest.cached_tokens == whole_blocks(len(so_far))

    prompts = [prompt(noise.randrange(1, 300), salt=index) for index in range(7)]
    async with serving(model) as reference, serving(model) as source, serving(model) as target:
        uninterrupted = [
            await sample(reference, request(ids, total, seed=index if seeded else None))
            for index, ids in enumerate(prompts)
        ]
        async with asyncio.TaskGroup() as tasks:
            for index, whole in enumerate(uninterrupted):
                tasks.create_task(stopped_and_continued(source, target, whole, index))
    assert continued


async def test_a_move_reports_what_moved_and_moves_nothing_twice(llama: Path) -> None:
    ids = prompt(100)
    async with serving(llama) as source, serving(llama) as target:
        await sample(source, request(ids, 1))
        first = await move_prefix(source, target, ids, 1, LIMIT_S)
        assert (first.blocks, first.tokens, first.reason) == (6, 96, "")
        # 2 layers, keys and values, 2 heads of 16 floats a token.
        assert first.bytes == 6 * BLOCK * 2 * 2 * 2 * 16 * 4
        again = await move_prefix(source, target, ids, 1, LIMIT_S)
        assert (again.blocks, again.bytes, again.reason) == (0, 0, "")
        longer = ids + prompt(40, salt=1)
        await sample(source, request(longer, 1))
        assert (await move_prefix(source, target, longer, 1, LIMIT_S)).blocks == 2, "only what the target lacks"


async def test_the_block_of_the_last_token_is_not_asked_for(llama: Path) -> None:
    """The last sampled token was never read: a prefix that ends with its block lacks that block's KV everywhere."""
    ids = prompt(40)
    async with serving(llama) as source, serving(llama) as target:
        answer = await sample(source, request(ids, 8))
        report = await move_prefix(source, target, ids + answer.token_ids, 1, LIMIT_S)
        assert (report.blocks, report.reason) == (2, "")
        assert (await move_prefix(source, target, [5], 1, LIMIT_S)).reason == ""


async def test_kv_of_another_version_is_refused_and_recomputed(llama: Path, tmp_path: Path) -> None:
    """C14: migration of version-1 KV to a version-2 engine."""
    other = make_model(tmp_path / "other", "llama", seed=5)
    ids = prompt(100)
    async with serving(llama) as source, serving(other, version=2) as target:
        await sample(source, request(ids, 4))
        before = await sample(target, request(ids, 10, version=2))
        await target.flush_cache()
        for version in (1, 2):
            report = await move_prefix(source, target, ids, version, LIMIT_S)
            assert report.blocks == 0
            assert "version" in report.reason
        after = await sample(target, request(ids, 10, version=2))
        assert after.cached_tokens == 0
        assert after.token_ids == before.token_ids


async def test_kv_of_other_weights_is_refused_though_their_version_is_the_same(llama: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "llama", seed=5)
    ids = prompt(100)
    async with serving(llama) as source, serving(other) as target, serving(llama) as twin:
        await sample(source, request(ids, 4))
        alone = await sample(target, request(ids, 10))
        await target.flush_cache()
        report = await move_prefix(source, target, ids, 1, LIMIT_S)
        assert (report.blocks, "model" in report.reason) == (0, True)
        assert await sample(target, request(ids, 10)) == alone
        await target.update_weights(str(llama), 1)
        for receiver in (target, twin):
            assert (await move_prefix(source, receiver, ids, 1, LIMIT_S)).blocks == 6, "what counts is what they are"


async def test_engines_of_another_layout_exchange_nothing(llama: Path) -> None:
    ids = prompt(100)
    async with serving(llama) as source, serving(llama, block_tokens=8) as target:
        await sample(source, request(ids, 4))
        report = await move_prefix(source, target, ids, 1, LIMIT_S)
        assert report.blocks == 0
        assert "layouts differ" in report.reason


async def test_what_the_source_has_lost_is_recomputed(llama: Path) -> None:
    ids = prompt(100)
    async with serving(llama) as source, serving(llama) as target:
        whole = await sample(source, request(ids, 10))
        await source.flush_cache()
        await sample(source, request(ids[:50], 1))
        report = await move_prefix(source, target, ids, 1, LIMIT_S)
        assert report.blocks == 3
        assert report.reason == "3 of 6 blocks were gone or found no room"
        answer = await sample(target, request(ids, 10))
        assert answer.cached_tokens == 48
        assert answer.token_ids == whole.token_ids


async def test_a_target_without_room_recomputes_and_the_source_goes_on(llama: Path) -> None:
    ids = prompt(200)
    async with serving(llama) as source, serving(llama, cache_tokens=256) as target:
        whole = await sample(source, request(ids, 10))
        # A live request holds half of the target's memory.
        busy = target.generate(request(prompt(100, salt=9), 60))
        await anext(busy)
        await target.pause("in_place")
        report = await move_prefix(source, target, ids, 1, LIMIT_S)
        assert 0 < report.blocks < 12
        assert "no room" in report.reason
        await target.resume()
        assert (await sample(target, request(ids, 10))).token_ids == whole.token_ids
        assert (await sample(source, request(ids, 10))).token_ids == whole.token_ids
        await busy.aclose()


@pytest.mark.parametrize("secret", [None, b"another secret entirely"], ids=["none", "another"])
async def test_engines_that_do_not_share_a_secret_exchange_nothing(llama: Path, secret: bytes | None) -> None:
    ids = prompt(100)
    async with serving(llama) as source, serving(llama, secret=secret) as target:
        await sample(source, request(ids, 4))
        for one, two in ((source, target), (target, source)):
            report = await move_prefix(one, two, ids, 1, LIMIT_S)
            assert report.blocks == 0
        assert (await sample(target, request(ids, 1))).cached_tokens == 0


async def test_memory_can_be_released_right_after_a_move_and_then_nothing_moves(llama: Path) -> None:
    ids = prompt(300)
    async with serving(llama) as source, serving(llama) as target:
        for salt in range(5):
            await source.resume_memory()
            await source.update_weights(str(llama), 1)
            await sample(source, request(prompt(300, salt), 1))
            assert (await move_prefix(source, target, prompt(300, salt), 1, LIMIT_S)).blocks == 18
            await source.release_memory()
        report = await move_prefix(source, target, prompt(301, salt=77), 1, LIMIT_S)
        assert (report.blocks, "released" in report.reason) == (0, True)
        report = await move_prefix(target, source, ids, 1, LIMIT_S)
        assert (report.blocks, "released" in report.reason) == (0, True)


async def test_a_source_that_is_frozen_or_killed_is_given_up(llama: Path, tmp_path: Path) -> None:
    ids = prompt(200)
    (tmp_path / "secret").write_bytes(SECRET)
    with engine_process(tmp_path / "source", llama, "--secret-file", str(tmp_path / "secret")) as process:
        async with EngineClient(process.url, key=http_key(SECRET.decode())) as source, serving(llama) as target:
            whole = await sample(source, request(ids, 10))
            info = await source.info()
            process.signal(signal.SIGSTOP)
            frozen = await move_prefix(source, target, ids, 1, LIMIT_S, silence_s=0.45)
            assert (frozen.blocks, frozen.reason) == (0, f"{process.url} said nothing for 0.45 s")
            again = await move_prefix(source, target, ids, 1, LIMIT_S, silence_s=0.45)
            assert (again.blocks, again.reason) == (0, f"{process.url} said nothing a moment ago and is left alone")
            # Its blocks can be asked for directly as well: the pull has a deadline of its own.
            lack = await target.kv_lack(ids, 1)
            manifest = Manifest("t", info.kv_epoch, info.kv_model, 1, lack.layout, lack.missing)
            pulled = await target.kv_pull(process.kv_address, manifest, 0.3)
            assert (pulled.blocks, "within 0.3 s" in pulled.reason) == (0, True)
            process.signal(signal.SIGCONT)
            os.kill(process.process.pid, signal.SIGKILL)
            process.process.wait(LIMIT_S)
            async with EngineClient(process.url, key=http_key(SECRET.decode())) as unaware:
                killed = await move_prefix(unaware, target, ids, 1, LIMIT_S)
            assert (killed.blocks, "Connect call failed" in killed.reason) == (0, True), killed.reason
            answer = await sample(target, request(ids, 10))
            assert answer.cached_tokens == 0
            assert answer.token_ids == whole.token_ids


@asynccontextmanager
async def source_engine(folder: Path, model: Path, *options: str) -> AsyncIterator[EngineClient]:
    """An engine in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "secret").write_bytes(SECRET)
    with engine_process(folder, model, "--secret-file", str(folder / "secret"), *options) as process:
        async with EngineClient(process.url, key=http_key(SECRET.decode())) as client:
            yield client


async def about(source: EngineClient, target: EngineClient, ids: list[int]) -> Manifest:
    info, lack = await source.info(), await target.kv_lack(ids[:-1], 1)
    return Manifest(uuid.uuid4().hex, info.kv_epoch, info.kv_model, 1, lack.layout, lack.missing)


async def fetch(line: Line, wanted: Manifest, count: int) -> bytes:
    await line.ask(Fetch(wanted.transfer, wanted.epoch, 0, count), Granted)
    return await (await line.stream()).receive(count)


async def test_blocks_that_a_peer_reads_are_not_evicted_however_much_else_the_source_has_to_hold(
    llama: Path, tmp_path: Path
) -> None:
    ids = prompt(200)
    async with source_engine(tmp_path / "s", llama, "--cache-tokens", "512") as source, serving(llama) as target:
        whole = await sample(source, request(ids, 1))
        address = (await source.info()).kv_address
        first, second = (Line(Kind.TCP, address, SharedSecret(SECRET)) for _ in range(2))
        wanted = await about(source, target, ids)
        offer = await open_transfer(first, wanted, Kind.TCP, LIMIT_S)
        assert not offer.missing
        size = offer.block_bytes * len(wanted.blocks)
        before = await fetch(first, wanted, size)
        again = replace(wanted, transfer="again")
        await open_transfer(second, again, Kind.TCP, LIMIT_S)
        await (await first.stream()).send_frame(Acknowledge(wanted.transfer, wanted.epoch))
        for salt in range(1, 6):
            await sample(source, request(prompt(200, salt), 20))
        assert await fetch(second, again, size) == before
        await (await second.stream()).send_frame(Acknowledge("again", again.epoch))
        for salt in range(6, 11):
            await sample(source, request(prompt(200, salt), 20))
        first.close()
        second.close()
        assert len((await source.kv_lack(ids[:-1], 1)).missing) == 12, "once nobody reads them they make room"
        report = await move_prefix(source, target, ids, 1, LIMIT_S)
        assert (report.blocks, report.reason) == (0, "12 of 12 blocks were gone or found no room")
        assert (await sample(target, request(ids, 1))).token_ids == whole.token_ids


async def test_a_block_that_comes_damaged_is_recomputed(llama: Path, tmp_path: Path) -> None:
    ids = prompt(200)
    async with source_engine(tmp_path / "s", llama) as source, serving(llama) as target:
        whole = await sample(source, request(ids, 10))

        def damage(data: bytes, offset: int) -> bytes:
            changed = bytearray(data)
            if offset <= 30_000 < offset + len(data):
                changed[30_000 - offset] ^= 0x10
            return bytes(changed)

        async with between((await source.info()).kv_address, damage) as address:
            pulled = await target.kv_pull(address, await about(source, target, ids), LIMIT_S)
            assert (pulled.blocks, pulled.damaged, pulled.reason) == (11, 1, "")
        answer = await sample(target, request(ids, 10))
        assert (answer.token_ids, answer.cached_tokens) == (whole.token_ids, 48)


async def test_a_pull_that_is_cancelled_anywhere_commits_whole_blocks_or_none(llama: Path, tmp_path: Path) -> None:
    """Whoever asks goes away at a random moment: the engine's memory is its own again, and holds nothing wrong."""
    ids = prompt(300)
    noise = random.Random(2)
    async with source_engine(tmp_path / "s", llama) as source, serving(llama) as target:
        whole = await sample(source, request(ids, 10))
        address = (await source.info()).kv_address
        for _ in range(12):
            pulling = asyncio.ensure_future(target.kv_pull(address, await about(source, target, ids), LIMIT_S))
            await asyncio.sleep(noise.random() * 0.02)
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
            assert (await sample(target, request(ids, 10))).token_ids == whole.token_ids
            await target.release_memory()
            await target.resume_memory()
            await target.update_weights(str(llama), 1)
        await source.release_memory()


@pytest.mark.parametrize("seed", range(3))
async def test_a_source_killed_at_any_byte_costs_a_recompute(llama: Path, tmp_path: Path, seed: int) -> None:
    ids = prompt(300)
    at = random.Random(seed).randrange(18 * 8192)
    (tmp_path / "secret").write_bytes(SECRET)
    with engine_process(tmp_path / "s", llama, "--secret-file", str(tmp_path / "secret")) as process:
        async with EngineClient(process.url, key=http_key(SECRET.decode())) as source, serving(llama) as target:
            whole = await sample(source, request(ids, 10))
            wanted = await about(source, target, ids)

            def kill(data: bytes, offset: int) -> bytes | None:
                if offset + len(data) <= at:
                    return data
                process.signal(signal.SIGKILL)
                return None

            async with between(process.kv_address, kill) as address:
                pulled = await target.kv_pull(address, wanted, LIMIT_S)
            assert (pulled.blocks, "was lost" in pulled.reason) == (0, True)
            answer = await sample(target, request(ids, 10))
            assert (answer.token_ids, answer.cached_tokens) == (whole.token_ids, 0)


async def test_what_a_stopped_source_sends_when_it_goes_on_lands_nowhere(llama: Path, tmp_path: Path) -> None:
    """Stopped at any byte of a move; meanwhile the target has used its memory for something else."""
    ids, others = prompt(300), prompt(300, salt=1)
    noise = random.Random(4)
    (tmp_path / "secret").write_bytes(SECRET)
    with engine_process(tmp_path / "s", llama, "--secret-file", str(tmp_path / "secret")) as process:
        async with EngineClient(process.url, key=http_key(SECRET.decode())) as source, serving(llama) as target:
            whole, other = await sample(source, request(ids, 10)), await sample(source, request(others, 10))
            for _ in range(3):
                at = noise.randrange(18 * 8192)

                def stop(data: bytes, offset: int, at: int = at) -> bytes:
                    if offset <= at < offset + len(data):
                        process.signal(signal.SIGSTOP)
                    return data

                wanted = await about(source, target, ids)
                async with between(process.kv_address, stop) as address:
                    pulled = await target.kv_pull(address, wanted, 0.5)
                    assert (pulled.blocks, "within 0.5 s" in pulled.reason) == (0, True)
                    # The staging memory of a pull that failed is not used again; that of the engine is.
                    before = await sample(target, request(others, 10))
                    process.signal(signal.SIGCONT)
                    assert (await move_prefix(source, target, ids, 1, LIMIT_S)).blocks == 18
                after = [await sample(target, request(others, 10)), await sample(target, request(ids, 10))]
                assert [before.token_ids, *(answer.token_ids for answer in after)] == [
                    other.token_ids,
                    other.token_ids,
                    whole.token_ids,
                ]
                assert [answer.cached_tokens for answer in after] == [whole_blocks(len(ids))] * 2
                await target.flush_cache()


async def test_several_moves_of_the_same_blocks_at_once_bring_them_and_what_a_request_waits_for_goes_first(
    llama: Path, tmp_path: Path
) -> None:
    ids = prompt(600)
    async with source_engine(tmp_path / "s", llama) as source, serving(llama) as target:
        whole = await sample(source, request(ids, 10))
        assert (await move_prefix(source, target, ids, 1, LIMIT_S, 1e9)).blocks == 37
        await target.flush_cache()
        address = (await source.info()).kv_address
        # At a byte a second what does not come at once takes days.
        resting = asyncio.ensure_future(target.kv_pull(address, await about(source, target, ids), LIMIT_S, 1.0))
        reports = await asyncio.gather(*(move_prefix(source, target, ids, 1, LIMIT_S) for _ in range(3)))
        assert [report.reason for report in reports] == [""] * 3
        assert max(report.blocks for report in reports) == 37
        assert not resting.done()
        answer = await sample(target, request(ids, 10))
        assert (answer.token_ids, answer.cached_tokens) == (whole.token_ids, whole_blocks(len(ids)))
        resting.cancel()
        await asyncio.gather(resting, return_exceptions=True)
        await target.flush_cache()
        late = await target.kv_pull(address, await about(source, target, ids), 0.3, 1.0)
        assert (late.blocks, "within 0.3 s" in late.reason) == (0, True)
        await source.release_memory()


@pytest.mark.parametrize("bytes_s", [-1, 0.5, "8", True, None])
async def test_a_rate_that_cannot_be_is_refused(llama: Path, bytes_s: object) -> None:
    async with serving(llama) as engine:
        wanted = Manifest("t", 1, "m", 1, "l", (bytes(16),))
        with pytest.raises(EngineRefused, match="bytes_s"):
            await engine.kv_pull("tcp:127.0.0.1:1", wanted, 1.0, bytes_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["certificates", "mooncake-tcp"])
async def test_engines_move_kv_over_certificates_and_over_mooncake(llama: Path, tmp_path: Path, way: str) -> None:
    ids = prompt(200)
    options: dict[str, list[str]] = {"a": ["--kv-transport", way], "b": ["--kv-transport", way]}
    if way == "certificates":
        certificates(tmp_path, "a", "b")
        for node in options:
            options[node] = [
                "--certificates",
                *(str(tmp_path / file) for file in ("ca.pem", f"{node}.pem", f"{node}.key")),
            ]
    else:
        need(Kind.MOONCAKE_TCP)
    async with (
        source_engine(tmp_path / "s", llama, *options["a"]) as source,
        source_engine(tmp_path / "t", llama, *options["b"]) as target,
        serving(llama) as outsider,
    ):
        whole = await sample(source, request(ids, 10))
        kind = "tcp" if way == "certificates" else way
        assert (await source.info()).kv_carrier.startswith(f"{kind}: ")
        assert (await move_prefix(source, outsider, ids, 1, 3.0)).blocks == 0
        report = await move_prefix(source, target, ids, 1, LIMIT_S)
        assert (report.blocks, report.reason) == (12, "")
        answer = await sample(target, request(ids, 10))
        assert (answer.token_ids, answer.cached_tokens) == (whole.token_ids, whole_blocks(len(ids)))


def test_an_engine_that_cannot_have_the_transport_it_was_given_says_so_and_ends(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    options = ("--version", "1", "--secret-file", str(tmp_path / "secret"), "--kv-transport", "mooncake")
    ended = subprocess.run(
        engine_command(llama, *options), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 2
    assert "transport: 'mooncake' is not allowed; it needs an RDMA device" in ended.stderr
