"""`python -m tools.doctor`: what this machine has; what of it will fail or be slow, and how to mend it."""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshwright.parallel.compile.setup import cache_folder
from meshwright.parallel.config import CompileConfig
from meshwright.tools.command import run_tool
from meshwright.tools.doctor.checks import try_all_reduce, try_compile
from meshwright.tools.doctor.environment import choose_shown
from meshwright.tools.doctor.facts import Facts, Unknown, find
from meshwright.tools.doctor.judge import judge
from meshwright.tools.doctor.machine import look_at_cache_folder, look_at_machine, look_at_run_folder
from meshwright.tools.doctor.software import look_at_gpus, look_at_software, look_at_topology
from meshwright.tools.doctor.text import format_report
from meshwright.train.errors import ConfigError

EXIT_WILL_FAIL = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report; exit code 1 if something will fail."""
    options = make_parser().parse_args(arguments)
    facts = look(_run_dir(options.run_dir))
    findings = judge(facts)
    if options.json:
        found = {"facts": to_plain(facts), "findings": [dataclasses.asdict(one) for one in findings]}
        print(json.dumps(found, indent=2))
    else:
        print(format_report(facts, findings))
    if any(one.kind == "fails" for one in findings):
        sys.stdout.flush()
        sys.exit(EXIT_WILL_FAIL)


def make_parser() -> argparse.ArgumentParser:
    """The tool's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.doctor",
        allow_abbrev=False,
        description="What this machine has: versions, GPUs, compiler, folders, limits, network, environment; "
        "a compiled product "
        "and an all-reduce tried for real. Then what of it will fail or be slow, the most important first, "
        "and how "
        "to mend it. Exit code 0 if nothing will fail, else 1.",
    )
    parser.add_argument(
        "--run_dir",
        default="runs",
        metavar="FOLDER",
        help="where runs go (default runs); its disk is tried with a file of 256 MB",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the tables")
    return parser


def _run_dir(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"--run_dir={text}: there is no such user, so no home folder of theirs") from None


def look(run_dir: Path) -> Facts:
    """Everything. The compiler works while the rest is looked at; the all-reduce has the machine for
    itself."""
    # before torch's compiler adds its own
    environment, cache = choose_shown(os.environ), cache_folder(CompileConfig())
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        compiling = try_compile(Path(folder))
        software, machine = look_at_software(), look_at_machine()
        gpus, topology = find(look_at_gpus), find(look_at_topology)
        graphs = look_at_cache_folder(cache)
        compiled = compiling.result()
    all_reduce = try_all_reduce().result()
    run = look_at_run_folder(run_dir)
    return Facts(software, machine, gpus, topology, run, graphs, environment, compiled, all_reduce)


def to_plain(value: object) -> object:
    """For JSON: dataclasses as objects; what is unknown as {"unknown": why}."""
    if isinstance(value, Unknown):
        return {"unknown": value.why}
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(one) for key, one in value.items()}
    return [to_plain(one) for one in value] if isinstance(value, tuple) else value


if __name__ == "__main__":
    run_tool(main)
