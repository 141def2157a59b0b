"""Files that others write (prepared data, tokenizers, checkpoints, folders of Hugging Face), wrong on purpose
and mutated at random: each is read as something valid, or refused with a message that names the place; none
runs code, is hung on, or takes more memory than it has bytes."""

import dataclasses
import hashlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from meshwright.models.config import LlamaConfig
from meshwright.models.hf import config_to_hf
from meshwright.train.checkpoint.huggingface import open_folder
from meshwright.train.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    TrainPosition,
    manifest_to_text,
    read_manifest,
)
from meshwright.train.checkpoint.reader import open_checkpoint, read_tensors
from meshwright.train.checkpoint.shards import TensorShard, describe_tensor, write_shard_file
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.config import DataConfig
from meshwright.train.config_keys import known_keys
from meshwright.train.config_parser import CONFIG_FOLDER, load_config
from meshwright.train.data.corpus import find_tokenizer
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import make_sequence_shape, read_batch
from meshwright.train.data.tokenizer import load_tokenizer
from meshwright.train.errors import CheckpointError, ConfigError, DataError
from tests.support.mutations import CANARY_MODULE, Target, clear, judge, put_in_place
from tests.support.stores import load_corpus
from tests.support.texts import odd_texts, prepare_texts, train_bpe, write_jsonl

MEMORY_BYTES = 2 * 2**30  # that reading may allocate in addition to the process's memory


# Files and the functions that read them


def prepared(folder: Path, tokenizer: str = "bytes") -> DataConfig:
    """60 texts, prepared in the folder "data"."""
    source = write_jsonl(folder / "texts.jsonl", odd_texts(60, seed=1))
    prepare_texts(source, folder / "data", tokenizer, held_out=0.2)
    return DataConfig(source=str(folder / "data"), cache_dir=str(folder / "cache"), verify="size")


def read_corpus(config: DataConfig) -> None:
    """Load a corpus and read all of it, as training does."""
    corpus = load_corpus(config)
    shape = make_sequence_shape(config, corpus.tokenizer, 32, 512)
    order = SampleOrder(corpus.sources, shape, 0)
    if min(order.sizes):
        assert read_batch(order.splits, order.rows(0, sum(order.sizes)), shape).tokens.max() < 512
    for split in corpus.evaluation_sets.values():
        read_batch([split], np.array([[0, -1]]), shape)


def data_targets(folder: Path) -> Iterator[Target]:
    """A prepared folder's files, checked in full or by size, read packed and unpacked."""
    lax = prepared(folder)
    for name in ("manifest.json", "train-00000.bin", "train-00000.ends", "held_out-00000.ends"):
        for config in (
            dataclasses.replace(lax, verify="full", cache_dir=f"{lax.cache_dir}-full", document_mask=True),
            dataclasses.replace(lax, packing=False),
        ):
            yield Target(folder / "data" / name, partial(read_corpus, config), DataError, (str(folder),))


def tokenizer_targets(folder: Path) -> Iterator[Target]:
    """The tokenizer of prepared data, and the config next to one."""
    tokenizer = train_bpe(folder / "bpe", vocab_size=300)
    config = prepared(folder, str(tokenizer))

    def encode() -> None:
        loaded = find_tokenizer(config)
        assert isinstance(loaded.decode(loaded.encode([b"a <s> b"])[0].tolist()), str)

    yield Target(folder / "data/tokenizer.json", encode, DataError, (str(folder),))
    beside = tokenizer.with_name("tokenizer_config.json")
    words = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    beside.write_text(json.dumps(words))
    yield Target(beside, partial(load_tokenizer, str(tokenizer)), DataError, (str(folder),))


def checkpoint_targets(folder: Path) -> Iterator[Target]:
    """A checkpoint's config, manifest and tensors; these also with hashes that fit the mutant."""
    checkpoint, name = folder / "step-00000003", "model.weight"
    checkpoint.mkdir()
    config, shards, manifest = (
        checkpoint / file for file in ("config.yaml", "rank-00000.safetensors", MANIFEST)
    )
    config.write_bytes((CONFIG_FOLDER / "llama_debug.yaml").read_bytes())
    yield Target(config, partial(load_config, config), ConfigError, (str(config), *known_keys()))
    value = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    saved = write_shard_file(shards, {name: TensorShard(value, (0, 0))})
    split = dataclasses.replace(describe_tensor(value), sharding=(("dp_shard", 0),))
    position = TrainPosition(3, 24, 0, 32, 1, "data")
    valid = CheckpointManifest(position, {shards.name: saved}, {name: split}, mesh={"dp_shard": 1})
    manifest.write_text(manifest_to_text(valid))

    def read_signed() -> None:
        if manifest.is_file() and not manifest.is_symlink():
            body = manifest.read_bytes().rpartition(b',\n "sha256"')[0] + b"\n}"
            signature = b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()
            manifest.write_bytes(body[:-2] + signature)
        found = read_manifest(checkpoint)
        if tensor := found.tensors.get(name):  # never allocate more than the files contain
            into = {name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))}
            read_tensors(open_checkpoint(checkpoint, found), into)

    def read_unverified() -> None:
        if shards.is_file() or not shards.exists():  # pipes are refused earlier, by the verification
            read_tensors(open_checkpoint(checkpoint, valid), {name: torch.empty(8, 8)})

    for path, read in ((manifest, read_signed), (shards, read_unverified)):
        for reader in (partial(verify_alone, checkpoint), read):
            yield Target(path, reader, CheckpointError, (str(checkpoint),))


def hf_targets(folder: Path) -> Iterator[Target]:
    """config.json, the index and a header of a Hugging Face folder."""
    config = LlamaConfig(
        dim=16, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=32, vocab_size=64, max_seq_len=64
    )
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    tensors = {"model.embed_tokens.weight": torch.zeros(64, 16), "model.norm.weight": torch.zeros(16)}
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors, 1)}
    for name, file in files.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for name in ("config.json", "model.safetensors.index.json", "model-1.safetensors"):
        yield Target(folder / name, partial(open_folder, folder), CheckpointError, (str(folder),))


# Mutants


@pytest.fixture
def canaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which code of a mutant would create a file; it is also the current folder and HOME."""
    outside = tmp_path / "outside"
    modules = tmp_path / "modules"
    for folder in (outside, modules, tmp_path / "inside" / "tmp"):
        folder.mkdir(parents=True)
    code = f"open({str(outside / 'CANARY')!r}, 'w').close()\nclass X: pass\n"
    (modules / f"{CANARY_MODULE}.py").write_text(code)
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


MAKERS = {
    "data": data_targets,
    "tokenizer": tokenizer_targets,
    "checkpoint": checkpoint_targets,
    "hf": hf_targets,
}


@pytest.mark.parametrize("seed", ["1", pytest.param("", id="of the session", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MAKERS)
def test_mutants_are_read_or_refused(
    kind: str, seed: str, canaries: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Forty; those of the session's seed are twice as many, and twenty times for the seed "all"."""
    count = 40 if seed else 80
    if not seed and (seed := os.environ["MESHWRIGHT_TESTS_SEED"]) == "all":
        count = 800
    targets = list(MAKERS[kind](canaries.parent / "inside"))
    contents, faults = [target.path.read_bytes() for target in targets], list[str]()
    with bounded_memory():
        for number in range(count):
            rng = random.Random(f"{seed}-{kind}-{number}")
            target, content = targets[number % len(targets)], contents[number % len(targets)]
            mutant = put_in_place(rng, target.path, content, canaries / "secret")
            if problem := judge(target):
                faults.append(f"{target.path.name} #{number} of seed {seed}: {problem} <- {mutant}")
            clear(target.path)
            target.path.write_bytes(content)
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:20])
    assert [path.name for path in canaries.iterdir()] == ["secret"]
    assert CANARY_MODULE not in sys.modules
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err


# Single faults


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    prepared(folder)
    return folder


def manifest_with(key: str, value: object) -> Callable[[Path], None]:
    """Change a value of the first shard in a folder's manifest."""

    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["splits"]["train"][0][key] = value
        path.write_text(json.dumps(manifest))

    return change


def link_to_itself(folder: Path) -> None:
    ends = folder / "train-00000.ends"
    ends.unlink()
    ends.symlink_to(ends)


def end_at(index: int, value: int) -> Callable[[Path], None]:
    """Let a document end at another token, which the sizes of the files do not show."""

    def change(folder: Path) -> None:
        ends = np.memmap(folder / "train-00000.ends", "<u8", "r+")
        ends[index] = value
        ends.flush()

    return change


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {  # the message
    **{
        f"name {name!r}": (manifest_with("name", name), r"manifest\.json .*\[0\]\.name=.*string matching")
        for name in ("../../etc/passwd", "/etc/passwd", "..", "train-00000\n")
    },
    **{
        f"{key}={value}": (manifest_with(key, value), r"manifest\.json")
        for key, value in (("tokens", 10**15), ("documents", 10**15), ("tokens", -1), ("text_bytes", 10**30))
    },
    "loop": (link_to_itself, r"train-00000\.ends: .*, but .*manifest\.json "),
    **{
        f"end {index} at {value}": (end_at(index, value), "prepare the data again")
        for index, value in ((0, 2**63), (3, 2**64 - 1), (3, 0))
    },
}


@pytest.mark.parametrize("fault", WRONG)
def test_prepared_data_that_no_checksum_guards_is_not_believed(
    fault: str, whole: Path, tmp_path: Path
) -> None:
    change, message = WRONG[fault]
    folder = shutil.copytree(whole / "data", tmp_path / "data")
    change(folder)
    for packing in (True, False):
        config = DataConfig(str(folder), verify="size", packing=packing, document_mask=packing)
        with bounded_memory(), pytest.raises(DataError, match=message):
            read_corpus(dataclasses.replace(config, cache_dir=str(tmp_path / "cache")))
