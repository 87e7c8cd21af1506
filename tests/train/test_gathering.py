"""A snapshot that comes chunk by chunk: what is there is known from the chunks, whoever was killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.train import snapshot, whole_folder
from gyre.train.gathering import Gathering, begin_gathering, clear_gatherings, find_gathering, read_chunk
from gyre.train.snapshot import SnapshotTorn, snapshot_path, verify, write_snapshot

CHUNK_BYTES = 1024
CONTENT = bytes(range(256)) * 20 + b"the end"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (snapshot, whole_folder):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture
def source(tmp_path: Path, small_chunks: None) -> tuple[Path, str]:
    """A whole snapshot 3 and its digest."""

    def fill(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(CONTENT)
        (folder / "config.json").write_text("{}")
        (folder / "empty").touch()

    path = snapshot_path(tmp_path / "source", 3)
    return path, write_snapshot(path, 3, fill)


def begin(source: tuple[Path, str], target: Path) -> Gathering:
    return begin_gathering(target, 3, source[1], (source[0] / "manifest.json").read_bytes())


def test_chunks_come_in_any_order_and_the_last_one_makes_it_whole(source: tuple[Path, str], tmp_path: Path) -> None:
    gathering = begin(source, tmp_path)
    assert gathering.have == 0
    for number in reversed(range(len(gathering.chunks))):
        assert snapshot.list_snapshots(tmp_path) == []
        assert gathering.put(number, read_chunk(source[0], gathering.chunks[number]))
        assert gathering.have >> number & 1
        assert gathering.read(number) == read_chunk(source[0], gathering.chunks[number])
    path = gathering.commit()
    assert path == snapshot_path(tmp_path, 3)
    verify(path, source[1])
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []
    assert {file.name for file in path.iterdir()} == {file.name for file in source[0].iterdir()}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_a_killed_process_left_is_known_from_the_chunks_themselves(
    source: tuple[Path, str], tmp_path: Path, data: st.DataObject
) -> None:
    gathering = begin(source, tmp_path)
    count = len(gathering.chunks)
    there = data.draw(st.sets(st.integers(0, count - 1)))
    for number in there:
        gathering.put(number, read_chunk(source[0], gathering.chunks[number]))
    hurt = data.draw(st.sampled_from(sorted(there))) if there else None
    if hurt is not None:
        place = gathering.chunks[hurt]
        content = bytearray((gathering.path / place.file).read_bytes())
        content[place.offset] ^= 1
        (gathering.path / place.file).write_bytes(content[: data.draw(st.sampled_from([None, place.offset + 1]))])
    found = find_gathering(tmp_path, 3, source[1])
    assert found is not None
    assert not found.have & ~sum(1 << number for number in there)
    if hurt is not None:
        assert not found.have >> hurt & 1
    for number in range(count):
        if not found.have >> number & 1:
            assert found.put(number, read_chunk(source[0], found.chunks[number]))
    verify(found.commit(), source[1])


@pytest.mark.parametrize("data", [b"", b"x", b"x" * CHUNK_BYTES, bytes(range(256)) * 4 + b"x"])
def test_what_is_not_the_chunk_is_not_taken(source: tuple[Path, str], tmp_path: Path, data: bytes) -> None:
    gathering = begin(source, tmp_path)
    assert not gathering.put(2, data)
    assert gathering.have == 0


def test_a_manifest_that_was_not_published_is_refused_and_one_that_was_changed_is_not_gone_on_with(
    source: tuple[Path, str], tmp_path: Path
) -> None:
    manifest = (source[0] / "manifest.json").read_bytes()
    with pytest.raises(SnapshotTorn, match="published was"):
        begin_gathering(tmp_path, 3, source[1], manifest + b" ")
    with pytest.raises(SnapshotTorn, match="is of version 3"):
        begin_gathering(tmp_path, 4, source[1], manifest)
    gathering = begin(source, tmp_path)
    assert find_gathering(tmp_path, 4, source[1]) is None
    (gathering.path / "manifest.json").write_bytes(manifest + b" ")
    assert find_gathering(tmp_path, 3, source[1]) is None


def test_a_folder_that_is_not_whole_is_not_given_its_name(source: tuple[Path, str], tmp_path: Path) -> None:
    gathering = begin(source, tmp_path)
    gathering.have = (1 << len(gathering.chunks)) - 1
    with pytest.raises(SnapshotTorn):
        gathering.commit()
    assert find_gathering(tmp_path, 3, source[1]) is None, "it is begun anew"


def test_what_other_tries_left_is_cleared(source: tuple[Path, str], tmp_path: Path) -> None:
    gathering = begin(source, tmp_path)
    left = tmp_path / ".gathering-v00000002-0123"
    left.mkdir()
    clear_gatherings(tmp_path, [gathering.path])
    assert not left.exists()
    assert gathering.path.is_dir()
