"""Python's collector of cyclic garbage, run between steps and not in the middle of one."""

import gc


class Garbage:
    """Collects after every `every`-th step, so on all ranks after the same one: a rank whose Python collects
    when it likes makes all others wait for it in the next collective. With `every` 0 Python keeps its own
    ways.

    What is there after the first step (300,000 objects, mostly modules and the compiler's) is set apart and
    not looked at again. A collection of everything then takes 0.1 ms, without that 150 ms (on one CPU core),
    so no generation is left out and nothing unreachable grows old.
    """

    def __init__(self, every: int) -> None:
        self._every, self._took_over, self._was_enabled = every, False, gc.isenabled()

    def step_done(self, step: int) -> None:
        """Called after each step; the first call, of whatever step, takes over from Python."""
        if not self._every:
            return
        if not self._took_over:
            gc.disable()
            gc.collect()
            gc.freeze()
            self._took_over = True
        elif step % self._every == 0:
            gc.collect()

    def close(self) -> None:
        """Leave the collector as it was."""
        if self._took_over:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
            self._took_over = False
