"""What an engine's owner may ask of SGLang, and what its client asks before: SGLang itself would die of it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from engine.conftest import EngineUnderTest
from engine.contract import LONG, Live, new_rid
from transformers import AutoModelForCausalLM

from gyre.config import EngineSection
from gyre.engine.client import EngineClient, EngineRefused
from gyre.engine.http import Origin
from gyre.engine.sglang.command import command, environment
from gyre.engine.sglang.control import SglangClient

from .servers import CELLS, KEY, PYTHON, Server, engine_section

LONGEST = 1900
"""Tokens of an answer that is still being sampled when the test has asked: all that the context has room for."""


@pytest.fixture
async def owner(server: Server) -> AsyncIterator[SglangClient]:
    """One that is told soon that a request goes on."""
    async with SglangClient(server.url, key=KEY, idle_s=0.2) as client:
        yield client


async def test_memory_is_not_released_under_a_request_which_goes_on(
    engine: EngineUnderTest, server: Server, owner: SglangClient
) -> None:
    async with Live(engine, engine.request(new_rid(), 60, max_new_tokens=LONGEST), first=5) as live:
        with pytest.raises(EngineRefused) as refusal:
            await owner.release_memory()
        assert refusal.value.status == 400
        await live.has(len(live.token_ids) + 1)
    assert server.alive


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_memory_is_not_released_under_a_request_that_is_paused(
    engine: EngineUnderTest, server: Server, owner: SglangClient, mode: str
) -> None:
    async with Live(engine, engine.request(new_rid(), 60, max_new_tokens=LONGEST), first=5) as live:
        await engine.client.pause(mode)  # type: ignore[arg-type]
        with pytest.raises(EngineRefused):
            await owner.release_memory()
        await engine.client.resume()
        await live.has(len(live.token_ids) + 1)
    assert server.alive


async def test_a_request_that_comes_while_the_memory_is_released_waits_until_it_is_back(
    engine: EngineUnderTest,
) -> None:
    before = await engine.run(engine.request(new_rid()))
    await engine.client.release_memory()
    async with Live(engine, engine.request(new_rid()), first=0) as early:
        await asyncio.sleep(0.3)
        assert early.token_ids == []
        await engine.client.resume_memory()
        assert (await early.answer()).token_ids == before.token_ids


async def test_memory_is_released_right_behind_the_last_token(engine: EngineUnderTest, server: Server) -> None:
    for stopped in (False, True) * 3:
        async with Live(engine, engine.request(new_rid(), max_new_tokens=LONG if stopped else 8), first=1) as live:
            await (live.aborted() if stopped else live.answer())
        await engine.client.release_memory()
        await engine.client.resume_memory()
    assert server.alive


async def test_weights_do_not_change_under_a_live_request(engine: EngineUnderTest, owner: SglangClient) -> None:
    async with Live(engine, engine.request(new_rid(), 60, max_new_tokens=LONGEST), first=5) as live:
        with pytest.raises(EngineRefused):
            await owner.update_weights(str(engine.other_model), 2)
        assert (await engine.client.info()).version == 1
        await live.has(len(live.token_ids) + 1)
        (span,) = (await live.aborted()).last.version_spans
        assert (span.version, span.start) == (1, 0)


async def test_logprobs_are_the_models_own_at_the_temperature_that_was_sampled_with(engine: EngineUnderTest) -> None:
    model = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
    for temperature in (0.0, 0.7, 1.5):
        request = engine.request(new_rid(), 40, max_new_tokens=30, temperature=temperature, top_p=0.9)
        answer = await engine.run(request)
        prompt = list(request.input_ids)  # type: ignore[arg-type]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, torch.tensor([answer.token_ids]).T)
        assert torch.allclose(torch.tensor(answer.logprobs), expected[:, 0], atol=2e-4), temperature


def test_the_command_line_for_gpus_is_one_that_it_knows(server: Server, tmp_path: Path) -> None:
    """As far as that can be known without a GPU."""
    section = EngineSection(kind="sglang", python=str(PYTHON), tensor_parallel=4)
    rest = {"host": "127.0.0.1", "port": 30000, "secrets": tmp_path / "secrets", "place": 1, "kv": None}
    argv = command(section, CELLS, python=section.python, model=server.model, version=3, **rest)  # type: ignore[arg-type]
    program = (
        "import argparse, json, sys; from sglang.srt.server_args import ServerArgs; "
        "parser = argparse.ArgumentParser(allow_abbrev=False); ServerArgs.add_cli_args(parser); "
        "read = parser.parse_args(json.loads(sys.argv[1])); "
        "print(read.tp_size, read.base_gpu_id, read.enable_memory_saver, read.weight_version)"
    )
    env = environment(engine_section(), CELLS, os.environ)
    said = subprocess.run(
        [str(PYTHON), "-c", program, json.dumps(argv[3:])], env=env, capture_output=True, text=True, cwd=tmp_path
    )
    assert said.stdout.splitlines()[-1:] == ["4 4 True 3"], said.stderr


async def test_it_answers_nothing_without_the_key(server: Server, engine: EngineUnderTest) -> None:
    async with EngineClient(server.url, key="another") as stranger:
        for asking in (stranger.info(), stranger.abort_all(), stranger.flush_cache(), stranger.pause()):
            with pytest.raises(EngineRefused) as refusal:
                await asking
            assert refusal.value.status == 401
    assert KEY not in server.log.read_text()
    assert KEY.encode() not in Path(f"/proc/{server.process.pid}/cmdline").read_bytes()


async def test_its_metrics_are_there(server: Server, engine: EngineUnderTest) -> None:
    await engine.run(engine.request(new_rid(), 40, max_new_tokens=12))
    origin = Origin(server.url, {"Authorization": f"Bearer {KEY}"}, 5.0)
    async with origin.ask("GET", "/metrics", ()) as answer:
        text = (await answer.whole()).decode()
    origin.close()
    for name in ("sglang:generation_tokens_total", "sglang:num_running_reqs", "sglang:cache_hit_rate"):
        assert f"\n{name}{{" in text, name
