"""The order of a streamed corpus in a run: its lanes, shared out to the ranks."""

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.parallel.memory_breakdown import GIB
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config import Config, DataConfig
from meshwright.train.data.corpus import Corpus, cache_root, short_names
from meshwright.train.data.prepare.partition import is_utf8
from meshwright.train.data.prepare.worker import PrepareSettings, TokenizeJob
from meshwright.train.data.sample_order import draw, shares
from meshwright.train.data.sequences import Batch, BatchShape, Mark, SequenceShape, read_batch
from meshwright.train.data.stream.index import StreamIndex, read_index
from meshwright.train.data.stream.lanes import Lane, Place, choose_lanes
from meshwright.train.data.stream.remote import Remote
from meshwright.train.data.stream.shards import find_shards
from meshwright.train.data.stream.token_cache import CachedSource, CacheLimits, TokenCache
from meshwright.train.data.token_store import TokenShard, TokenStream
from meshwright.train.distributed.agreement import broadcast_from_rank0
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import DataError

_MIB = 2**20
_PARTS = 1_000_000  # of an epoch, so that sums over the ranks are exact


@dataclass(frozen=True)
class HeldNumbers:
    """An array in memory in place of a `MappedFile`; `path`: what a message names."""

    path: str
    array: NDArray[Any]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def __len__(self) -> int:
        return len(self.array)

    def numbers(self) -> NDArray[Any]:
        return self.array


class StreamOrder:
    """The order of sequences of a streamed corpus; in place of a SampleOrder.

    Args:
        weights: of the sources, in a mixture
        lanes: of the run; a source with fewer groups has as many lanes as groups, and lane l of the run takes
            its lane l modulo their number
        limits: of the cache on this node
    """

    strided = True
    sizes: tuple[int, ...] = ()

    def __init__(
        self,
        sources: Sequence[CachedSource],
        weights: tuple[float, ...],
        lanes: int,
        seed: int,
        limits: CacheLimits,
        remote: Remote,
    ) -> None:
        self.sources, self.weights, self.lanes, self.seed = sources, weights, lanes, seed
        self.limits, self.remote = limits, remote
        self.names = [source.name for source in sources]
        self.counts = [min(lanes, len(source.index.groups)) for source in sources]
        self._reported = 0, 0  # bytes fetched until the last report, and its time

    def reader(self, start: TrainPosition, batch: BatchShape, shape: SequenceShape) -> "StreamReader":
        return StreamReader(self, start, batch, shape)

    def check(self, first: int, shape: SequenceShape) -> None:
        """What each rank reads follows from the index, which all ranks have in common."""

    def waiting(self) -> str:
        """Return the request of this process that has failed for longest, as one clause; "" for none."""
        return self.remote.waiting()

    def fetched(self) -> int:
        """Return the bytes that this process has fetched from sources of URLs."""
        return self.remote.fetched_bytes

    def describe(self, positions: NDArray[np.int64]) -> str:
        """Name the sequences at these positions."""
        lanes = ", ".join(str(lane) for lane in sorted({*(positions % self.lanes).tolist()}))
        return f"positions {', '.join(map(str, positions.tolist()))} (lanes {lanes})"

    def progress(self, position: int, sums: Sequence[int] = ()) -> dict[str, float]:
        """Return the progress as metrics, from the sums of the readers' counts."""
        fetched, elapsed_us, *parts = sums
        epochs = [part / _PARTS / count for part, count in zip(parts, self.counts, strict=True)]
        more, more_us = fetched - self._reported[0], elapsed_us - self._reported[1]
        self._reported = fetched, elapsed_us
        rate = {"data_fetched_mib_per_s": more / _MIB / max(1, more_us) * 1e6}
        if len(epochs) == 1:
            return {"epoch": epochs[0], **rate}
        return {f"epoch/{name}": epoch for name, epoch in zip(self.names, epochs, strict=True)} | rate

    def source_of(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the source of each position first .. first + count - 1."""
        if len(self.sources) == 1:
            return np.zeros(count, np.int64)
        return draw(first, count, self.weights, self.seed)[0]


class StreamReader:
    """Reads this rank's sequences of one step after another, from `start` on.

    Position k of a run belongs to the rank k modulo the data-parallel degree and to lane k modulo the lanes.
    If the degree divides the lanes, no lane has positions of two ranks; otherwise all ranks with positions of
    a lane read it, and each keeps its own.
    """

    def __init__(
        self, order: StreamOrder, start: TrainPosition, batch: BatchShape, shape: SequenceShape
    ) -> None:
        self._order, self._batch, self._shape, self._began_s = order, batch, shape, time.monotonic()
        self._cache = TokenCache(order.sources, order.limits, order.remote)
        apart = math.gcd(order.lanes, batch.data_parallel)  # ranks that read different lanes
        mine = batch.data_rank % apart
        self._lanes = dict[tuple[int, int], Lane]()
        self._owned = list[tuple[int, int]]()  # of several ranks that read a lane, the first saves its place
        for source, (data, count) in enumerate(zip(order.sources, order.counts, strict=True)):
            sizes = data.index.sizes
            for number in sorted({lane % count for lane in range(mine, order.lanes, apart)}):
                key = source, number
                if min(lane % apart for lane in range(number, order.lanes, count)) == batch.data_rank:
                    self._owned.append(key)
                place = _parse(start.places.get(_format(key), ""))
                read = partial(self._cache.turn, key)
                self._lanes[key] = Lane(number, count, sizes, order.seed + source, place, read)
        self._begin(start.samples)

    def _begin(self, first_sample: int) -> None:
        """Begin to fetch the first window of each lane in the order of the positions, before any window that
        follows, as far as their files have at most half of this rank's share of the cache."""
        order, room = self._order, self._order.limits.share_bytes / 2
        sources = order.source_of(first_sample, order.lanes).tolist()
        keys = [self._key(source, first_sample + n) for n, source in enumerate(sources)]
        for key in dict.fromkeys(key for key in keys if key in self._lanes):
            groups = self._lanes[key].groups_at(self._lanes[key].place)
            room -= float(order.sources[key[0]].index.sizes[groups].sum())
            if room < 0:
                return
            self._cache.expect(key, groups)

    def _key(self, source: int, position: int) -> tuple[int, int]:
        """The source and lane of a position, of which the source is known."""
        return source, position % self._order.lanes % self._order.counts[source]

    def read(self, first_sample: int, pinned: bool) -> list[Batch]:
        """Return the micro batches of the step that begins at position `first_sample`, in host memory. Steps
        are read in order. Raises DataError."""
        order, batch, streams = self._order, self._batch, list[TokenStream]()
        own = {*batch.positions(first_sample, order.strided).tolist()}
        for position, source in enumerate(
            order.source_of(first_sample, batch.global_batch_size).tolist(), first_sample
        ):
            if (lane := self._lanes.get(self._key(source, position))) is None:
                continue
            sequence = self._next(lane, order.names[source])
            if position in own:
                streams.append(sequence)
        size = batch.micro_batch_size
        rows = np.stack((np.arange(size), np.zeros(size, np.int64)), axis=1)
        return [
            read_batch(streams[first : first + size], rows, self._shape, pinned)
            for first in range(0, len(streams), size)
        ]

    def mark(self) -> Mark:
        """Return where the lanes that this rank saves go on after the last step that was read; and bytes
        fetched by this process, microseconds of the first, and parts of epochs of each source
        (`StreamOrder.progress`)."""
        places, parts = dict[str, str](), [0] * len(self._order.sources)
        for key in self._owned:
            places[_format(key)] = " ".join(map(str, self._lanes[key].place))
            parts[key[0]] += round(self._lanes[key].epochs() * _PARTS)
        elapsed_us = 0 if self._batch.data_rank else round((time.monotonic() - self._began_s) * 1e6)
        return Mark(places, (self._order.fetched(), elapsed_us, *parts))

    def close(self) -> None:
        self._cache.close()

    def _next(self, lane: Lane, name: str) -> TokenStream:
        """The next sequence of a lane, as a stream of its own for the packer of prepared data."""
        seq_len = self._shape.seq_len
        packing = self._shape.packing
        tokens, ends = lane.next_packed(seq_len) if packing else lane.next_document(seq_len + 1)
        return TokenStream([TokenShard(HeldNumbers(name, tokens), HeldNumbers(name, ends))], 0)


def load_stream(
    config: Config,
    corpus: Corpus,
    data_parallel: int,
    ranks: RankInfo,
    start: TrainPosition,
    print_: Callable[[str], None],
) -> tuple[StreamOrder, Corpus]:
    """Index the streamed sources of a run; return their order, and the corpus with what it is. `start`: that
    of the checkpoint. Collective: every rank must call it. Raises the same DataError on every rank."""
    data, remote = config.data, Remote(config.data.fetch_s or math.inf)
    key = "data.mixture" if data.mixture else "data.source"
    found = broadcast_from_rank0(
        ranks, lambda: {source: find_shards(source, key) for source in data.training_sources}
    )
    names = short_names(list(found))
    folder = cache_root(data)
    sources = list[CachedSource]()
    # nodes may share the folder, perhaps by NFS, where a file that another one has open must not be deleted
    cache = folder / "stream" / platform.node()
    settings, tokenizer = PrepareSettings(0.0, data.text_field, skip_bad=data.skip_bad), corpus.tokenizer
    for source, shards in found.items():
        if source == "stdlib" and tokenizer.sha256:
            shards = {name: path for name, path in shards.items() if is_utf8(Path(path))}
        job = TokenizeJob(
            *(data.tokenizer, data.bos, data.eos, tokenizer.sha256, settings, cache),
            check_text=source != "stdlib",  # bytes may be any text
        )
        index = read_index(source, shards, data.text_field, remote, folder, ranks)
        sources.append(CachedSource(names[source], index, shards, job, tokenizer.vocab_size))
        print_(f"data: {names[source]}: {_describe(index)}")
    lanes = _lanes(data.lanes, start.lanes, data_parallel)
    # Sorted by their content, as prepared sources are.
    weights = [data.mixture.get(source, 1.0) for source in found]
    pairs = sorted(zip(sources, weights, strict=True), key=lambda pair: pair[0].index.fingerprint)
    sources, weights = [source for source, _ in pairs], [weight for _, weight in pairs]
    limits = _limits(data, data_parallel, ranks)
    order = StreamOrder(sources, tuple(weights), lanes, config.run.seed, limits, remote)
    if lanes % data_parallel:
        print_(
            f"data: {data_parallel} data-parallel ranks do not divide {lanes} lanes: each lane is read by "
            f"{data_parallel // math.gcd(lanes, data_parallel)} of them, and the sequences stay the same"
        )
    contents = [source.index.fingerprint for source in sources], shares(tuple(weights)), lanes
    read = data.packing, data.text_field, vars(replace(corpus.tokenizer, name=""))
    fingerprint = hashlib.sha256(json.dumps([contents, read]).encode()).hexdigest()[:16]
    description = f"{', '.join(order.names)}, streamed over {lanes} lanes"
    return order, replace(corpus, fingerprint=fingerprint, description=description)


def _describe(index: StreamIndex) -> str:
    return (
        f"{len(index.shards):,} files, {sum(shard.size_bytes for shard in index.shards) / GIB:.2f} GiB, in "
        f"{len(index.groups):,} groups of which the largest has {index.sizes.max() / _MIB:.2f} MiB of text"
    )


def _lanes(asked: int | str, recorded: int, data_parallel: int) -> int:
    """The lanes of a run: as before a resume, as asked, or chosen for its degree. Raises DataError."""
    if isinstance(asked, int) and recorded not in (0, asked):
        raise DataError(
            f"data.lanes={asked}, but the run has trained with {recorded}, on which its order of sequences "
            "depends: set data.lanes=auto, or begin another run"
        )
    return recorded or (asked if isinstance(asked, int) else choose_lanes(data_parallel))


def _limits(data: DataConfig, data_parallel: int, ranks: RankInfo) -> CacheLimits:
    """The part of this rank, if as many data-parallel ranks are on every node."""
    readers = max(1, ranks.local_world_size * data_parallel // ranks.world_size)
    cores = usable_cores() // ranks.local_world_size
    workers = data.workers if isinstance(data.workers, int) else max(1, cores - 1)
    return CacheLimits(data.cache_gib * GIB, data.cache_gib * GIB / readers, workers)


def _format(key: tuple[int, int]) -> str:
    return f"{key[0]}/{key[1]}"


def _parse(place: str) -> Place:
    return Place(*map(int, place.split()))
