"""What `gyrectl config check` and `gyrectl up` test of a job file beyond its shape: that what it names is there.

Each fault is one line naming the key, the value and what is allowed.
"""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any, cast

from gyre.config import EngineSection, JobSpec
from gyre.demo.builtin import model_dir
from gyre.errors import BadInput, GyreError
from gyre.harness.confine import choose
from gyre.harness.profiles import Settings, profile
from gyre.harness.tasks import open_source
from gyre.kv_migrate.choice import Host, active_devices, look
from gyre.kv_migrate.choice import choose as choose_transport
from gyre.train.shape import read_shape, require_shares

ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM")
_HAS_SGLANG = "import importlib.util as u; raise SystemExit(0 if u.find_spec('sglang') else 1)"
_PYTHON_S = 60.0


def check_job(spec: JobSpec, base: Path) -> list[str]:
    """Every fault of a job file whose shape is right. `base` is the folder that relative paths start from."""
    faults: list[str] = []
    for test in (_model, _ranks, _engine, _renderer, _tasks, _harness, _port):
        try:
            faults += test(spec, base)
        except GyreError as error:
            faults.append(str(error))
    return faults


def _model(spec: JobSpec, base: Path) -> list[str]:
    path = model_dir(spec.model.path, base)
    try:
        config = cast(dict[str, Any], json.loads((path / "config.json").read_text(encoding="utf-8")))
        names = list(cast(list[str], config["architectures"]))
        limit = int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [
            f"model.path: {spec.model.path!r} is not allowed; its config.json must name architectures and max_position_embeddings ({error!r})"
        ]
    faults: list[str] = []
    if not set(names) & set(ARCHITECTURES):
        faults.append(f"model.path: architecture {names!r} is not allowed; one of {', '.join(ARCHITECTURES)}")
    if spec.model.context_tokens > limit:
        faults.append(
            f"model.context_tokens: {spec.model.context_tokens} is not allowed; the model has {limit} positions"
        )
    if spec.sampling.max_tokens >= spec.model.context_tokens:
        faults.append(
            f"sampling.max_tokens: {spec.sampling.max_tokens} is not allowed; less than model.context_tokens ({spec.model.context_tokens})"
        )
    return faults


def _ranks(spec: JobSpec, base: Path) -> list[str]:
    ranks, engine = spec.cells.train_ranks, spec.engine
    if ranks == 1:
        return []
    if engine.kind == "sglang" and engine.device == "cuda" and ranks > engine.tensor_parallel:
        return [
            f"cells.train_ranks: {ranks} is not allowed; a cell has engine.tensor_parallel ({engine.tensor_parallel}) GPUs"
        ]
    require_shares(read_shape(model_dir(spec.model.path, base)), ranks)
    return []


def _engine(spec: JobSpec, base: Path) -> list[str]:
    """Whether this machine's Python has what the engine is asked to use."""
    engine = spec.engine
    if engine.kind == "local":
        return _transport(engine, look(engine.kv_transport))
    # Whether mooncake can be loaded is for SGLang's Python to say.
    return _transport(engine, Host(active_devices(), "")) + _python(engine, base)


def _transport(engine: EngineSection, host: Host) -> list[str]:
    try:
        choose_transport(engine.kv_transport, host)
    except BadInput as fault:
        return [str(BadInput("engine.kv_transport", fault.value, fault.allowed))]
    return []


def _python(engine: EngineSection, base: Path) -> list[str]:
    python = str(base / engine.python) if "/" in engine.python else engine.python
    try:
        tried = subprocess.run((python, "-c", _HAS_SGLANG), capture_output=True, timeout=_PYTHON_S, check=False)
        why = "it has no sglang" if tried.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"it gave no answer within {_PYTHON_S:g} s"
    except OSError as error:
        why = f"it cannot be run ({error.strerror})"
    return (
        [f"engine.python: {engine.python!r} is not allowed; a Python that has SGLang is expected: {why}"] if why else []
    )


def _renderer(spec: JobSpec, base: Path) -> list[str]:
    """Whether the model's text form can be made: only the gateway's own code can tell, and it is quick to ask."""
    from gyre.proxy.rendering import Rendering

    Rendering(model_dir(spec.model.path, base), spec.model.renderer, thinking=spec.model.thinking)
    return []


def _tasks(spec: JobSpec, base: Path) -> list[str]:
    source = open_source(spec.tasks, spec.job.seed, base)
    found = len(source.heldout())
    if found < spec.tasks.heldout:
        return [f"tasks.heldout: {spec.tasks.heldout} is not allowed; the source has {found} held-out tasks"]
    return []


def _harness(spec: JobSpec, base: Path) -> list[str]:
    profile(spec.harness.profile).check(Settings.of(spec, base))
    choose(spec.harness.confine)
    return []


def _port(spec: JobSpec, base: Path) -> list[str]:
    del base
    family = socket.AF_INET6 if ":" in spec.server.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((spec.server.host, spec.server.port))
    except OSError as error:
        return [
            f"server.port: {spec.server.port} on {spec.server.host!r} is not allowed; a free port is needed ({error.strerror})"
        ]
    return []
