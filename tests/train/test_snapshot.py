"""Snapshots on disk: whole or not at all, and found to be what they were."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.errors import BadInput, StorageFull
from gyre.train.snapshot import (
    SnapshotTorn,
    keep_newest,
    list_snapshots,
    make_first_snapshot,
    newest_complete,
    read_manifest,
    snapshot_path,
    verify,
    write_snapshot,
)
from gyre.train.whole_folder import CHUNK_BYTES, chunk_checksum, clear_unfinished


def write(snapshots_dir: Path, version: int, content: bytes = b"weights") -> str:
    def fill(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(content)
        (folder / "config.json").write_text("{}")

    return write_snapshot(snapshot_path(snapshots_dir, version), version, fill)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "optimizer.safetensors", "pytorch_model.bin"):
        (folder / name).write_text(name)
    return folder


def test_a_snapshot_reads_back_with_the_digest_that_its_writer_got(tmp_path: Path) -> None:
    digest = write(tmp_path, 3)
    manifest = verify(snapshot_path(tmp_path, 3), digest)
    assert manifest.version == 3
    assert [entry.name for entry in manifest.files] == ["config.json", "model.safetensors"]
    assert newest_complete(tmp_path) == (3, snapshot_path(tmp_path, 3), digest)


def test_the_digest_names_the_content(tmp_path: Path) -> None:
    digests = [write(tmp_path / name, 1, content) for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2"))]
    assert digests[0] == digests[1] != digests[2]


def test_the_first_snapshot_is_the_model_with_what_an_engine_needs_and_no_more(tmp_path: Path, model_dir: Path) -> None:
    path, digest = make_first_snapshot(model_dir, tmp_path / "snapshots")
    names = {file.name for file in path.iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors", "manifest.json"}
    assert newest_complete(tmp_path / "snapshots") == (0, path, digest)
    assert make_first_snapshot(model_dir, tmp_path / "snapshots") == (path, digest), "it may be repeated"


def test_a_torn_first_snapshot_is_made_again(tmp_path: Path, model_dir: Path) -> None:
    path, digest = make_first_snapshot(model_dir, tmp_path / "snapshots")
    (path / "model.safetensors").unlink()
    assert make_first_snapshot(model_dir, tmp_path / "snapshots") == (path, digest)
    verify(path, digest)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, model_dir: Path, missing: str) -> None:
    (model_dir / missing).unlink()
    with pytest.raises(BadInput, match=r"model\.path"):
        make_first_snapshot(model_dir, tmp_path / "snapshots")
    assert list_snapshots(tmp_path / "snapshots") == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_or_cut_of_any_file_is_found(tmp_path: Path, data: st.DataObject) -> None:
    digest = write(tmp_path, 1, b"some weights of a model" * 20)
    path = snapshot_path(tmp_path, 1)
    file = data.draw(st.sampled_from(sorted(path.iterdir())))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    with pytest.raises(SnapshotTorn, match="v00000001"):
        verify(path, digest)
    assert newest_complete(tmp_path) is None or file.name == "manifest.json"


def test_another_snapshot_under_a_published_digest_is_found(tmp_path: Path) -> None:
    digest = write(tmp_path, 1, b"first")
    write(tmp_path, 1, b"second")
    with pytest.raises(SnapshotTorn, match="published"):
        verify(snapshot_path(tmp_path, 1), digest)


def test_the_newest_complete_snapshot_skips_torn_and_misnamed_ones(tmp_path: Path) -> None:
    digest = write(tmp_path, 1)
    write(tmp_path, 2)
    write(tmp_path, 3)
    (snapshot_path(tmp_path, 2) / "config.json").unlink()
    snapshot_path(tmp_path, 3).rename(snapshot_path(tmp_path, 4))
    (tmp_path / "v00000009").mkdir()
    (tmp_path / "notes").mkdir()
    assert newest_complete(tmp_path) == (1, snapshot_path(tmp_path, 1), digest)
    assert newest_complete(tmp_path / "nowhere") is None


def test_the_chunks_of_a_manifest_are_all_its_bytes_in_order(tmp_path: Path) -> None:
    content = bytes(range(256)) * (CHUNK_BYTES // 256) + b"and a little more"
    write(tmp_path, 1, content)
    path = snapshot_path(tmp_path, 1)
    chunks = read_manifest(path).chunks
    assert [(chunk.file, chunk.offset, chunk.size_bytes) for chunk in chunks] == [
        ("config.json", 0, 2),
        ("model.safetensors", 0, CHUNK_BYTES),
        ("model.safetensors", CHUNK_BYTES, 17),
    ]
    for chunk in chunks:
        part = (path / chunk.file).read_bytes()[chunk.offset : chunk.offset + chunk.size_bytes]
        assert chunk_checksum(part) == chunk.checksum


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        "{}",
        '{"format": 1, "version": 1, "files": {}}',
        '{"format": 2, "version": 1, "files": {"a": 1}}',
        '{"format": 2, "version": "one", "files": {}}',
        '{"format": 2, "version": 1, "files": {"a": {"bytes": 1, "xxh3_128": "", "chunks": []}}}',
        '{"format": 2, "version": 1, "files": {"a": {"bytes": -1, "xxh3_128": "", "chunks": []}}}',
        '{"format": 2, "version": 1, "files": {"../a": {"bytes": 0, "xxh3_128": "", "chunks": []}}}',
        '{"format": 2, "version": 1, "files": {"/etc/a": {"bytes": 0, "xxh3_128": "", "chunks": []}}}',
        '{"format": 2, "version": 1, "files": {"..": {"bytes": 0, "xxh3_128": "", "chunks": []}}}',
        '{"format": 2, "version": 1, "files": {"": {"bytes": 0, "xxh3_128": "", "chunks": []}}}',
        '{"format": 2, "version": 1, "files": {"manifest.json": {"bytes": 0, "xxh3_128": "", "chunks": []}}}',
    ],
)
def test_a_manifest_that_is_none_or_names_what_lies_elsewhere_is_torn(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(SnapshotTorn, match="manifest"):
        read_manifest(tmp_path)


def test_a_version_that_was_written_and_not_published_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 1, b"first try")
    digest = write(tmp_path, 1, b"second try")
    assert newest_complete(tmp_path) == (1, snapshot_path(tmp_path, 1), digest)
    assert [path.name for path in tmp_path.iterdir()] == ["v00000001"]


def test_a_full_disk_leaves_nothing_behind_and_says_so(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageFull, match="v00000001"):
        write_snapshot(snapshot_path(tmp_path, 1), 1, fill)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_killed_in_the_middle_leaves_the_last_snapshot_in_force(tmp_path: Path) -> None:
    digest = write(tmp_path, 1)
    program = (
        "import sys, time, pathlib\n"
        "from gyre.train.snapshot import *\n"
        "def fill(folder):\n"
        "    (folder / 'model.safetensors').write_bytes(b'half')\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        "write_snapshot(snapshot_path(pathlib.Path(sys.argv[1]), 2), 2, fill)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        os.kill(writer.pid, signal.SIGKILL)
        assert writer.wait(timeout=10) == -signal.SIGKILL
    assert newest_complete(tmp_path) == (1, snapshot_path(tmp_path, 1), digest)
    assert len(list(tmp_path.iterdir())) == 2, "the half-written folder is there, under another name"
    clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["v00000001"]


def test_the_newest_and_the_pinned_are_kept(tmp_path: Path) -> None:
    for version in range(6):
        write(tmp_path, version)
    assert keep_newest(tmp_path, 2, pinned={0, 3}) == (1, 2)
    assert [version for version, _ in list_snapshots(tmp_path)] == [0, 3, 4, 5]
    assert keep_newest(tmp_path, 2, pinned={0, 3}) == ()


def test_versions_sort_as_numbers(tmp_path: Path) -> None:
    write(tmp_path, 99_999_999)
    digest = write(tmp_path, 100_000_000)
    assert newest_complete(tmp_path) == (100_000_000, snapshot_path(tmp_path, 100_000_000), digest)


def test_what_gyred_imports_of_training_is_light() -> None:
    heavy = ["torch", "numpy", "transformers", "safetensors", "megatron"]
    program = (
        "import sys, json, gyre.train.batch, gyre.train.ledger, gyre.train.snapshot, gyre.train.shape\n"
        f"print(json.dumps([name for name in {heavy!r} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout) == []
