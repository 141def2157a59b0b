"""The files that `tools.plan` writes, each atomically: the plan, and the step as a picture or a trace."""

import json
from collections.abc import Sequence
from pathlib import Path

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.parallel.planner.timeline import Timeline, chrome_trace
from meshwright.parallel.planner.timeline_plot import draw_timeline, picture_bytes
from meshwright.train import files
from meshwright.train.errors import ConfigError

PLAN_SUFFIXES = (".yaml", ".yml")
TIMELINE_SUFFIXES = (".svg", ".png", ".json")


def check_target(option: str, path: Path, suffixes: Sequence[str], overwrites: bool) -> Path:
    """Return the path if a file can be written there, else raise ConfigError; called before anything is
    computed.

    Args:
        option: the option that names the path, for messages
        suffixes: allowed suffixes
        overwrites: whether the file may exist
    """
    place = f"{option}={path}"
    if path.suffix not in suffixes:
        raise ConfigError(f"{place}: the file name must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ConfigError(f"{place} is a folder: name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{place}: there is no folder {path.parent}: create it first")
    if path.exists() and not overwrites:
        raise ConfigError(
            f"{place} exists already and is not overwritten: choose another name or remove the file"
        )
    return path


def save_plan(path: Path, plan: Plan, about: Sequence[str]) -> None:
    """Write the plan file, with the lines of `about` as comments at the top."""
    comments = "".join(f"# {line}\n" for sentence in about for line in sentence.splitlines())
    write_atomically(path, (comments + plan_to_yaml(plan)).encode())


def save_timeline(path: Path, timeline: Timeline, title: str) -> None:
    """Write the step as a picture (.svg, .png) or as a trace for Perfetto (.json), by the suffix."""
    if path.suffix == ".json":
        write_atomically(path, json.dumps(chrome_trace(timeline, title)).encode())
    else:
        write_atomically(path, picture_bytes(draw_timeline(timeline, title), path.suffix))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically, by a rename. Raises ConfigError if it cannot be written."""
    try:
        files.write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}): choose another path") from None
