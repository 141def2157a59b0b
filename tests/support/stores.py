"""Writes prepared data shard by shard without a source: shards of any number and size."""

import functools
import hashlib
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from meshwright.train.config import DataConfig
from meshwright.train.data.corpus import Corpus, find_prepared, load_on_all_ranks, open_corpus
from meshwright.train.data.token_store import (
    MANIFEST,
    ShardInfo,
    TokenStoreManifest,
    TokenStream,
    manifest_to_json,
    open_split,
)
from meshwright.train.data.tokenizer import ByteTokenizer
from meshwright.train.distributed.ranks import ALONE

Documents = Sequence[Sequence[int]]  # the tokens of each

_NUMBERS = itertools.count()


def load_corpus(config: DataConfig) -> Corpus:
    """The data of a config in this process; checked, unless there are other ranks."""
    if dist.is_initialized():
        return open_corpus(config, find_prepared(config))
    return load_on_all_ranks(config, ALONE, None, lambda line: None)


def write_store(
    folder: Path, train: Sequence[Documents], held_out: Sequence[Documents] = ()
) -> TokenStoreManifest:
    """Write a prepared folder of byte tokens with one shard for each item."""
    folder.mkdir(parents=True)
    splits = {
        split: tuple(
            _write_shard(folder, f"{split}-{number:05d}", documents)
            for number, documents in enumerate(shards)
        )
        for split, shards in (("train", train), ("held_out", held_out))
    }
    manifest = TokenStoreManifest(ByteTokenizer.info, "uint16", (), splits)
    (folder / MANIFEST).write_text(manifest_to_json(manifest))
    return manifest


def split_of(*shards: Documents) -> TokenStream:
    """A split of these shards."""
    folder = Path(_folders().name, str(next(_NUMBERS)))
    return open_split(folder, write_store(folder, shards), "train")


@functools.cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    """A folder that exists until this process ends."""
    return tempfile.TemporaryDirectory()


def _write_shard(folder: Path, name: str, documents: Documents) -> ShardInfo:
    ids = np.concatenate([np.array(document, "<u2") for document in documents])
    ends = np.cumsum([len(document) for document in documents]).astype("<u8")
    ids.tofile(folder / f"{name}.bin")
    ends.tofile(folder / f"{name}.ends")
    sha256, ends_sha256 = (hashlib.sha256(array.tobytes()).hexdigest() for array in (ids, ends))
    return ShardInfo(name, len(ids), len(documents), len(ids), int(ids.max()), sha256, ends_sha256)
