"""The end of a process, with a real thread of gloo that is caught in it."""

import sys

import pytest

from tests.launch import run


def ended(way: str) -> tuple[int, str]:
    result = run(2, way, module="tests.train.end_worker")
    assert all(f"rank {rank} has done all" in result.stdout for rank in (0, 1)), result.stderr
    return result.returncode, result.stderr


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 lets such a thread sleep (python/cpython#87135)")
def test_python_aborts_a_process_whose_gloo_thread_waits_for_it():
    """Why end_process is there; it goes away with Python 3.13."""
    code, said = ended("sys.exit")
    assert code != 0
    assert "terminate called without an active exception" in said


def test_our_end_does_not():
    assert ended("end_process") == (0, "")
