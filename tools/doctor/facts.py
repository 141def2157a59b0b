"""Facts about a machine and the findings of the rules: plain data, so that tests can describe any machine.

The report shows the fields by their names, in text and in JSON.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from meshwright.parallel.errors import one_line

OPTIONAL = ("transformers", "datasets", "torchao")  # packages that some features need
MAX_REASON = 200  # characters of the reason why a fact is unknown
T = TypeVar("T")


@dataclass(frozen=True)
class Unknown:
    """A fact that could not be determined, with the reason."""

    unknown: str


def find(look: Callable[[], T]) -> T | Unknown:
    """Return what `look` returns, or Unknown if it raises: one missing fact must not end the report."""
    try:
        return look()
    except Exception as error:
        return Unknown(one_line(str(error), MAX_REASON) or type(error).__name__)


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it; None for values that it does not report. `power_limit_w` is the limit
    in force, `default_power_limit_w` the factory's."""

    name: str
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None


@dataclass(frozen=True)
class Folder:
    """A folder that a run uses; None: not inspected. `filesystem`: its type, such as ext4 or nfs4. `problem`:
    why it is not writable, if known."""

    path: str
    writable: bool = True
    problem: str = ""
    free_gib: float | Unknown | None = None
    filesystem: str | Unknown | None = None
    write_mb_s: float | Unknown | None = None


@dataclass(frozen=True)
class Software:
    """Versions by package, "" if not installed; the GPUs and dtype that torch can use; the C++ compiler."""

    versions: Mapping[str, str | Unknown] = field(default_factory=dict)
    torch_cuda: str = ""  # the CUDA version that torch was built for, "" for a CPU build
    gpus_of_torch: int | Unknown = 0
    compiler: str | Unknown = "g++"  # "" if there is none
    python_headers: bool = True
    bfloat16: str | Unknown = ""  # whether param_dtype auto selects bfloat16, and why


@dataclass(frozen=True)
class MachineFacts:
    """Memory in GiB, cores, limits and network of this machine.

    A run raises open_files to most_open_files. memlock_kib, open_files, most_open_files: None is unlimited;
    cgroup_gib: None is no limit.
    """

    memory_gib: float | Unknown | None = 64.0
    available_gib: float | Unknown | None = 64.0
    cgroup_gib: float | Unknown | None = None
    cores: int | Unknown = 8  # physical cores that this process may use
    threads: int | Unknown = 8  # hardware threads that this process may use
    memlock_kib: int | Unknown | None = None
    open_files: int | Unknown | None = None
    most_open_files: int | Unknown | None = None
    shm_gib: float | Unknown | None = 32.0
    hostname: str = "node"
    addresses: tuple[str, ...] | Unknown = ("10.0.0.1",)  # addresses to which the host name resolves
    interfaces: tuple[str, ...] | Unknown = ()
    infiniband: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial as text (`said`), or why it failed (`failed`)."""

    said: str = ""
    failed: str = ""


@dataclass(frozen=True)
class Facts:
    """All facts of the report."""

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
    """A problem with its value, and how to fix it. `kind`: a run will fail, a run will be slow, or a note
    that may matter."""

    kind: Literal["fails", "slow", "note"]
    what: str
    remedy: str
