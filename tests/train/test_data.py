"""From text to batches: which documents, which tokens, in which order, cut over ranks without overlap or loss."""

import os
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.loss import IGNORE_INDEX
from train.data.config import DataConfig, DataError
from train.data.documents import find_documents
from train.data.held_out import held_out_batches
from train.data.loader import BatchShape, TrainLoader, count_sequences, read_batch
from train.data.order import sample_indices
from train.data.tokenise import SEPARATOR, choose_held_out, decode, encode
from train.data.tokens import check_vocabulary, load_tokens
from train.step import Batch

CPU = torch.device("cpu")


# Documents


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    for name in ("b.txt", "a.py", "sub/c.md", "sub/deep/d.txt", "image.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}\n" * 20)
    (folder / "empty.txt").touch()
    return folder


def names_of(source: str | Path) -> list[str]:
    return [name for name, _ in find_documents(str(source))]


def test_a_folder_has_all_text_files_below_it_sorted_by_name(corpus: Path) -> None:
    assert names_of(corpus) == ["a.py", "b.txt", "sub/c.md", "sub/deep/d.txt"]
    assert all(path.read_text() == f"text of {name}\n" * 20 for name, path in find_documents(str(corpus)))


def test_a_file_is_one_document_whatever_its_ending(corpus: Path) -> None:
    assert find_documents(str(corpus / "image.png")) == [("image.png", corpus / "image.png")]


def test_a_glob_finds_what_it_matches_at_any_depth(corpus: Path) -> None:
    assert [path for _, path in find_documents(f"{corpus}/**/*.txt")] == [corpus / "b.txt", corpus / "sub/deep/d.txt"]
    assert [path for _, path in find_documents(f"{corpus}/su*/*")] == [corpus / "sub/c.md"]


@pytest.mark.parametrize("pattern", ["", "/sub", "/*"])
def test_names_do_not_change_when_the_source_moves(pattern: str, corpus: Path) -> None:
    before = names_of(f"{corpus}{pattern}")
    moved = corpus.rename(corpus.parent / "elsewhere")
    assert names_of(f"{moved}{pattern}") == before


def test_stdlib_is_the_source_of_this_pythons_library_alone() -> None:
    documents = find_documents("stdlib")
    assert {"ast.py", "json/decoder.py"} <= {name for name, _ in documents}
    assert not [path for _, path in documents if "site-packages" in path.parts or path.suffix != ".py"]
    assert [name for name, _ in documents] == sorted(name for name, _ in documents)


@pytest.mark.parametrize("source", ["nowhere", "nowhere/*.txt", "nowhere.txt"])
def test_a_source_that_is_not_there_is_refused_by_name(source: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.source=.*nowhere"):
        find_documents(str(tmp_path / source))


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"x")
    for source in (tmp_path, tmp_path / "*.txt"):
        with pytest.raises(DataError, match="holds no text"):
            find_documents(str(source))
    with pytest.raises(DataError):
        find_documents(str(tmp_path / "empty.txt"))


def test_an_existing_folder_is_a_folder_even_if_its_name_looks_like_a_glob(tmp_path: Path) -> None:
    (tmp_path / "set[1]").mkdir()
    (tmp_path / "set[1]" / "a.txt").write_text("text")
    assert names_of(tmp_path / "set[1]") == ["a.txt"]


# Tokens


@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_text_comes_back_from_its_ids(text: str) -> None:
    ids = np.frombuffer(encode(text.encode()), np.uint16)
    assert ids[-1] == SEPARATOR
    assert ids[:-1].tolist() == list(text.encode())
    assert decode(ids.tolist()) == text


def test_ids_without_a_byte_are_left_out_and_broken_utf8_is_shown() -> None:
    assert decode([104, 263, 105, SEPARATOR, 33]) == "hi!"
    assert decode([104, 0xC3]) == "h\N{REPLACEMENT CHARACTER}"


def test_a_vocabulary_must_hold_every_id() -> None:
    check_vocabulary(257)
    with pytest.raises(DataError, match=r"model\.vocab_size=256 .* 257"):
        check_vocabulary(256)


def documents_in(tokens: NDArray[np.uint16]) -> list[str]:
    """The texts between separators."""
    parts = np.split(tokens, np.flatnonzero(tokens == SEPARATOR) + 1)
    assert len(parts[-1]) == 0, "the last token is a separator"
    return [decode(part.tolist()) for part in parts[:-1]]


@pytest.fixture
def many(tmp_path: Path) -> DataConfig:
    """60 documents, of which about a quarter is held out."""
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02d}.txt").write_text(f"document {i} é\n" * (i + 1))
    return DataConfig(source=str(folder), held_out=0.25, cache_dir=str(tmp_path / "cache"))


def test_every_document_is_whole_and_in_exactly_one_split(many: DataConfig) -> None:
    tokens = load_tokens(many)
    train, held_out = documents_in(tokens.train), documents_in(tokens.held_out)
    assert sorted(train + held_out) == sorted(path.read_text() for _, path in find_documents(many.source))
    assert 5 <= len(held_out) <= 25
    assert "60 documents" in tokens.description


def test_another_document_does_not_move_the_others_between_the_splits(many: DataConfig) -> None:
    before = set(documents_in(load_tokens(many).held_out))
    (Path(many.source) / "new.txt").write_text("new")
    assert set(documents_in(load_tokens(many).held_out)) - {"new"} == before


def test_one_document_is_cut_in_two_and_its_end_held_out(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "one.txt").write_text(text)
    tokens = load_tokens(DataConfig(source=str(tmp_path / "one.txt"), held_out=0.1, cache_dir=str(tmp_path / "cache")))
    (train,), (held_out,) = documents_in(tokens.train), documents_in(tokens.held_out)
    assert train + held_out == text
    assert len(held_out) == round(len(text) * 0.1)


@pytest.mark.parametrize(("count", "share"), [(2, 0.001), (2, 0.999), (50, 0.001), (50, 0.999), (3, 0.5)])
def test_some_document_is_held_out_and_some_is_not(count: int, share: float) -> None:
    assert 1 <= len(choose_held_out([f"{i}.txt" for i in range(count)], share)) <= count - 1


def test_the_share_held_out_is_about_that_asked_for() -> None:
    names = [f"{i}.txt" for i in range(5000)]
    assert len(choose_held_out(names, 0.1)) == pytest.approx(500, abs=80)
    assert choose_held_out(names, 0.1) < choose_held_out(names, 0.2), "a larger share adds documents"


def caches(config: DataConfig) -> dict[str, int]:
    """Everything in the cache's folder, hidden or not, and when it was written."""
    return {path.name: path.stat().st_mtime_ns for path in Path(str(config.cache_dir)).iterdir()}


def last_change(config: DataConfig) -> int:
    """When anything was last put into the cache's folder, or taken out."""
    return Path(str(config.cache_dir)).stat().st_mtime_ns


def test_a_second_call_uses_the_cache(many: DataConfig) -> None:
    first, before = load_tokens(many), caches(many)
    assert len(before) == 1, "nothing partial is left behind"
    (folder,) = Path(str(many.cache_dir)).iterdir()
    with open(folder / "train.bin", "r+b") as file:
        file.write(b"\x07\x00")  # what a cache that is read shows, and one that is made again does not
    changed = last_change(many)
    second = load_tokens(many)
    assert caches(many) == before
    assert last_change(many) == changed, "nothing was written and thrown away"
    assert (second.train[0], len(second.train)) == (7, len(first.train))


@pytest.mark.parametrize("change", ["content", "time", "new file", "share"])
def test_a_change_of_the_source_makes_another_cache_and_leaves_the_old_one(change: str, many: DataConfig) -> None:
    load_tokens(many)
    before, path = caches(many), Path(many.source) / "00.txt"
    if change == "content":
        path.write_text("changed")
    elif change == "time":
        os.utime(path, ns=(1, 1))
    elif change == "new file":
        (path.parent / "new.txt").write_text("new")
    config = many if change != "share" else DataConfig(many.source, held_out=0.3, cache_dir=many.cache_dir)
    load_tokens(config)
    assert len(caches(many)) == 2
    assert before.items() <= caches(many).items()


def test_two_runs_that_fill_the_cache_at_once_both_get_all_tokens(many: DataConfig) -> None:
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(len(load_tokens(many).train))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [len(load_tokens(many).train)] * 4
    assert len(caches(many)) == 1


def test_a_cache_folder_that_cannot_be_made_is_refused_by_name(many: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data\.cache_dir.*file"):
        load_tokens(DataConfig(many.source, cache_dir=str(tmp_path / "file" / "cache")))


def test_a_name_that_is_not_utf8_is_a_name(many: DataConfig) -> None:
    (Path(many.source) / os.fsdecode(b"\xff.txt")).write_text("text")
    assert "61 documents" in load_tokens(many).description


# Order


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_every_epoch_is_a_permutation_of_its_own(n: int, seed: int) -> None:
    order = sample_indices(0, 3 * n, n, seed).reshape(3, n)
    assert all(sorted(epoch) == list(range(n)) for epoch in order.tolist())
    if n > 8:
        assert len({tuple(epoch) for epoch in order.tolist()}) == 3


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 300), first=st.integers(0, 2000), counts=st.lists(st.integers(0, 200), max_size=6), seed=st.integers(0, 9)
)
def test_the_order_does_not_depend_on_how_it_is_cut(n: int, first: int, counts: list[int], seed: int) -> None:
    starts = np.cumsum([first, *counts]).tolist()
    pieces = [sample_indices(start, count, n, seed) for start, count in zip(starts, counts, strict=False)]
    assert np.concatenate([np.empty(0, np.int64), *pieces]).tolist() == sample_indices(first, sum(counts), n, seed).tolist()


def test_the_seed_decides_the_order() -> None:
    orders = [tuple(sample_indices(0, 100, 100, seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_every_sample_is_as_likely_at_every_place() -> None:
    """1,400 orders of 7 samples: each is first 200 times, give or take 5 standard deviations of 13."""
    firsts = Counter(int(sample_indices(0, 1, 7, seed)[0]) for seed in range(1400))
    assert set(firsts) == set(range(7))
    assert all(abs(count - 200) < 65 for count in firsts.values()), firsts


def test_neighbours_in_the_text_are_not_neighbours_in_the_order() -> None:
    steps = np.diff(sample_indices(0, 1000, 1000, 0))
    assert (np.abs(steps) == 1).mean() < 0.01


# Batches

SEQ_LEN = 4
N = 100
TOKENS = np.arange(N * SEQ_LEN + 1, dtype=np.uint16)  # sequence i starts with token i * SEQ_LEN


def shape_of(rank: int, ranks: int, micro: int = 1, global_batch: int = 8) -> BatchShape:
    return BatchShape(micro, global_batch // (micro * ranks), SEQ_LEN, rank, ranks)


def samples_of(batches: list[Batch]) -> list[int]:
    """Which sequences the batches hold, checked token by token."""
    for batch in batches:
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.tokens, batch.tokens[:, :1] + torch.arange(SEQ_LEN))
        assert torch.equal(batch.targets, batch.tokens + 1)
    return [int(first) // SEQ_LEN for batch in batches for first in batch.tokens[:, 0]]


def steps_of(shape: BatchShape, count: int, first_sample: int = 0) -> list[list[int]]:
    """The samples of a rank in the first `count` steps."""
    loader = TrainLoader(TOKENS, shape, seed=3, first_sample=first_sample, device=CPU, ahead=2)
    try:
        return [samples_of(loader.next()[0]) for _ in range(count)]
    finally:
        loader.close()


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1), (8, 1)])
def test_a_step_has_the_same_samples_however_it_is_cut_and_no_rank_has_anothers(ranks: int, micro: int) -> None:
    steps = 30  # of 8 samples: more than two epochs of 100
    by_rank = [steps_of(shape_of(rank, ranks, micro), steps) for rank in range(ranks)]
    for step in range(steps):
        expected = sample_indices(step * 8, 8, N, seed=3).tolist()
        assert [sample for rank in by_rank for sample in rank[step]] == expected


def test_an_epoch_shows_every_sample_once() -> None:
    seen = [sample for rank in range(2) for step in steps_of(shape_of(rank, 2, 1, 10), 10) for sample in step]
    assert sorted(seen) == list(range(N))


@pytest.mark.parametrize("done", [1, 5, 12, 13])
def test_going_on_at_a_step_is_as_never_having_stopped(done: int) -> None:
    whole = steps_of(shape_of(1, 2, 2), 16)
    assert steps_of(shape_of(1, 2, 2), 16 - done, first_sample=done * 8) == whole[done:]


def test_micro_batches_have_the_shape_of_the_plan() -> None:
    loader = TrainLoader(TOKENS, BatchShape(2, 3, SEQ_LEN, 0, 4), 0, 0, CPU, 1)
    batches, wait_s = loader.next()
    loader.close()
    assert [batch.tokens.shape for batch in batches] == [(2, SEQ_LEN)] * 3
    assert wait_s >= 0


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "train-loader"]


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_close_ends_the_thread(taken: int) -> None:
    loader = TrainLoader(TOKENS, shape_of(0, 1), 0, 0, CPU, ahead=2)
    for _ in range(taken):
        loader.next()
    assert len(loader_threads()) == 1
    loader.close()
    assert loader_threads() == []
    loader.close()  # and again, as a `finally` may


def test_an_exception_in_the_thread_reaches_whoever_asks_for_the_next_batch() -> None:
    loader = TrainLoader(TOKENS, shape_of(0, 1), seed=-1, first_sample=0, device=CPU, ahead=2)
    with pytest.raises(ValueError, match="non-negative"):
        loader.next()
    loader.close()
    assert loader_threads() == []


def test_too_little_text_for_one_sequence_is_refused_with_the_numbers() -> None:
    assert count_sequences(TOKENS[: SEQ_LEN + 1], SEQ_LEN, "training") == 1
    assert count_sequences(TOKENS, SEQ_LEN, "training") == N
    with pytest.raises(DataError, match=r"4 held-out tokens.*train\.seq_len=4 \+ 1"):
        count_sequences(TOKENS[:SEQ_LEN], SEQ_LEN, "held-out")
    with pytest.raises(DataError, match="0 training tokens"):
        TrainLoader(TOKENS[:0], shape_of(0, 1), 0, 0, CPU, 2)
    assert loader_threads() == []


def test_a_row_of_minus_1_is_padding_that_counts_for_nothing() -> None:
    batch = read_batch(TOKENS, np.array([5, -1]), SEQ_LEN)
    assert batch.tokens.shape == (2, SEQ_LEN)
    assert batch.targets.tolist() == [[21, 22, 23, 24], [IGNORE_INDEX] * SEQ_LEN]


@pytest.mark.parametrize("limit", [1, 7, 64, 1000])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 16), (2, 3), (3, 2), (4, 8), (8, 1)])
def test_evaluation_sees_each_held_out_sequence_exactly_once(ranks: int, micro: int, limit: int) -> None:
    by_rank = [list(held_out_batches(TOKENS, shape_of(rank, ranks, micro, ranks * micro), limit, CPU)) for rank in range(ranks)]
    assert len({len(batches) for batches in by_rank}) == 1, "every rank runs as many forwards"
    assert {batch.tokens.shape for batches in by_rank for batch in batches} == {(micro, SEQ_LEN)}, "one shape, one graph"
    rows = [row for batches in by_rank for batch in batches for row in batch.targets]
    counted = [row.tolist() for row in rows if (row != IGNORE_INDEX).any()]
    assert all(IGNORE_INDEX not in row for row in counted)
    assert sorted((row[0] - 1) // SEQ_LEN for row in counted) == list(range(min(limit, N)))
