"""Checkpoint folders: their names, the atomic commit, retention, and damaged checkpoints.

`step-00000100` is committed: one rename created it, and nothing writes into it afterwards.
`.step-00000100.partial` is being written and `.step-00000100.old` is being deleted: neither counts, and the
next save removes leftovers of both. `damaged-step-00000100` failed verification at a resume; it stays until
the user deletes it.
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from meshwright.parallel.errors import first_of
from meshwright.parallel.memory_breakdown import GIB
from meshwright.train.checkpoint.manifest import MANIFEST, CheckpointManifest, manifest_to_text
from meshwright.train.errors import CheckpointError, SaveError
from meshwright.train.files import flush_folder

_STEP = re.compile(r"step-(\d{8,18})")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints of a run, oldest first.

    Only folder names count, so that a checkpoint that lost its manifest is reported as damaged and not
    skipped. Raises CheckpointError if the folder exists but cannot be read.
    """
    try:
        checkpoints = [folder / name for name in os.listdir(folder) if _STEP.fullmatch(name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error.strerror}), so its checkpoints cannot be listed: fix the "
            "folder, or use another run.dir"
        ) from None
    return sorted(checkpoints, key=step_of)


def checkpoints_folder(path: Path) -> Path:
    """Return a run's checkpoints folder, given the run's folder or that one. CheckpointError if missing."""
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such folder: use the folder of a run, such as runs/NAME, or its checkpoints folder"
        )
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def find_newest(path: Path) -> Path:
    """Return `path` if it is a checkpoint; else the newest checkpoint of the run or checkpoints folder.
    CheckpointError if there is none."""
    if (path / MANIFEST).is_file():
        return path
    folder = checkpoints_folder(path)
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise CheckpointError(
            f"{folder} contains no complete checkpoint (a folder step-NNNNNNNN with a {MANIFEST}): "
            "use a checkpoint, or a run that has saved one"
        )
    return checkpoints[-1]


def begin_save(folder: Path, step: int, needed_bytes: int, retention: tuple[int, int] | None = None) -> Path:
    """Create an empty folder for a step's checkpoint and return it. `retention` (keep, keep_every) may make
    room if there is too little. Raises SaveError, before anything is deleted if the folder has a checkpoint
    of this step or a later one, and if the disk has less than `needed_bytes` free."""
    partial = folder / f".{step_name(step)}.partial"
    try:
        _make_durable_folder(folder)
        if later := [path.name for path in list_checkpoints(folder) if step_of(path) >= step]:
            raise SaveError(
                f"{folder} contains {first_of(later)}, so step {step} is not saved: a committed checkpoint "
                "is never overwritten, and retention would delete an earlier step. Resume from it, save into "
                "another folder, or move it away"
            )
        for leftover in folder.glob(".step-*"):  # of an interrupted save or deletion
            # Only `partial` must be removed; other leftovers do no harm, such as files that NFS keeps open.
            with suppress(*(() if leftover == partial else (OSError,))):
                _remove(leftover)
        partial.mkdir()
        if retention and _missing_bytes(folder, needed_bytes):
            delete_others(folder, *retention)
        if missing := _missing_bytes(folder, needed_bytes):
            older = list_checkpoints(folder)[:-1]
            freed_bytes = sum(file.stat().st_size for path in older for file in path.iterdir())
            names = f"{first_of([path.name for path in older])} ({_size(freed_bytes)})"
            advice = f", or delete {names}, as a start with a lower checkpoint.keep does" if older else ""
            raise SaveError(
                f"a checkpoint needs {_size(needed_bytes)}, but {folder} has {_size(needed_bytes - missing)} "
                f"free: free {_size(missing + 2**20)} more{advice}"
            )
    except OSError as error:
        raise SaveError(
            f"the checkpoint of step {step} cannot be written into {folder} ({error.strerror})"
        ) from None
    return partial


def _missing_bytes(folder: Path, needed_bytes: int) -> int:
    disk = shutil.disk_usage(folder)
    return max(0, needed_bytes - disk.free) if disk.total else 0  # some FUSE file systems report 0


def commit(partial: Path, manifest: CheckpointManifest) -> Path:
    """Write the manifest into `partial`, rename the folder to its committed name, safe against a loss of
    power, and return its path. Raises SaveError, also if a file in the manifest is missing or incomplete."""
    final = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    absent = [name for name, file in manifest.files.items() if _size_of(partial / name) != file.size_bytes]
    if absent:
        raise SaveError(
            f"{', '.join(absent[:3])}: missing or incomplete in {partial.parent}, which must be one folder, "
            "shared by all nodes"
        )
    try:
        write_synced(partial / MANIFEST, manifest_to_text(manifest))
        flush_folder(partial)
        os.rename(partial, final)
        _sync_parent(final, partial)
    except OSError as error:
        raise SaveError(f"{final} cannot be committed ({error.strerror})") from None
    return final


def abandon(folder: Path, step: int) -> None:
    """Remove the partial folder of a failed save."""
    shutil.rmtree(folder / f".{step_name(step)}.partial", ignore_errors=True)


def make_retained(steps: list[int], keep: int, keep_every: int) -> set[int]:
    """Return the steps that retention keeps, of the committed ones (oldest first): the newest `keep` (0:
    all), and the multiples of `keep_every` (0: none)."""
    newest = steps[-keep:] if keep else steps
    return {*newest, *(step for step in steps if keep_every and step % keep_every == 0)}


def delete_others(folder: Path, keep: int, keep_every: int) -> None:
    """Delete the checkpoints that `make_retained` does not keep: after a commit, or if a resume has no room.

    A checkpoint that cannot be deleted stays until the next call.
    """
    try:
        checkpoints = {step_of(path): path for path in list_checkpoints(folder)}
    except CheckpointError:
        return
    for step in checkpoints.keys() - make_retained(list(checkpoints), keep, keep_every):
        # renamed first: an interrupted deletion must not leave a damaged checkpoint
        hidden = checkpoints[step].with_name(f".{checkpoints[step].name}.old")
        try:
            os.rename(checkpoints[step], hidden)
        except OSError:
            continue
        shutil.rmtree(hidden, ignore_errors=True)


def put_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint so that it no longer counts, and return its new path. Nothing is deleted.
    Raises CheckpointError."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    for number in range(2, 10_000):
        if not aside.exists():
            break
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}-{number}")
    try:
        os.rename(checkpoint, aside)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint} does not verify and cannot be renamed ({error.strerror}): move it away"
        ) from None
    return aside


def write_synced(path: Path, content: str | bytes) -> None:
    """Write a small new file and wait until it is on disk."""
    with open(path, "xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def _sync_parent(final: Path, partial: Path) -> None:
    """Sync the rename to disk. On an error undo it: a failed save must leave no committed checkpoint."""
    try:
        flush_folder(final.parent)
    except OSError:
        os.rename(final, partial)
        raise


def _make_durable_folder(folder: Path) -> None:
    """Create a folder, and sync to disk the names of all new folders and of the first existing one above them
    (the run's folder, which was created just before)."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*made, made[-1].parent) if made else ():
        with suppress(PermissionError):  # another user's folder, which we may traverse but not open
            flush_folder(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _size(count_bytes: int) -> str:
    return f"{count_bytes / GIB:.1f} GiB" if count_bytes >= GIB / 10 else f"{count_bytes / 2**20:.1f} MiB"
