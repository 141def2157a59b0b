"""The data of a run: the cache, prepared folders, the common tokenizer, checksums, and errors."""

import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from meshwright.train.config import DataConfig
from meshwright.train.data.corpus import check_data, find_tokenizer, load_corpus, load_on_all_ranks
from meshwright.train.data.prepare.prepare import PrepareSettings, prepare
from meshwright.train.data.token_store import MANIFEST, TokenStream
from meshwright.train.data.tokenizer import ByteTokenizer, check_vocabulary, padded_vocab_size
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import DataError
from tests.support.texts import train_bpe
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
    bpe = train_bpe(folder / "bpe")
    prepare(
        str(folder / "many"), str(bpe), "auto", "auto", folder / "prepared", PrepareSettings(held_out=0.25)
    )
    return folder


@pytest.fixture
def many(made: Path, tmp_path: Path) -> DataConfig:
    """60 documents, about a quarter of them held out."""
    folder = Path(shutil.copytree(made / "many", tmp_path / "many"))
    return DataConfig(source=str(folder), eval_fraction=0.25, cache_dir=str(tmp_path / "cache"))


def held_out(config: DataConfig) -> list[str]:
    return documents_in(load_corpus(config).held_out["held_out"])


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


@pytest.mark.parametrize("change", ["content", "time", "new file", "share"])
def test_a_change_of_the_source_makes_another_cache_and_leaves_the_old_one(
    change: str, many: DataConfig
) -> None:
    load_corpus(many)
    before, path = caches(many), Path(many.source) / "00.txt"
    if change == "content":
        path.write_text("changed")
    elif change == "time":
        os.utime(path, ns=(1, 1))
    elif change == "new file":
        (path.parent / "new.txt").write_text("new")
    config = (
        many if change != "share" else DataConfig(many.source, eval_fraction=0.3, cache_dir=many.cache_dir)
    )
    load_corpus(config)
    assert len(caches(many)) == len(before) + 1
    assert before.items() <= caches(many).items()


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=pytest.mark.slow)])
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


def test_a_cache_folder_that_cannot_be_made_is_refused_by_name(many: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file"):
        load_corpus(DataConfig(many.source, cache_dir=str(tmp_path / "file" / "cache")))


def test_a_name_that_is_not_utf8_is_a_name(many: DataConfig) -> None:
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


def test_the_tokenizer_named_must_be_the_one_the_data_was_made_with(prepared: Path) -> None:
    same = prepared.parent / "bpe"
    assert load_corpus(with_cache(prepared, tokenizer=str(same))).tokenizer.sha256
    other = train_bpe(prepared.parent / "other", vocab_size=400)
    with pytest.raises(
        DataError, match=r"data\.tokenizer=.*other \(400 ids, sha256 .* was made with bpe \(600 ids"
    ):
        load_corpus(with_cache(prepared, tokenizer=str(other)))
    with pytest.raises(DataError, match="bytes"):
        load_corpus(with_cache(prepared, tokenizer="bytes"))
    with pytest.raises(DataError, match="bos None"):
        load_corpus(with_cache(prepared, tokenizer=str(same), bos="none"))


def test_the_sources_of_a_run_must_have_one_tokenizer(prepared: Path, many: DataConfig) -> None:
    with pytest.raises(DataError, match=r"same tokenizer.*600 ids.* bytes .*prepare"):
        load_corpus(with_cache(prepared, mixture={str(prepared): 1.0, many.source: 1.0}))
    with pytest.raises(DataError, match=r"same tokenizer.*600 ids.* bytes .*prepare"):
        load_corpus(with_cache(prepared, validation={"raw": many.source}))


def test_a_model_with_too_few_ids_is_told_how_many_and_which_multiple(prepared: Path) -> None:
    with pytest.raises(DataError, match=r"model\.vocab_size=500 .* best 640, a multiple of 128"):
        check_data(with_cache(prepared), 500)
    check_data(with_cache(prepared), 640)
    assert [padded_vocab_size(n) for n in (1, 128, 129, 50257, 128256)] == [128, 128, 256, 50304, 128256]
    with pytest.raises(DataError, match=r"model\.vocab_size=256 .* 257"):
        check_vocabulary(ByteTokenizer.info, 256)


@pytest.mark.parametrize("ending", ["bin", "ends"])
@pytest.mark.parametrize("seen_before", [False, True])
def test_a_shard_that_changed_is_named_with_both_fingerprints(
    ending: str, seen_before: bool, prepared: Path
) -> None:
    config = with_cache(prepared)
    if seen_before:
        load_corpus(config)
    shard = prepared / f"train-00000.{ending}"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(
        DataError,
        match=rf"train-00000\.{ending} has changed .* \w{{16}}.*{MANIFEST} .* \w{{16}}\.\.\.: prepare",
    ):
        load_corpus(config)
    assert load_corpus(with_cache(prepared, verify="size")).sources, "only the sizes are looked at"


def test_a_copy_with_the_files_own_time_is_looked_at_again(prepared: Path) -> None:
    """Like a copy by rsync: on another node's disk, under the same path."""
    config, shard = with_cache(prepared), prepared / "train-00000.bin"
    load_corpus(config)
    content, times = bytearray(shard.read_bytes()), shard.stat()
    content[0] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(DataError, match=r"train-00000\.bin has changed"):
        load_corpus(config)


@pytest.mark.parametrize("what", ["shorter", "gone", "manifest cut"])
def test_a_damaged_folder_is_refused_by_file(what: str, prepared: Path) -> None:
    shard, manifest = prepared / "train-00000.bin", prepared / MANIFEST
    if what == "shorter":
        os.truncate(shard, shard.stat().st_size - 2)
    elif what == "gone":
        shard.unlink()
    else:
        manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(DataError, match=str(manifest if what == "manifest cut" else shard)):
        load_corpus(with_cache(prepared))


def test_held_out_and_validation_sets_have_their_names(
    prepared: Path, many: DataConfig, tmp_path: Path
) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "a text"}) + "\n")
    shutil.copytree(prepared, tmp_path / "b" / "prepared")
    extra = load_corpus(with_cache(prepared, validation={"extra": str(tmp_path / "b" / "prepared")}))
    assert sorted(extra.held_out) == ["held_out"]
    assert [source.name for source in extra.sources] == ["prepared"]
    assert extra.validation["extra"].documents == 60, "all of a prepared folder is evaluated"
    with pytest.raises(DataError, match=r"data\.validation\.held_out: .*another name"):
        load_corpus(with_cache(prepared, validation={"held_out": str(tmp_path / "b" / "prepared")}))
    with pytest.raises(DataError, match=r"data\.validation\.again=.*prepared.* training source"):
        check_data(with_cache(prepared, validation={"again": str(prepared)}), 640)
    corpus = load_corpus(
        with_cache(prepared, mixture={str(prepared): 3.0, str(tmp_path / "b" / "prepared"): 1.0})
    )
    assert sorted(source.weight for source in corpus.sources) == [1.0, 3.0]
    assert set(corpus.held_out) == {str(prepared), str(tmp_path / "b" / "prepared")}, (
        "two sources with the same last part have their full path"
    )
    raw = DataConfig(many.source, cache_dir=many.cache_dir, validation={"one": str(tmp_path / "one.jsonl")})
    assert documents_in(load_corpus(raw).validation["one"]) == ["a text"], (
        "all of a raw validation set is evaluated"
    )


def test_the_fingerprint_changes_with_what_the_order_hangs_on_and_nothing_else(
    prepared: Path, many: DataConfig
) -> None:
    raw = train_bpe_store(prepared, "raw")
    configs = [
        with_cache(prepared),
        with_cache(prepared, packing=False),
        with_cache(raw),
        with_cache(prepared, mixture={str(prepared): 7.0, str(raw): 3.0}),
        with_cache(prepared, mixture={str(prepared): 6.0, str(raw): 3.0}),
    ]
    prints = [load_corpus(config).fingerprint for config in configs]
    assert len(set(prints)) == 5
    same = with_cache(
        prepared,
        mixture={str(raw): 0.3, str(prepared): 0.7},
        validation={"raw": many.source},
        tokenizer="auto",
    )
    same = DataConfig(**{**vars(same), "validation": {}})
    assert load_corpus(same).fingerprint == prints[3], "the same shares in another order of the keys"


def train_bpe_store(prepared: Path, name: str) -> Path:
    """Another prepared folder with the same tokenizer."""
    (prepared.parent / f"{name}.jsonl").write_text(
        "".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(50))
    )
    prepare(
        str(prepared.parent / f"{name}.jsonl"),
        str(prepared.parent / "bpe"),
        "auto",
        "auto",
        prepared.parent / name,
        PrepareSettings(),
    )
    return prepared.parent / name


def test_a_share_too_small_to_count_is_refused(prepared: Path) -> None:
    with pytest.raises(DataError, match=r"data\.mixture: .*raw .*1e-06 of 1\.000001.*1/10,000.*remove it"):
        check_data(
            with_cache(prepared, mixture={str(prepared): 1.0, str(train_bpe_store(prepared, "raw")): 1e-6}),
            640,
        )


def test_an_id_of_a_shard_beyond_the_model_is_found_before_anything_runs(prepared: Path) -> None:
    manifest = prepared / MANIFEST
    plain = json.loads(manifest.read_text())
    plain["splits"]["train"][0]["max_id"] = 639
    manifest.write_text(json.dumps(plain))
    check_data(with_cache(prepared), 640)
    with pytest.raises(
        DataError, match=r"train-00000\.bin .*token id 639.*model\.vocab_size=610.*prepare the data again"
    ):
        check_data(with_cache(prepared), 610)


def test_much_raw_text_is_to_be_prepared_first(tmp_path: Path) -> None:
    with open(tmp_path / "large.txt", "wb") as file:
        file.truncate(3 * 2**30)  # sparse
    with pytest.raises(
        DataError, match=r"large\.txt has 3\.0 GiB .*2\.0 GiB.* tools\.prepare_data .*OUT_DIR"
    ):
        check_data(DataConfig(str(tmp_path / "large.txt")), 640)


@pytest.mark.parametrize("order", ["backwards", "short", "beyond"])
def test_document_ends_that_cannot_be_are_refused_whatever_their_checksum(order: str, prepared: Path) -> None:
    file, manifest = prepared / "train-00000.ends", prepared / MANIFEST
    ends, plain = np.fromfile(file, "<i8"), json.loads(manifest.read_text())
    if order == "backwards":
        ends[:-1] = ends[:-1][::-1].copy()
    else:
        ends[-1] += 5 if order == "beyond" else -1
    ends.tofile(file)
    plain["splits"]["train"][0]["ends_sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(plain))
    with pytest.raises(DataError, match=str(file)):
        load_corpus(with_cache(prepared))
