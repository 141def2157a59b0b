"""The command line of all benchmarks, and their records: date, hardware, versions, configuration and raw
figures, without names of users and hosts."""

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
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright import __version__
from meshwright.tools.cli import run_tool
from meshwright.train.calibration.compute import cpu_model

KEYS = "Config keys of train.main are accepted too, as --section.key=value, and override the benchmark's."
EXIT_TERMINATED = 128 + signal.SIGTERM  # what a shell reports


@dataclass(frozen=True)
class BenchResult:
    """A benchmark's result: figures as data and text; `config`: of the run, of runs by name, or None."""

    config: dict[str, Any] | None
    figures: dict[str, Any]
    text: str


@dataclass(frozen=True)
class Measurement:
    """A benchmark: `python -m benchmarks.NAME`.

    Args:
        name: its module
        add_options: adds its options to a parser
        measure: function of the parsed options and the config keys. Raises train.errors.USER_ERRORS
        description, epilog: texts of its help
        takes_keys: whether it accepts config keys of train.main
        keeps_record: whether it writes its record itself, case by case
    """

    name: str
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Sequence[str]], BenchResult]
    description: str
    epilog: str = ""
    takes_keys: bool = True
    keeps_record: bool = False


def config_keys(text: str) -> tuple[str, ...]:
    """Return arguments of train.main from a text of keys: "train.steps=4 run.seed=1"."""
    return tuple(f"--{key}" for key in text.split())


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file by column, without its comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def run_benchmark(measurement: Measurement) -> None:
    """Run a benchmark as this process's command."""
    # SIGTERM raises SystemExit, so that running commands are terminated first
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_TERMINATED))
    run_tool(lambda: measure(measurement, sys.argv[1:]))


def measure(measurement: Measurement, arguments: Sequence[str]) -> None:
    """Measure, then print and record. Raises the classes in train.errors.USER_ERRORS."""
    parser = make_parser(measurement)
    options, overrides = parser.parse_known_args(arguments)
    if overrides and not measurement.takes_keys:
        parser.error(f"{measurement.name} accepts no config keys: {' '.join(overrides)}")
    options.command = arguments
    result = measurement.measure(options, overrides)
    document = make_document(f"benchmarks.{measurement.name}", arguments, result.config, result.figures)
    print(json.dumps(document, indent=2) if options.json else result.text)
    if options.record is not None and not measurement.keeps_record:
        path = write_record(document, options.record or measurement.name)
        print(f"recorded: benchmarks/records/{path.name}", file=sys.stderr)


def make_parser(measurement: Measurement) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, with the options common to all."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{measurement.name}",
        description=measurement.description,
        epilog=f"{measurement.epilog} {KEYS}" if measurement.takes_keys else measurement.epilog,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the JSON document that --record writes")
    text = f"write benchmarks/records/DATE-NAME.json (NAME: {measurement.name} if not given)"
    if measurement.keeps_record:
        text += ", or continue the newest record of that name: its cases are not measured again"
    parser.add_argument("--record", nargs="?", const="", type=record_name, metavar="NAME", help=text)
    measurement.add_options(parser)
    return parser


RECORDS = Path(__file__).parents[1] / "records"
_HOME = re.compile(r"""/(?:home|Users)/[^\s'"/,;:=]+""")  # the last component is a user's name
# An absolute path or a path below a home folder, of which the last component is kept. `tok/s`, `./x`, `../x`
# and `$HOME/x` do not match.
_PATH = re.compile(r"""(?:(?<![\w.~/})-])|(?<=\s-\w))(?:~\w*)?/+(?:[^\s'"/,;:=]+/+)*([^\s'"/,;:=]+)/*""")


def make_document(
    module: str, command: Sequence[str], config: dict[str, Any] | None, figures: dict[str, Any]
) -> dict[str, Any]:
    """Return the record of `python -m MODULE COMMAND` on this machine, without absolute paths, host and user
    names."""
    document = {
        "name": module.rpartition(".")[2],
        "date": datetime.date.today().isoformat(),
        "hardware": find_hardware(),
        "versions": find_versions(),
        "command": ["python", "-m", module, *command],
        "config": config,
        "figures": figures,
    }
    return without_names(document)


def write_record(document: dict[str, Any], name: str, folder: Path = RECORDS) -> Path:
    """Write DATE-NAME.json, or DATE-NAME-2.json and so on: none is overwritten. Returns the path."""
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


def record_name(name: str) -> str:
    """Return the name of a record, for argparse, which reports a wrong one before anything is measured."""
    if not re.fullmatch(r"[\w.-]+", name):
        raise argparse.ArgumentTypeError(
            f"{name}: the name of a record may contain only letters, digits, '-', '_' and '.'"
        )
    return name


def find_hardware() -> dict[str, Any]:
    """Return the CPU model, the number of cores that this process may use, and the GPUs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_model(),
        "cores": cores,
        "gpu": torch.cuda.get_device_name(0) if gpus else None,
        "gpus": gpus,
    }


def find_versions() -> dict[str, str | None]:
    """Return the versions of the software and the project's commit; None for what is not installed."""
    return {
        "meshwright": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
    }


def without_names(value: Any) -> Any:
    """Return the data without absolute paths and the names of host and user in strings, except keys."""
    if isinstance(value, dict):
        return {key: without_names(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_names(inner) for inner in value]
    return _anonymous(value) if isinstance(value, str) else value


def _anonymous(text: str) -> str:
    text = _PATH.sub(r"\1", _HOME.sub("/HOME", text))
    for name, placeholder in ((platform.node(), "HOST"), (_user(), "USER")):
        if name:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", placeholder, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # the user id has no name, as in some containers
        return ""


def _commit() -> str | None:
    """Return the checked-out commit, with -dirty if files differ from it; None if git cannot tell."""
    if shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def _version(module: str) -> str | None:
    try:
        return str(importlib.import_module(module).__version__)
    except ImportError:
        return None
