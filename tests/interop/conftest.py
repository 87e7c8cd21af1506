"""One stage a harness: every scenario of it, in one network namespace, before the first test that looks at them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine.tiny_models import make_model

from .harnesses import programs, tokenizer
from .stage import CONTEXT_TOKENS, TESTS, Config

_STAGE_S = 900.0


@dataclass(frozen=True)
class Performance:
    """What happened in the scenarios that were run; `fault` says why there are no others."""

    reports: dict[str, Any]
    fault: str


Perform = Callable[[str, tuple[str, ...]], Performance]


@pytest.fixture(scope="session")
def policy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 with Qwen3's own vocabulary and a long context."""
    model = make_model(
        tmp_path_factory.mktemp("policy") / "model",
        "qwen3",
        vocab_size=151_680,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT_TOKENS,
        eos_token_id=151_645,
    )
    shutil.copy(tokenizer(), model / "tokenizer.json")
    return model


@pytest.fixture(scope="session")
def perform(policy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Perform:
    """Performs the scenarios of a harness, once."""

    @cache
    def performed(harness: str, scenarios: tuple[str, ...]) -> Performance:
        folder = tmp_path_factory.mktemp(harness)
        report, config = folder / "report.json", folder / "config.json"
        made = Config(harness, scenarios, str(policy_model), str(folder / "stage"), str(report))
        config.write_text(json.dumps(asdict(made)), encoding="utf-8")
        found = programs(harness)
        env = {**os.environ, "PATH": f"{found}:{os.environ['PATH']}" if found else os.environ["PATH"]}
        alone = ("--net",) if os.geteuid() == 0 else ("--user", "--map-root-user", "--net")
        argv = ("unshare", *alone, "--", sys.executable, "-m", "interop.stage", str(config))
        done = subprocess.run(
            argv, cwd=TESTS, env=env, capture_output=True, text=True, timeout=_STAGE_S, stdin=subprocess.DEVNULL
        )
        fault = f"the stage ended with {done.returncode}; see {folder}\n{done.stdout}{done.stderr}"
        return Performance(json.loads(report.read_text(encoding="utf-8")), fault)

    return performed
