"""Verification: compare every file of a checkpoint with its manifest."""

import os
import re
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.parallel.errors import first_of, one_line
from meshwright.parallel.mesh import gather_from_all
from meshwright.train.checkpoint.manifest import (
    MANIFEST,
    NOT_FOUND,
    CheckpointManifest,
    SavedFile,
    hash_file,
    make_unreadable,
    read_manifest,
)
from meshwright.train.config import VerifyMode
from meshwright.train.errors import CheckpointError, UnreadableError


def verify_alone(checkpoint: Path) -> CheckpointManifest:
    """Verify every file that a checkpoint's manifest names, in this process, and return the manifest. Raises
    CheckpointError, or UnreadableError if something cannot be read."""
    manifest = read_manifest(checkpoint)
    raise_damage(checkpoint, find_damage(checkpoint, manifest, "full", list(manifest.files)))
    return manifest


def verify_together(checkpoint: Path, mode: VerifyMode) -> CheckpointManifest:
    """Like verify_alone, but every rank reads only its share of the files. All ranks call it and get the same
    result; a process without a group is alone. Without `mode` full, sizes are compared but not hashes."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    manifest, problems = None, list[tuple[str, str]]()
    try:
        manifest = read_manifest(checkpoint)
        by_size = sorted(manifest.files, key=lambda name: -manifest.files[name].size_bytes)  # type: ignore[union-attr]
        problems = [
            ("damaged", text) for text in find_damage(checkpoint, manifest, mode, by_size[rank::world_size])
        ]
    except CheckpointError as error:
        problems = [("unreadable" if isinstance(error, UnreadableError) else "damaged", str(error))]
    every = list(dict.fromkeys(chain.from_iterable(gather_from_all(problems))))
    if unreadable := [text for kind, text in every if kind == "unreadable"]:
        raise UnreadableError(unreadable[0])
    raise_damage(checkpoint, [text for _, text in every])
    assert manifest is not None
    return manifest


def raise_damage(checkpoint: Path, problems: Sequence[str]) -> None:
    """Raise CheckpointError if there are any problems."""
    # an error of the manifest is a complete message already
    if len(problems) == 1 and problems[0].startswith(str(checkpoint)):
        raise CheckpointError(problems[0])
    if problems:
        raise CheckpointError(f"{checkpoint} is damaged: {first_of(problems, '; ')}; use another checkpoint")


def find_damage(
    checkpoint: Path, manifest: CheckpointManifest, mode: VerifyMode, names: Sequence[str]
) -> list[str]:
    """Return the differences from the manifest: the step in the folder's name and, of the files in `names`,
    the size and (mode full) the hash. Raises UnreadableError if something cannot be read: only a proven
    difference counts."""
    problems, named = list[str](), re.fullmatch(r"step-(\d+)", checkpoint.resolve().name)
    if named and int(named[1]) != manifest.position.step:
        problems.append(f"its manifest is of step {manifest.position.step}")
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        checks = [pool.submit(_differs, checkpoint / name, manifest.files[name], mode) for name in names]
        problems += [
            f"{name} {check.result()}" for name, check in zip(names, checks, strict=True) if check.result()
        ]
    return problems


def unnamed_files(checkpoint: Path, manifest: CheckpointManifest) -> list[str]:
    """Return a description of each file in a checkpoint's folder that the manifest does not name, and that is
    never read. Raises CheckpointError, or UnreadableError."""
    try:
        unnamed = sorted({*os.listdir(checkpoint)} - {MANIFEST, *manifest.files})
    except NOT_FOUND as error:
        raise CheckpointError(
            f"{checkpoint} cannot be listed ({error.strerror}): use another checkpoint"
        ) from None
    except OSError as error:
        raise make_unreadable(checkpoint, error) from None
    return [f"{one_line(name, 100)} is not in the manifest" for name in unnamed]


def _differs(path: Path, saved: SavedFile, mode: VerifyMode) -> str:
    """Return how a file differs from the saved one, or "". Raises UnreadableError."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a regular file"
        if status.st_size != saved.size_bytes:
            return f"has {status.st_size} of {saved.size_bytes} bytes"
        if mode == "full" and hash_file(path).sha256 != saved.sha256:
            return "does not match its checksum"
    except NOT_FOUND:
        return "is missing"
    except OSError as error:
        raise make_unreadable(path, error) from None
    return ""
