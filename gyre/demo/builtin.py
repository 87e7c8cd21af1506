"""What a job file may name as `builtin:…`: the files of the quickstart that ship with the package."""

from __future__ import annotations

from pathlib import Path

from gyre.errors import BadInput

_HERE = Path(__file__).parent
_FILES = {
    "model.path": {"builtin:tiny": _HERE / "policy"},
    "harness.config": {"builtin:chores": _HERE / "mini_chores.yaml"},
}

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def path(key: str, name: str) -> Path:
    """The file or folder behind the `builtin:` name that the job file has at `key`."""
    known = _FILES[key]
    if name not in known:
        raise BadInput(key, name, f"one of {', '.join(sorted(known))}")
    return known[name]


def model_dir(name: str, base: Path) -> Path:
    """The folder of the model that a job names. Raises BadInput when a file that it must have is missing."""
    folder = path("model.path", name) if name.startswith("builtin:") else (base / name).resolve()
    missing = [file for file in MODEL_FILES if not (folder / file).is_file()]
    if missing:
        raise BadInput("model.path", name, f"a folder with {', '.join(MODEL_FILES)}; {', '.join(missing)} is missing")
    return folder
