"""Rules that find problems in a machine's facts, and name a fix for each. Pure functions of the facts."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from meshwright.parallel.yaml_io import load_mapping
from meshwright.tools.doctor.facts import Facts

KINDS = ("fails", "slow", "note")  # a run will fail, it will be slow, it may matter
TABLE = load_mapping(Path(__file__).with_name("problems.yaml"))
PROBLEMS, SWITCHES = TABLE["problems"], TABLE["switches"]
NETWORK = ("nfs", "lustre", "cifs", "smb", "9p", "fuse", "gpfs", "beegfs", "ceph", "wekafs", "virtiofs")
SLOW_COMPILE_S = 30.0
LEAST_SHM_GIB = 1.0  # NCCL maps about 10 MB for each peer of the node; Docker's default is 64 MiB


@dataclass(frozen=True)
class Finding:
    """A problem with its value, its kind (of KINDS), and how to fix it."""

    kind: str
    what: str
    remedy: str


def judge(facts: Facts) -> list[Finding]:
    """Return all findings, the most important first."""
    problems = [
        (name if name in PROBLEMS else "unknown", {"fact": name, "reason": reason})
        for name, reason in facts["failed"].items()
    ]
    for name in PROBLEMS:
        fact, _, least = name.partition("<")
        if least and (value := facts[fact]) is not None and value < int(least):
            problems.append((name, {}))
    problems += [*find_problems(facts), *find_variables(facts["environment"])]
    findings = [
        Finding(*(text.format(**facts | values) for text in PROBLEMS[name])) for name, values in problems
    ]
    return sorted(findings, key=lambda finding: KINDS.index(finding.kind))


def find_problems(facts: Facts) -> Iterator[tuple[str, Facts]]:
    """Yield the problems of GPUs, folders and addresses: their names, and the values in their texts."""
    gpus = facts["gpus"] or ()
    count = max(len(gpus), facts["gpus_of_torch"] or 0)
    if gpus and facts["gpus_of_torch"] == 0:
        hidden = facts["environment"].get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1")
        name = "build" if not facts["cuda_of_torch"] else "hidden" if hidden else "driver"
        yield name, {"count": count, "gpu": gpus[0]["name"], "driver": gpus[0]["driver"]}
    if len(names := sorted({gpu["name"] for gpu in gpus})) > 1:
        yield "kinds", {"names": ", ".join(names)}
    for number, gpu in enumerate(gpus):
        limit, default = gpu["power_limit_w"], gpu["default_power_limit_w"]
        if limit and default and limit < 0.98 * default:
            yield "power", {"number": number, "limit": limit, "default": default}
    if facts["compiled"] and float(facts["compiled"].split()[0]) > SLOW_COMPILE_S:
        yield "compile", {}
    if facts["memlock_kib"] is not None and facts["infiniband"]:
        yield "memlock", {}
    if facts["shm_gib"] is not None and facts["shm_gib"] < LEAST_SHM_GIB:
        yield "shm", {"kind": "fails" if count > 1 else "note"}
    if facts["cores"] is not None and facts["cores"] < 2 * count:
        yield "few_cores", {"count": count}
    if str(facts["cache_filesystem"]).startswith(NETWORK):
        yield "cache", {}
    loopback = facts["addresses"] and all(ip_address(each).is_loopback for each in facts["addresses"])
    if loopback and "GLOO_SOCKET_IFNAME" not in facts["environment"]:
        yield "loopback", {}


def find_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, Facts]]:
    """Yield the variables that cost speed or override a setting."""
    for name, value in environment.items():
        if name in SWITCHES and value not in ("", "0", "false", "False", "OFF", "INFO"):
            yield "variable", {"name": name, "value": value, "effect": SWITCHES[name]}
        # a list is valid: one number per level of nested regions (OpenMP 5.2, 21.2.1)
        if name == "OMP_NUM_THREADS" and not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", value):
            yield "threads", {"value": value}
        if name == "NCCL_DEBUG" and value in ("INFO", "TRACE"):
            yield "debug", {"value": value}
        if (
            name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
            and "expandable_segments:True" not in value
        ):
            yield "segments", {"name": name, "value": value}
