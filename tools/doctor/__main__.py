"""`python -m tools.doctor`: what this machine has; what of it will fail or be slow, and how to mend it."""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshwright.parallel.compile.setup import cache_folder
from meshwright.parallel.config import CompileConfig
from meshwright.tools.cli import run_tool
from meshwright.tools.doctor.facts import Facts, Finding, TrialResult, Unknown, find
from meshwright.tools.doctor.probe import (
    look_at_cache_folder,
    look_at_gpus,
    look_at_machine,
    look_at_run_folder,
    look_at_software,
    look_at_topology,
)
from meshwright.tools.doctor.rules import choose_shown, judge
from meshwright.tools.doctor.trials import try_all_reduce, try_compile
from meshwright.train.errors import ConfigError

EXIT_WILL_FAIL = 1
WIDTH = 22  # of the names
HEADINGS = {"fails": "FAILS", "slow": "SLOW", "note": "NOTE"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report; exit code 1 if something will fail."""
    options = make_parser().parse_args(arguments)
    facts = look(_run_dir(options.run_dir))
    findings = judge(facts)
    if options.json:
        found = {
            "facts": dataclasses.asdict(facts),
            "findings": [dataclasses.asdict(one) for one in findings],
        }
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
        "a compiled product and an all-reduce tried for real. Then what of it will fail or be slow, the most "
        "important first, and how to mend it. Exit code 0 if nothing will fail, else 1.",
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
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder, ThreadPoolExecutor(1) as beside:
        compiling = beside.submit(try_compile, Path(folder))
        software, machine = look_at_software(), look_at_machine()
        gpus, topology = find(look_at_gpus), find(look_at_topology)
        graphs = look_at_cache_folder(cache)
        compiled = compiling.result()
    all_reduce = try_all_reduce()
    run = look_at_run_folder(run_dir)
    return Facts(software, machine, gpus, topology, run, graphs, environment, compiled, all_reduce)


def format_report(facts: Facts, findings: Sequence[Finding]) -> str:
    """The facts in groups, then what will be slow or fail, and how to mend it."""
    seen = () if isinstance(facts.gpus, Unknown) else facts.gpus
    gpus: dict[str, object] = {f"GPU {number}": gpu for number, gpu in enumerate(seen)}
    groups: dict[str, Mapping[str, object]] = {
        "versions": facts.software.versions,
        "software": {name: value for name, value in _fields(facts.software) if name != "versions"},
        "GPUs": {"driver sees": facts.gpus} if isinstance(facts.gpus, Unknown) else gpus,
        "links": {"topology": facts.topology} if facts.topology else {},
        "machine": dict(_fields(facts.machine)),
        "folders": {"run_folder": facts.run_folder, "cache_folder": facts.cache_folder},
        "environment": facts.environment,
        "tried": {"torch.compile": facts.compiled, "all-reduce": facts.all_reduce},
    }
    blocks = [
        "\n".join([group, *(f"  {name:<{WIDTH}}  {show(value)}" for name, value in rows.items())])
        for group, rows in groups.items()
        if rows
    ]
    return "\n\n".join([*blocks, format_findings(findings)])


def _fields(record: object) -> Iterator[tuple[str, object]]:
    assert dataclasses.is_dataclass(record)
    return ((field.name, getattr(record, field.name)) for field in dataclasses.fields(record))


def show(value: object) -> str:
    """A fact in words; of a record its fields, without those that say nothing."""
    if value is None:
        return "no limit"
    if value in ("", ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, Unknown | TrialResult):
        return ", ".join(f"{name}={show(one)}" for name, one in _fields(value) if one not in (None, ""))
    text = str(value).rstrip()
    return f"\n{text}" if "\n" in text else text


def format_findings(findings: Sequence[Finding]) -> str:
    """The most important first."""
    if not findings:
        return "nothing will fail or be slow, as far as can be seen"
    lines = [f"  {HEADINGS[one.kind]:<6}{one.what}\n        {one.remedy}" for one in findings]
    return "\n".join(["what will be slow or fail, and how to mend it", *lines])


if __name__ == "__main__":
    run_tool(main)
