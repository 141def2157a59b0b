"""`python -m tools.doctor`: what this machine has; what of it will fail or be slow, and how to mend it."""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from meshwright.parallel.compile.setup import cache_folder
from meshwright.parallel.config import CompileConfig
from meshwright.tools.cli import run_tool
from meshwright.tools.doctor.facts import Facts, Finding, Folder, Gpu, Unknown, find
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


WIDTH = 22  # of the names
HEADINGS = {"fails": "FAILS", "slow": "SLOW", "note": "NOTE"}


def format_report(facts: Facts, findings: Sequence[Finding]) -> str:
    """Grouped facts, then what will be slow or fail, and how to mend it."""
    groups: dict[str, Sequence[tuple[str, object]]] = {
        "versions": versions(facts),
        "GPUs": gpus(facts),
        "compiling": compiling(facts),
        "machine": machine(facts),
        "folders": folders(facts),
        "environment": list(facts.environment.items()),
        "tried": [("torch.compile", facts.compiled), ("all-reduce", facts.all_reduce)],
    }
    blocks = ["\n".join([name, *_lines(rows)]) for name, rows in groups.items() if rows]
    return "\n\n".join([*blocks, format_findings(findings)])


def format_findings(findings: Sequence[Finding]) -> str:
    """The most important first."""
    if not findings:
        return "nothing will fail or be slow, as far as can be seen"
    lines = [f"  {HEADINGS[one.kind]:<6}{one.what}\n        {one.remedy}" for one in findings]
    return "\n".join(["what will be slow or fail, and how to mend it", *lines])


def versions(facts: Facts) -> list[tuple[str, object]]:
    """What is installed; an empty version is none."""
    return [(name, version or "none") for name, version in facts.software.versions.items()]


def gpus(facts: Facts) -> list[tuple[str, object]]:
    """One line each, then the links."""
    software = facts.software
    if isinstance(facts.gpus, Unknown):
        return [("driver sees", facts.gpus), ("torch sees", software.gpus_of_torch)]
    rows: list[tuple[str, object]] = [(f"GPU {i}", describe_gpu(gpu)) for i, gpu in enumerate(facts.gpus)]
    rows += [("torch sees", software.gpus_of_torch), ("dtype", software.bfloat16)]
    if software.cudnn_loaded:
        rows.append(("cuDNN in use", software.cudnn_loaded))
    if facts.topology:
        rows.append(
            ("links", f"\n{facts.topology.rstrip()}" if isinstance(facts.topology, str) else facts.topology)
        )
    return rows


def describe_gpu(gpu: Gpu) -> str:
    """What is known of it."""
    parts = [gpu.name]
    if gpu.memory_gib is not None:
        parts.append(f"{gpu.memory_gib:.1f} GiB")
    if gpu.ecc:
        parts.append(f"ECC {gpu.ecc.lower()}")
    if gpu.sm_clock_mhz is not None and gpu.max_sm_clock_mhz is not None:
        parts.append(f"clock {gpu.sm_clock_mhz:.0f} of {gpu.max_sm_clock_mhz:.0f} MHz")
    if gpu.power_limit_w is not None:
        parts.append(f"power limit {gpu.power_limit_w:.0f} W")
    return ", ".join(parts)


def compiling(facts: Facts) -> list[tuple[str, object]]:
    """What inductor needs."""
    software = facts.software
    return [
        ("C++ compiler", software.compiler or "none"),
        ("Python.h", "there" if software.python_headers else "missing"),
    ]


def machine(facts: Facts) -> list[tuple[str, object]]:
    """Memory, cores, limits, network."""
    have = facts.machine
    return [
        (
            "memory",
            f"{_gib(have.memory_gib)}, available {_gib(have.available_gib)}, cgroup limit "
            f"{_gib(have.cgroup_gib)}",
        ),
        ("cores", f"{have.cores} usable, {have.threads} hardware threads"),
        (
            "ulimit -l, -n",
            f"{_kib(have.memlock_kib)}, {_files(have.open_files)} (a run has {_files(have.most_open_files)})",
        ),
        ("/dev/shm", f"{_gib(have.shm_gib)} free"),
        ("name", f"{have.hostname}: {_joined(have.addresses)}"),
        ("interfaces", _joined(have.interfaces)),
        ("InfiniBand", _joined(have.infiniband)),
    ]


def folders(facts: Facts) -> list[tuple[str, object]]:
    """Runs and compiled graphs."""
    run, cache = facts.run_folder, facts.cache_folder
    rate = (
        f"{run.write_mb_s:.0f} MB/s flushed"
        if isinstance(run.write_mb_s, float)
        else f"write rate {run.write_mb_s}"
    )
    return [
        ("runs", f"{_place(run)}, {rate}"),
        ("compile cache", f"{_place(cache)}, holds {_gib(cache.size_gib)}"),
    ]


def _place(folder: Folder) -> str:
    writable = "" if folder.writable else ", NOT writable"
    return f"{folder.path} on {folder.filesystem}{writable}, {_gib(folder.free_gib)} free"


def _lines(rows: Iterable[tuple[str, object]]) -> Iterable[str]:
    return (f"  {name:<{WIDTH}}  {value}" for name, value in rows)


def _gib(value: float | Unknown | None) -> str:
    return "none" if value is None else f"{value:.2f} GiB" if isinstance(value, float) else str(value)


def _kib(value: int | Unknown | None) -> str:
    return "unlimited" if value is None else f"{value} KiB" if isinstance(value, int) else str(value)


def _files(value: int | Unknown | None) -> str:
    return "unlimited" if value is None else str(value)


def _joined(values: Sequence[str] | Unknown) -> str:
    return str(values) if isinstance(values, Unknown) else ", ".join(values) or "none"


if __name__ == "__main__":
    run_tool(main)
