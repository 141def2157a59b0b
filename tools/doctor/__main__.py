"""`python -m tools.doctor`: what this machine has; what of it will fail or be slow, and how to mend it."""

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from meshwright.parallel.compile.setup import cache_folder
from meshwright.parallel.config import CompileConfig
from meshwright.tools.cli import run_tool, to_json
from meshwright.tools.doctor.facts import Facts, Finding, find
from meshwright.tools.doctor.probe import (
    look_at_folder,
    look_at_gpus,
    look_at_machine,
    look_at_run_folder,
    look_at_software,
    look_at_topology,
)
from meshwright.tools.doctor.rules import choose_shown, judge
from meshwright.tools.doctor.trials import try_all_reduce, try_compile
from meshwright.train.errors import ConfigError
from meshwright.train.files import user_path

EXIT_WILL_FAIL = 1
WIDTH = 110


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report; exit code 1 if something will fail."""
    options = make_parser().parse_args(arguments)
    facts = look(user_path(options.run_dir, "--run_dir", ConfigError))
    findings = judge(facts)
    if options.json:
        print(to_json({"facts": facts, "findings": findings}))
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
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    return parser


def look(run_dir: Path) -> Facts:
    """Everything. The compiler works while the rest is looked at; the all-reduce has the machine for
    itself."""
    # before torch's compiler adds its own
    environment, cache = choose_shown(os.environ), cache_folder(CompileConfig())
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder, ThreadPoolExecutor(1) as beside:
        compiling = beside.submit(try_compile, Path(folder))
        software, machine = look_at_software(), look_at_machine()
        gpus, topology = find(look_at_gpus), find(look_at_topology)
        graphs = look_at_folder(cache)
        compiled = compiling.result()
    all_reduce = try_all_reduce()
    run = look_at_run_folder(run_dir)
    return Facts(software, machine, gpus, topology, run, graphs, environment, compiled, all_reduce)


def format_report(facts: Facts, findings: Sequence[Finding]) -> str:
    """The facts as YAML, then what will be slow or fail, and how to mend it."""
    shown = yaml.safe_dump(dataclasses.asdict(facts), sort_keys=False, allow_unicode=True, width=WIDTH)
    return f"{shown}\n{format_findings(findings)}"


def format_findings(findings: Sequence[Finding]) -> str:
    """The most important first."""
    if not findings:
        return "nothing will fail or be slow, as far as can be seen"
    lines = [f"  {one.kind.upper():<6}{one.what}\n        {one.remedy}" for one in findings]
    return "\n".join(["what will be slow or fail, and how to mend it", *lines])


if __name__ == "__main__":
    run_tool(main)
