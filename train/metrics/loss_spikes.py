"""Spikes of the loss: values far above what the run has reported lately."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 100  # reports that say what is usual
MIN_REPORTS = 20  # fewer say too little of how much the loss varies
# deviations: what OLMo 2 counts as a spike (arXiv 2501.00656), though from a mean over 1,000 steps
THRESHOLD = 7.0
MAD_TO_STD = 1.4826  # of normally distributed values, the standard deviation by the median absolute deviation
MIN_DEVIATION = 1e-3  # of the usual loss: one that hardly varies does not spike in its last digits


@dataclass(frozen=True)
class Spike:
    """`deviations`: how many robust standard deviations the loss lies above `usual`, the median of the
    reports before."""

    deviations: float
    usual: float


class SpikeDetector:
    """Remembers the last reported losses and says of each new one whether it is a spike."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def add(self, loss: float) -> Spike | None:
        """A spike or not. Spikes count among the losses that follow, so that a new level becomes usual; what
        is not finite does not, and is no spike."""
        if not math.isfinite(loss):
            return None
        spike = find_spike(tuple(self._losses), loss)
        self._losses.append(loss)
        return spike


def find_spike(before: Sequence[float], loss: float) -> Spike | None:
    """Compare a loss with those before it by median and median absolute deviation, which a few outliers do
    not move (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993). Only what lies above is a
    spike."""
    if len(before) < MIN_REPORTS:
        return None
    usual = statistics.median(before)
    deviation = MAD_TO_STD * statistics.median(abs(value - usual) for value in before)
    deviations = (loss - usual) / max(deviation, MIN_DEVIATION * abs(usual), math.ulp(0.0))
    return Spike(deviations, usual) if deviations > THRESHOLD else None
