"""The recompile guard: whatever is compiled after the first step is said, with the guard that failed."""

import logging
import re

import torch

from meshwright.parallel.compile_check import count_compiled_graphs
from meshwright.parallel.config import CompileConfig


class RecompileError(RuntimeError):
    """Something was compiled again, and `parallel.compile.on_recompile` is error."""


class RecompileGuard:
    """Listens, once armed, to what dynamo says of recompiling; `news` hands it on."""

    def __init__(self, config: CompileConfig) -> None:
        self._action = config.on_recompile if config.enabled else "ignore"
        self._heard: list[str] = []
        self._graphs: int | None = None
        self._listener = _Listener(self._heard)

    def arm(self) -> None:
        """Start listening: what is compiled from now on should have been compiled in the first step."""
        if self._action == "ignore" or self._graphs is not None:
            return
        self._graphs = count_compiled_graphs()
        torch._logging.set_logs(recompiles=True)  # type: ignore[attr-defined]
        log = _recompiles_log()
        log.handlers[:] = [self._listener]  # instead of printing on every rank
        log.propagate = False

    def news(self) -> list[str]:
        """What has been recompiled since the last call, one sentence each. Raises RecompileError under
        `error`."""
        if self._graphs is None:
            return []
        heard, self._heard[:] = list(self._heard), []
        before, self._graphs = self._graphs, count_compiled_graphs()
        if self._graphs > before and not heard:  # set_logs gives way to TORCH_LOGS
            heard = [
                f"recompiled {self._graphs - before} graphs; TORCH_LOGS keeps the reason back, add "
                f"recompiles to it"
            ]
        if heard and self._action == "error":
            raise RecompileError(
                f"{heard[0]}. parallel.compile.on_recompile=error ends the run here; warn would go on"
            )
        return heard


class _Listener(logging.Handler):
    def __init__(self, heard: list[str]) -> None:
        super().__init__(logging.DEBUG)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard.append(in_words(record.getMessage()))


def in_words(message: str) -> str:
    """dynamo's report of a recompilation as one sentence: what was compiled again, and why."""
    head, *guards = [line.strip() for line in message.splitlines() if line.strip()]
    what = re.sub(r"^Recompiling function (\S+) in (\S+)$", r"recompiled \1 (\2)", head)
    reasons = [re.sub(r"^- \d+/\d+: ", "", guard) for guard in guards if guard.startswith("- ")]
    return f"{what}: {'; '.join(reasons) or 'dynamo names no guard'}"


def _recompiles_log() -> logging.Logger:
    return torch._logging.getArtifactLogger("torch._dynamo.guards", "recompiles")  # type: ignore[attr-defined]
