"""The data of a run: the cache, prepared folders, the common tokenizer, checksums, and errors."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from meshwright.train.config import DataConfig
from meshwright.train.data.corpus import check_data, find_tokenizer, load_on_all_ranks
from meshwright.train.data.token_store import MANIFEST, TokenStream
from meshwright.train.data.tokenizer import ByteTokenizer, check_vocabulary, padded_vocab_size
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import DataError
from tests.support.stores import load_corpus
from tests.support.texts import prepare_texts, train_bpe, write_jsonl
from tests.support.worlds import run_ranks


def documents_in(split: TokenStream) -> list[str]:
    """The texts of a split of byte tokens."""
    texts = []
    for index in range(split.documents):
        first, last = split.document(index)
        ids = np.empty(last - first, np.int64)
        split.read(first, ids)
        assert ids[-1] == ByteTokenizer.info.eos
        texts.append(bytes(ids[:-1].tolist()).decode())
    return texts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 documents, a tokenizer.json, and the documents prepared with it. Tests must not change them."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "many").mkdir()
    for i in range(60):
        (folder / "many" / f"{i:02d}.txt").write_text(f"document {i} é\n" * (i + 1))
    prepare_texts(folder / "many", folder / "prepared", train_bpe(folder / "bpe"), held_out=0.25)
    return folder


@pytest.fixture
def many(made: Path, tmp_path: Path) -> DataConfig:
    """60 documents, about a quarter of them held out."""
    folder = Path(shutil.copytree(made / "many", tmp_path / "many"))
    return DataConfig(source=str(folder), eval_fraction=0.25, cache_dir=str(tmp_path / "cache"))


def held_out(config: DataConfig) -> list[str]:
    return documents_in(load_corpus(config).evaluation_sets["held_out"])


def test_every_document_is_whole_and_in_exactly_one_split(many: DataConfig) -> None:
    corpus = load_corpus(many)
    train, rest = documents_in(corpus.sources[0].split), held_out(many)
    assert sorted(train + rest) == sorted(path.read_text() for path in Path(many.source).iterdir())
    assert 5 <= len(rest) <= 25
    assert "60 documents" in corpus.description


def test_another_document_does_not_move_the_others_between_the_splits(many: DataConfig) -> None:
    before = set(held_out(many))
    (Path(many.source) / "new.txt").write_text("new")
    assert set(held_out(many)) - {"new"} == before


def caches(config: DataConfig) -> dict[str, int]:
    """The names in the cache folder (hidden ones too, without the verification records), with their times."""
    return {
        path.name: path.stat().st_mtime_ns
        for path in Path(str(config.cache_dir)).iterdir()
        if path.name != "verified"
    }


def test_a_second_call_uses_the_cache(many: DataConfig) -> None:
    first, before = load_corpus(many), caches(many)
    assert len([name for name in before if not name.endswith(".lock")]) == 1, "nothing partial is left behind"
    second = load_corpus(many)
    assert caches(many) == before
    assert second.fingerprint == first.fingerprint


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda folder: (folder / "00.txt").write_text("changed"),
    "time": lambda folder: os.utime(folder / "00.txt", ns=(1, 1)),
    "new file": lambda folder: (folder / "new.txt").write_text("new"),
    "share": lambda folder: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_source_makes_another_cache_and_leaves_the_old_one(
    change: str, many: DataConfig
) -> None:
    load_corpus(many)
    before = caches(many)
    CHANGES[change](Path(many.source))
    load_corpus(replace(many, eval_fraction=0.3) if change == "share" else many)
    assert len(caches(many)) == len(before) + 1
    assert before.items() <= caches(many).items()


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.sampled(5)])])
def test_runs_that_fill_the_cache_at_once_all_get_all_tokens(rounds: int, many: DataConfig) -> None:
    """Many rounds: a run that ends removes the work folder while others wait for it, at any moment."""
    for name in sorted(os.listdir(many.source))[3:]:
        os.remove(Path(many.source, name))
    for i in range(rounds):
        config = replace(many, cache_dir=f"{many.cache_dir}-{i}")
        with ThreadPoolExecutor(6) as pool:
            corpora = list(pool.map(load_corpus, [config] * 6))
        assert {corpus.sources[0].split.tokens for corpus in corpora} == {
            load_corpus(config).sources[0].split.tokens
        }
        assert not list(Path(config.cache_dir).glob(".*")), "no work folder is left"


def load_and_print(config: DataConfig) -> list[str]:
    lines: list[str] = []
    ranks = RankInfo(dist.get_rank(), 2, dist.get_rank(), 2, True)
    load_on_all_ranks(config, ranks, None, lines.append)
    return lines


def test_what_is_not_read_or_left_out_is_printed_once_and_a_stricter_run_refuses_it(many: DataConfig) -> None:
    (Path(many.source) / "image.png").write_bytes(bytes(70))
    (Path(many.source) / "bad.txt").write_bytes(b"latin \xe9")
    lax = replace(many, skip_bad=1)
    first, second = run_ranks(2, load_and_print, lax)
    assert [line for line in first if "image.png (70 bytes)" in line]
    assert not [line for line in second if "image.png" in line]
    assert re.search(r"60 documents.*1 bad records.*bad\.txt, byte 6", load_corpus(lax).description)
    with pytest.raises(DataError, match=r"bad\.txt, byte 6: .*data\.skip_bad"):
        load_corpus(many)


def test_a_cache_folder_that_cannot_be_made_is_refused_and_a_name_that_is_not_utf8_is_a_name(
    many: DataConfig, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file"):
        load_corpus(replace(many, cache_dir=str(tmp_path / "file" / "cache")))
    (Path(many.source) / os.fsdecode(b"\xff.txt")).write_text("text")
    assert "61 documents" in load_corpus(many).description


# Prepared folders


@pytest.fixture
def prepared(made: Path, tmp_path: Path) -> Path:
    """The same documents, prepared with a tokenizer.json; a copy for one test."""
    shutil.copytree(made / "bpe", tmp_path / "bpe")
    return Path(shutil.copytree(made / "prepared", tmp_path / "prepared"))


def with_cache(prepared: Path, **keys: object) -> DataConfig:
    return DataConfig(source=str(prepared), cache_dir=str(prepared.parent / "cache"), **keys)  # type: ignore[arg-type]


def test_prepared_data_is_used_as_it_is_wherever_it_lies(prepared: Path) -> None:
    corpus = load_corpus(with_cache(prepared))
    assert corpus.tokenizer.sha256
    moved = prepared.rename(prepared.with_name("elsewhere"))
    again = load_corpus(with_cache(moved))
    assert again.fingerprint == corpus.fingerprint
    tokenizer = find_tokenizer(with_cache(moved))
    first, last = again.sources[0].split.document(0)
    ids = np.empty(last - first, np.int64)
    again.sources[0].split.read(first, ids)
    assert tokenizer.decode(ids.tolist()).startswith("document ")


def test_all_data_must_have_the_tokenizer_that_is_named_and_the_same(
    prepared: Path, many: DataConfig
) -> None:
    same, other = prepared.parent / "bpe", train_bpe(prepared.parent / "other", vocab_size=400)
    assert load_corpus(with_cache(prepared, tokenizer=str(same))).tokenizer.sha256
    for keys, message in (
        (
            {"tokenizer": str(other)},
            r"data\.tokenizer=.*other \(400 ids, sha256 .* was made with bpe \(600 ids",
        ),
        ({"tokenizer": "bytes"}, "bytes"),
        ({"tokenizer": str(same), "bos": "none"}, "bos None"),
        ({"mixture": {str(prepared): 1.0, many.source: 1.0}}, r"same tokenizer.*600 ids.* bytes .*prepare"),
        ({"validation": {"raw": many.source}}, r"same tokenizer.*600 ids.* bytes .*prepare"),
    ):
        with pytest.raises(DataError, match=message):
            load_corpus(with_cache(prepared, **keys))


def flip(file: Path, keep_time: bool = False) -> None:
    content, times = bytearray(file.read_bytes()), file.stat()
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    if keep_time:  # as rsync does, on another node's disk, under the same path
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def move_ends(file: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change the ends of documents, and their checksum."""
    change(np.fromfile(file, "<i8")).tofile(file)
    manifest = file.parent / MANIFEST
    plain = json.loads(manifest.read_text())
    plain["splits"]["train"][0]["ends_sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(plain))


MOVED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ends backwards": lambda ends: np.append(ends[-2::-1], ends[-1]),
    "the last end too early": lambda ends: ends - (ends == ends[-1]),
    "the last end too late": lambda ends: ends + 5 * (ends == ends[-1]),
}
CHANGED = r" has changed .* \w{16}.*manifest\.json .* \w{16}\.\.\.: prepare"
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {  # the file, and the message after its name
    "tokens": ("train-00000.bin", flip, CHANGED),
    "ends": ("train-00000.ends", flip, CHANGED),
    "a copy with the file's own time": ("train-00000.bin", lambda file: flip(file, keep_time=True), CHANGED),
    "shorter": ("train-00000.bin", lambda file: os.truncate(file, file.stat().st_size - 2), ""),
    "gone": ("train-00000.bin", Path.unlink, ""),
    "manifest cut": (MANIFEST, lambda file: os.truncate(file, file.stat().st_size - 20), ""),
    **{name: ("train-00000.ends", partial(move_ends, change=change), "") for name, change in MOVED.items()},
}


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_also_where_it_was_whole_before(
    damage: str, seen_before: bool, prepared: Path
) -> None:
    name, change, message = DAMAGE[damage]
    if seen_before:
        load_corpus(with_cache(prepared))
    change(prepared / name)
    with pytest.raises(DataError, match=re.escape(str(prepared / name)) + message):
        load_corpus(with_cache(prepared))
    if message == CHANGED:
        assert load_corpus(with_cache(prepared, verify="size")).sources, "only the sizes are looked at"


def another_store(prepared: Path) -> str:
    """Another prepared folder with the same tokenizer."""
    folder = prepared.parent
    source = write_jsonl(folder / "raw.jsonl", [f"raw {i}" for i in range(50)])
    prepare_texts(source, folder / "raw", folder / "bpe")
    return str(folder / "raw")


def test_held_out_and_validation_sets_have_their_names(
    prepared: Path, many: DataConfig, tmp_path: Path
) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "a text"}) + "\n")
    copy = str(shutil.copytree(prepared, tmp_path / "b" / "prepared"))
    extra = load_corpus(with_cache(prepared, validation={"extra": copy}))
    assert sorted(extra.evaluation_sets) == ["extra", "held_out"]
    assert [source.name for source in extra.sources] == ["prepared"]
    assert extra.evaluation_sets["extra"].documents == 60, "all of a prepared folder is evaluated"
    with pytest.raises(DataError, match=r"data\.validation\.held_out: .*another name"):
        load_corpus(with_cache(prepared, validation={"held_out": copy}))
    corpus = load_corpus(with_cache(prepared, mixture={str(prepared): 3.0, copy: 1.0}))
    assert sorted(source.weight for source in corpus.sources) == [1.0, 3.0]
    assert set(corpus.evaluation_sets) == {str(prepared), copy}, (
        "with the same last part they have their full path"
    )
    raw = replace(many, eval_fraction=0.0, validation={"one": str(tmp_path / "one.jsonl")})
    assert documents_in(load_corpus(raw).evaluation_sets["one"]) == ["a text"], "all of it is evaluated"


def test_the_fingerprint_changes_with_what_the_order_hangs_on_and_nothing_else(prepared: Path) -> None:
    raw, own = another_store(prepared), str(prepared)
    mixtures = ({own: 7.0, raw: 3.0}, {own: 6.0, raw: 3.0})
    configs = [
        *(with_cache(prepared), with_cache(prepared, packing=False), with_cache(Path(raw))),
        *(with_cache(prepared, mixture=mixture) for mixture in mixtures),
    ]
    prints = [load_corpus(config).fingerprint for config in configs]
    assert len(set(prints)) == 5
    same = with_cache(prepared, mixture={raw: 0.3, own: 0.7}, tokenizer="auto")
    assert load_corpus(same).fingerprint == prints[3], "the same shares in another order of the keys"


# Before anything is tokenized


def test_what_a_run_could_not_use_is_refused_before_anything_is_tokenized(prepared: Path) -> None:
    raw, own, large = another_store(prepared), str(prepared), prepared.parent / "large.txt"
    with open(large, "wb") as file:
        file.truncate(3 * 2**30)  # sparse
    manifest = prepared / MANIFEST
    plain = json.loads(manifest.read_text())
    plain["splits"]["train"][0]["max_id"] = 639
    manifest.write_text(json.dumps(plain))
    check_data(with_cache(prepared), 640)
    for keys, vocab_size, message in (
        ({}, 500, r"model\.vocab_size=500 .* best 640, a multiple of 128"),
        ({}, 639, r"train-00000\.bin .*token id 639.*model\.vocab_size=639.*prepare the data again"),
        (
            {"mixture": {own: 1.0, raw: 1e-6}},
            640,
            r"data\.mixture: .*raw .*1e-06 of 1\.0.*1/10,000.*remove it",
        ),
        ({"validation": {"again": own}}, 640, r"data\.validation\.again=.*prepared.* training source"),
        ({"source": str(large)}, 640, r"large\.txt has 3\.0 GiB .*2\.0 GiB.* tools\.prepare_data .*OUT_DIR"),
    ):
        with pytest.raises(DataError, match=message):
            check_data(replace(with_cache(prepared), **keys), vocab_size)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"model\.vocab_size=256 .* 257"):
        check_vocabulary(ByteTokenizer.info, 256)
    assert [padded_vocab_size(n) for n in (1, 128, 129, 50257, 128256)] == [128, 128, 256, 50304, 128256]
