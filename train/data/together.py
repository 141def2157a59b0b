"""The corpus on every rank: written by one process of each node, and the same on all."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.train.data.config import DataConfig, DataError
from meshwright.train.data.tokens import Corpus, load_corpus
from meshwright.train.place import Place


def load_together(config: DataConfig, place: Place, resume_from: Path | None) -> Corpus:
    """One process per node writes the cache and compares checksums, the others wait. A DataError reaches all
    alike, also where ranks see different text or checkpoints."""
    corpus, problem = None, ""
    if place.local_rank == 0:
        try:
            corpus = load_corpus(config)
        except DataError as error:
            problem = str(error)
    problems = [""] * place.world_size
    dist.all_gather_object(problems, problem)
    if any(problems):
        raise DataError(next(filter(None, problems)))
    corpus = corpus or load_corpus(config)
    seen: list[Any] = [None] * place.world_size
    sizes = {name: split.tokens for name, split in {**corpus.held_out, **corpus.validation}.items()}
    dist.all_gather_object(seen, (corpus.fingerprint, sizes, resume_from and resume_from.name))
    if any(what != seen[0] for what in seen):
        raise DataError(
            f"the processes see different data or checkpoints (fingerprint, tokens to evaluate, checkpoint): "
            f"{sorted(set(map(str, seen)))}. data.source and run.dir must be the same on every node"
        )
    return corpus
