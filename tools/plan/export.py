"""What `tools.plan` writes: the plan file, and the step as a picture or a trace. Either a whole file or
none."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.parallel.planner.plot.timeline import draw_timeline, timeline_svg
from meshwright.parallel.planner.timeline import Timeline, chrome_trace
from meshwright.train import files
from meshwright.train.errors import ConfigError

PLAN_SUFFIXES = (".yaml", ".yml")


def check_target(option: str, path: Path, suffixes: Sequence[str], overwrites: bool) -> Path:
    """The path, if a file can be written there. Raises ConfigError, before anything is computed."""
    place = f"{option}={path}"
    if path.suffix not in suffixes:
        raise ConfigError(f"{place}: its name must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ConfigError(f"{place} is a folder: name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{place}: there is no folder {path.parent}: make it first")
    if path.exists() and not overwrites:
        raise ConfigError(
            f"{place} is there already, and is not overwritten: take another name, or remove it"
        )
    return path


def save_plan(path: Path, plan: Plan, about: Sequence[str]) -> None:
    """Write the plan file, `about` it as comments first."""
    comments = "".join(f"# {line}\n" for sentence in about for line in sentence.splitlines())
    write_whole(path, (comments + plan_to_yaml(plan)).encode())


def save_timeline(path: Path, timeline: Timeline, title: str) -> None:
    """Write the step as a picture, or as a trace that Perfetto opens, by the file's suffix."""
    write_whole(path, TIMELINES[path.suffix](timeline, title))


def write_whole(path: Path, content: bytes) -> None:
    """By one rename, so that nobody sees half of it. Raises ConfigError where that cannot be."""
    try:
        files.write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def _png(timeline: Timeline, title: str) -> bytes:
    try:
        from meshwright.parallel.planner.plot.shapes import to_png
    except ImportError:
        raise ConfigError(
            "--timeline: a PNG needs Pillow (pip install pillow); an SVG needs nothing"
        ) from None
    return to_png(draw_timeline(timeline, title))


TIMELINES: Mapping[str, Callable[[Timeline, str], bytes]] = {
    ".svg": lambda timeline, title: timeline_svg(timeline, title).encode(),
    ".png": _png,
    ".json": lambda timeline, title: json.dumps(chrome_trace(timeline, title)).encode(),
}
