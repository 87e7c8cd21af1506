"""SGLang's command line, out of the job file. Pure, and nothing of SGLang is imported: it has a Python of its own.

What Gyre has to be sure of is always there: token ids without a tokenizer, the weights' version, the sizes that routing
goes by, memory that can be given back. `engine.options` of the job file stand behind it, word for word.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gyre.config import CellsSection, EngineSection
from gyre.kv_migrate.hicache_settings import HicacheSettings, hicache_flags

_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that lead to packages of our Python."""


def command(
    engine: EngineSection,
    cells: CellsSection,
    *,
    python: str,
    model: Path,
    version: int,
    host: str,
    port: int,
    secrets: Path,
    place: int,
    kv: HicacheSettings | None,
) -> tuple[str, ...]:
    """Serve `model` as `version` at `host`:`port`. `secrets` is a file of `secret_options`; the cell is its node's
    `place`-th, and has the GPUs behind those of the cells before it. With `kv` its blocks move."""
    return (
        *(python, "-m", "sglang.launch_server", "--config", str(secrets)),
        *("--model-path", str(model), "--weight-version", str(version)),
        *("--host", host, "--port", str(port)),
        *("--device", engine.device, "--dtype", engine.dtype, "--tp-size", str(engine.tensor_parallel)),
        *("--page-size", str(cells.block_tokens), "--max-total-tokens", str(cells.cache_tokens)),
        *("--max-running-requests", str(2 * cells.slots)),  # the gateway gives an engine no more
        "--skip-tokenizer-init",  # token ids go in and out
        *("--grammar-backend", "none"),
        "--enable-metrics",
        "--sleep-on-idle",  # else its scheduler keeps a core busy while the cell trains
        *("--log-level", "warning"),  # its first line at `info` has the key
        *(_CPU if engine.device == "cpu" else _gpu(engine, place)),
        *(() if kv is None else hicache_flags(kv, cells.block_tokens)),
        *engine.options,
    )


def environment(engine: EngineSection, cells: CellsSection, ours: Mapping[str, str]) -> dict[str, str]:
    """The process's environment, from ours."""
    theirs = {name: value for name, value in ours.items() if name not in _OURS}
    theirs |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if engine.device == "cpu":
        theirs |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(cells.threads)}
    return theirs


def secret_options(key: str) -> str:
    """The text of the file that `command` names: a command line can be read by everybody on the machine."""
    return f"api-key: {key}\n"


_CPU = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    "--disable-overlap-schedule",
    *("--mem-fraction-static", "0.3"),
    "--skip-server-warmup",
)


def _gpu(engine: EngineSection, place: int) -> tuple[str, ...]:
    """A role switch gives back what the memory saver holds, and no other memory."""
    return ("--base-gpu-id", str(engine.first_gpu(place)), "--enable-memory-saver")
