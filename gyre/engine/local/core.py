"""The engine without threads and sockets: continuous batching over a paged prefix cache.

`step` runs one forward pass over everything that is live and samples one token for each sequence that has its whole
prompt in memory. All other methods act between two steps. Outputs gather in `take_outputs`.

Every whole block is published the moment it is full, so a request that shares a prefix, or a peer that takes a live
request over, finds it at once. Block names hold the weights' version: KV of one version is never read by another.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch

from gyre.engine.local.block_store import BlockStore
from gyre.engine.local.decode_window import DecodeWindow
from gyre.engine.local.forward import Part, forward
from gyre.engine.local.requests import FinishReason, Load, Output, SampleRequest
from gyre.engine.local.sampling import Draw, Sampler, sample
from gyre.engine.local.sequence import Sequence
from gyre.engine.local.shape import read_shape
from gyre.engine.local.weights import Weights, digest, load_weights
from gyre.engine.records import PauseMode
from gyre.errors import BadInput, Refused
from gyre.kv_migrate.blocks import block_hashes, next_hash, root_hash


@dataclass(frozen=True)
class EngineConfig:
    model: Path
    version: int
    block_tokens: int = 16
    cache_tokens: int = 65536
    max_running: int = 64
    """Sequences in one batch; more wait."""
    prompt_tokens_per_step: int = 512
    """Longer prompts are computed in pieces, so that sequences that decode are not held up."""
    dtype: torch.dtype = torch.float32


class EngineCore:
    """Not thread-safe: one thread owns it."""

    def __init__(self, config: EngineConfig, sampler: Sampler = sample) -> None:
        self._config = config
        self._sampler = sampler
        self.shape = read_shape(config.model)
        self.model_path = config.model
        weights = load_weights(config.model, self.shape, config.dtype)
        self._weights: Weights | None = weights
        self.store = BlockStore(
            self.shape,
            digest(weights),
            config.version,
            config.cache_tokens // config.block_tokens,
            config.block_tokens,
            config.dtype,
        )
        self.context_tokens = min(self.shape.context_tokens, self.store.blocks * config.block_tokens)
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._by_rid: dict[str, Sequence] = {}
        self._outputs: list[Output] = []
        self._paused = False
        self._admissions = 0
        self._window = DecodeWindow(self.shape, config.dtype)

    # ------------------------------------------------------------------------------------------ requests

    def submit(self, request: SampleRequest) -> None:
        """Queue a request. Raises BadInput when it cannot be served, Refused when the memory is released."""
        if request.rid in self._by_rid:
            raise BadInput("rid", request.rid, "it must not be that of a live request")
        if self.store.memory is None or self._weights is None:
            raise Refused("the engine's memory is released; resume it and update its weights first")
        highest = max(request.input_ids)
        if highest >= self.shape.vocab_size:
            raise BadInput("input_ids", highest, f"token ids are below {self.shape.vocab_size}")
        room = self.context_tokens - len(request.input_ids)
        if room < 1:
            raise BadInput(
                "input_ids",
                f"{len(request.input_ids)} tokens",
                f"the input must be shorter than the model's context length ({self.context_tokens} tokens)",
            )
        seed = secrets.randbits(63) if request.seed is None else request.seed
        sequence = Sequence(request, min(request.max_new_tokens, room), seed)
        self._by_rid[request.rid] = sequence
        self._waiting.append(sequence)

    def abort(self, rid: str) -> None:
        """End a request where it stands. Works at any time, also while paused; an unknown rid is no error."""
        sequence = self._by_rid.get(rid)
        if sequence is not None:
            self._finish(sequence, FinishReason("abort", message="Aborted"))

    def abort_all(self) -> None:
        for sequence in list(self._by_rid.values()):
            self._finish(sequence, FinishReason("abort", message="Aborted"))

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def has_work(self) -> bool:
        return bool(self._by_rid) and not self._paused

    @property
    def load(self) -> Load:
        return Load(len(self._running), len(self._waiting))

    @property
    def version(self) -> int:
        return self.store.version

    # ------------------------------------------------------------------------------------------ one step

    def step(self) -> bool:
        """One forward pass. False when nothing could be done now (all blocks are held)."""
        memory, weights = self.store.memory, self._weights
        if not self.has_work or memory is None or weights is None:
            return False
        self._make_room()
        self._admit()
        planned = self._plan()
        if not planned:
            return False
        with torch.inference_mode():
            decodes = [part for part in planned if len(part.token_ids) == 1]
            decodes = [decodes[index] for index in self._window.arrange(memory, decodes)]
            prompts = [part for part in planned if len(part.token_ids) > 1]
            logits = forward(self.shape, weights, memory, self._window, decodes, prompts)
            done: list[Sequence] = []
            by_owner = {sequence.admission: sequence for sequence in self._running}
            for part in [*decodes, *prompts]:
                sequence = by_owner[part.owner]
                sequence.computed += len(part.token_ids)
                self._name_whole_blocks(sequence)
                if part.wants_logits:
                    done.append(sequence)
            if done:
                self._sample(done, logits)
        return True

    def _make_room(self) -> None:
        """Give every running sequence the block its next token goes to; the youngest make way when there are none."""
        for sequence in list(self._running):
            if sequence not in self._running:
                continue
            while not self._grow(sequence, sequence.computed + 1):
                youngest = self._running[-1]
                self._retract(youngest)
                if youngest is sequence:
                    break

    def _admit(self) -> None:
        """Start waiting sequences, oldest first, while there is room in the batch, the step and the memory."""
        budget = self._config.prompt_tokens_per_step - sum(s.pending for s in self._running if s.pending > 1)
        coming: set[bytes] = set()
        for sequence in self._running:
            if sequence.pending > 1:
                coming.update(self._names(sequence)[len(sequence.names) :])
        for sequence in list(self._waiting):
            if budget <= 0 or len(self._running) >= self._config.max_running:
                return
            names = self._names(sequence)
            missing = next((name for name in names if name not in self.store.index), None)
            if missing in coming:
                # Another sequence is computing the same block: it is cheaper to wait a step and share it.
                continue
            if not self._start(sequence, names):
                return
            coming.update(names[len(sequence.names) :])
            budget -= sequence.pending

    def _start(self, sequence: Sequence, names: Seq[bytes]) -> bool:
        blocks = self.store.index.match(names)
        sequence.blocks = blocks
        sequence.names = list(names[: len(blocks)])
        sequence.computed = len(blocks) * self._config.block_tokens
        sequence.publishes = True
        if not self._grow(sequence, len(sequence.tokens)):
            self._drop_blocks(sequence)
            return False
        if not sequence.sampled:
            sequence.cached_tokens = sequence.computed
        self._waiting.remove(sequence)
        self._running.append(sequence)
        self._admissions += 1
        sequence.admission = self._admissions
        return True

    def _plan(self) -> list[Part]:
        """What each running sequence contributes to this step: its next token, or a piece of its prompt."""
        budget = self._config.prompt_tokens_per_step
        parts: list[Part] = []
        for sequence in self._running:
            pending, start = sequence.pending, sequence.computed
            count = min(pending, budget) if pending > 1 else 1
            if count == 1 and pending > 1:
                # A piece of one token would pass for a decode; the next step has room for more.
                continue
            if count > 1:
                budget -= count
            if count:
                tokens = sequence.tokens[start : start + count]
                parts.append(Part(sequence.admission, tokens, start, sequence.blocks, count == pending))
        return parts

    def _sample(self, sequences: Seq[Sequence], logits: torch.Tensor) -> None:
        draws = [Draw(s.request.temperature, s.request.top_p, s.request.top_k, s.seed, s.tokens) for s in sequences]
        tokens, logprobs = self._sampler(logits, draws)
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                self._finish(sequence, FinishReason("abort", message="the model's logits are not finite"))
                # What is masked away is still multiplied by 0, and 0 * NaN is NaN: let no such KV lie about.
                self._window.clear()
                continue
            sequence.add(token, self.version)
            finish = self._why_finished(sequence, token)
            if finish is not None:
                self._finish(sequence, finish, (token,), (logprob,))
            else:
                self._outputs.append(sequence.output((token,), (logprob,), self.version, None))

    def _why_finished(self, sequence: Sequence, token: int) -> FinishReason | None:
        request = sequence.request
        if token in request.stop_token_ids or (not request.ignore_eos and token in self.shape.eos_token_ids):
            return FinishReason("stop", matched=token)
        if sequence.sampled >= sequence.max_new_tokens:
            return FinishReason("length", length=sequence.sampled)
        return None

    # ------------------------------------------------------------------------------------------ blocks

    def _names(self, sequence: Sequence) -> list[bytes]:
        """The names of the blocks that the sequence could take from the cache: all whole ones before its last token."""
        width = self._config.block_tokens
        key = (self.version, (len(sequence.tokens) - 1) // width)
        if sequence.wanted_key != key:
            sequence.wanted_key = key
            sequence.wanted = block_hashes(sequence.tokens[: key[1] * width], self.version, width, self._salt(sequence))
        return sequence.wanted

    def _salt(self, sequence: Sequence) -> str:
        """A key that is not the version gets a name space of its own: a miss, never the KV of other weights."""
        key = sequence.request.extra_key
        return "" if key is None or key == str(self.version) else key

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence the blocks for its first `tokens` tokens."""
        lacking = -(-tokens // self._config.block_tokens) - len(sequence.blocks)
        if lacking <= 0:
            return True
        fresh = self.store.index.allocate(lacking)
        if fresh is None:
            return False
        sequence.blocks.extend(fresh)
        return True

    def _name_whole_blocks(self, sequence: Sequence) -> None:
        width = self._config.block_tokens
        while sequence.publishes and (len(sequence.names) + 1) * width <= sequence.computed:
            index = len(sequence.names)
            previous = sequence.names[-1] if sequence.names else root_hash(self.version, self._salt(sequence))
            name = next_hash(previous, sequence.tokens[index * width : (index + 1) * width])
            sequence.names.append(name)
            self.store.index.publish(sequence.blocks[index], name)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.store.index.release(sequence.blocks)
        sequence.blocks, sequence.names, sequence.computed = [], [], 0

    def _retract(self, sequence: Sequence) -> None:
        """Back to the head of the queue, tokens kept, KV given up."""
        self._running.remove(sequence)
        self._drop_blocks(sequence)
        sequence.retractions += 1
        self._waiting.appendleft(sequence)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[float, ...] = (),
    ) -> None:
        del self._by_rid[sequence.rid]
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._drop_blocks(sequence)
        self._outputs.append(sequence.output(token_ids, logprobs, self.version, reason))

    # ------------------------------------------------------------------------------------------ control

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping. `abort` ends all requests, `retract` gives their KV up, `in_place` keeps it."""
        self._paused = True
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            for sequence in reversed(list(self._running)):
                self._retract(sequence)

    def resume(self) -> None:
        self._paused = False

    def flush(self) -> None:
        """Forget the prefix cache. Refused while sequences run: they hold blocks of it."""
        if self._running:
            raise Refused(f"the cache cannot be flushed while {len(self._running)} requests run")
        self.store.forget()

    def update_weights(self, path: Path, version: int, *, flush: bool) -> None:
        """Take the weights in `path` as `version`; the old ones stay when they cannot be read.

        Refused while requests run, unless they are paused: these go on with the new weights, and their KV, where it
        was kept, is theirs alone.
        """
        if self._by_rid and not self._paused:
            raise Refused(f"weights cannot change under {len(self._by_rid)} live requests; abort or pause them first")
        shape = read_shape(path)
        if shape.digest != self.shape.digest:
            raise BadInput("model_path", str(path), "its config.json must be that of the model being served")
        self._weights = load_weights(path, shape, self._config.dtype)
        self.store.model = digest(self._weights)
        self.shape, self.model_path = shape, path
        self._set_version(version)
        if flush:
            self.store.forget()

    def relabel(self, version: int) -> None:
        """Call the weights in memory `version`."""
        if self._by_rid and not self._paused:
            raise Refused(f"the version cannot change under {len(self._by_rid)} live requests")
        self._set_version(version)

    def _set_version(self, version: int) -> None:
        self.store.version = version
        for sequence in self._running:
            sequence.publishes = False

    def release_memory(self, *, weights: bool, kv: bool) -> None:
        """Give memory back to the system. Refused while there are requests, or while a peer reads blocks."""
        if self._by_rid:
            raise Refused(f"memory cannot be released with {len(self._by_rid)} live requests; abort them first")
        if kv:
            self.store.release()
            self._window.clear()
        if weights:
            self._weights = None

    def resume_memory(self, *, kv: bool) -> None:
        """Take memory again. Weights that were released come with the next update: what they were is out of date by then."""
        if kv:
            self.store.resume()
