"""An engine that says what a test wants it to say: SGLang's HTTP subset, without a model.

A fake only of the sampling, to choose outputs and to inject faults: the gateway talks to it over HTTP as to any engine.
A script maps the prompt's text to the answer's text; a request whose prompt already holds a part of the answer (a
continuation) gets the rest. Several engines may share a script.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from .model_folder import byte_tokenizer

Script = Callable[[str], str]
TURN = "<|im_start|>assistant\n"
THOUGHTLESS = "<think>\n\n</think>\n\n"
BLOCK_TOKENS = 4


class ScriptedEngine:
    def __init__(self, script: Script, version: int = 0, token_s: float = 0.0) -> None:
        self.script = script
        self.version = version
        self.token_s = token_s
        self.requests: list[dict[str, Any]] = []
        """Every /generate body, in order of arrival."""
        self.aborted: list[str] = []
        self.live: dict[str, asyncio.Event] = {}
        self.refuse_status = 0
        self.hang_up_after: int | None = None
        """Tokens after which the connection of a stream is cut, once."""
        self.made: dict[str, int] = {}
        """Tokens sent, by request."""
        self.deaf = False
        """Whether it takes orders to abort and does not follow them."""
        self.serves_kv = True
        self.held = asyncio.Event()
        """While not set, no token comes."""
        self.held.set()
        self.pulls: list[dict[str, Any]] = []
        self.pull_gates: list[asyncio.Event] = []
        """What the first pulls wait for, each for its own."""
        self._tokenizer: Tokenizer = byte_tokenizer()
        self._cached: list[list[int]] = []
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/model_info", self._info)
        app.router.add_post("/kv/lack", self._lack)
        app.router.add_post("/kv/pull", self._pull)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.refuse_status:
            return web.json_response({"error": {"message": "not now"}}, status=self.refuse_status)
        if body.get("extra_key") not in (None, str(self.version)):
            return web.json_response({"error": {"message": f"version {self.version} is served here"}}, status=409)
        prompt: list[int] = body["input_ids"]
        head, _, so_far = self.text(prompt).rpartition(TURN)
        so_far = so_far.removeprefix(THOUGHTLESS)
        answer = self.script(head)
        assert answer.startswith(so_far), f"{so_far!r} does not begin {answer!r}"
        tokens = self._tokenizer.encode(answer[len(so_far) :] + "<|im_end|>", add_special_tokens=False).ids
        limit = body["sampling_params"]["max_new_tokens"]
        cached = max((_common(prompt, known) for known in self._cached), default=0)
        cached = min(cached, len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        stop = self.live[body["rid"]] = asyncio.Event()
        made: list[int] = []
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            while True:
                await self._pause(stop)
                if stop.is_set():
                    reason: dict[str, Any] | None = {"type": "abort", "message": "Aborted"}
                    new: list[int] = []
                elif self.hang_up_after is not None and len(made) >= self.hang_up_after:
                    self.hang_up_after = None
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                else:
                    new = [tokens[len(made)]]
                    made += new
                    reason = None
                    if len(made) == len(tokens):
                        reason = {"type": "stop", "matched": tokens[-1]}
                    elif len(made) == limit:
                        reason = {"type": "length", "length": limit}
                meta = {
                    "id": body["rid"],
                    "finish_reason": reason,
                    "prompt_tokens": len(prompt),
                    "completion_tokens": len(made),
                    "cached_tokens": cached,
                    "weight_version": str(self.version),
                    "output_token_logprobs": [[-0.25, token, None] for token in new],
                }
                if reason is not None:
                    meta["weight_versions"] = [{"version": str(self.version), "start": 0, "end": len(made)}]
                    self._cached.append(prompt + made)
                payload = json.dumps({"text": "", "output_ids": new, "meta_info": meta})
                await response.write(f"data: {payload}\n\n".encode())
                self.made[body["rid"]] = len(made)
                if reason is not None:
                    await response.write(b"data: [DONE]\n\n")
                    return response
        finally:
            del self.live[body["rid"]]

    async def _pause(self, stop: asyncio.Event) -> None:
        """One token's time; longer while the engine is held, until it is let go or the request is aborted."""
        await asyncio.sleep(self.token_s)
        if self.held.is_set() or stop.is_set():
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (self.held, stop)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all"):
            self.aborted.append("*")
            for stop in self.live.values():
                stop.set()
        else:
            self.aborted.append(body["rid"])
            if body["rid"] in self.live and not self.deaf:
                self.live[body["rid"]].set()
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        kv = {"address": self.url if self.serves_kv else "", "layout": "scripted", "block_tokens": BLOCK_TOKENS}
        return web.json_response({"model_path": "scripted", "weight_version": str(self.version), "kv": kv})

    async def _lack(self, request: web.Request) -> web.Response:
        body = await request.json()
        blocks = len(body["token_ids"]) // BLOCK_TOKENS
        self._pending = body["token_ids"]
        missing = [f"{block:032x}" for block in range(blocks)]
        answer = {"version": self.version, "layout": "scripted", "blocks": blocks, "missing": missing}
        return web.json_response(answer)

    async def _pull(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.pulls.append(body)
        pending = self._pending
        if len(self.pulls) <= len(self.pull_gates):
            await self.pull_gates[len(self.pulls) - 1].wait()
        self._cached.append(pending)
        blocks = len(body["manifest"]["blocks"])
        return web.json_response({"blocks": blocks, "bytes": 10 * blocks, "seconds": 0.001, "reason": ""})


def _common(left: list[int], right: list[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
