"""The order of a streamed corpus: what each lane reads, a pure function of the seed, the same on every mesh.

An epoch is a permutation of all groups (row groups of parquet files, blocks of other files), dealt to a fixed
number of lanes. A lane reads its groups in windows of a few, the documents of a window in a shuffled order,
and concatenates epochs without end. Sequence k of a run is the next one of lane k modulo the number of lanes,
so that a few numbers per lane (`Place`) are all the state there is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.train.data.sample_order import permute
from meshwright.train.errors import DataError

LEAST_LANES = 64
# A window has as many groups as fit these limits, at least one; the first of a lane has one, so that the
# first steps of a run need little.
WINDOW_GROUPS, WINDOW_BYTES = 4, 64 * 2**20
EMPTY_EPOCHS = 64  # of a lane, whose groups may be empty by chance: the source has no text


class Place(NamedTuple):
    """Where a lane goes on: `epoch`, the first `group` of its window among those dealt to it, the `document`
    in the window's order, and the `token` in that."""

    epoch: int = 0
    group: int = 0
    document: int = 0
    token: int = 0


@dataclass(frozen=True)
class GroupTokens:
    """A tokenized group: ids[tokens], document after document; ends[documents], where each ends; and the
    number that names it."""

    ids: NDArray[Any]
    ends: NDArray[np.int64]
    name: int = 0

    @property
    def size_bytes(self) -> int:
        return self.ids.nbytes + self.ends.nbytes


def choose_lanes(data_parallel: int) -> int:
    """Return the smallest multiple of the data-parallel degree that is at least LEAST_LANES."""
    return data_parallel * math.ceil(LEAST_LANES / data_parallel)


def deal(groups: int, lanes: int, lane: int, epoch: int, seed: int) -> NDArray[np.int64]:
    """Return the groups, of 0 .. groups - 1, that a lane reads in an epoch, in order. Every group is dealt to
    one lane; `lanes` is at most `groups`."""
    # the third number, 2, separates these random numbers from those of prepared data's order
    return permute(np.arange(lane, groups, lanes), groups, np.random.SeedSequence([seed, epoch, 2]))


def window_end(sizes: NDArray[np.int64], place: Place) -> int:
    """Return where the window at `place` ends, given the bytes of the lane's groups in this epoch."""
    if place.epoch == place.group == 0:
        return 1
    total = np.cumsum(sizes[place.group : place.group + WINDOW_GROUPS])
    return place.group + max(1, int(np.searchsorted(total, WINDOW_BYTES, side="right")))


class Window:
    """The documents of some groups in a shuffled order, as documents[n] = (group, first token, end)."""

    def __init__(self, groups: Sequence[GroupTokens], seed: np.random.SeedSequence) -> None:
        self.ids = [group.ids for group in groups]
        documents = [np.empty((0, 3), np.int64)]
        for number, ends in enumerate(group.ends for group in groups):
            begins = np.concatenate(([0], ends[:-1]))[: len(ends)]
            documents.append(np.stack((np.full(len(ends), number), begins, ends), axis=1))
        self.documents = np.concatenate(documents)
        count = len(self.documents)
        self.documents = self.documents[permute(np.arange(count), count, seed)]


# reads groups, given their numbers, and is told which come next
ReadGroups = Callable[[Sequence[int], Sequence[int]], Sequence[GroupTokens]]


class Lane:
    """Reads the sequences of one lane, one after another, from `place` on.

    Args:
        lane, lanes: the number of the lane, and of all
        sizes: bytes of every group of the source
        read: returns the tokens of groups; its second argument are those of the window after this one. The
            groups of the call before are no longer needed.
    """

    def __init__(
        self, lane: int, lanes: int, sizes: NDArray[np.int64], seed: int, place: Place, read: ReadGroups
    ) -> None:
        self._lane, self._lanes, self._sizes, self._seed, self._read = lane, lanes, sizes, seed, read
        self._window, self._dealt = Window([], np.random.SeedSequence(0)), np.empty(0, np.int64)
        self.place, self._end = place, -1  # of the window; -1: none is open

    def epochs(self) -> float:
        """The epochs that are read so far, in groups; the window counts by its documents."""
        if self._end < 0:
            return float(self.place.epoch)
        read = self.place.document / max(1, len(self._window.documents))
        groups = self.place.group + read * (self._end - self.place.group)
        return self.place.epoch + groups / len(self._dealt)

    def next_packed(self, seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens[seq_len + 1] and the ends of documents in them. The last token is also the first of
        the next sequence."""
        tokens, ends = np.empty(seq_len + 1, np.int64), list[int]()
        at = 0
        while at < seq_len:
            part, ended = self._take(seq_len - at)
            tokens[at : at + len(part)] = part
            at += len(part)
            ends += [at] if ended else []
        self._open()
        group, begin, _ = self._document()
        tokens[seq_len] = self._window.ids[group][begin + self.place.token]
        return tokens, np.array(ends, np.int64)

    def next_document(self, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return at most `most` tokens of the next document, as next_packed does; the others are left out."""
        self._open()
        group, begin, end = self._document()
        tokens = self._window.ids[group][begin : min(end, begin + most)].astype(np.int64)
        self._next_document()
        return tokens, np.array([len(tokens)])

    def _take(self, most: int) -> tuple[NDArray[Any], bool]:
        """Take at most `most` tokens of the current document; and whether it ends with them."""
        self._open()
        group, begin, end = self._document()
        begin += self.place.token
        part = self._window.ids[group][begin : min(end, begin + most)]
        if ended := begin + len(part) == end:
            self._next_document()
        else:
            epoch, window, document, token = self.place
            self.place = Place(epoch, window, document, token + len(part))
        return part, ended

    def _document(self) -> tuple[int, int, int]:
        group, begin, end = self._window.documents[self.place.document].tolist()
        return group, begin, end

    def _next_document(self) -> None:
        epoch, window, document, _ = self.place
        self.place = Place(epoch, window, document + 1)

    def _open(self) -> None:
        """Open the window with the next token, unless it is open. DataError if there is no text."""
        first_epoch = self.place.epoch
        while self._end < 0 or self.place.document >= len(self._window.documents):
            place = self.place
            if self._end >= 0:  # the window is read
                done = self._end == len(self._dealt)
                place = Place(place.epoch + 1) if done else Place(place.epoch, self._end)
            if place.epoch > first_epoch + EMPTY_EPOCHS:
                raise DataError(
                    f"data.source: no document has any text in {EMPTY_EPOCHS} epochs of lane {self._lane}"
                )
            self._dealt = self._deal(place.epoch)
            self.place, self._end = place, window_end(self._sizes[self._dealt], place)
            groups = self._dealt[place.group : self._end]
            seed = np.random.SeedSequence([self._seed, place.epoch, self._lane, place.group, 3])
            following = self.groups_at(Place(place.epoch, self._end))
            self._window = Window(self._read(groups.tolist(), following), seed)

    def groups_at(self, place: Place) -> list[int]:
        """Return the groups of the window at a place, which is in the next epoch if none is left in its
        own."""
        dealt = self._deal(place.epoch)
        if place.group == len(dealt):
            place = Place(place.epoch + 1)
            dealt = self._deal(place.epoch)
        numbers: list[int] = dealt[place.group : window_end(self._sizes[dealt], place)].tolist()
        return numbers

    def _deal(self, epoch: int) -> NDArray[np.int64]:
        return deal(len(self._sizes), self._lanes, self._lane, epoch, self._seed)
