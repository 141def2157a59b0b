"""Traces for a search in other processes. Each writes what it traces to the user's folder, from which the
search reads it: the search begins with the first cases, the others with the last, and nothing waits for them.
"""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

import torch

from meshwright.parallel.compile.apply import cache_folder
from meshwright.parallel.planner.hardware import Machines
from meshwright.train.config import TrainingJob
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.planning.captures import TraceCase, find_capture
from meshwright.train.planning.predict import cases_of_search
from meshwright.train.planning.trace_model import trace_and_keep

FEW = 8  # captured graphs: less time than other processes need to begin
MOST_FORKS = 8  # of whom each lists all cases first
FIRST = 3  # cases of a search; if these were traced before, most of all were


def trace_share(job: TrainingJob, machines: Machines, share: int, shares: int) -> Iterator[None]:
    """Trace a share of what a search for a plan of the job bounds its plans by, case by case, the last first.
    Cases of one captured graph are in one share; few graphs are left to the search. Ends at an error, which
    the search meets too and reports."""
    folder, graphs = cache_folder(job.parallel.compile), dict[TraceCase, dict[TraceCase, None]]()
    with contextlib.suppress(Exception):
        for case in cases_of_search(job, machines):
            graph = replace(case, activation_checkpoint="none", saved_ops=(), activation_budget=1.0)
            if case.sequences == 1 or not case.compiled:
                graphs.setdefault(graph, {})[case] = None
        if sum(graph.compiled for graph in graphs) <= FEW:
            return
        for case in chain.from_iterable(list(graphs.values())[::-1][share::shares]):
            trace_and_keep(case, folder)
            yield


@contextlib.contextmanager
def traced_aside(job: TrainingJob, machines: Machines) -> Iterator[None]:
    """Context of a search for which forked processes trace, on the cores that it leaves idle, unless its
    first cases were traced before."""
    folder, forks = cache_folder(job.parallel.compile), list[BaseProcess]()
    with contextlib.suppress(Exception):  # as above
        first = [find_capture(folder, case) for case in islice(cases_of_search(job, machines), FIRST)]
        # a fork cannot use the CUDA of this process, which the compiler looks at
        idle = min(usable_cores() - 1, MOST_FORKS)
        shares = idle if None in first and not torch.cuda.is_initialized() else 0
        for share in range(shares):
            part = trace_share(job, machines, share, shares)
            fork = get_context("fork").Process(target=_trace_all, args=(part,), daemon=True)
            fork.start()
            forks.append(fork)
    try:
        yield
    finally:
        for process in forks:
            process.kill()
            process.join()


def _trace_all(share: Iterator[None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the search's, which then kills its forks
    for _ in share:
        pass
