"""How far a run has come in its data."""

from meshwright.train.data.loader import SampleOrder
from meshwright.train.data.mixture import drawn


def data_progress(order: SampleOrder, position: int) -> dict[str, float]:
    """How far positions before `position` have come: epochs of the data; in a mixture sequences and epochs by
    source."""
    if len(order.sizes) == 1:
        return {"epoch": position / order.sizes[0]}
    taken = dict(zip(order.names, drawn(position, order.weights, order.seed), strict=True))
    epochs = {
        f"epoch/{name}": count / size for (name, count), size in zip(taken.items(), order.sizes, strict=True)
    }
    return {f"sequences/{name}": float(count) for name, count in taken.items()} | epochs
