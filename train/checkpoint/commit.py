"""Where checkpoints lie and when one counts: the folder's names, the commit, and what is deleted.

`step-00000100` is committed: it has appeared by one rename and nothing writes into it again.
`.step-00000100.partial` is being written, `.step-00000100.old` is being deleted: neither counts, and the next
save removes what is left of them. `damaged-step-00000100` was passed over at a resume, and stays until
somebody deletes it.
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from meshwright.parallel.memory_breakdown import GIB
from meshwright.train.checkpoint.manifest import MANIFEST, CheckpointManifest, manifest_to_text
from meshwright.train.errors import CheckpointError, SaveError
from meshwright.train.files import flush_folder

_STEP = re.compile(r"step-(\d{8,18})")


def step_name(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """What counts as a checkpoint of a run, oldest first: by its name alone, so that one that has lost its
    manifest is found to be damaged, not overlooked. Raises CheckpointError if the folder is there and cannot
    be read."""
    try:
        found = [folder / name for name in os.listdir(folder) if _STEP.fullmatch(name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error.strerror}), so nobody knows whether there are checkpoints in "
            "it: mend it, or use another run.dir"
        ) from None
    return sorted(found, key=step_of)


def refuse_newer(folder: Path, start_step: int, own: bool) -> None:
    """CheckpointError if the run's folder holds another training's checkpoints, which the next start would
    take for this one's, and retention would delete: those beyond where this run starts, and unless it is the
    folder's own training (`own`: started under auto, or from a checkpoint that lies in the folder) any."""
    others = [path.name for path in list_checkpoints(folder) if not own or step_of(path) > start_step]
    if others:
        which = (
            f"newer than step {start_step} where this run starts"
            if own
            else "from none of which this run goes on"
        )
        raise CheckpointError(
            f"{folder} holds {', '.join(others[-3:])}, {which}: --checkpoint.resume=auto goes on from the "
            "newest of them, another run.dir leaves them as they are"
        )


def begin_save(folder: Path, step: int, needed_bytes: int) -> Path:
    """An empty folder to write a step's checkpoint into. SaveError if there is no room for `needed_bytes`."""
    final = folder / step_name(step)
    partial = folder / f".{final.name}.partial"
    try:
        _make_lasting(folder)
        for leftover in folder.glob(".step-*"):  # of a save or a deletion that was cut short
            # Only the name that is needed now must be free: there is no harm in others, such as those that
            # NFS keeps open.
            with suppress(*(() if leftover == partial else (OSError,))):
                _remove(leftover)
        disk = shutil.disk_usage(folder)
        if disk.total and disk.free < needed_bytes:  # some file systems in user space say 0 of everything
            raise SaveError(
                f"the checkpoint of step {step} needs {_size(needed_bytes)}, {folder} has {_size(disk.free)} "
                "free: make room, or lower checkpoint.keep"
            )
        if final.exists():
            raise SaveError(
                f"{final} is there already, and nothing writes into a committed checkpoint: move it away"
            )
        partial.mkdir()
    except OSError as error:
        raise SaveError(
            f"the checkpoint of step {step} cannot be written into {folder} ({error.strerror})"
        ) from None
    return partial


def commit(partial: Path, manifest: CheckpointManifest) -> Path:
    """Give what lies in `partial` its manifest, and by one rename the name under which it counts, safe
    against a loss of power. Raises SaveError, also where a file that the manifest names did not arrive."""
    final = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    absent = [name for name, file in manifest.files.items() if _size_of(partial / name) != file.size_bytes]
    if absent:
        raise SaveError(
            f"{', '.join(absent[:3])} did not arrive in {partial.parent}: it must be one folder, shared by "
            "all nodes"
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
    """Remove what a failed save has written."""
    shutil.rmtree(folder / f".{step_name(step)}.partial", ignore_errors=True)


def make_retained(steps: list[int], keep: int, keep_every: int) -> set[int]:
    """Which of the committed steps, oldest first, stay: the newest `keep` (0: all), and those that
    `keep_every` divides."""
    newest = steps[-keep:] if keep else steps
    return {*newest, *(step for step in steps if keep_every and step % keep_every == 0)}


def delete_others(folder: Path, keep: int, keep_every: int) -> None:
    """Delete what `make_retained` does not keep; called after a commit, never before. A checkpoint that
    cannot be deleted stays for the next time: there is no harm in it."""
    try:
        found = {step_of(path): path for path in list_checkpoints(folder)}
    except CheckpointError:
        return
    for step in found.keys() - make_retained(list(found), keep, keep_every):
        # a name that does not count, should this be cut short
        hidden = found[step].with_name(f".{found[step].name}.old")
        try:
            os.rename(found[step], hidden)
        except OSError:
            continue
        shutil.rmtree(hidden, ignore_errors=True)


def put_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that does not verify, so that it no longer counts; nothing of it is deleted."""
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


def write_synced(path: Path, text: str) -> None:
    """Write a small file and wait until the disk has it."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_parent(final: Path, partial: Path) -> None:
    """Make the rename last. Where the disk refuses that, take it back: a save that has failed leaves nothing
    that counts."""
    try:
        flush_folder(final.parent)
    except OSError:
        os.rename(final, partial)
        raise


def _make_lasting(folder: Path) -> None:
    """Make a folder that is not there, and have the disk keep its name, and those of the folders above that
    are as new: the run's, which is made just before, too."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*made, made[-1].parent) if made else ():
        with suppress(PermissionError):  # somebody else's folder, which we may pass through and not open
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
