"""A rank of bench_ranks in a process of its own: `rank_process.py RANK COUNT MEETING MODEL SNAPSHOT FOLDER`.

For each line that it reads it does what that says, over memory given back before, and writes the seconds and the processor
seconds that it took.

    load     the product's: its part of the snapshot's weights, out of Hugging Face's layout
    shard    the same numbers out of a file that holds this rank's memory as it is, checked as the snapshot is
    copy     as many bytes as the whole weights have, from memory to memory
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from time import perf_counter, process_time

import torch
from safetensors.torch import save_file

from gyre.train.ranks import RankPlace
from gyre.train.replica import Replica, ReplicaConfig
from gyre.train.snapshot import read_manifest
from gyre.train.tensor_file import MappedFile
from gyre.train.whole_folder import CHUNK_BYTES, chunk_checksum


class Rank:
    def __init__(self, place: RankPlace, model: Path, snapshot: Path, folder: Path) -> None:
        self._share = place.rank, place.count
        self._snapshot = snapshot
        (self._weights,) = (entry for entry in read_manifest(snapshot).files if entry.name == "model.safetensors")
        self._replica = Replica(model, ReplicaConfig(), folder / "checkpoints", place=place)
        self._model = self._replica._model  # pyright: ignore[reportPrivateUsage] - of which one step is timed
        self._there, self._here = bytearray(self._weights.size_bytes), bytearray(self._weights.size_bytes)
        self._replica.load(snapshot, 0)
        self._shard = folder / f"shard-{place.rank}-of-{place.count}.safetensors"
        written = folder / f"written-{place.rank}"
        save_file({"params": self._model.params}, written)
        shutil.copyfile(written, self._shard)  # as the snapshot came: how a file was written shows in how it is read
        whole = memoryview(self._shard.read_bytes())
        self._checksums = tuple(
            chunk_checksum(whole[at : at + CHUNK_BYTES]) for at in range(0, len(whole), CHUNK_BYTES)
        )

    def load(self) -> None:
        self._model.load([MappedFile(self._snapshot / self._weights.name, self._weights.chunks, self._share)])

    def shard(self) -> None:
        self._model._memories[0].take()  # pyright: ignore[reportPrivateUsage]
        file = MappedFile(self._shard, self._checksums)
        (tensor,) = file.tensors
        step = CHUNK_BYTES // tensor.values.element_size()
        for begin in range(0, tensor.values.numel(), step):
            file.check_until(tensor.begin + begin * tensor.values.element_size() + CHUNK_BYTES)
            self._model.params[begin : begin + step].copy_(tensor.values[begin : begin + step])
        file.check_until(file.size_bytes)

    def copy(self) -> None:
        self._here[:] = self._there

    def timed(self, what: str) -> tuple[float, float]:
        self._replica.offload()
        started_s, started_cpu_s = perf_counter(), process_time()
        {"load": self.load, "shard": self.shard, "copy": self.copy}[what]()
        return perf_counter() - started_s, process_time() - started_cpu_s


def main() -> None:
    torch.set_num_threads(1)
    rank, count, meeting, model, snapshot, folder = sys.argv[1:]
    one = Rank(RankPlace(int(rank), int(count), meeting), Path(model), Path(snapshot), Path(folder))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(one.timed(line.strip())), flush=True)


if __name__ == "__main__":
    main()
