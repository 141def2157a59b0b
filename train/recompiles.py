"""Compiling during training: what the first step compiled, and recompiles after it."""

from collections.abc import Callable

from meshwright.parallel.compile.stats import RecompileGuard, describe_compiling
from meshwright.parallel.plan.schema import Plan
from meshwright.train.hooks import Hook, StepDone
from meshwright.train.memory import return_free_memory


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
