"""A streamed corpus gives the same sequences on every mesh and after every resume, each document once an
epoch."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.parallel.memory_breakdown import GIB
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.data.prepare.worker import PrepareSettings, TokenizeJob
from meshwright.train.data.sequences import Batch, BatchShape, SequenceShape
from meshwright.train.data.stream.index import read_index
from meshwright.train.data.stream.order import StreamOrder, StreamReader
from meshwright.train.data.stream.remote import Remote
from meshwright.train.data.stream.shards import find_shards
from meshwright.train.data.stream.token_cache import CachedSource, CacheLimits
from meshwright.train.data.tokenizer import ByteTokenizer
from meshwright.train.distributed.ranks import ALONE

PACKED = SequenceShape(24, packing=True, document_mask=True, start_id=None, vocab_size=257)
UNPACKED = replace(PACKED, packing=False, document_mask=False, start_id=256)
LIMITS = CacheLimits(GIB, GIB, workers=1)


def write_text(folder: Path, files: int, lines: int = 30) -> list[str]:
    """Write different documents of 2 to 60 letters into JSON lines, and return them."""
    chosen, documents = random.Random(files), list[str]()
    folder.mkdir()
    for number in range(files):
        texts = [f"{number}.{line}" + "x" * chosen.randrange(56) for line in range(lines)]
        documents += texts
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{number:03d}.jsonl").write_text(content)
    return documents


def order_of(
    cache: Path, *folders: Path, lanes: int = 6, limits: CacheLimits = LIMITS, skip_bad: int = 0
) -> StreamOrder:
    remote, sources = Remote(limit_s=1.0), list[CachedSource]()
    settings = PrepareSettings(held_out=0.0, skip_bad=skip_bad)
    for folder in folders:
        shards = find_shards(str(folder))
        index = read_index(str(folder), shards, "text", remote, cache, ALONE)
        job = TokenizeJob("bytes", "auto", "auto", "", settings, cache / "stream", check_text=True)
        sources.append(CachedSource(folder.name, index, shards, job, ByteTokenizer.info.vocab_size))
    return StreamOrder(sources, tuple([3.0, 1.0][: len(folders)]), lanes, 5, limits, remote)


def rows_of(batches: Sequence[Batch]) -> list[list[list[int]]]:
    """Of each sequence its tokens, targets, and beginnings of documents."""
    tensors = [batch.tensors().values() for batch in batches]
    return [[row.tolist() for row in rows] for of_batch in tensors for rows in zip(*of_batch, strict=True)]


def read(
    order: StreamOrder,
    start: TrainPosition,
    ranks: int,
    steps: int,
    accumulation: int = 1,
    shape: SequenceShape = PACKED,
) -> tuple[dict[int, object], TrainPosition]:
    """Read steps on ranks that share a cache; return the sequence at each position, and where the ranks
    end."""
    sequences, places, samples = dict[int, object](), dict[str, str](), start.samples
    for rank in range(ranks):
        batch = BatchShape(2, accumulation, rank, ranks)
        with closing(StreamReader(order, start, batch, shape)) as reader:
            for step in range(steps):
                first = samples + step * batch.global_batch_size
                rows = rows_of(reader.read(first, pinned=False))
                positions = batch.positions(first, strided=True).tolist()
                assert not sequences.keys() & positions
                sequences |= zip(positions, rows, strict=True)
            assert not places.keys() & reader.mark().places.keys()
            places |= reader.mark().places
    return sequences, TrainPosition(samples=samples + steps * 2 * accumulation * ranks, places=places)


@pytest.mark.parametrize("shape", [PACKED, UNPACKED], ids=["packed", "unpacked"])
@pytest.mark.parametrize(
    "files", [(9,), (1,), (7, 2)], ids=["one source", "fewer groups than lanes", "mixture"]
)
def test_every_mesh_and_every_resume_reads_the_same_sequences(
    files: tuple[int, ...], shape: SequenceShape, tmp_path: Path
) -> None:
    folders = [tmp_path / f"text{count}" for count in files]
    for folder, count in zip(folders, files, strict=True):
        write_text(folder, count)
    undisturbed, _ = read(order_of(tmp_path / "cache", *folders), TrainPosition(), 1, 90, shape=shape)
    assert len({str(rows) for rows in undisturbed.values()}) > 20

    position, resumed = TrainPosition(), dict[int, object]()
    for ranks, steps, accumulation in [(2, 7, 1), (4, 3, 2), (3, 4, 1), (1, 9, 1), (4, 2, 1)]:
        order = order_of(tmp_path / "cache", *folders)
        sequences, position = read(order, position, ranks, steps, accumulation, shape)
        resumed |= sequences
    assert resumed == {place: undisturbed[place] for place in range(position.samples)}
    assert position.samples > 120


def test_each_document_is_read_once_an_epoch_in_another_order(tmp_path: Path) -> None:
    documents = write_text(tmp_path / "text", files=10)
    order = order_of(tmp_path / "cache", tmp_path / "text", lanes=4)
    shape, epochs = replace(UNPACKED, seq_len=64), dict[int, list[str]]()
    with closing(StreamReader(order, TrainPosition(), BatchShape(4, 1, 0, 1), shape)) as reader:
        unread = True
        while unread:
            batch = reader.read(0, pinned=False)[0]
            places = [reader.mark().places[f"0/{lane}"].split() for lane in range(4)]
            for place, tokens in zip(places, batch.tokens.tolist(), strict=True):
                epochs.setdefault(int(place[0]), []).append(bytes(tokens[1 : tokens.index(256, 1)]).decode())
            unread = any(int(place[0]) < 3 for place in places)
    assert all(Counter(epochs[epoch]) == Counter(documents) for epoch in range(3))
    assert len({tuple(epochs[epoch]) for epoch in range(3)}) == 3
