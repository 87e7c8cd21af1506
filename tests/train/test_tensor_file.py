"""Tensors out of a mapped file: every byte is checked by one rank or another, before who reads it is done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gyre.train.tensor_file import ChunkChanged, MappedFile
from gyre.train.whole_folder import CHUNK_BYTES, FileEntry, list_entries


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FileEntry]:
    folder = tmp_path_factory.mktemp("weights")
    numbers = torch.arange(CHUNK_BYTES, dtype=torch.float32)
    save_file({"a": numbers, "b": numbers[:7].clone(), "c": numbers[:99].to(torch.bfloat16)}, folder / "w.safetensors")
    (entry,) = list_entries(folder)
    return folder / "w.safetensors", entry


def test_tensors_are_those_of_the_file_in_the_order_in_which_they_lie(written: tuple[Path, FileEntry]) -> None:
    path, entry = written
    file = MappedFile(path, entry.chunks)
    file.check_until(file.size_bytes)
    found = {tensor.name: tensor.values for tensor in file.tensors}
    assert torch.equal(found["a"], torch.arange(CHUNK_BYTES, dtype=torch.float32))
    assert torch.equal(found["b"], torch.arange(7, dtype=torch.float32))
    assert torch.equal(found["c"], torch.arange(99, dtype=torch.float32).to(torch.bfloat16))
    assert [tensor.begin for tensor in file.tensors] == sorted(tensor.begin for tensor in file.tensors)


def changed(path: Path, entry: FileEntry, share: tuple[int, int], steps: list[int]) -> bool:
    try:
        file = MappedFile(path, entry.chunks, share)
        for place in (*steps, file.size_bytes):
            file.check_until(place)
    except ChunkChanged:
        return True
    return False


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_byte_anywhere_is_found_by_one_rank_however_they_come_to_it(
    written: tuple[Path, FileEntry], data: st.DataObject
) -> None:
    path, entry = written
    ranks = data.draw(st.integers(1, 4))
    steps = sorted(data.draw(st.lists(st.integers(0, entry.size_bytes), max_size=5)))
    place = data.draw(st.integers(0, entry.size_bytes - 1))
    assert not any(changed(path, entry, (rank, ranks), steps) for rank in range(ranks))
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        try:
            file.seek(place)
            file.write(bytes([byte ^ 1 << data.draw(st.integers(0, 7))]))
            file.flush()
            found = [changed(path, entry, (rank, ranks), steps) for rank in range(ranks)]
        finally:
            file.seek(place)
            file.write(bytes([byte]))
    assert any(found)
    if place >= CHUNK_BYTES:  # the first chunk has the header in it, which every rank needs
        assert found.count(True) == 1
