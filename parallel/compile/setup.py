"""Requirements of compiling, and the cache folder of compiled graphs."""

import contextlib
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

from meshwright.parallel.compile.async_tp import check_async_tp
from meshwright.parallel.config import CompileConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import Plan

DEFAULT_CACHE = "~/.cache/meshwright"


def check_compiler(plan: Plan, device_type: str, local_processes: int) -> None:
    """Raise PlanError if inductor would fail because this machine lacks a compiler, Python's headers, or the
    requirements of async tp.

    `local_processes`: the processes of this node.
    """
    if not plan.compile.enabled or plan.compile.backend != "inductor":
        return
    if plan.async_tp:
        check_async_tp(plan.mesh.tp, device_type, local_processes)
    missing = _missing_for_cpu() if device_type == "cpu" else _missing_for_gpu()
    if not missing and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing = "the headers of this Python (Python.h)"
    if missing:
        raise PlanError(
            f"parallel.compile.enabled=true needs {missing}, which this machine lacks: install it "
            "(Debian, Ubuntu: apt-get install g++ python3-dev), or train without compiling: "
            "--parallel.compile.enabled=false"
        )


def _missing_for_cpu() -> str | None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError):  # OSError: $CXX is not an executable program
        return "a C++ compiler (g++)"
    return None


def _missing_for_gpu() -> str | None:
    # Triton compiles its launcher with one of these.
    return None if any(map(shutil.which, ("cc", "gcc", "clang"))) else "a C compiler (gcc or clang)"


def cache_folder(config: CompileConfig) -> Path:
    """Return the folder that caches compiled graphs and the planner's traces."""
    named = config.cache_dir or os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    # importing torch's compiler sets the variable to a folder of its own
    default = named.startswith(os.path.join(tempfile.gettempdir(), "torchinductor_"))
    return Path(os.path.expanduser(named)) if named and not default else user_cache() / "compile"


def user_cache() -> Path:
    """Return this user's cache folder: ~/.cache/meshwright, or one among the temporary files, and for Triton,
    if no home folder can be written, as in a container for a user id without a name. Raises PlanError."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: ~ is unknown
        folder = Path(DEFAULT_CACHE).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir(), f"meshwright-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # its compiled code would run
        raise PlanError(f"{folder} is another user's: set HOME, or TMPDIR, to a folder that can be written")
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    return folder


def use_cache_folder(config: CompileConfig) -> None:
    """Create the cache folder and set TORCHINDUCTOR_CACHE_DIR to it, before inductor reads that variable.

    Raises PlanError if the folder cannot be created.
    """
    folder = cache_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: not a valid path
        problem = f"cannot create this folder ({getattr(error, 'strerror', error)}): name another"
        raise PlanError(f"parallel.compile.cache_dir={folder}: {problem}") from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # inductor reads it only from the environment
