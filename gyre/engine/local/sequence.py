"""One request while the engine works on it: its tokens, and how far their KV is in memory."""

from __future__ import annotations

from gyre.engine.local.requests import FinishReason, Output, SampleRequest


class Sequence:
    """Built by the core from a request. Mutable; only the core's thread touches it."""

    def __init__(self, request: SampleRequest, max_new_tokens: int, seed: int) -> None:
        self.request = request
        self.rid = request.rid
        self.tokens = list(request.input_ids)
        self.prompt_tokens = len(self.tokens)
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.cached_tokens = 0
        self.retractions = 0
        self.spans: list[tuple[int, int, int]] = []
        self.admission = 0
        """Which admission into the batch this is; a sequence that was retracted gets a new one."""
        self.computed = 0
        """Tokens whose KV is in memory."""
        self.blocks: list[int] = []
        self.names: list[bytes] = []
        """The names of the leading blocks that are whole; a whole block is published when it gets its name."""
        self.wanted_key: tuple[int, int] | None = None
        self.wanted: list[bytes] = []
        """The names of the blocks it could share, for (version, number of whole blocks); kept, for queues are long."""
        self.publishes = True
        """False once its KV was made by more than one version: nobody else may find it."""

    @property
    def sampled(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens to run through the model before the next one can be sampled."""
        return len(self.tokens) - self.computed

    def add(self, token: int, version: int) -> None:
        position = self.sampled
        self.tokens.append(token)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], position + 1)
        else:
            self.spans.append((version, position, position + 1))

    def output(
        self, token_ids: tuple[int, ...], logprobs: tuple[float, ...], version: int, finish: FinishReason | None
    ) -> Output:
        return Output(
            rid=self.rid,
            token_ids=token_ids,
            logprobs=logprobs,
            version=version,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.sampled,
            cached_tokens=self.cached_tokens,
            retractions=self.retractions,
            finish=finish,
            spans=tuple(self.spans) if finish is not None else (),
        )
