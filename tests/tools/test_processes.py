"""Commands that a tool starts leave no processes running, and an interrupted one no traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.tools.processes import find_running, run_to_end
from tests.support.launch import LIMIT_S


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_an_interrupted_command_ends_with_all_its_descendants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a descendant in its own session, such as torchrun's workers, and one that ignores SIGTERM."""
    pids, script = tmp_path / "pids", tmp_path / "script.py"
    script.write_text(
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN) if os.fork() else "
        f"os.setsid()\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(1000)"
    )

    def interrupt() -> None:
        if pids.exists() and pids.read_text().count("\n") == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.tools.processes.GRACE_S", 0.2)
    with pytest.raises(KeyboardInterrupt):
        run_to_end(f"{sys.executable} -S {script}; true", dict(os.environ), tmp_path / "log", interrupt)
    left = [int(pid) for pid in pids.read_text().split()]
    deadline_s = time.monotonic() + LIMIT_S
    while find_running(left) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not find_running(left)


@pytest.mark.parametrize(
    ("module", "code"), [("tools.trace", -signal.SIGINT), ("meshwright.train.main", 130)]
)
def test_ctrl_c_while_torch_is_imported_prints_nothing(tmp_path: Path, module: str, code: int) -> None:
    (tmp_path / "torch.py").write_text("print('importing', flush=True); import time; time.sleep(1000)")
    env, pipe = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}, subprocess.PIPE
    command = [sys.executable, "-m", module]
    process = subprocess.Popen(command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=LIMIT_S)[0], process.returncode) == ("", code)
