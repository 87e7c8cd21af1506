"""The local engine whose choice of tokens is the scripted policy's: `python -m interop.scripted_engine …`.

Everything else of it is real: the forward passes, the KV blocks, the prefix cache, and the log-probability of each
token that the policy chose. What is chosen is written down, line by line, into the file that GYRE_POLICY_LOG names.

    {"decided": label, "role": …, "prompt": digest, "ids": digest of the answer's tokens, "tokens": n, …}
    {"token": i, "of": label, "prompt": digest, "on_script": bool}        {"half": label}
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from gyre.engine.local.__main__ import main

from .policy import Decision, decide

if TYPE_CHECKING:
    from torch import Tensor

    from gyre.engine.local.sampling import Draw


@dataclass(frozen=True)
class Answer:
    decision: Decision
    prompt: str
    """A digest."""
    ids: tuple[int, ...]


class ScriptedPolicy:
    """Stands in for `gyre.engine.local.sampling.sample`."""

    def __init__(self, tokenizer: Tokenizer, log: str) -> None:
        self._tokenizer = tokenizer
        self._begin = tokenizer.token_to_id("<|im_start|>")
        self._end = tokenizer.token_to_id("<|im_end|>")
        self._header = len(tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False).ids)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._answers: dict[str, Answer] = {}

    def __call__(self, logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
        import torch

        tokens, slowest_s = [], 0.0
        for draw in draws:
            token, token_s = self._next(draw.before)
            tokens.append(token)
            slowest_s = max(slowest_s, token_s)
        if slowest_s:
            time.sleep(slowest_s)
        scale = torch.tensor([draw.temperature or 1.0 for draw in draws])
        logprobs = torch.log_softmax(logits / scale[:, None], dim=-1)
        return tokens, logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

    def _next(self, before: Sequence[int]) -> tuple[int, float]:
        start = len(before) - 1 - before[::-1].index(self._begin) + self._header
        answer = self._answer(before[:start])
        place, decision = len(before) - start, answer.decision
        # A policy that was made to say something else would end its turn.
        on_script = place < len(answer.ids) and tuple(before[start:]) == answer.ids[:place]
        token = answer.ids[place] if on_script else self._end
        self._say({"token": place, "of": decision.label, "prompt": answer.prompt, "on_script": on_script})
        if decision.mark and place == len(answer.ids) // 2:
            self._say({"half": decision.label})
        return token, decision.token_s

    def _answer(self, prompt: Sequence[int]) -> Answer:
        key = hashlib.sha256(array("i", prompt)).hexdigest()
        found = self._answers.get(key)
        if found is None:
            decision = decide(self._tokenizer.decode(list(prompt), skip_special_tokens=False))
            ids = tuple(self._tokenizer.encode(decision.answer, add_special_tokens=False).ids)
            found = self._answers[key] = Answer(decision, key, ids)
            self._say(
                {
                    "decided": decision.label,
                    "role": decision.role,
                    "prompt": key,
                    "ids": hashlib.sha256(array("i", ids)).hexdigest(),
                    "tokens": len(ids),
                    "prompt_tokens": len(prompt),
                }
            )
        return found

    def _say(self, event: dict[str, Any]) -> None:
        os.write(self._log, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    status = main(ScriptedPolicy(Tokenizer.from_file(os.environ["GYRE_TOKENIZER"]), os.environ["GYRE_POLICY_LOG"]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
