"""`python -m tools.doctor`: what this machine has, what will fail or be slow in a run, and how to fix it."""

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshwright.parallel.compile.setup import cache_folder
from meshwright.parallel.config import CompileConfig
from meshwright.parallel.yaml_io import to_yaml
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
    """Print the report; exit with code 1 if something will fail."""
    options = make_parser().parse_args(arguments)
    facts = look(user_path(options.run_dir, "--run_dir", ConfigError))
    findings = judge(facts)
    if options.json:
        print(to_json({"facts": facts, "findings": findings}))
    else:
        print(format_report(facts, findings))
    if any(finding.kind == "fails" for finding in findings):
        sys.stdout.flush()
        sys.exit(EXIT_WILL_FAIL)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.doctor",
        allow_abbrev=False,
        description="Print what this machine has: versions, GPUs, compiler, folders, limits, network, "
        "environment, and the results of two trials: a compiled matrix product and an all-reduce. Then print "
        "what will fail or be slow, the most important first, and how to fix it. Exit code 0 if nothing will "
        "fail, else 1.",
    )
    parser.add_argument(
        "--run_dir",
        default="runs",
        metavar="FOLDER",
        help="the folder of your runs (default runs); a file of 256 MB measures its disk",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser


def look(run_dir: Path) -> Facts:
    """Collect all facts. The compile trial runs in parallel to the inspection, the all-reduce trial alone."""
    # first: torch's compiler sets environment variables
    environment, cache = choose_shown(os.environ), cache_folder(CompileConfig())
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder, ThreadPoolExecutor(1) as executor:
        compiling = executor.submit(try_compile, Path(folder))
        software, machine = look_at_software(), look_at_machine()
        gpus, topology = find(look_at_gpus), find(look_at_topology)
        graphs = look_at_folder(cache)
        compiled = compiling.result()
    all_reduce = try_all_reduce()
    run = look_at_run_folder(run_dir)
    return Facts(software, machine, gpus, topology, run, graphs, environment, compiled, all_reduce)


def format_report(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return the facts as YAML, then the findings."""
    shown = to_yaml(dataclasses.asdict(facts), allow_unicode=True, width=WIDTH)
    return f"{shown}\n{format_findings(findings)}"


def format_findings(findings: Sequence[Finding]) -> str:
    """Return the findings as text: a line for each, and its remedy below it."""
    if not findings:
        return "no problem found: nothing here should fail or be slow"
    lines = [f"  {each.kind.upper():<6}{each.what}\n        {each.remedy}" for each in findings]
    return "\n".join(["what will fail or be slow, and how to fix it", *lines])


if __name__ == "__main__":
    run_tool(main)
