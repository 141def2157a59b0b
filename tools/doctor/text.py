"""The report as people read it."""

from collections.abc import Iterable, Sequence

from meshwright.tools.doctor.facts import Facts, Folder, Gpu, Unknown
from meshwright.tools.doctor.finding import Finding

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
