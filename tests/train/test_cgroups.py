"""Memory limits of a container or a job: the page cache does not count, the tightest group decides, in both
cgroup versions."""

import platform
import resource
from types import SimpleNamespace

import pytest

from meshwright.parallel.machine_memory import (
    free_host_bytes,
    keep_freed_memory,
    memory_left_bytes,
    memory_limit_bytes,
    peak_resident_bytes,
)
from tests.support.control_groups import write_groups
from tests.support.worlds import run_ranks

GIB = 2**30
NO_LIMIT = 2**63 - 4096  # the value of version 1 for no limit


def version_2(limit_gib: float | None, used_gib: float, cache_gib: float = 0.0) -> dict[str, str | int]:
    limit = "max" if limit_gib is None else int(limit_gib * GIB)
    inactive, active = int(cache_gib * 0.75 * GIB), int(cache_gib * 0.25 * GIB)
    # 1 GiB of shared memory
    stat = f"anon 1\nfile {inactive + active + GIB}\ninactive_file {inactive}\nactive_file {active}"
    return {
        "memory.max": limit,
        "memory.high": "max",
        "memory.current": int(used_gib * GIB),
        "memory.stat": stat,
    }


def version_1(limit_gib: float | None, used_gib: float, cache_gib: float = 0.0) -> dict[str, str | int]:
    limit = NO_LIMIT if limit_gib is None else int(limit_gib * GIB)
    stat = f"inactive_file 7\nactive_file 7\ntotal_inactive_file {int(cache_gib * GIB)}\ntotal_active_file 0"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": int(used_gib * GIB), "memory.stat": stat}


@pytest.mark.parametrize(
    ("groups", "options", "left_gib", "limit_gib"),
    [
        pytest.param([version_2(512, 511, 480)], {}, 481, 512, id="a pod that has read its limit"),
        pytest.param([version_2(512, 511)], {}, 1, 512, id="a pod that uses its limit"),
        pytest.param([{}, version_2(None, 9)], {}, None, None, id="no limit"),
        pytest.param(
            [{}, version_2(100, 40, 10), version_2(None, 30), version_2(None, 8, 4)],
            {},
            70,
            100,
            id="a job above",
        ),
        pytest.param([{}, version_2(100, 40), version_2(50, 20, 10)], {}, 40, 50, id="the tighter of two"),
        pytest.param([version_2(100, 40) | {"memory.high": 60 * GIB}], {}, 20, 60, id="throttled above"),
        pytest.param([version_2(4, 5)], {}, 0, 4, id="beyond its limit"),
        pytest.param(
            [version_1(None, 9), version_1(64, 60, 50)], {"version_1": "memory"}, 54, 64, id="version 1"
        ),
        pytest.param(
            [version_1(None, 9), version_1(64, 60, 50)],
            {"version_1": "memory", "container": True},
            54,
            64,
            id="version 1 in a container",
        ),
        pytest.param(
            [version_1(None, 9)], {"version_1": "memory"}, None, None, id="version 1 without a limit"
        ),
    ],
)
def test_what_a_group_has_left_is_without_its_page_cache(
    groups, options, left_gib, limit_gib, tmp_path
) -> None:
    root = write_groups(tmp_path, *groups, **options)
    assert memory_left_bytes(root) == (None if left_gib is None else left_gib * GIB)
    assert memory_limit_bytes(root) == (None if limit_gib is None else limit_gib * GIB)


def test_a_group_elsewhere_is_looked_for_at_the_mount_point(tmp_path) -> None:
    root = write_groups(tmp_path, version_2(8, 2))
    for path in ("/../../other", "/kubepods/pod1"):
        (root / "proc/self/cgroup").write_text(f"0::{path}\n")
        assert memory_left_bytes(root) == 6 * GIB


def test_a_line_that_is_no_group_is_passed_over(tmp_path) -> None:
    root = write_groups(tmp_path, {}, version_2(8, 2), version_2(None, 1))
    (root / "proc/self/cgroup").write_bytes(b"nonsense\n7:pids:/caf\xe9\n0::/group_1/group_2\n")
    assert memory_left_bytes(root) == 6 * GIB


@pytest.mark.parametrize(("available_gib", "free_gib"), [(1800, 481), (200, 200)])
def test_the_host_has_the_less_of_machine_and_container(
    available_gib, free_gib, tmp_path, monkeypatch
) -> None:
    root = write_groups(tmp_path, version_2(512, 511, 480))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available_gib * GIB))
    assert free_host_bytes(root) == free_gib * GIB


def _faults_of_a_step() -> int:
    """Return the page faults of the last of three steps that allocate and free 32 MiB in pieces."""
    before = 0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pieces = [bytearray(2**20) for _ in range(32)]
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _faults_without_and_with() -> tuple[int, int]:
    without = _faults_of_a_step()
    keep_freed_memory()
    return without, _faults_of_a_step()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    without, kept = run_ranks(1, _faults_without_and_with)[0]
    assert kept < 100 < 4_000 < without


def test_the_peak_is_this_processs_own(tmp_path) -> None:
    """getrusage would count the memory of the launcher before exec."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Name:\tpython\nVmHWM:\t   1234 kB\nVmRSS:\t 1000 kB\n")
    assert peak_resident_bytes(tmp_path) == 1234 * 1024
    (tmp_path / "proc/self/status").write_text("Name:\tpython\nVmRSS:\t 1000 kB\n")
    assert peak_resident_bytes(tmp_path) > 2**26, "a kernel without VmHWM"
    assert 2**26 < peak_resident_bytes() < 2**34
