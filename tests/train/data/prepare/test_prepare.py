"""Prepared data has every document of the source once, for every file format and number of processes."""

import csv
import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from meshwright.train.data.prepare import readers, worker
from meshwright.train.data.prepare.partition import cut_source, unit_hash
from meshwright.train.data.prepare.prepare import Progress, prepare
from meshwright.train.data.prepare.readers import read_part
from meshwright.train.data.prepare.worker import PrepareSettings
from meshwright.train.data.token_store import SPLITS, read_manifest
from meshwright.train.data.tokenizer import load_tokenizer
from meshwright.train.errors import DataError
from tests.support.forks import environment, fork
from tests.support.texts import (
    documents_of,
    files_of,
    odd_texts,
    prepare_texts,
    texts_of,
    train_bpe,
    write_jsonl,
)

TEXTS = odd_texts(400, seed=1)
WITH_TEXT = [text for text in TEXTS if text]
SMALL = {"held_out": 0.1, "shard_bytes": 4000}


@pytest.mark.parametrize(
    "count", [2000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.sampled(10)])]
)
def test_odd_documents_come_back_as_the_tokenizer_gives_them(count: int, tmp_path: Path) -> None:
    """One document is so long that it is encoded in parts."""
    texts = odd_texts(count - 1, seed=count)
    filler = "the quick brown fox 0123456789 " * 60
    texts.insert(count // 2, "".join(filler + text for text in odd_texts(count // 2 + 1250, seed=2)))
    assert len(texts[count // 2].encode()) > worker._LONG_BYTES
    source, path = write_jsonl(tmp_path / "all.jsonl", texts), train_bpe(tmp_path / "bpe")
    manifest = prepare_texts(source, tmp_path / "out", path, held_out=0.1, shard_bytes=2**16, workers=2)
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    bos, eos = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    with open(source, "rb") as file:
        offsets = np.cumsum([0, *map(len, file)]).tolist()
    expected: dict[str, list[list[int]]] = {split: [] for split in SPLITS}
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for encoding, text, offset in zip(encodings, texts, offsets, strict=False):
        if text:
            split = SPLITS[unit_hash(f"all.jsonl:{offset}") < 0.1]
            expected[split].append([bos, *encoding.ids, eos])
    assert len(manifest.splits["train"]) > 3
    for split in SPLITS:
        documents = documents_of(tmp_path / "out", manifest, split)
        assert [ids.tolist() for ids in documents] == expected[split]
        assert len(documents) > 99
    assert manifest.settings["empty_documents"] == texts.count("")
    shards = [shard for split in SPLITS for shard in manifest.splits[split]]
    assert sum(shard.text_bytes for shard in shards) == sum(len(text.encode()) for text in texts)
    assert max(shard.max_id for shard in shards) <= manifest.tokenizer.vocab_size - 1


BYTE_LEVEL = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
# similar to Llama 3's
DIGITS = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\s*[\r\n]+|\s+(?!\S)|\s+|[^\s]+"), "isolated")
OF_DIGITS = [DIGITS, tokenizers.pre_tokenizers.ByteLevel(use_regex=False)]
PREPEND = tokenizers.normalizers.Prepend("_")


@pytest.mark.parametrize(
    ("cut", "pre_tokenizer", "normalizer"),
    [
        (True, BYTE_LEVEL, None),
        (True, tokenizers.pre_tokenizers.Sequence(OF_DIGITS), None),
        (False, None, PREPEND),
    ],
)
def test_a_long_text_is_cut_only_where_its_ids_stay_the_same(
    cut: bool, pre_tokenizer: object, normalizer: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(train_bpe(tmp_path)))
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizer, normalizer
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encode = load_tokenizer(str(tmp_path)).encode
    filler = " the quick\n\nbrown fox \n\n\n 12345 \nthe"
    text = "".join(text + filler for text in odd_texts(4000, seed=30, mean_bits=6)).encode()
    monkeypatch.setattr(worker, "PART_BYTES", 5000)
    parts, reported = list(worker.cut_text(encode, text)), list[tuple[int, ...]]()
    assert b"".join(parts) == text
    assert (len(parts) > 20) == cut
    arrays = worker.encode_in_parts(encode, text, np.dtype(np.uint16), lambda *n: reported.append(n))
    assert np.array_equal(np.concatenate(arrays), encode([text])[0])
    assert reported == [(len(part), len(ids)) for part, ids in zip(parts, arrays, strict=True)]


def write_as(form: str, folder: Path, texts: list[str]) -> Path:
    """Write the texts as records of one file."""
    path = folder / f"all.{form}"
    records = [{"id": i, "text": text} for i, text in enumerate(texts)]
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    if form == "csv":
        with open(path, "w", encoding="utf-8-sig", newline="") as file:
            rows = csv.DictWriter(file, ("text", "id"))
            rows.writeheader()
            rows.writerows(records)
    elif form.startswith("list"):
        content = json.dumps(records, ensure_ascii="2" in form, indent=1 if "2" in form else None)
        path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    elif "json" in form:
        write_jsonl(path, texts)
        if form.endswith("zst"):
            path.write_bytes(pyarrow.compress(path.read_bytes(), "zstd", asbytes=True))
    elif form == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=37, write_page_checksum=True)
    else:
        new = pyarrow.ipc.new_stream if form == "stream.arrow" else pyarrow.ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=37)
    return path


FORMS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "stream.arrow"]
FORMS += ["lines.json", "lines.json.gz", "list.json", "list2.json", "list.json.gz", "csv"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_documents_in_order(form: str, tmp_path: Path) -> None:
    source = write_as(form, tmp_path, TEXTS)
    manifest = prepare_texts(source, tmp_path / "out", **SMALL)
    texts = texts_of(tmp_path / "out", manifest)
    order = {text: i for i, text in enumerate(WITH_TEXT)}
    for split in SPLITS:
        places = [order[text] for text in texts[split] if WITH_TEXT.count(text) == 1]
        assert places == sorted(places)
    assert sorted(texts["train"] + texts["held_out"]) == sorted(WITH_TEXT)
    assert 15 < len(texts["held_out"]) < 70
    assert manifest.settings["empty_documents"] == len(TEXTS) - len(WITH_TEXT)
    if form in ("jsonl", "lines.json", "parquet", "arrow", "stream.arrow"):
        assert len(manifest.splits["train"]) > 3, "cut into pieces"


TEXT_TYPES = [
    pyarrow.string(),
    pyarrow.large_string(),
    pyarrow.string_view(),
    pyarrow.binary(),
    pyarrow.large_binary(),
    pyarrow.binary_view(),
    pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
]


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_every_type_of_text_column_is_read_and_null_is_no_text(
    kind: pyarrow.DataType, tmp_path: Path
) -> None:
    """Next to a file with a column of nulls, which has no type of its own."""
    column = pyarrow.array(["é", None, "", "two"], pyarrow.string()).cast(kind)
    forms = ("arrow",) if str(kind).endswith("_view") else ("arrow", "parquet")  # which has no views
    for name, values in (("a", column), ("b", pyarrow.nulls(3))):
        table = pyarrow.table({"text": values})
        with pyarrow.ipc.new_file(tmp_path / f"{name}.arrow", table.schema) as file:
            file.write_table(table)
        if "parquet" in forms:
            pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    manifest = prepare_texts(tmp_path, tmp_path / "out", held_out=0.0)
    assert texts_of(tmp_path / "out", manifest)["train"] == ["é", "two"] * len(forms)
    assert manifest.settings["empty_documents"] == 5 * len(forms)


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_a_hugging_face_dataset_is_read_from_its_folder(tmp_path: Path) -> None:
    """In separate processes, because the library reads HF_HOME once; the second one reuses the existing
    folder."""
    if not importlib.util.find_spec("datasets"):
        pytest.skip("needs the datasets library")
    env = environment(HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    for names in (["plain", "parts::test", "loose"], ["loose"]):
        process = fork(prepare_datasets, names, tmp_path, output=tmp_path / "output", env=env)
        assert process.wait(120) == 0, (tmp_path / "output").read_text()
    for name, wanted in (("plain", TEXTS), ("parts::test", TEXTS[50:60]), ("loose", TEXTS)):
        folder = tmp_path / f"out-{name[:5]}"
        texts = texts_of(folder, read_manifest(folder))
        assert sorted(texts["train"] + texts["held_out"]) == sorted(filter(None, wanted))
        assert texts["held_out"]
    assert len(read_manifest(tmp_path / "out-plain").splits["train"]) > 3, (
        "cut into pieces, for two processes"
    )


def prepare_datasets(names: list[str], folder: Path) -> None:
    """Prepare these datasets; save them first if they do not exist."""
    if not (folder / "plain").exists():
        save_datasets(folder)
    for name in names:
        settings = {"shard_bytes": 4000, "workers": 2} if name == "plain" else {}
        settings |= {"held_out": 0.1, "text_field": "body"}
        prepare_texts(f"hf:{folder / name}", folder / f"out-{name[:5]}", **settings)


def save_datasets(folder: Path) -> None:
    """Save a dataset, a dictionary of two datasets, and a folder with a .jsonl file."""
    import datasets

    datasets.disable_progress_bars()
    plain = datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "body": TEXTS})
    plain.save_to_disk(str(folder / "plain"))
    datasets.DatasetDict({"train": plain, "test": plain.select(range(50, 60))}).save_to_disk(
        str(folder / "parts")
    )
    (folder / "loose").mkdir()
    write_jsonl(folder / "loose" / "train.jsonl", TEXTS, "body")


def write_bad_records(folder: Path) -> list[str]:
    """Write files with seven bad records, in five pieces of 2000 bytes; return the good texts."""
    lines = [json.dumps({"text": f"line {i}"}) for i in range(300)]
    for at, bad in ((10, r'{"text": "a\ud800"}'), (150, "[1]"), (299, '{"text": "cut sho')):
        lines[at] = bad
    (folder / "a.jsonl").write_text("\n".join(lines))
    items = [{"text": f'item {i}, \\ " ][' * 9, "n": [{}, i]} for i in range(2000)]
    content = json.dumps([*items[:1000], {"n": 1}, *items[1000:]]).replace('"n": 1}', '"n": NaN}')
    (folder / "b.json").write_text(content)
    (folder / "c.csv").write_bytes(b'id,text\n1,"row 1,\n"\n\n2\n3,row \xff\n4,"row ""4"""\n')
    (folder / "d.txt").write_bytes(b"latin \xe9")
    return (
        [f"line {i}" for i in range(300) if i not in (10, 150, 299)]
        + [item["text"] for item in items]
        + ["row 1,\n", 'row "4"']
    )


def test_bad_records_are_left_out_and_named_and_change_nothing_else(tmp_path: Path) -> None:
    """The number that is allowed is no input: the shards of a start that refused the seventh are kept."""
    source, out, other = tmp_path / "source", tmp_path / "out", tmp_path / "other"
    source.mkdir()
    good = write_bad_records(source)
    settings = {"held_out": 0.0, "shard_bytes": 2000}
    for most in (0, 6):
        with pytest.raises(DataError, match=r"a\.jsonl, line 11: .*skip_bad=N"):
            prepare_texts(source, out, **settings, skip_bad=most)
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / ".out.partial").glob("data/*")}
    assert len(kept) == 10, "no piece has more than 6 of them, so all are finished"
    manifest = prepare_texts(source, out, **settings, skip_bad=7)
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in out.iterdir()}.items()
    assert sorted(texts_of(out, manifest)["train"]) == sorted(good)
    prepare_texts(source, other, **settings, skip_bad=100, workers=2)
    assert files_of(out) == files_of(other)
    places = [("a.jsonl", f"line {n}") for n in (11, 151, 300)]
    places += [("b.json", "item 1,001"), ("c.csv", "line 5"), ("c.csv", "line 6"), ("d.txt", "byte 6")]
    assert manifest.bad_records.count == len(places)
    for (name, place), described in zip(places, read_manifest(out).bad_records.first, strict=True):
        assert f"{source / name}, {place}" in described
    with pytest.raises(DataError, match=r"line 11: .* 6 more, above data\.skip_bad=6"):
        prepare_texts(source, out, **settings, skip_bad=6)
    write_jsonl(source / "good.jsonl", good)
    for name, most in (("strict", 0), ("lax", 5)):
        prepare_texts(source / "good.jsonl", tmp_path / name, skip_bad=most)
    assert files_of(tmp_path / "strict") == files_of(tmp_path / "lax"), "nothing was left out"


def test_a_line_is_read_once_however_the_file_is_cut(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    lines = [
        "\ufeff" + json.dumps({"text": "first"}),
        "",
        json.dumps({"text": "x" * 1000}),
        "  ",
        json.dumps({"text": "y"}) + "\r",
        json.dumps({"text": "\ud83d\ude00"}),
        json.dumps({"text": "last"}),
    ]
    source.write_text("\n".join(lines))  # the last line has no end
    content = source.read_bytes()
    starts = [
        content.index(start)
        for start in (b'{"text": "x', b'{"text": "y', b'{"text": "\\ud83d', b'{"text": "last')
    ]
    expected = [
        (f"a.jsonl:{at}", text)
        for at, text in zip([0, *starts], ["first", "x" * 1000, "y", "😀", "last"], strict=True)
    ]
    for shard_bytes in range(1, 150):
        parts = [part for piece in cut_source(str(source), 0.0, shard_bytes)[1] for part in piece.parts]
        found = [
            (document.name, document.text.decode())
            for part in parts
            for document in read_part(part, "text", True)
        ]
        assert found == expected
    manifest = prepare_texts(source, tmp_path / "out", held_out=0.0, shard_bytes=50)
    assert texts_of(tmp_path / "out", manifest) == {"train": [text for _, text in expected], "held_out": []}


def test_an_item_of_a_list_is_read_once_however_much_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["", "]", '"', "\\", '\\"', '{"text": [', ",", "é" * 30, "\ufeff", "plain", "\\" * 7 + '"', "]}"]
    records = [{"n": [1, [{"[": "}"}], {}], "text": text, text: text} for text in texts]
    content = "\ufeff \n" + json.dumps(records, ensure_ascii=False, indent=1) + "\n"
    (tmp_path / "a.json").write_text(content)
    (part,) = cut_source(str(tmp_path / "a.json"), 0.0, 2**20)[1][0].parts
    for size in range(2, 200):
        monkeypatch.setattr(readers, "CHUNK_BYTES", size)
        assert [document.text.decode() for document in read_part(part, "text", True)] == texts


def test_text_files_are_documents_and_the_only_one_is_cut_at_a_character(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("äöü" * 100)
    manifest = prepare_texts(tmp_path / "one.txt", tmp_path / "out", held_out=0.0017)
    texts = texts_of(tmp_path / "out", manifest)
    assert (len(texts["train"][0]), texts["held_out"]) == (299, ["ü"])
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.txt").write_text("ä")
    (tmp_path / "two" / "b.txt").write_text("b")
    texts = texts_of(tmp_path / "bytes", prepare_texts(tmp_path / "two", tmp_path / "bytes"))
    assert sorted(texts["train"] + texts["held_out"]) == ["b", "ä"]


@pytest.mark.parametrize("texts", [["one two three"], ["a", "b"], ["a"] * 30, ["", "only this has text", ""]])
def test_of_few_records_too_some_are_held_out_and_some_are_not(texts: list[str], tmp_path: Path) -> None:
    """The only record is cut in two, or one record is moved to the other split; two workers do the same."""
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    for share, workers in ((0.0001, (1, 2) if len(texts) == 1 else (1,)), (0.9999, (1,))):
        every = []
        for count in workers:
            folder, settings = tmp_path / f"{count}-{share}", {"held_out": share, "workers": count}
            found = texts_of(folder, prepare_texts(source, folder, shard_bytes=50, **settings))
            assert found["held_out"]
            assert found["train"] or (share > 0.5 and len(list(filter(None, texts))) == 1)
            assert sorted("".join(found["train"] + found["held_out"])) == sorted("".join(texts))
            every.append(files_of(folder))
        assert every[0] == every[-1]


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"</s>": 0} | {f"w{i}": i for i in range(1, 70_000)})
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["w1 w69999 w65536", "w2"])
    manifest = prepare_texts(source, tmp_path / "out", tmp_path / "words.json", held_out=0.0)
    assert (manifest.dtype, manifest.tokenizer.bos) == ("uint32", None)
    assert manifest.splits["train"][0].max_id == 69_999
    ids = [ids.tolist() for ids in documents_of(tmp_path / "out", manifest, "train")]
    assert ids == [[1, 69_999, 65_536, 0], [2, 0]]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "words.json").read_bytes()


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_goes_from_nothing_to_all_of_the_source(workers: int, tmp_path: Path) -> None:
    source, seen = write_jsonl(tmp_path / "a.jsonl", odd_texts(800, seed=4, mean_bits=100)), list[Progress]()
    settings = PrepareSettings(shard_bytes=10**5, workers=workers)
    manifest = prepare(str(source), "bytes", "auto", "auto", tmp_path / "out", settings, seen.append)
    assert_from_nothing_to_all(seen, source)
    assert seen[-1].tokens == sum(shard.tokens for split in SPLITS for shard in manifest.splits[split])


def assert_from_nothing_to_all(seen: list[Progress], source: Path) -> None:
    done, size = [progress.done_bytes for progress in seen], source.stat().st_size
    assert (done[0], done[-1]) == (0, size)
    assert done == sorted(done)
    assert {progress.total_bytes for progress in seen} == {size}


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz"])
def test_progress_goes_on_within_a_long_text(name: str, tmp_path: Path) -> None:
    text, source, seen = "the quick brown fox\n" * 350_000, tmp_path / name, list[Progress]()
    source.write_text(text) if name == "a.txt" else write_jsonl(source, [text])
    prepare(str(source), "bytes", "auto", "auto", tmp_path / "out", PrepareSettings(0.0), seen.append)
    assert_from_nothing_to_all(seen, source)
    assert len({progress.tokens for progress in seen}) >= 6, "each MiB of 7 MB"
    assert seen[-1].tokens == 7_000_001
