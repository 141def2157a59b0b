"""Files that others may have written, mutated at random: each mutant is read as something valid or refused
with a message."""

import dataclasses
import json
import os
import random
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from meshwright.models.hf import config_to_hf
from meshwright.models.llama import LlamaConfig
from meshwright.train.checkpoint.huggingface import open_folder
from meshwright.train.config import Config, DataConfig
from meshwright.train.config_parser import CONFIG_FOLDER, known_keys, load_config, parse_config
from meshwright.train.data.corpus import find_tokenizer, load_corpus
from meshwright.train.data.prepare.prepare import PrepareSettings, prepare
from meshwright.train.data.prepare.worker import read_result
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import make_sequence_shape, read_batch
from meshwright.train.data.tokenizer import load_tokenizer
from meshwright.train.errors import CheckpointError, ConfigError, DataError
from tests.support.checkpoint_targets import checkpoint_targets
from tests.support.mutations import CANARY_MODULE, Target, clear, judge, put_in_place
from tests.support.texts import odd_texts, train_bpe, write_jsonl

MEMORY_BYTES = 2 * 2**30  # that reading may allocate in addition to the process's memory
# Files and the functions that read them


def config_targets(folder: Path) -> Iterator[Target]:
    """A config, such as a checkpoint has."""

    def read(path: Path) -> None:
        config = parse_config([f"--config={path}"])
        sections = {
            item.name: dataclasses.replace(getattr(config, item.name)) for item in dataclasses.fields(Config)
        }
        assert repr(Config(**sections)) == repr(config)

    path = folder / "config.yaml"
    path.write_bytes((CONFIG_FOLDER / "llama_debug.yaml").read_bytes())
    named = (str(path), f"--config {path}", *known_keys())
    yield Target("config", path, partial(read, path), (ConfigError,), named=named)


def data_targets(folder: Path) -> Iterator[Target]:
    """A prepared folder's manifest, shards and ends, checked in full or by size; a tokenizer; outputs of an
    interrupted preparation."""
    source = write_jsonl(folder / "texts.jsonl", odd_texts(60, seed=1))
    out = folder / "bytes"
    prepare(str(source), "bytes", "auto", "auto", out, PrepareSettings(held_out=0.2))
    for verify in ("full", "size"):
        cache_dir = str(folder / f"cache-{verify}")
        config = DataConfig(
            source=str(out), verify=verify, cache_dir=cache_dir, document_mask=verify == "full"
        )
        for name in ("manifest.json", "train-00000.bin", "train-00000.ends", "held_out-00000.ends"):
            yield Target(
                f"{name}, {verify}",
                out / name,
                partial(read_corpus, config),
                (DataError,),
                named=(str(folder),),
            )
        unpacked = dataclasses.replace(config, packing=False, document_mask=False)
        yield Target(
            f"ends, unpacked, {verify}",
            out / "train-00000.ends",
            partial(read_corpus, unpacked),
            (DataError,),
            named=(str(folder),),
        )
    yield from tokenizer_targets(folder, source)


def read_corpus(config: DataConfig) -> None:
    """Load a corpus and read all of it, as training does."""
    corpus = load_corpus(config)
    shape = make_sequence_shape(config, corpus.tokenizer, 32, 512)
    order = SampleOrder(corpus.sources, shape, 0)
    if min(order.sizes):
        assert read_batch(order.splits, order.rows(0, sum(order.sizes)), shape).tokens.max() < 512
    for split in corpus.held_out.values():
        read_batch([split], np.array([[0, -1]]), shape)


def tokenizer_targets(folder: Path, source: Path) -> Iterator[Target]:
    """Data prepared with a tokenizer, that tokenizer and the config next to it, and the result of a piece."""
    tokenizer = train_bpe(folder / "bpe", vocab_size=300)
    out = folder / "ids"
    prepare(str(source), str(tokenizer), "auto", "auto", out, PrepareSettings())
    config = DataConfig(source=str(out), cache_dir=str(folder / "cache"))

    def encode() -> None:
        loaded = find_tokenizer(config)
        assert isinstance(loaded.decode(loaded.encode([b"a <s> b"])[0].tolist()), str)

    yield Target(
        "manifest of ids",
        out / "manifest.json",
        partial(read_corpus, config),
        (DataError,),
        named=(str(out),),
    )
    yield Target("tokenizer of data", out / "tokenizer.json", encode, (DataError,), named=(str(out),))
    beside = tokenizer.with_name("tokenizer_config.json")
    beside.write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True})
    )
    load = partial(load_tokenizer, str(tokenizer))
    yield Target("tokenizer_config", beside, load, (DataError,), named=(str(tokenizer.parent),))
    manifest = json.loads((out / "manifest.json").read_text())
    result = folder / "00000.json"
    shards = {split: manifest["splits"][split][0] for split in ("train", "held_out")}
    result.write_text(
        json.dumps({"key": "k", "shards": shards, "empty": 1, "lowest": [0.1, "a"], "highest": [0.9, "b"]})
    )

    def read() -> None:
        with suppress(OSError, ValueError, TypeError, KeyError):  # after these the piece is prepared again
            assert read_result(result).shards.keys() == shards.keys()

    yield Target("result of a piece", result, read, ())


def hf_targets(folder: Path) -> Iterator[Target]:
    """config.json, the index and a header of a Hugging Face folder."""
    config = LlamaConfig(
        dim=16, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=32, vocab_size=64, max_seq_len=64
    )
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    tensors = {"model.embed_tokens.weight": torch.zeros(64, 16), "model.norm.weight": torch.zeros(16)}
    for number, name in enumerate(tensors, 1):
        save_file({name: tensors[name]}, folder / f"model-{number}.safetensors")
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors, 1)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for name in ("config.json", "model.safetensors.index.json", "model-1.safetensors"):
        yield Target(
            f"hf {name}",
            folder / name,
            partial(open_folder, folder),
            (CheckpointError,),
            named=(str(folder),),
        )


Maker = Callable[[Path], Iterator[Target]]
MAKERS: dict[str, tuple[Maker, int]] = {  # maker of the targets, and number of mutants
    "configs": (config_targets, 20),
    "data": (data_targets, 40),
    "checkpoints": (checkpoint_targets, 40),
    "hf": (hf_targets, 30),
}


# Single faults


@pytest.mark.parametrize("value", [f"{CANARY_MODULE}.X", "../../etc/passwd", "other.yaml"])
def test_a_word_in_place_of_a_section_is_neither_imported_nor_opened(value: str, canaries: Path) -> None:
    (canaries / "other.yaml").write_text("kind: linear\n")
    (canaries / "config.yaml").write_text(f"model:\n  rope_scaling: {value}\n")
    with pytest.raises(ConfigError, match=r"model\.rope_scaling is a section"):
        load_config(canaries / "config.yaml")
    assert CANARY_MODULE not in sys.modules


def test_a_key_is_not_given_twice_by_writing_it_with_a_dot(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {dir: a}\nrun.dir: b\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: run\.dir .*twice.*: delete one"):
        load_config(tmp_path / "config.yaml")


def make_prepared(folder: Path) -> DataConfig:
    source = write_jsonl(folder / "texts.jsonl", odd_texts(60, seed=1))
    prepare(str(source), "bytes", "auto", "auto", folder / "out", PrepareSettings(held_out=0.2))
    return DataConfig(source=str(folder / "out"), cache_dir=str(folder / "cache"), verify="size")


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "train-00000\n"])
def test_a_manifest_names_no_file_elsewhere(name: str, tmp_path: Path) -> None:
    config = make_prepared(tmp_path)
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["splits"]["train"][0]["name"] = name
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        DataError, match=r"manifest\.json cannot be read .*\[0\]\.name=.* must be a string matching"
    ):
        load_corpus(config)


def test_a_shard_is_no_link_to_elsewhere(tmp_path: Path) -> None:
    config = make_prepared(tmp_path)
    shard = tmp_path / "out" / "train-00000.bin"
    shard.rename(tmp_path / "moved.bin")
    shard.symlink_to(tmp_path / "moved.bin")
    with pytest.raises(DataError, match=r"train-00000\.bin .*out of its folder, to .*moved\.bin: replace"):
        load_corpus(config)


def test_a_shard_is_no_link_to_itself(tmp_path: Path) -> None:
    """Path.resolve raises RuntimeError for it (before Python 3.13)."""
    config = make_prepared(tmp_path)
    shard = tmp_path / "out" / "train-00000.ends"
    shard.unlink()
    shard.symlink_to(shard)
    with pytest.raises(
        DataError, match=r"train-00000\.ends: (a link .*|Too many levels .*), but .*manifest\.json "
    ):
        load_corpus(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokens", 10**15), ("documents", 10**15), ("tokens", -1), ("documents", True), ("text_bytes", 10**30)],
)
def test_a_count_that_cannot_be_is_refused_before_memory_is_taken(
    key: str, value: object, tmp_path: Path
) -> None:
    config = make_prepared(tmp_path)
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["splits"]["train"][0][key] = value
    path.write_text(json.dumps(manifest))
    with bounded_memory(), pytest.raises(DataError, match=r"manifest\.json"):
        load_corpus(config)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("index", "value"), [(0, 2**63), (3, 2**64 - 1), (3, 0)])
def test_ends_that_no_checksum_guards_are_not_believed(
    index: int, value: int, packing: bool, tmp_path: Path
) -> None:
    config = dataclasses.replace(make_prepared(tmp_path), packing=packing, document_mask=packing)
    read_corpus(config)
    ends = np.memmap(tmp_path / "out" / "train-00000.ends", "<u8", "r+")
    ends[index] = value
    ends.flush()
    with bounded_memory(), pytest.raises(DataError, match="prepare the data again"):
        read_corpus(config)


# Mutants


@pytest.fixture
def canaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which code of a mutant would create a file; it is also the current folder and HOME."""
    outside = tmp_path / "outside"
    modules = tmp_path / "modules"
    for folder in (outside, modules, tmp_path / "inside" / "tmp"):
        folder.mkdir(parents=True)
    (modules / f"{CANARY_MODULE}.py").write_text(
        f"open({str(outside / 'CANARY')!r}, 'w').close()\nclass X: pass\n"
    )
    (outside / "secret").write_text("root:x:0:0\n")
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "inside" / "tmp"))
    monkeypatch.setenv("HOME", str(outside))
    monkeypatch.chdir(outside)
    return outside


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Context in which allocating more than MEMORY_BYTES raises MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def listing(folder: Path, inside: Path) -> set[tuple[str, int]]:
    """Path and size of every file below a folder, except below `inside`."""
    paths = [path for path in folder.rglob("*") if not path.is_relative_to(inside)]
    return {(str(path), path.stat().st_size) for path in paths if path.is_file()}


def sweep(make: Maker, count: int, seed: int | str, outside: Path) -> list[str]:
    """Read `count` mutants; return the faults."""
    root, inside = outside.parent, outside.parent / "inside"
    targets = list(make(inside))
    contents = [target.path.read_bytes() for target in targets]
    before, faults, seen = listing(root, inside), [], Counter[str]()
    with bounded_memory():
        for number in range(count):
            rng = random.Random(f"{seed}-{make.__name__}-{number}")
            index = number % len(targets)
            mutant = put_in_place(rng, targets[index], contents[index], outside / "secret")
            if problem := judge(targets[index]):
                faults.append(f"{targets[index].name} #{number}: {problem} <- {mutant}")
            clear(targets[index].path)
            targets[index].path.write_bytes(contents[index])
            seen[targets[index].name] += 1
    if changed := before ^ listing(root, inside):
        faults.append(f"outside the folder: {sorted(changed)}")
    assert CANARY_MODULE not in sys.modules
    assert sum(seen.values()) == count
    return faults


@pytest.mark.parametrize("kind", MAKERS)
def test_mutants_are_read_or_refused(kind: str, canaries: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, count = MAKERS[kind]
    faults = sweep(make, count, 1, canaries)
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:20])
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_many_other_mutants_are_read_or_refused(kind: str, canaries: Path) -> None:
    """The mutants of the seed; ten times as many for the seed "all"."""
    make, count = MAKERS[kind]
    seed = os.environ["MESHWRIGHT_TESTS_SEED"]
    faults = sweep(make, count * (20 if seed == "all" else 2), seed, canaries)
    command = (
        f"MESHWRIGHT_TESTS_SEED={seed} pytest -m slow tests/train/test_untrusted.py -k '{kind} and many'"
    )
    assert not faults, f"{len(faults)} faults, repeat with {command}:\n" + "\n".join(faults[:20])
