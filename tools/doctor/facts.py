"""What is known of a machine, and what a rule says of it: plain data, so that the rules can be tried on
machines that are not there. The report shows the fields by their names, in text as in JSON."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from meshwright.parallel.errors import one_line

OPTIONAL = ("transformers", "datasets", "torchao")  # packages that some features need
MAX_WHY = 200  # characters of why something is unknown
T = TypeVar("T")


@dataclass(frozen=True)
class Unknown:
    """What could not be found out: why not."""

    unknown: str


def find(look: Callable[[], T]) -> T | Unknown:
    """What `look` finds, or why not: a report must not end because one thing in it cannot be had."""
    try:
        return look()
    except Exception as error:
        return Unknown(one_line(str(error), MAX_WHY) or type(error).__name__)


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver sees it; what it does not tell is None. Power: the limit set, and the one it came
    with."""

    name: str
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None


@dataclass(frozen=True)
class Folder:
    """A folder in use; None is not looked at. `filesystem`: its type, as ext4 or nfs4. `problem`: why it is
    not writable, where more is known than that."""

    path: str
    writable: bool = True
    problem: str = ""
    free_gib: float | Unknown | None = None
    filesystem: str | Unknown | None = None
    write_mb_s: float | Unknown | None = None


@dataclass(frozen=True)
class Software:
    """Versions by name, "" for what is not installed; what torch can use; how code is compiled."""

    versions: Mapping[str, str | Unknown] = field(default_factory=dict)
    torch_cuda: str = ""  # the CUDA that torch was built for, "" for a CPU build
    gpus_of_torch: int | Unknown = 0
    compiler: str | Unknown = "g++"  # "" where there is none
    python_headers: bool = True
    bfloat16: str | Unknown = ""  # whether auto computes in it, and why


@dataclass(frozen=True)
class MachineFacts:
    """Memory in GiB, cores, limits. memlock_kib, open_files and most_open_files, to which a run raises it:
    None is unlimited; cgroup_gib: None is no limit."""

    memory_gib: float | Unknown | None = 64.0
    available_gib: float | Unknown | None = 64.0
    cgroup_gib: float | Unknown | None = None
    cores: int | Unknown = 8  # physical ones that this process may use
    threads: int | Unknown = 8  # hardware threads that it may use
    memlock_kib: int | Unknown | None = None
    open_files: int | Unknown | None = None
    most_open_files: int | Unknown | None = None
    shm_gib: float | Unknown | None = 32.0
    hostname: str = "node"
    addresses: tuple[str, ...] | Unknown = ("10.0.0.1",)  # what the host's own name resolves to
    interfaces: tuple[str, ...] | Unknown = ()
    infiniband: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrialResult:
    """Something tried for real: what came out, in words, or why it failed."""

    said: str = ""
    failed: str = ""


@dataclass(frozen=True)
class Facts:
    """All of it."""

    software: Software = Software()
    machine: MachineFacts = MachineFacts()
    gpus: tuple[Gpu, ...] | Unknown = ()
    topology: tuple[str, ...] | Unknown = ()  # lines of nvidia-smi topo -m
    run_folder: Folder = Folder("runs")
    cache_folder: Folder = Folder("cache")
    environment: Mapping[str, str] = field(default_factory=dict)
    compiled: TrialResult = TrialResult()
    all_reduce: TrialResult = TrialResult()


@dataclass(frozen=True)
class Finding:
    """What is so, with its value, and how to mend it. kind: a run will fail; will be slower than it could be;
    or it may matter."""

    kind: Literal["fails", "slow", "note"]
    what: str
    remedy: str
