"""What is installed, and what of it torch really uses."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

from meshwright import __version__
from meshwright.tools.doctor.facts import Gpu, Software, Unknown, find
from meshwright.train.planning.device_defaults import describe_dtype

OPTIONAL = ("transformers", "datasets", "torchao")
PACKAGES = ("torch", "triton", "torchao", "tensorboard", "numpy", "safetensors", "tokenizers")
QUERY = (
    "name",
    "memory.total",
    "ecc.mode.current",
    "clocks.sm",
    "clocks.max.sm",
    "power.limit",
    "power.default_limit",
)
DRIVER_S = 20.0  # nvidia-smi hangs where a GPU has fallen off the bus


def look_at_software() -> Software:
    """Everything of it; what cannot be found out is Unknown."""
    gpus = find(lambda: torch.cuda.device_count() if torch.cuda.is_available() else 0)
    cudnn = find(find_cudnn) if gpus else ""
    return Software(
        versions=find_versions(bool(gpus)),
        missing_packages=tuple(name for name in OPTIONAL if importlib.util.find_spec(name) is None),
        torch_cuda=torch.version.cuda or "",
        gpus_of_torch=gpus,
        cudnn_loaded=cudnn,
        cudnn_bundled=isinstance(cudnn, Unknown) or is_bundled(cudnn),
        compiler=find(find_compiler),
        python_headers=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        bfloat16=find(lambda: describe_dtype(torch.device("cuda" if gpus else "cpu"))),
    )


def find_versions(gpu: bool) -> dict[str, str | Unknown]:
    """By name; "" for what is not there."""
    found: dict[str, str | Unknown] = {
        "meshwright": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    found |= {name: find_version(name) for name in PACKAGES}
    found["CUDA of torch"] = torch.version.cuda or ""
    found["driver"] = find(
        lambda: ask_driver("--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    )
    if gpu:
        found["NCCL"] = find(lambda: ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
        found["cuDNN"] = find(lambda: str(torch.backends.cudnn.version()))
    return found


def find_version(package: str) -> str:
    """Of an installed package; "" if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_compiler() -> str:
    """The C++ compiler that inductor takes; "" where there is none, or $CXX names something that cannot be
    run. Raises what it raises for any other reason."""
    from torch._inductor import cpp_builder, exc

    try:
        return str(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return ""
    except OSError as error:
        if error.filename is None or error.filename != os.environ.get("CXX"):
            raise
        return ""


def find_cudnn() -> str:
    """Path of the cuDNN in this process's memory; "" where none is."""
    torch.backends.cudnn.version()  # loads it
    return find_library(Path("/proc/self/maps").read_text(encoding="utf-8"), "libcudnn")


def find_library(maps: str, name: str) -> str:
    """The first library of this name in the text of /proc/PID/maps."""
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6)
    return next((path for path in paths if Path(path).name.startswith(name)), "")


def is_bundled(library: str) -> bool:
    """Whether it came with torch: from its own folder, or from the nvidia packages beside it."""
    packages = Path(torch.__file__).parents[1]
    return not library or Path(library).is_relative_to(packages)


def look_at_gpus() -> tuple[Gpu, ...]:
    """Those that the driver sees; none where there is no nvidia-smi. Raises as `ask_driver`."""
    if not shutil.which("nvidia-smi"):
        return ()
    return parse_gpus(ask_driver(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Of nvidia-smi's table, one line a GPU, values by commas; what it does not know it calls [N/A] and the
    like."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(QUERY):
            memory, *rest = (_number(cells[i]) for i in (1, 3, 4, 5, 6))
            ecc = cells[2] if cells[2].isalpha() else None
            found.append(Gpu(cells[0], None if memory is None else memory / 1024, ecc, *rest))
    return tuple(found)


def look_at_topology() -> str:
    """What nvidia-smi says of the links; "" where there is none. Raises as `ask_driver`."""
    return strip_colours(ask_driver("topo", "-m")) if shutil.which("nvidia-smi") else ""


def strip_colours(text: str) -> str:
    """nvidia-smi underlines the head of its table by escape sequences, also where nobody sees them."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def ask_driver(*arguments: str) -> str:
    """What nvidia-smi prints. Raises OSError without one, RuntimeError where it fails, TimeoutExpired where
    it hangs."""
    if not shutil.which("nvidia-smi"):
        raise OSError("no nvidia-smi: no NVIDIA driver")
    done = subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=DRIVER_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"nvidia-smi: {(done.stdout or done.stderr).strip()}")
    return done.stdout


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
