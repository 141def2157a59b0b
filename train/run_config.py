"""What the user says about the process and its folder."""

from dataclasses import dataclass, field

from meshwright.train.bounds import bounded
from meshwright.train.watchdog import TimeoutConfig


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and how long.

    Args:
        dir: folder of the run, in which the same command goes on where it stopped. null: runs/ plus the
            config's name
        seed: seed of the initial weights and of the order of the data
        device: auto takes the GPU where every local process has one, else the CPU; or cpu, or cuda
        threads: CPU threads per process; 0 shares the cores among the local processes
        max_hours: stop after this many hours, saving first; 0 is never
        expandable_segments: on a GPU, let segments of allocated memory grow instead of leaving gaps between
            them; without effect where PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF is set
        grace_s: seconds a stop may take after a signal, before the process ends without saving; torchrun
            allows its workers 30, or what --shutdown-timeout (torch 2.13) says. Slurm: --signal=TERM@180
        timeouts: after which a section of the run counts as stuck
    """

    dir: str | None = None
    seed: int = bounded(0, low=0, high=2**63 - 1)
    device: str = "auto"
    threads: int = bounded(0, low=0, high=4096)
    expandable_segments: bool = True
    max_hours: float = bounded(0.0, low=0, high=1e6)
    grace_s: float = bounded(120.0, low=1, high=1e6)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"run.device={self.device} must be auto, cpu or cuda")
