"""What every subcommand of the bench is: its words, its options, what it measures; and the record that it
leaves: date, hardware, versions, configuration, raw figures, and nobody's name."""

import argparse
import csv
import datetime
import getpass
import importlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright import __version__
from meshwright.tools.processes import BenchError, make_environment, python_command, run_to_end

WORKER = "meshwright.tools.bench.worker"
KEYS = "Config keys of train.main are accepted too, as --section.key=value, and win over what is set here."


@dataclass(frozen=True)
class BenchResult:
    """What a subcommand found: figures as data and as text; `config` of the run, or of several by name, where
    there is one."""

    config: dict[str, Any] | None
    figures: dict[str, Any]
    text: str


@dataclass(frozen=True)
class Measurement:
    """A subcommand.

    Args:
        name: on the command line
        add_options: adds its options to a parser
        measure: takes them and the config keys that follow. Raises what train.config.USER_ERRORS lists
        summary, description, epilog: of its help
        takes_keys: whether config keys of train.main may follow
        keeps_record: it writes its record itself, case by case
    """

    name: str
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Sequence[str]], BenchResult]
    summary: str
    description: str
    epilog: str = ""
    takes_keys: bool = True
    keeps_record: bool = False


def config_keys(text: str) -> tuple[str, ...]:
    """Arguments of train.main from its keys as text: "train.steps=4 run.seed=1"."""
    return tuple(f"--{key}" for key in text.split())


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by column, without its comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def add_measurement(subparsers: Any, measurement: Measurement) -> None:
    """Its parser, with the options that all have."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        measurement.name,
        help=measurement.summary,
        description=measurement.description,
        epilog=f"{measurement.epilog} {KEYS}" if measurement.takes_keys else measurement.epilog,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document: what --record writes")
    words = f"write tools/bench/records/DATE-NAME.json (NAME: {measurement.name} if not given)"
    if measurement.keeps_record:
        words += ", or go on with the newest of that name: what is in it is not measured again"
    parser.add_argument("--record", nargs="?", const="", metavar="NAME", help=words)
    measurement.add_options(parser)
    parser.set_defaults(measurement=measurement)


def run_workers(
    part: str, processes: int, threads: int, device: str, settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What each process found that measured one part of `tools.bench.worker`. Raises BenchError if one
    fails."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        folder = Path(name)
        command = [
            *python_command(WORKER, processes, folder / "torchrun"),
            part,
            f"--folder={folder}",
            f"--threads={threads}",
            f"--device={device}",
            f"--settings={json.dumps(settings)}",
        ]
        run_to_end(command, make_environment(threads, {}), folder / "log", lambda: None)
        return [
            json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)
        ]


RECORDS = Path(__file__).parent / "records"
_HOME = re.compile(r"""/(?:home|Users)/[^\s'"/,;:=]+""")  # its last part is somebody's name
# an absolute path or one below a home: its last part is kept; `tok/s`, `./x`, `../x` and `$HOME/x` are not
# touched
_PATH = re.compile(r"""(?:(?<![\w.~/})-])|(?<=\s-\w))(?:~\w*)?/+(?:[^\s'"/,;:=]+/+)*([^\s'"/,;:=]+)/*""")


def make_document(
    name: str, command: Sequence[str], config: dict[str, Any] | None, figures: dict[str, Any]
) -> dict[str, Any]:
    """One measurement, without absolute paths, host names and user names. Looks at the machine."""
    document = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "hardware": find_hardware(),
        "versions": find_versions(),
        "command": ["python", "-m", "tools.bench", *command],
        "config": config,
        "figures": figures,
    }
    return without_names(document)


def write_record(document: dict[str, Any], name: str, folder: Path = RECORDS) -> Path:
    """Write DATE-NAME.json, or DATE-NAME-2.json and so on: a record is never overwritten. Raises
    BenchError."""
    check_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=2) + "\n"
    number = 1
    while True:
        path = folder / f"{document['date']}-{name}{f'-{number}' if number > 1 else ''}.json"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return path
        except FileExistsError:
            number += 1


def check_name(name: str) -> None:
    """Raises BenchError for what cannot be a record's name."""
    if not re.fullmatch(r"[\w.-]+", name):
        raise BenchError(
            f"--record {name}: the name of a record is made of letters, digits, '-', '_' and '.'"
        )


def find_hardware() -> dict[str, Any]:
    """CPU model, cores that this process may use, and the GPUs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "gpu": torch.cuda.get_device_name(0) if gpus else None,
        "gpus": gpus,
    }


def find_versions() -> dict[str, str | None]:
    """Versions of what was measured, and the project's commit; None for what is not here."""
    return {
        "meshwright": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
    }


def without_names(value: Any) -> Any:
    """The same data, every string in it (keys aside) without absolute paths, this host's and this user's
    name."""
    if isinstance(value, dict):
        return {key: without_names(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_names(inner) for inner in value]
    return _anonymous(value) if isinstance(value, str) else value


def _anonymous(text: str) -> str:
    text = _PATH.sub(r"\1", _HOME.sub("/HOME", text))
    for name, stand_in in ((platform.node(), "HOST"), (_user(), "USER")):
        if name:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", stand_in, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in some containers
        return ""


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit that is checked out, with -dirty where the files differ from it."""
    if shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _version(module: str) -> str | None:
    try:
        return str(importlib.import_module(module).__version__)
    except ImportError:
        return None


def check_room(folder: Path, gb: float) -> None:
    """BenchError if the disk has less than what is to be written, and a tenth more."""
    if not folder.is_dir():
        raise BenchError(f"--folder {folder}: no such folder")
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < 1.1 * gb:
        raise BenchError(
            f"{folder} has {free_gb:.3g} GB free, and --gb {gb:g} needs {1.1 * gb:.3g}: use a smaller --gb, "
            "or another disk with --folder"
        )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
