"""Loss spikes: values far above the recently reported losses."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

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
    """Stores the last reported losses and checks each new one for a spike."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def add(self, loss: float) -> Spike | None:
        """Add a loss; return its spike, or None. Spikes are stored too, so that a new level becomes usual; a
        loss that is not finite is neither stored nor a spike."""
        if not math.isfinite(loss):
            return None
        spike = find_spike(tuple(self._losses), loss)
        self._losses.append(loss)
        return spike


def find_spike(before: Sequence[float], loss: float) -> Spike | None:
    """Compare a loss with the previous ones by median and median absolute deviation, which a few outliers do
    not change (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993). Only a loss above the median
    is a spike; None if there is none."""
    if len(before) < MIN_REPORTS:
        return None
    usual = statistics.median(before)
    deviation = MAD_TO_STD * statistics.median(abs(value - usual) for value in before)
    deviations = (loss - usual) / max(deviation, MIN_DEVIATION * abs(usual), math.ulp(0.0))
    return Spike(deviations, usual) if deviations > THRESHOLD else None
