"""Build the libraries that a CUDA build of torch loads: the functions implemented in `fake_cuda/`, and a
stub for every other symbol.

A stub logs and prints its name and returns "not supported". torch binds symbols lazily, so unused stubs have
no effect.
"""

import re
import subprocess
from pathlib import Path

from meshwright.train.errors import ConfigError

SOURCES = Path(__file__).parent / "fake_cuda"
IMPLEMENTED = {
    "libcuda.so.1": "cuda.cc",
    "libcudart.so.13": "cudart.cc",
    "libcublas.so.13": "cublas.cc",
    "libcublasLt.so.13": "cublaslt.cc",
    "libcudnn.so.9": "cudnn.cc",
    "libcupti.so.13": "cupti.cc",
    "libnccl.so.2": "nccl.cc",
    "libnvidia-ml.so.1": "nvml.cc",
    "libnvrtc.so.13": "nvrtc.cc",
}
# torch looks here for NVIDIA's libraries, below each folder of sys.path, and loads the first that it finds.
PLACE = Path("nvidia/cu13/lib")
STUBS = (
    "libcufft.so.12",
    "libcufile.so.0",
    "libcurand.so.10",
    "libcusolver.so.12",
    "libcusparse.so.12",
    "libcusparseLt.so.0",
    "libnvJitLink.so.13",
    "libnvrtc-builtins.so.13.0",
    "libnvshmem_host.so.3",
)
# Libraries whose symbols torch references without a version, with the prefix of their symbols. The symbols of
# other libraries have the soname as version.
UNVERSIONED = {
    "libnccl.so.2": r"p?nccl",
    "libcusparseLt.so.0": "cusparseLt",
    "libcufile.so.0": "cuFile",
    "libcuda.so.1": r"cu[A-Z](?!Fi)",
    "libcurand.so.10": None,
    "libnvidia-ml.so.1": None,
}
# versions that are not the soname
VERSIONS = {"libnvshmem_host.so.3": "NVSHMEM", "libnvrtc-builtins.so.13.0": "libnvrtc_builtins"}
FLAGS = ["-std=c++17", "-O1", "-fPIC"]


class BuildError(ConfigError):
    """The libraries do not compile; the message contains the command and its output."""


def build_libraries(site: Path, out: Path) -> None:
    """Build all libraries for the torch and the triton of `site` (which has CUDA's headers) into `out` /
    PLACE.

    Raises BuildError with the compiler's output.
    """
    out = out / PLACE
    out.mkdir(parents=True)
    wanted = _wanted_symbols(site)
    _link("libfakecore.so", out, *FLAGS, SOURCES / "core.cc")
    for soname in (*IMPLEMENTED, *STUBS):
        _build(soname, wanted[soname], site / "triton/backends/nvidia/include", out)
    (out / "libcuda.so").symlink_to("libcuda.so.1")
    for leftover in (*out.glob("*.o"), *out.glob("*.c"), *out.glob("*.map")):
        leftover.unlink()


def _build(soname: str, wanted: set[str], include: Path, out: Path) -> None:
    objects, implemented = [], set()
    if soname in IMPLEMENTED:
        objects.append(out / f"{soname}.o")
        _run("g++", *FLAGS, "-c", SOURCES / IMPLEMENTED[soname], "-I", include, "-o", objects[0])
        implemented = set(re.findall(r" [TDB] (\w+)", _run("nm", objects[0])))
        implemented |= {name.removesuffix("_v2") for name in implemented if soname == "libcuda.so.1"}
    stubs = out / f"{soname}.stub.c"
    stubs.write_text(
        "int fake_unimplemented(const char*);\n"
        + "".join(
            f'int {name}(void) {{ return fake_unimplemented("{name}"); }}\n'
            for name in sorted(wanted - implemented)
        )
    )
    _run("gcc", "-w", "-O1", "-fPIC", "-c", stubs, "-o", stubs.with_suffix(".o"))
    version = out / f"{soname}.map"
    version.write_text(f"{VERSIONS.get(soname, soname)} {{ global: *; }};\n")
    versioned = [] if soname in UNVERSIONED else [f"-Wl,--version-script={version}"]
    core = ("-L", out, "-lfakecore", "-Wl,-rpath,$ORIGIN", "-ldl")
    _link(soname, out, *objects, stubs.with_suffix(".o"), *versioned, *core)


def _link(soname: str, out: Path, *parts: object) -> None:
    _run("g++", "-shared", "-o", out / soname, f"-Wl,-soname,{soname}", *parts)


def _wanted_symbols(site: Path) -> dict[str, set[str]]:
    """Return the symbols of each library that torch and Triton's driver call."""
    wanted: dict[str, set[str]] = {soname: set() for soname in (*IMPLEMENTED, *STUBS)}
    by_version = {VERSIONS.get(soname, soname): soname for soname in wanted}
    for library in sorted((site / "torch/lib").glob("lib*.so")):
        for line in _run("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            owner = by_version.get(version.lstrip("@")) or (None if version else _owner(name))
            if owner:
                wanted[owner].add(name)
    # torch looks up the driver's functions by name; Triton compiles its driver.c at run time.
    strings = re.findall(rb"\bcu[A-Z][A-Za-z0-9]+\b", (site / "torch/lib/libc10_cuda.so").read_bytes())
    driver = (site / "triton/backends/nvidia/driver.c").read_text()
    wanted["libcuda.so.1"] |= {name.decode() for name in strings} | set(
        re.findall(r"\bcu[A-Z]\w+(?=\()", driver)
    )
    return wanted


def _owner(name: str) -> str | None:
    return next((soname for soname, prefix in UNVERSIONED.items() if prefix and re.match(prefix, name)), None)


def _run(*command: object) -> str:
    result = subprocess.run(
        [str(argument) for argument in command], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise BuildError(f"{' '.join(map(str, command))}\n{result.stderr.strip()[-2000:]}")
    return result.stdout
