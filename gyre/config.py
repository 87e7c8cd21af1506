"""The job file (TOML) and its validation: the one form of configuration that a person writes.

`load_job` reads it; every fault is one line naming the key, the value and what is allowed. Relative paths are taken
from the job file's folder. Nothing heavy is imported here: the CLI, gyred and every child read the same model.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gyre.errors import BadInput

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]

PLACEHOLDERS = ("base_url", "instruction", "workspace", "home")
"""What stands in braces in `harness.command` and in the values of `harness.env`."""
PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
"""Every brace there is a placeholder's, or one of a doubled pair that stands for itself."""
_VARIABLE = re.compile(r"[^\s={}\0]+")
_KEY_DEPTH = 2
"""Parts of a key's name: its section, and its own."""
_OWN_VARIABLES = ("PATH", "HOME", "GYRE_RUN")
"""What a run's environment has whatever the job says: how programs are found, where it may write, whose it is."""


SGLANG_SET = (
    *("--config", "--model-path", "--model", "--weight-version", "--host", "--port", "--api-key", "--admin-api-key"),
    *("--device", "--dtype", "--tp-size", "--tp", "--tensor-parallel-size", "--base-gpu-id", "--page-size"),
    *("--max-total-tokens", "--max-running-requests", "--skip-tokenizer-init"),
)
"""Options of SGLang's that follow from the job file (gyre/engine/sglang/command.py)."""


class FileError(BadInput):
    """A file that people write, and that cannot be used; `faults` has one line each."""

    def __init__(self, path: Path, faults: list[str]) -> None:
        super().__init__("file", str(path), "; ".join(faults))
        self.args = ("\n".join(f"{path.name}: {fault}" for fault in faults),)
        self.faults = faults


Validated = TypeVar("Validated", bound=BaseModel)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class JobSection(Section):
    name: Name
    """Also the cluster's name in the state store."""
    dir: str = ""
    """Where everything of the job is kept; default `runs/<name>` beside the current folder."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    steps: Annotated[int, Field(ge=1, le=1_000_000)]
    """Optimizer steps to take."""


class ModelSection(Section):
    path: str
    """A folder in Hugging Face's layout (config.json, model.safetensors, tokenizer.json), or `builtin:tiny`."""
    renderer: str = "auto"
    """The family of `renderers` that turns messages to token ids, `auto` to take it from config.json."""
    thinking: bool = False
    context_tokens: Annotated[int, Field(ge=64)] = 1024


class SamplingSection(Section):
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    max_tokens: Positive = 512
    """The most tokens an answer may have, whatever the harness asks."""


class TasksSection(Section):
    source: str
    """`builtin:chores`, or a folder of tasks (docs/tasks.md)."""
    heldout: Annotated[int, Field(ge=0)] = 32
    """Held-out tasks, each run once before the first step and once after the last."""
    train: Annotated[int, Field(ge=0)] = 0
    """Training tasks to go round; 0: as many as the source has, or a new one for each group."""


class HarnessSection(Section):
    profile: str = "mini-swe-agent"
    config: str = ""
    """The profile's own configuration file (`builtin:chores` for the quickstart's), or empty."""
    command: tuple[str, ...] = ()
    """Of the profile `command`: the program and its arguments, with placeholders."""
    env: dict[str, str] = {}
    """Of the profile `command`: environment variables, with placeholders in their values."""
    confine: Literal["auto", "unconfined"] = "auto"
    """`auto`: a run sees a read-only system and writes only its workspace. `unconfined`: it runs as you."""
    max_live: Positive = 4
    """Runs live at a time on one node."""
    attempts: Positive = 2
    """Times a run is started before an infrastructure failure stands."""

    @field_validator("command", "env")
    @classmethod
    def _placeholders(cls, value: tuple[str, ...] | dict[str, str]) -> tuple[str, ...] | dict[str, str]:
        texts = value.values() if isinstance(value, dict) else value
        for found in (found for text in texts for found in PLACEHOLDER.finditer(text)):
            if found[0] not in ("{{", "}}") and found[1] not in PLACEHOLDERS:
                known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
                raise ValueError(f"{found[0]} is no placeholder; there are {known}; a brace itself is {{{{ or }}}}")
        return value

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no variable's name: it is empty, or has '=', a brace, NUL or a space in it"
                )
            if name in _OWN_VARIABLES:
                raise ValueError(f"the variable {name} is the run's own, and no job sets it")
        return env

    @model_validator(mode="after")
    def _command_of_its_profile(self) -> HarnessSection:
        if self.profile == "command" and not any(self.command[:1]):
            raise ValueError("the profile command needs a command: a list, the program first")
        if self.profile != "command" and (self.command or self.env):
            raise ValueError("command and env are for the profile command")
        if self.profile == "command" and self.config:
            raise ValueError("the profile command has no use for config; name the file in command")
        return self


class CellsSection(Section):
    count: Annotated[int, Field(ge=1, le=64)] = 2
    slots: Annotated[int, Field(ge=1, le=1024)] = 4
    """Runs a cell's engine serves at a time without slowing."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of an engine, and of each rank of a replica."""
    train_ranks: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share one replica out among them (tensor parallel)."""
    block_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    cache_tokens: Annotated[int, Field(ge=256)] = 65536
    """KV cache of one engine, in tokens."""
    resting_kv_mib_s: Annotated[int, Field(ge=0, le=1_000_000)] = 256
    """MiB a second that an engine takes over of prefixes that no request waits for, when another leaves; 0: no bound."""
    kv_silence_s: Annotated[float, Field(gt=0, le=60)] = 0.45
    """An engine that says nothing for so long while its KV is to move is given up, and the KV computed again."""

    @model_validator(mode="after")
    def _room_for_two_blocks(self) -> CellsSection:
        if self.cache_tokens < 2 * self.block_tokens:
            raise ValueError(f"cache_tokens must hold two blocks at least, {2 * self.block_tokens} tokens")
        return self


class EngineSection(Section):
    kind: Literal["local", "sglang"] = "local"
    """`local`: Gyre's small CPU engine. `sglang`: SGLang 0.5.23 (docs/sglang.md)."""
    kv_transport: Literal["auto", "tcp", "mooncake", "mooncake-tcp"] = "auto"
    """What carries KV blocks between the engines (docs/kv-migration.md), SGLang's where `moves_kv`. What follows is SGLang's
    alone."""
    python: str = ""
    """The Python that has SGLang; a path with a slash in it starts from the job file's folder."""
    device: Literal["cuda", "cpu"] = "cuda"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    """GPUs of one cell."""
    moves_kv: bool = False
    """KV blocks go ahead of a request that goes on at another cell, by Gyre's plug-in for HiCache."""
    options: tuple[str, ...] = ()
    """Further options of SGLang's command line."""

    def first_gpu(self, place: int) -> int:
        """Of its node's `place`-th cell. Cells of the local engine, which has no use for one, train on the same."""
        return place * self.tensor_parallel if self.kind == "sglang" else 0

    @field_validator("options")
    @classmethod
    def _leave_ours_alone(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if option.partition("=")[0] in SGLANG_SET:
                raise ValueError(f"{option.partition('=')[0]} is set by Gyre")
        return options

    @model_validator(mode="after")
    def _of_its_kind(self) -> EngineSection:
        if self.kind == "sglang" and not self.python:
            raise ValueError("the kind sglang needs python: the Python that has SGLang")
        fields = type(self).model_fields
        given = [name for name in fields if name != "kind" and getattr(self, name) != fields[name].default]
        if self.kind == "sglang" and "kv_transport" in given and not self.moves_kv:
            raise ValueError("kv_transport: the kind sglang moves KV only with moves_kv = true")
        of_sglang = [name for name in given if name != "kv_transport"]
        if self.kind == "local" and of_sglang:
            raise ValueError(f"{', '.join(of_sglang)}: for the kind sglang alone")
        return self


class BatchSection(Section):
    groups: Annotated[int, Field(ge=1, le=100)] = 8
    """Groups of one optimizer step; a step is published in one transaction of the store, which bounds them."""
    group_size: Annotated[int, Field(ge=1, le=100)] = 16
    """Runs of one task; a group is launched in one transaction."""
    staleness: Annotated[int, Field(ge=0, le=64)] = 1
    """η: launched - consumed groups stay within (η + 1) * groups."""
    j_max: Positive = 5
    micro_step_tokens: Annotated[int, Field(ge=64)] = 4096
    """A micro-step packs whole lineages up to this many tokens (a longer lineage stands alone)."""
    sums_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of gradient sums on their way to the core; they are added up in float32."""
    claim_s: Seconds = 60.0
    """A cell that claimed a micro-step and did not ship it in this time gives it back."""


class LossSection(Section):
    kind: Literal["gspo", "grpo", "dapo", "cispo"] = "gspo"
    clip_low: Annotated[float, Field(ge=0)] = 3e-4
    clip_high: Annotated[float, Field(ge=0)] = 4e-4
    advantage: Literal["std", "mean"] = "std"
    """`std`: (R - mean) / population standard deviation of the group; `mean`: R - mean."""
    advantage_scale: Annotated[float, Field(gt=0)] = 1.0
    """The advantage is multiplied by this."""
    truncate_is: Annotated[float, Field(ge=0)] = 0.0
    """Cap of truncated importance sampling; 0 leaves it out."""


class OptimizerSection(Section):
    kind: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-6
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_grad: Annotated[float, Field(gt=0)] = 1.0


class CheckpointSection(Section):
    dir: str = ""
    """Where they are kept: a folder that every node reaches, so that another core goes on from them; default: the job's."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """The newest checkpoints kept; one that is torn has the others before it."""
    every_steps: Annotated[int, Field(ge=1, le=10_000)] = 1
    """A checkpoint is written after every this many steps."""


class LimitsSection(Section):
    run_s: Seconds = 3600.0
    """Wall clock of one run; a run that reaches it is scored on what it left."""
    evaluator_s: Seconds = 60.0
    request_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024


class JournalSection(Section):
    fsync: Literal["call", "os"] = "call"
    """`call`: an answer is on the disk before it is complete at the harness. `os`: the kernel writes it when it likes."""
    copies: Annotated[int, Field(ge=0, le=1)] = 1
    """On other nodes, of each journal and of what closed runs leave for training. A lone node has none."""


class SchedulerSection(Section):
    hysteresis: Annotated[float, Field(ge=0, lt=0.5)] = 0.15
    share_weight: Annotated[float, Field(ge=0)] = 0.75
    backlog_gain: Annotated[float, Field(ge=0)] = 0.35
    min_work_switches: Annotated[float, Field(ge=0)] = 2.0
    """A cell joins training only for at least this many switch costs of work."""


class TelemetrySection(Section):
    otlp_endpoint: str = ""
    """An OTLP/HTTP collector (Jaeger: http://host:4318), or empty: spans stay in the node's ring."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_http(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme not in ("http", "https") or not parts.netloc):
            raise ValueError("give http://host:port, https://host:port, or nothing")
        return value


class ServerSection(Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """The proxy's port; 0 takes a free one."""


class JobSpec(Section):
    job: JobSection
    model: ModelSection
    tasks: TasksSection
    harness: HarnessSection = HarnessSection()
    sampling: SamplingSection = SamplingSection()
    cells: CellsSection = CellsSection()
    engine: EngineSection = EngineSection()
    batch: BatchSection = BatchSection()
    loss: LossSection = LossSection()
    optimizer: OptimizerSection = OptimizerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    limits: LimitsSection = LimitsSection()
    journal: JournalSection = JournalSection()
    scheduler: SchedulerSection = SchedulerSection()
    telemetry: TelemetrySection = TelemetrySection()
    server: ServerSection = ServerSection()

    def to_json(self) -> str:
        return self.model_dump_json()

    @staticmethod
    def from_json(text: str) -> JobSpec:
        return JobSpec.model_validate_json(text)


def load_job(path: Path, overrides: dict[str, Any] | None = None) -> JobSpec:
    """The validated job in the TOML file at `path`.

    `overrides` maps dotted keys ("job.steps") to values that replace the file's (command-line options).
    Raises FileError with one line a fault.
    """
    plain = read_toml(path)
    if plain.keys() & {"node", "cluster"} or not plain.keys() & JobSpec.model_fields.keys():
        required = ", ".join(f"[{name}]" for name, field in JobSpec.model_fields.items() if field.is_required())
        others = {
            "node": "it says what a node is, and not what a job is",
            "cluster": "it says how a cluster is reached, and not what a job is",
        }
        none = f"neither a job file, which has {required}, nor a node's, which has [node], nor gyrectl's, which has [cluster]"
        raise FileError(path, [next((said for key, said in others.items() if key in plain), none)])
    for key, value in (overrides or {}).items():
        section, _, name = key.partition(".")
        target = plain.setdefault(section, {})
        if isinstance(target, dict):
            target[name] = value
    return validated(path, plain, JobSpec)


def read_toml(path: Path) -> dict[str, Any]:
    """What stands in the file at `path`. Raises FileError."""
    try:
        plain: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(path, [f"cannot be read ({error.strerror})"]) from error
    except RecursionError:
        raise FileError(path, ["is not TOML that can be read: it is nested too deep"]) from None
    except ValueError as error:  # not TOML, not UTF-8, or a number with thousands of digits
        raise FileError(path, [f"is not TOML: {str(error).splitlines()[0]}"]) from error
    unprintable = _with_nul(plain)
    if unprintable:
        raise FileError(path, [f"{key}: a NUL character is not allowed" for key in unprintable])
    return plain


def validated(path: Path, plain: dict[str, Any], model: type[Validated]) -> Validated:
    """`plain`, the content of the file at `path`, as a `model`. Raises FileError with one line a fault."""
    try:
        return model.model_validate_json(json.dumps(plain, default=str))
    except ValidationError as error:
        raise FileError(path, [_fault(model, dict(item)) for item in error.errors()]) from error


def _fault(model: type[BaseModel], item: dict[str, Any]) -> str:
    location = [part for part in item["loc"] if isinstance(part, str | int)]
    key = ".".join(_shown(part) for part in location)
    kind = str(item["type"])
    if kind == "extra_forbidden":
        known = ", ".join(sorted(_known(model, location[:-1])))
        return f"{key}: no such key; allowed here: {known}"
    if kind == "missing":
        return f"{key}: required, and not there"
    message = str(item["msg"]).removeprefix("Value error, ")
    if kind == "value_error" and location and len(location) < _KEY_DEPTH:  # of a section as a whole
        return f"{key}: {message}"
    return f"{key}: {_clipped(item['input'])} is not allowed; {message[0].lower()}{message[1:]}"


def _with_nul(value: object, key: str = "") -> list[str]:
    """The keys under which a text holds a NUL, which no path and no host may."""
    if isinstance(value, str):
        return [key] if "\0" in value else []
    if isinstance(value, dict):
        items = cast(dict[str, object], value).items()
        return [found for name, inner in items for found in _with_nul(inner, f"{key}.{_shown(name)}".lstrip("."))]
    if isinstance(value, list):
        return [found for inner in cast(list[object], value) for found in _with_nul(inner, key)]
    return []


def _shown(part: str | int) -> str:
    """A key as it stands in the file; one that would break the line is quoted."""
    text = str(part)
    return text if text.isprintable() else repr(text)


def _known(model: type[BaseModel], location: list[str | int]) -> list[str]:
    found: Any = model
    for part in location:
        found = found.model_fields[str(part)].annotation
    return list(found.model_fields)


def _clipped(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 120 else f"{shown[:117]}..."
