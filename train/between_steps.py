"""What a process does from its first step on, which compiles: print what was compiled, watch for recompiles,
and collect garbage between steps instead of within one."""

import gc
from collections.abc import Callable

from meshwright.parallel.compile.stats import RecompileGuard, describe_compiling
from meshwright.parallel.machine_memory import return_free_memory
from meshwright.parallel.plan.schema import Plan
from meshwright.train.hooks import Hook, StepDone


class Recompiles(Hook):
    """After the first step prints the compile time and the cache hits, and returns the memory that compiling
    took; from then on prints every recompile, or raises RecompileError (`parallel.compile.on_recompile`)."""

    def __init__(self, plan: Plan, print_: Callable[[str], None]) -> None:
        self._plan, self._print, self._warm = plan, print_, False
        self._guard = RecompileGuard(plan.compile)

    def after_step(self, done: StepDone) -> None:
        if not self._warm:
            self._end_warm_up()
        for message in self._guard.new_messages():
            self._print(f"warning: step {done.step} {message}")

    def _end_warm_up(self) -> None:
        if message := describe_compiling():
            self._print(message)
        if self._plan.async_tp:
            from meshwright.parallel.compile.async_tp import describe_async_tp  # late: few plans have it

            self._print(describe_async_tp())
        return_free_memory()
        self._guard.arm()
        self._warm = True


class GarbageCollector(Hook):
    """Collects garbage after every `every`-th step, on all ranks after the same step. A rank that Python
    pauses at another moment makes all others wait in the next collective. 0 leaves the timing to Python.

    The objects that exist after the first step (300,000, mostly of modules and the compiler) are frozen, so
    later collections skip them. A full collection then takes 0.1 ms instead of 150 ms (on one CPU core), and
    therefore each one covers all generations.
    """

    def __init__(self, every: int) -> None:
        self._every, self._took_over, self._was_enabled = every, False, gc.isenabled()

    def after_step(self, done: StepDone) -> None:
        """Collect if due. The first call disables Python's automatic collection. With
        `every` 0 nothing changes."""
        if not self._every:
            return
        if not self._took_over:
            gc.disable()
            gc.collect()
            gc.freeze()
            self._took_over = True
        elif done.step % self._every == 0:
            gc.collect()

    def close(self) -> None:
        """Restore the collector's previous state."""
        if self._took_over:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
            self._took_over = False
