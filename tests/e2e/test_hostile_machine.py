"""What a machine lacks costs nothing: a home folder, a name of the user id, the letters of a path."""

import ctypes
import os
import random
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.forks import environment, fork, run_module
from tests.support.launch import EAGER, LIMIT_S, TINY

CLONE_NEWUSER, NAMELESS, NO_NAMESPACES = 0x10000000, 54321, 77


def run_nameless(encoding: str, module: str, arguments: tuple[str, ...]) -> None:
    """Run a command as a user id that /etc/passwd lacks, with a terminal of this encoding."""
    own = os.getuid()
    if ctypes.CDLL(None).unshare(CLONE_NEWUSER):
        os._exit(NO_NAMESPACES)
    Path("/proc/self/uid_map").write_text(f"{NAMELESS} {own} 1")
    tempfile.tempdir = None  # of the server that has forked this process
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding=encoding)  # type: ignore[union-attr]
    run_module(module, arguments)


@pytest.mark.sampled(3)
def test_without_home_name_and_letters_a_run_and_its_tools_do_their_work(tmp_path: Path) -> None:
    draws = random.Random(os.environ["MESHWRIGHT_TESTS_SEED"])
    home, encoding = draws.choice([None, "/dev/null"]), draws.choice(["ascii", "latin-1"])
    text, run, temporary = tmp_path / "文", tmp_path / "\udce9文", tmp_path / "temporary"
    text.mkdir()
    temporary.mkdir()
    (text / "a.txt").write_text("some text\n" * 3000)
    lacking = ("USER", "LOGNAME", "LNAME", "USERNAME", "HOME")
    env = {name: value for name, value in environment(TMPDIR=str(temporary)).items() if name not in lacking}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(temporary / "torchinductor_uid")}  # as torch's compiler sets it
    env |= {"HOME": home} if home else {}
    trained = (f"--data.source={text}", f"--run.dir={run}", "--train.steps=1", "--checkpoint.every=1")
    for module, arguments, code in (
        ("train.main", (*TINY, *EAGER, *trained), 0),
        ("tools.checkpoint", ("ls", str(run)), 0),
        ("tools.eval", (str(text / "文"),), 2),
    ):
        output = tmp_path / "output"
        output.write_text("")
        process = fork(run_nameless, encoding, module, arguments, output=output, env=env)
        if process.wait(LIMIT_S) == NO_NAMESPACES:
            pytest.skip("this machine has no user namespaces for users")
        assert (process.returncode, "\\u6587" in output.read_text()) == (code, True), output.read_text()
        assert "Traceback" not in output.read_text()
    cached = {path.name.split("-")[0] for path in (temporary / f"meshwright-{NAMELESS}").iterdir()}
    assert cached == {"compile", "tokens"}
