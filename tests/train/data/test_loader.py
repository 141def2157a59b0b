"""Sample order and batches: every rank reads its part of the order, without overlap or loss."""

import threading
from multiprocessing.pool import ThreadPool

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from meshwright.models.loss import IGNORE_INDEX
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.data import sample_order
from meshwright.train.data import training_data as loader_module
from meshwright.train.data.corpus import check_sequences
from meshwright.train.data.sample_order import SampleOrder, sample_indices
from meshwright.train.data.sequences import Batch, BatchShape, SequenceShape, read_batch
from meshwright.train.data.token_store import Source, TokenStream
from meshwright.train.data.training_data import TrainLoader, hash_tokens
from meshwright.train.errors import DataError
from meshwright.train.evaluation import set_batches
from tests.support import stores
from tests.support.device_calls import DeviceCalls

CPU = torch.device("cpu")


def between(first: int, count: int, n: int, seed: int) -> NDArray[np.int64]:
    """Samples at positions first .. first + count - 1."""
    return sample_indices(np.arange(first, first + count), n, seed)


# Order


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 17, 64, 65, 256, 1000])
def test_every_epoch_is_a_permutation_of_its_own_that_the_seed_decides(n: int) -> None:
    order = {seed: between(0, 3 * n, n, seed).reshape(3, n).tolist() for seed in (0, 1, 2**40)}
    epochs = [epoch for of_seed in order.values() for epoch in of_seed]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert between(0, 3 * n, n, 1).reshape(3, n).tolist() == order[1]
    if n > 8:
        assert len(set(map(tuple, epochs))) == 9


# Batches

SEQ_LEN = 4
N = 100
SEQUENCES = SequenceShape(SEQ_LEN, packing=True, document_mask=False, start_id=None, vocab_size=65536)


def split_of(count: int) -> TokenStream:
    """Tokens 0, 1, 2 ...: sequence i starts with token i * SEQ_LEN."""
    return stores.split_of([range(count)])


TOKENS = split_of(N * SEQ_LEN + 1)


def shape_of(rank: int, ranks: int, micro: int = 1, global_batch: int = 8) -> BatchShape:
    return BatchShape(micro, global_batch // (micro * ranks), rank, ranks)


def load(
    shape: BatchShape, split: TokenStream = TOKENS, seed: int = 0, first_sample: int = 0, ahead: int = 2
) -> TrainLoader:
    order = SampleOrder((Source("all", 1.0, split),), SEQUENCES, seed)
    return TrainLoader(order, SEQUENCES, shape, TrainPosition(samples=first_sample), CPU, ahead)


def samples_of(batches: list[Batch]) -> list[int]:
    """The sequences in the batches, checked token by token."""
    for batch in batches:
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.tokens, batch.tokens[:, :1] + torch.arange(SEQ_LEN))
        assert torch.equal(batch.targets, batch.tokens + 1)
    return [int(first) // SEQ_LEN for batch in batches for first in batch.tokens[:, 0]]


def steps_of(shape: BatchShape, count: int, first_sample: int = 0) -> list[list[int]]:
    """The samples of a rank in the first `count` steps."""
    loader = load(shape, seed=3, first_sample=first_sample)
    try:
        return [samples_of(loader.next().micro_batches) for _ in range(count)]
    finally:
        loader.close()


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1), (8, 1)])
def test_a_step_has_the_same_samples_however_it_is_cut_and_no_rank_has_anothers(
    ranks: int, micro: int
) -> None:
    steps = 30  # of 8 samples: more than two epochs of 100
    by_rank = [steps_of(shape_of(rank, ranks, micro), steps) for rank in range(ranks)]
    for step in range(steps):
        expected = between(step * 8, 8, N, seed=3).tolist()
        assert [sample for rank in by_rank for sample in rank[step]] == expected


def test_the_thread_names_no_device_but_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun local rank 1 of 2 computes on cuda:1, and every new thread starts on cuda:0."""
    calls = DeviceCalls(monkeypatch)
    monkeypatch.setattr(
        sample_order, "read_batch", lambda splits, rows, shape, pinned: read_batch(splits, rows, shape)
    )
    monkeypatch.setattr(loader_module, "to_device", lambda batch, device: batch)
    order = SampleOrder((Source("all", 1.0, TOKENS),), SEQUENCES, 0)
    loader = TrainLoader(order, SEQUENCES, shape_of(1, 2), TrainPosition(), torch.device("cuda:1"), ahead=2)
    for _ in range(3):
        loader.next()
    loader.close()
    assert calls.by_thread.keys() == {"MainThread", "train-loader"}
    assert set(calls.by_thread["train-loader"]) == {1}


@pytest.mark.parametrize("done", [1, 5, 12, 13])
def test_going_on_at_a_step_is_as_never_having_stopped(done: int) -> None:
    expected = steps_of(shape_of(1, 2, 2), 16)
    assert steps_of(shape_of(1, 2, 2), 16 - done, first_sample=done * 8) == expected[done:]


def hashes_of(ranks: int, micro: int, steps: int, first_sample: int = 0) -> list[int]:
    loaders = [load(shape_of(rank, ranks, micro), seed=3, first_sample=first_sample) for rank in range(ranks)]
    try:
        return [sum(loader.next().data_hash for loader in loaders) for _ in range(steps)]
    finally:
        for loader in loaders:
            loader.close()


def test_the_hash_of_a_step_is_the_same_on_every_mesh_and_changes_with_the_order_of_its_sequences() -> None:
    expected = hashes_of(1, 8, 10)
    assert len(set(expected)) == 10
    assert hashes_of(4, 1, 10) == hashes_of(2, 2, 10) == expected
    assert hashes_of(8, 1, 4, first_sample=6 * 8) == expected[6:]
    loader = load(shape_of(0, 1, 8), seed=3)
    (batch,) = loader.next().micro_batches
    loader.close()
    for changed, same in ((range(8), True), ((1, 0, *range(2, 8)), False)):
        hashes = [hash_tokens(row, position) for position, row in enumerate(batch.tokens[[*changed]])]
        assert (sum(hashes) == expected[0]) == same


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "train-loader"]


@pytest.mark.parametrize("taken", [0, 5])
def test_close_ends_the_thread(taken: int) -> None:
    loader = load(shape_of(0, 1))
    for _ in range(taken):
        loader.next()
    assert len(loader_threads()) == 1
    loader.close()
    assert loader_threads() == []
    loader.close()  # a second call is allowed


class Noted(SampleOrder):
    """Counts the steps that are read, and by how many they are ahead of those that were asked for."""

    def __init__(self) -> None:
        super().__init__((Source("all", 1.0, TOKENS),), SEQUENCES, 0)
        self.seen = self.asked = self.most_ahead = 0
        self.changed = threading.Condition()

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        with self.changed:
            self.seen += first % 8 == 0  # the first sequence of a step of 8
            self.most_ahead = max(self.most_ahead, self.seen - self.asked)
            self.changed.notify()
        return super().rows(first, count)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_no_more_than_so_many_steps_are_read_before_they_are_asked_for(ahead: int) -> None:
    order = Noted()
    loader = TrainLoader(order, SEQUENCES, shape_of(0, 1), TrainPosition(), CPU, ahead)
    for _ in range(20):
        with order.changed:
            assert order.changed.wait_for(lambda: order.seen >= order.asked + ahead, timeout=60)
            order.asked += 1
        loader.next()
    loader.close()
    assert order.most_ahead == ahead


def test_an_exception_in_the_thread_reaches_whoever_asks_for_the_next_batch() -> None:
    loader, thread = load(shape_of(0, 1), seed=-1), ThreadPool(1)
    for _ in range(3):  # every later call raises it again
        with pytest.raises(ValueError, match="non-negative"):
            thread.apply_async(loader.next).get(60)
    thread.terminate()
    loader.close()
    assert loader_threads() == []


def test_too_little_text_for_one_sequence_is_refused_with_the_numbers() -> None:
    assert check_sequences(split_of(SEQ_LEN + 1), SEQUENCES, "web") == 1
    assert check_sequences(TOKENS, SEQUENCES, "web") == N
    for tokens in (SEQ_LEN, 0):
        with pytest.raises(DataError, match=rf"web: {tokens} training tokens .* train\.seq_len=4 \+ 1"):
            check_sequences(split_of(tokens) if tokens else TokenStream([], 0), SEQUENCES, "web")


def test_the_end_of_a_set_and_a_set_shorter_than_a_sequence_are_evaluated_too() -> None:
    shape = BatchShape(1, 1, 0, 1)
    targets = [b.targets[0].tolist() for b in set_batches(split_of(SEQ_LEN + 3), SEQUENCES, shape, 0, CPU)]
    assert targets == [[1, 2, 3, 4], [5, 6, IGNORE_INDEX, IGNORE_INDEX]]
    (batch,) = set_batches(split_of(2), SEQUENCES, shape, 0, CPU)
    assert batch.targets.tolist() == [[1, *[IGNORE_INDEX] * 3]]


@pytest.mark.parametrize("limit", [1, 7, 64, 1000, 0])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 16), (2, 3), (3, 2), (4, 8), (8, 1)])
def test_evaluation_sees_each_held_out_sequence_exactly_once(ranks: int, micro: int, limit: int) -> None:
    shapes = [shape_of(rank, ranks, micro, ranks * micro) for rank in range(ranks)]
    by_rank = [list(set_batches(TOKENS, SEQUENCES, shape, limit, CPU)) for shape in shapes]
    assert len({len(batches) for batches in by_rank}) == 1, "every rank runs as many forwards"
    assert {batch.tokens.shape for batches in by_rank for batch in batches} == {(micro, SEQ_LEN)}, (
        "one shape, one graph"
    )
    rows = [row for batches in by_rank for batch in batches for row in batch.targets]
    counted = [row.tolist() for row in rows if (row != IGNORE_INDEX).any()]
    assert all(IGNORE_INDEX not in row for row in counted)
    assert sorted((row[0] - 1) // SEQ_LEN for row in counted) == list(range(min(limit or N, N)))
