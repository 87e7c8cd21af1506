"""Throws inputs at the three dialects that coverage leads to: `bin/fuzz [--seconds N] [--dialect NAME] [--replay FILE]`.

Inputs that reached something new are kept in .cache/fuzz, and the next run goes on from them. An input that ends in
anything but a Fault or a valid answer is told with its trace, once for each place, and lies in the dialect's `failures`;
the run goes on, and exits with 1. The next run tries those inputs first, so that what is mended is no failure any more.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["gyre", "renderers"]):
    from proxy.model_folder import write_model_folder
    from proxy.mutations import BODIES, mutated

    from gyre.proxy.rendering import Rendering

    from .exchange import PATHS, SAID, Exchange

CACHE = Path(__file__).parents[2] / ".cache" / "fuzz"
NAMES = dict(zip(("chat", "responses", "messages"), PATHS, strict=True))
ANSWERS = (
    b"<think>\nhm\n</think>\n\nA plain answer.",
    b'Look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
    b'<tool_call>\n{"name": "patch", "arguments": {"input": "+a"}}\n</tool_call>',
    b'<tool_call>\n{"name": "ns__run", "arguments": {}}\n</tool_call>',
    b"<think>\nnever closed",
    b"<tool_call>\n{broken\n</tool_call>",
    b"The END of it \xf0\x9f",
    b"",
)
_PIECES = (
    b"<think>",
    b"</think>",
    b"<tool_call>",
    b"</tool_call>",
    b"<|im_end|>",
    b"END",
    b"\xf0\x9f",
    b"\0",
    b"\\ud800",
)
_INPUT_BYTES = 20_000
_ONE_INPUT_S = 20


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description="Fuzz the dialects, led by coverage.")
    parser.add_argument("--seconds", type=int, default=60, help="for each dialect (default: 60)")
    parser.add_argument("--dialect", choices=NAMES, help="only this one")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="try one input of --dialect, and tell how it ends")
    options = parser.parse_args(arguments)
    if options.replay is not None and options.dialect is None:
        parser.error("--replay needs --dialect")
    if options.replay is not None:
        print(_exchange(options.dialect).attempt(options.replay.read_bytes()) or "it has an answer")
        return 0
    failed = False
    for name in NAMES if options.dialect is None else (options.dialect,):
        # A process each: libFuzzer ends the one that it runs in.
        process = multiprocessing.get_context("fork").Process(target=fuzz, args=(name, options.seconds))
        process.start()
        process.join()
        failures = sorted((CACHE / name / "failures").iterdir())
        print(f"fuzz: {name}: {len(failures)} failures", *failures, sep="\n  ", flush=True)
        failed |= bool(failures) or process.exitcode != 0
    return int(failed)


def fuzz(name: str, seconds: int) -> None:
    """Fuzz one dialect, and end the process."""
    logging.disable(logging.CRITICAL)
    corpus, failures = CACHE / name / "corpus", CACHE / name / "failures"
    for folder in (corpus, failures):
        folder.mkdir(parents=True, exist_ok=True)
    for known in failures.iterdir():
        known.rename(corpus / known.name)
    for place, said in enumerate(ANSWERS):
        (corpus / f"seed-{place}").write_bytes(json.dumps(BODIES[NAMES[name]]).encode() + SAID + said)
    exchange, told = _exchange(name), set[str]()

    def attempt(data: bytes) -> None:
        try:
            exchange.attempt(data)
        except Exception as error:
            where = _where(error)
            if where not in told:
                told.add(where)
                (failures / where).write_bytes(data)
                print(f"fuzz: {name}: {where}\n{traceback.format_exc()}", file=sys.stderr, flush=True)

    limits = [f"-max_total_time={seconds}", f"-max_len={_INPUT_BYTES}", f"-timeout={_ONE_INPUT_S}"]
    options = ["-len_control=0", "-print_final_stats=1", "-verbosity=0", f"-artifact_prefix={failures}/"]
    atheris.Setup(["fuzz", *limits, *options, str(corpus)], attempt, custom_mutator=_changed)
    atheris.Fuzz()


def _exchange(name: str) -> Exchange:
    with tempfile.TemporaryDirectory() as folder, atheris.instrument_imports(include=["renderers"]):
        return Exchange(NAMES[name], Rendering(write_model_folder(Path(folder)), thinking=True))


def _changed(data: bytes, most_bytes: int, seed: int) -> bytes:
    """Another input: its body changed as JSON or as bytes, or what is said to it."""
    random = Random(seed)
    body, _, said = data.partition(SAID)
    how = random.choice(("json", "json", "bytes", "said", "piece"))
    if how == "json":
        try:
            body = json.dumps(mutated(json.loads(body), random)).encode()
        except (ValueError, RecursionError):
            how = "bytes"
    if how == "bytes":
        body = atheris.Mutate(body, _INPUT_BYTES)
    elif how == "said":
        said = atheris.Mutate(said, 2_000)
    elif how == "piece":
        place = random.randint(0, len(said))
        said = said[:place] + random.choice(_PIECES) + said[place:]
    return (body + SAID + said)[:most_bytes]


def _where(error: Exception) -> str:
    """What the error is and the line of ours that it came through last, as a file's name."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/gyre/" in frame.filename] or list(frames)
    return f"{type(error).__name__}-{Path(ours[-1].filename).stem}-{frames[-1].name}-{ours[-1].lineno}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
