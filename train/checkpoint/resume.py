"""Where a run goes on: the checkpoint that `checkpoint.resume` means, verified by all ranks."""

from dataclasses import dataclass
from pathlib import Path

from meshwright.train.checkpoint.config import CheckpointConfig, CheckpointError, UnreadableError
from meshwright.train.checkpoint.folder import list_checkpoints, put_aside
from meshwright.train.checkpoint.manifest import Manifest
from meshwright.train.checkpoint.verify import verify_together
from meshwright.train.data.paths import user_path
from meshwright.train.place import Place
from meshwright.train.together import from_main


@dataclass(frozen=True)
class Start:
    """A verified checkpoint to go on from, and lines that say what was passed over on the way to it."""

    checkpoint: Path | None = None
    manifest: Manifest | None = None
    said: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Steps that are done already."""
        return self.manifest.position.step if self.manifest else 0


def find_start(config: CheckpointConfig, folder: Path, place: Place) -> Start:
    """The checkpoint to go on from; every rank calls it, and all find the same.

    Under `auto` it is the newest in `folder` that verifies; those passed over are renamed, so that they no
    longer count. Raises CheckpointError if one is named that is not there or does not verify, and if there
    are some of which none verifies: never a silent start from step 0. UnreadableError if one cannot be read
    now: it may be whole, and is not passed over.
    """
    if config.resume == "none":
        return Start()
    if config.resume != "auto":
        path = user_path(config.resume, "checkpoint.resume", CheckpointError)
        return Start(path, _verify_named(config, path))
    damaged: list[tuple[Path, str]] = []
    found = from_main(place, lambda: list_checkpoints(folder))
    for path in reversed(found):
        try:
            manifest = verify_together(path, config.verify)
        except UnreadableError:
            raise
        except CheckpointError as error:
            damaged.append((path, str(error)))
            continue
        aside = from_main(place, lambda: [put_aside(one) for one, _ in damaged])
        said = [
            f"checkpoint: passed over: {why}. It is now {new}"
            for (_, why), new in zip(damaged, aside, strict=True)
        ]
        return Start(path, manifest, tuple(said))
    if damaged:
        raise CheckpointError(
            f"none of the {len(damaged)} checkpoints in {folder} verifies: {damaged[0][1]}. Mend or delete "
            "them, or use another run.dir"
        )
    return Start()


def _verify_named(config: CheckpointConfig, path: Path) -> Manifest:
    try:
        return verify_together(path, config.verify)
    except CheckpointError as error:
        raise type(error)(f"checkpoint.resume={config.resume}: {error}") from None
