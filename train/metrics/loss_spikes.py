"""Loss spikes: values far above the recently reported losses."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

WINDOW = 100  # reports that define the usual loss
MIN_REPORTS = 20  # with fewer reports the deviation is too uncertain
# in deviations: the threshold of OLMo 2 (arXiv 2501.00656), which uses the mean over 1,000 steps
THRESHOLD = 7.0
MAD_TO_STD = 1.4826  # standard deviation per median absolute deviation of a normal distribution
MIN_DEVIATION = 1e-3  # fraction of the usual loss: changes in the last digits of a flat loss are no spikes


@dataclass(frozen=True)
class Spike:
    """A loss that is `deviations` robust standard deviations above `usual`, the median of earlier reports."""

    deviations: float
    usual: float


class SpikeDetector:
    """Stores the last reported losses and compares each new one with them by median and median absolute
    deviation, which a few outliers do not change (Iglewicz and Hoaglin, How to Detect and Handle Outliers,
    1993)."""

    def __init__(self, before: Iterable[float] = ()) -> None:
        self._losses = deque(before, maxlen=WINDOW)

    def add(self, loss: float) -> Spike | None:
        """Add a loss; return its spike, or None. Only a loss above the median is a spike. Spikes are stored
        too, so that a new level becomes usual; a loss that is not finite is neither stored nor a spike."""
        if not math.isfinite(loss):
            return None
        before = list(self._losses)
        self._losses.append(loss)
        if len(before) < MIN_REPORTS:
            return None
        usual = statistics.median(before)
        deviation = MAD_TO_STD * statistics.median(abs(value - usual) for value in before)
        deviations = (loss - usual) / max(deviation, MIN_DEVIATION * abs(usual), math.ulp(0.0))
        return Spike(deviations, usual) if deviations > THRESHOLD else None


ABOUT_DATA = (
    "epoch",
    "sequences/",
    "data_hash",
    "skipped_steps",
)  # the columns of a row that say what was read


def describe_spike(row: Mapping[str, Any]) -> str:
    """Describe the spike of a row of metrics.jsonl in Markdown, with the position in the data."""
    position = ", ".join(f"{name} {value}" for name, value in row.items() if name.startswith(ABOUT_DATA))
    return (
        f"step {row['step']}: loss {row['loss']:.4f}, usual loss {row['usual_loss']:.4f} "
        f"({row['loss_spike']:.1f} deviations above)\n\ngrad_norm {row['grad_norm']:.4g}, "
        f"lr {row['lr']:.4g}; {position}"
    )
