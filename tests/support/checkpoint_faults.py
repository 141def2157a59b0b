"""Seeded disk faults for a committed checkpoint; each changes at least one file."""

import hashlib
import itertools
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.train.checkpoint.manifest import MANIFEST

Damage = Callable[[Path], object]


@dataclass(frozen=True)
class Fault:
    """A fault of a checkpoint's folder: its name and a function of the folder.

    `of_tensors`: a bit flip in a file of tensors. `kind`: faults of one kind test nearly the same, so that
    one of them is enough for a short run.
    """

    name: str
    damage: Damage
    kind: str
    of_tensors: bool = False


@dataclass(frozen=True)
class Canary:
    """Creates a file when it is unpickled."""

    path: Path

    def __reduce__(self) -> tuple[Callable[..., int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def make_faults(good: Path, before: Path, outside: Path, rng: random.Random) -> Iterator[Fault]:
    """Every fault of the sweep for the checkpoint `good`. `before`: the checkpoint of the step before;
    `outside`: a folder with a copy of `good`, in which a canary file would appear."""
    for path in sorted(good.iterdir()):
        yield from _flips(path, rng)
        yield from _of_a_file(path.name, before, outside)
    yield from _of_ranks(sorted(path.name for path in good.glob("*.safetensors")))
    yield from _of_the_manifest(before, outside)
    yield from _of_the_folder(before, outside)


def make_strays(outside: Path, rng: random.Random) -> Iterator[Fault]:
    """Files and folders beside those of the manifest, as file managers and editors leave them; some would run
    code if they were read as what they look like."""
    evil = pickle.dumps(Canary(outside / "CANARY"))
    odd = "".join(rng.choices("._-~#$ abcXYZ0é\n", k=12)).replace("/", "") + "x"
    for name in (".metadata", "extra.safetensors", "state.pt", ".DS_Store", ".config.yaml.swp", "a\nb", odd):
        yield _single(name, lambda folder, name=name: (folder / name).write_bytes(evil))
    yield _single(".ipynb_checkpoints", lambda folder: (folder / ".ipynb_checkpoints").mkdir())


def _flips(path: Path, rng: random.Random) -> Iterator[Fault]:
    """Single bit flips: in each part of a safetensors file, in YAML, and in text, white space and hash of the
    manifest."""
    content = path.read_bytes()
    regions: dict[str, tuple[list[int], int]] = {"": (list(range(len(content))), 15)}
    if path.suffix == ".safetensors":
        header = 8 + int.from_bytes(content[:8], "little")
        regions = {
            "length of the header": (list(range(8)), 10),
            "header": (list(range(8, header)), 10),
            "data": (list(range(header, len(content))), 20),
        }
    if path.name == MANIFEST:
        digest = content.index(b'\n "sha256"')
        regions = {
            "text": (list(range(digest)), 25),
            "digest": (list(range(digest, len(content))), 15),
            "space": ([i for i, byte in enumerate(content) if byte in b" \n"], 15),
        }
    for region, (places, count) in regions.items():
        for _ in range(count):
            place, bit = rng.choice(places), rng.randrange(8)
            name = f"bit {bit} of byte {place} ({region}) of {path.name}"
            yield Fault(
                name,
                _flip(path.name, place, bit),
                f"{_class_of(path.name)}: {region}",
                path.suffix == ".safetensors",
            )


def _flip(name: str, place: int, bit: int) -> Damage:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[place] ^= 1 << bit
        (folder / name).write_bytes(content)

    return damage


def _of_a_file(name: str, before: Path, outside: Path) -> Iterator[Fault]:
    def cut(keep: Callable[[int], int]) -> Damage:
        return lambda folder: os.truncate(folder / name, keep((folder / name).stat().st_size))

    def replaced(by: Callable[[Path], object]) -> Damage:
        def damage(folder: Path) -> None:
            (folder / name).unlink()
            by(folder / name)

        return damage

    damages: dict[str, Damage] = {
        "a byte short": cut(lambda size: size - 1),
        "half": cut(lambda size: size // 2),
        "empty": cut(lambda size: 0),
        "a byte more": lambda folder: _append(folder / name, b"\0"),
        "a line more": lambda folder: _append(folder / name, b"\n"),
        "deleted": lambda folder: (folder / name).unlink(),
        "a link to the same bytes": replaced(lambda path: path.symlink_to(outside / "copy" / name)),
        "a link to itself": replaced(lambda path: path.symlink_to(path)),
        "a link to an endless device": replaced(lambda path: path.symlink_to("/dev/zero")),
        "a folder": replaced(lambda path: path.mkdir()),
        "a pipe": replaced(os.mkfifo),
        "under another name": lambda folder: os.rename(folder / name, folder / f"{name}.old"),
        "zeros of the same size": lambda folder: (folder / name).write_bytes(
            bytes((folder / name).stat().st_size)
        ),
    }
    if (before / name).read_bytes() != (outside / "copy" / name).read_bytes():
        damages["the one of the step before"] = lambda folder: shutil.copyfile(before / name, folder / name)
    for kind, damage in damages.items():
        yield Fault(f"{name}: {kind}", damage, f"{_class_of(name)}: {kind}")


def _class_of(name: str) -> str:
    """The class of a file: all shards are one class."""
    return "shard" if name.endswith(".safetensors") else name


def _append(path: Path, content: bytes) -> None:
    with open(path, "ab") as file:
        file.write(content)


def _of_ranks(names: list[str]) -> Iterator[Fault]:
    def swap(folder: Path, first: str, second: str) -> None:
        os.rename(folder / first, folder / "between")
        os.rename(folder / second, folder / first)
        os.rename(folder / "between", folder / second)

    for first, second in itertools.pairwise(names):
        yield Fault(
            f"{first} and {second} swapped",
            lambda folder, first=first, second=second: swap(folder, first, second),
            "swapped",
        )
        yield Fault(
            f"{second} is {first}",
            lambda folder, first=first, second=second: shutil.copyfile(folder / first, folder / second),
            "twice",
        )


def rewrite_manifest(folder: Path, change: Callable[[str], str]) -> None:
    """Change the text before the manifest's hash, and update the hash."""
    text = (folder / MANIFEST).read_text()
    body = change(text[: text.index(',\n "sha256": "')] + "\n}")
    digest = hashlib.sha256(body.encode()).hexdigest()
    (folder / MANIFEST).write_text(f'{body[:-2]},\n "sha256": "{digest}"\n}}\n')


def _single(name: str, damage: Damage) -> Fault:
    """A fault that is the only one of its kind."""
    return Fault(name, damage, name)


def _of_the_manifest(before: Path, outside: Path) -> Iterator[Fault]:
    """Wrong manifests with a right hash, as if they were written so."""

    def change(old: str, new: str) -> Damage:
        def damage(folder: Path) -> None:
            original = (folder / MANIFEST).read_text()
            rewrite_manifest(folder, lambda text: text.replace(old, new, 1))
            assert (folder / MANIFEST).read_text() != original

        return damage

    for name in (
        "../x",
        "/etc/passwd",
        "a/b",
        "..",
        ".",
        "",
        "\\u0000",
        "\\ud800",
        "a\\nb",
        "x" * 300,
        MANIFEST,
    ):
        yield _single(f"manifest with the name {name!r}", change('"config.yaml": {', f'"{name}": {{'))
    entry = '"gone.safetensors": {"size_bytes": 1, "sha256": ""},\n  '
    values = {
        "a file that is not there": ('"config.yaml"', f'{entry}"config.yaml"'),
        "twice the same key": ('"seed"', '"step": 1,\n  "seed"'),
        "a negative size": ('"size_bytes": ', '"size_bytes": -'),
        "a size in words": ('"size_bytes": ', '"size_bytes": "1", "a": '),
        "no format": ('"format"', '"form"'),
        "another format": ("checkpoint 3", "checkpoint 4"),
        "a dtype that is code": ("float32[", "load["),
        "no dtype": ("float32[", "float33["),
        "much larger tensors": ("[", "[999999999, "),
        "a true number": ('"seed": 0', '"seed": true'),
        "a list": ("{", "[{"),
        "NaN": ('"seed": 0', '"seed": NaN'),
    }
    for description, (old, new) in values.items():
        yield _single(f"manifest with {description}", change(old, new))
    deep = "[" * 200_000
    yield _single("manifest of brackets", lambda folder: (folder / MANIFEST).write_text(deep))
    evil = pickle.dumps(Canary(outside / "CANARY"))
    yield _single("manifest that is a pickle", lambda folder: (folder / MANIFEST).write_bytes(evil))
    yield _single(
        "manifest in UTF-16",
        lambda folder: (folder / MANIFEST).write_text((folder / MANIFEST).read_text(), "utf-16"),
    )
    yield _single(
        "manifest on one line",
        lambda folder: (folder / MANIFEST).write_text(
            json.dumps(json.loads((folder / MANIFEST).read_text()))
        ),
    )
    yield _single(
        "manifest, and the step before's shards",
        lambda folder: [shutil.copyfile(path, folder / path.name) for path in before.glob("*.safetensors")],
    )


def _of_the_folder(before: Path, outside: Path) -> Iterator[Fault]:
    evil = pickle.dumps(Canary(outside / "CANARY"))
    for name, make in {
        "the step before under this name": lambda folder: shutil.copytree(before, folder),
        "a file in place of the folder": lambda folder: folder.write_bytes(evil),
        "a pipe in place of the folder": os.mkfifo,
        "an empty folder": Path.mkdir,
    }.items():
        yield _single(name, lambda folder, make=make: (shutil.rmtree(folder), make(folder)))
