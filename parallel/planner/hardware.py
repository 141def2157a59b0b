"""Machine kinds: one small YAML each in configs/hardware, every number with its source."""

from dataclasses import dataclass
from pathlib import Path

from parallel.strict_yaml import load_mapping

HARDWARE_FOLDER = Path(__file__).parents[2] / "configs" / "hardware"
GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One kind of device. `device_names`: what torch calls it; `peak_tflops`: dense matmul rate by dtype of the inputs."""

    name: str
    device_names: tuple[str, ...]
    memory_gib: float
    peak_tflops: dict[str, float]


def load_hardware() -> dict[str, Hardware]:
    """All known kinds by name."""
    kinds = {}
    for path in sorted(HARDWARE_FOLDER.glob("*.yaml")):
        data = load_mapping(path)
        kinds[path.stem] = Hardware(path.stem, tuple(data["device_names"]), data["memory_gib"], data["peak_tflops"])
    return kinds


def find_hardware(device_name: str) -> Hardware | None:
    """The kind that torch's `device_name` is, or None: an unknown device gets no guess."""
    return next((kind for kind in load_hardware().values() if device_name in kind.device_names), None)
