"""What a job file may name as `builtin:…`: the files of the quickstart that ship with the package."""

from __future__ import annotations

from pathlib import Path

from gyre.errors import BadInput

_HERE = Path(__file__).parent
_FILES = {
    "builtin:tiny": _HERE / "policy",
    "builtin:chores": _HERE / "mini_chores.yaml",
}

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def path(name: str) -> Path:
    """The file or folder behind a `builtin:` name."""
    if name not in _FILES:
        raise BadInput("builtin", name, f"one of {', '.join(sorted(_FILES))}")
    return _FILES[name]


def model_dir(name: str, base: Path) -> Path:
    """The folder of the model that a job names. Raises BadInput when a file that it must have is missing."""
    folder = path(name) if name.startswith("builtin:") else (base / name).resolve()
    missing = [file for file in MODEL_FILES if not (folder / file).is_file()]
    if missing:
        raise BadInput("model.path", name, f"a folder with {', '.join(MODEL_FILES)}; {', '.join(missing)} is missing")
    return folder
