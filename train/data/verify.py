"""Compares prepared data with its checksums: all ranks together hash every file once, and a record tells
later starts. One process of each node takes the stamps (size, times, inode) of a folder's files, one call per
file. The record, a file beside the data or in the cache, is named by a hash of the stamps, so a change makes
it void."""

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.mesh import gather_from_all
from meshwright.train.data.token_store import MANIFEST, ShardInfo, TokenStoreManifest, file_sizes, hash_file
from meshwright.train.distributed.agreement import on_all_ranks
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import DataError

RECORD = ".verified-"  # and a hash of the stamps
THREADS = 4  # hashing releases the GIL

Manifests = Mapping[Path, TokenStoreManifest]
Print = Callable[[str], None]


def verify_together(manifests: Manifests, hashes: bool, cache: Path, ranks: RankInfo, print_: Print) -> None:
    """Check all files of prepared folders: their sizes, and with `hashes` their contents, unless that was
    done before. The ranks whose nodes see the same files divide them. Every rank calls it, and a problem is
    raised on all, as DataError that names the file. `print_`: prints a line on rank 0."""
    leads = gather_from_all(ranks.machine).index(ranks.machine) == ranks.rank  # the lowest rank of its node

    def look() -> list[tuple[str, bool]]:
        stamps = [(folder, take_stamp(folder, manifest)) for folder, manifest in manifests.items() if leads]
        return [(stamp, not hashes or _is_recorded(folder, stamp, cache)) for folder, stamp in stamps]

    states = on_all_ranks(look)  # of each folder its stamp, and whether it is recorded
    of_ranks = gather_from_all((ranks.machine, states))
    of_nodes = {machine: of_node for machine, of_node in of_ranks if of_node}

    def compare() -> None:
        for number, (folder, manifest) in enumerate(manifests.items()):
            of_folder = [of_nodes[machine][number] for machine, _ in of_ranks]
            # the ranks of all nodes with these files, of which one at least has no record of them
            sharing = [rank for rank, (stamp, _) in enumerate(of_folder) if stamp == of_folder[ranks.rank][0]]
            if not all(of_folder[rank][1] for rank in sharing):
                sizes = file_sizes(manifest)
                print_(
                    f"data: comparing {len(sizes):,} files of {folder} with their checksums, once: "
                    f"{sum(sizes.values()) / GIB:.2f} GiB by {len(sharing)} processes"
                )
                by_size = sorted(sizes, key=lambda name: (-sizes[name], name))
                _compare(folder, manifest, by_size[sharing.index(ranks.rank) :: len(sharing)])

    on_all_ranks(compare)
    for folder, (stamp, recorded) in zip(manifests, states, strict=False):  # no states unless this rank leads
        if not recorded:
            _record(folder, stamp, cache)


def take_stamp(folder: Path, manifest: TokenStoreManifest) -> str:
    """Check the sizes of a folder's files, and return a hash of their stamps: sizes, times and inodes, which
    differ in a copy that kept the files' times. One call per file. Raises DataError unless each is a regular
    file of the size in the manifest, or a link to one."""
    sizes, stamps = file_sizes(manifest), dict[str, tuple[int, ...]]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name in sizes or entry.name == MANIFEST:
                    stamps[entry.name] = _stamp(folder, entry, sizes.get(entry.name))
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror}): restore the folder") from None
    for name in sizes.keys() - stamps.keys():
        raise DataError(f"{folder / name}: no such file{_listed(folder, sizes[name])}")
    return hashlib.sha256(json.dumps(sorted(stamps.items())).encode()).hexdigest()[:16]


def _stamp(folder: Path, entry: os.DirEntry[str], size_bytes: int | None) -> tuple[int, ...]:
    path = folder / entry.name
    try:
        status = entry.stat()
    except OSError:
        raise DataError(f"{path}: a link to a missing file{_listed(folder, size_bytes)}") from None
    regular = stat.S_ISREG(status.st_mode)
    if not regular or size_bytes not in (None, status.st_size):
        found = f"{status.st_size:,} bytes" if regular else "not a regular file"
        raise DataError(f"{path}: {found}{_listed(folder, size_bytes)}")
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _listed(folder: Path, size_bytes: int | None) -> str:
    listed = f"{size_bytes:,} bytes" if size_bytes is not None else "it"
    return f", but {folder / MANIFEST} lists {listed}: prepare the data again"


def _is_recorded(folder: Path, stamp: str, cache: Path) -> bool:
    return any((place / f"{RECORD}{stamp}").is_file() for place in (folder, cache))


def _record(folder: Path, stamp: str, cache: Path) -> None:
    """Write an empty file beside the data, or else into the cache; without it the next start reads again."""
    for place in (folder, cache):
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            for earlier in place.glob(f"{RECORD}*") if place == folder else ():
                earlier.unlink(missing_ok=True)
            (place / f"{RECORD}{stamp}").touch()
            return


def _compare(folder: Path, manifest: TokenStoreManifest, names: Sequence[str]) -> None:
    """Raise DataError with the first of these files that is not what was prepared."""
    shards = {shard.name: shard for shards in manifest.splits.values() for shard in shards}
    with ThreadPoolExecutor(THREADS) as pool:
        checks = pool.map(lambda name: _damage_of(folder / name, shards[Path(name).stem]), names)
        for name, problem in zip(names, checks, strict=True):
            if problem:
                pool.shutdown(cancel_futures=True)
                raise DataError(f"{folder / name} {problem}: prepare the data again")


def _damage_of(path: Path, shard: ShardInfo) -> str:
    """Return how a file differs from what was prepared; "" if it does not."""
    expected = shard.ends_sha256 if path.suffix == ".ends" else shard.sha256
    try:
        if (sha256 := hash_file(path)) != expected:
            return (
                f"has changed since it was prepared: its sha256 is {sha256[:16]}..., but "
                f"{path.parent / MANIFEST} lists {expected[:16]}..."
            )
        ends = np.fromfile(path, "<i8") if path.suffix == ".ends" else np.array([shard.tokens])
        if (np.diff(ends, prepend=0) <= 0).any() or ends[-1] != shard.tokens:
            return f"has document ends that do not increase to {shard.tokens:,} tokens"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""
