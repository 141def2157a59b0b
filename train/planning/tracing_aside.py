"""Traces for a search in other processes. Each writes what it traces to the user's folder, from which the
search reads it: the search begins with the first cases, the others with the last, and nothing waits for them.
"""

import contextlib
import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch

from meshwright.parallel.compile.apply import cache_folder
from meshwright.parallel.planner.hardware import Machines
from meshwright.train.config import TrainingJob
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.planning.captures import TraceCase, find_capture
from meshwright.train.planning.predict import cases_of_search
from meshwright.train.planning.trace_model import trace_and_keep

FIRST = 3  # cases of a search: if these were traced before, then most of all


def trace_share(job: TrainingJob, machines: Machines, share: int, shares: int) -> Iterator[None]:
    """Trace a share of what a search for a plan of the job can have to trace, case by case, the last first.
    Cases of one captured graph are in one share. Ends at an error, which the search meets too and reports."""
    folder, graphs = cache_folder(job.parallel.compile), dict[TraceCase, list[TraceCase]]()
    with contextlib.suppress(Exception):
        for case in cases_of_search(job, machines):
            graph = replace(case, activation_checkpoint="none", saved_ops=(), activation_budget=1.0)
            graphs.setdefault(graph, []).append(case)
        for cases in list(graphs.values())[::-1][share::shares]:
            for case in cases:
                trace_and_keep(case, folder)
                yield


@contextlib.contextmanager
def traced_aside(job: TrainingJob, machines: Machines) -> Iterator[None]:
    """Context of a search in which forked processes trace for it, on the cores that it leaves idle, unless
    most was traced before."""
    helpers = usable_cores() - 1
    # a fork cannot use the CUDA of this process, which the compiler looks at
    if torch.cuda.is_initialized() or not (helpers and _has_much_to_trace(job, machines)):
        helpers = 0
    fork = multiprocessing.get_context("fork").Process
    processes = [
        fork(target=_trace_all, args=(job, machines, n, helpers), daemon=True) for n in range(helpers)
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _has_much_to_trace(job: TrainingJob, machines: Machines) -> bool:
    """Whether the first cases of a search are not known."""
    folder = cache_folder(job.parallel.compile)
    with contextlib.suppress(Exception):  # as above
        return None in (find_capture(folder, case) for case in islice(cases_of_search(job, machines), FIRST))
    return False


def _trace_all(job: TrainingJob, machines: Machines, share: int, shares: int) -> None:
    for _ in trace_share(job, machines, share, shares):
        pass
