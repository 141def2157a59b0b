"""How far apart two runs may lie and still be the same training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.tools.run_folder import RunFolder

CURVES = ("loss", "grad_norm", "eval_loss")  # what is compared, by the names in a row
REDUCED = ("bfloat16", "float8")


@dataclass(frozen=True)
class Tolerance:
    """Two values are alike where they lie no further apart than atol + rtol x the first one's size."""

    rtol: float
    atol: float

    def allows(self, a: float, b: float) -> bool:
        """Values that are not finite are alike where neither is."""
        return distance(a, b) <= self.width(a)

    def width(self, a: float) -> float:
        """How far beside `a` a value may lie."""
        return self.atol + (self.rtol * abs(a) if math.isfinite(a) else 0.0)


@dataclass(frozen=True)
class Band:
    """A tolerance for each curve, under a name that completes "the same training ..."."""

    name: str
    tolerances: Mapping[str, Tolerance]


def _band(name: str, loss: Tolerance, grad_norm: Tolerance) -> Band:
    return Band(name, {"loss": loss, "eval_loss": loss, "grad_norm": grad_norm})


BITWISE = _band("bit for bit", Tolerance(0, 0), Tolerance(0, 0))
# What tests/distributed/test_parity.py holds every mesh to, at every step, against one plain process.
FLOAT32 = _band("within float32 re-ordering noise", Tolerance(0, 5e-5), Tolerance(1e-5, 0))
# What parameters and moments kept in bfloat16 may do (tests/distributed/test_bfloat16_state.py: 0.02 nats),
# of which computing in it alone is a part; and sqrt(2) times what its roundings do to a gradient's norm
# (2.9%, derived in test_parity.py).
BFLOAT16 = _band("within what bfloat16 rounds", Tolerance(0, 0.02), Tolerance(0.042, 0))


def own_band(rtol: float, atol: float) -> Band:
    """The same tolerance for all curves."""
    return _band(f"within rtol {rtol:g}, atol {atol:g}", Tolerance(rtol, atol), Tolerance(rtol, atol))


def bands_for(a: RunFolder, b: RunFolder) -> tuple[Band, ...]:
    """Bands from the narrowest to the widest that explains a difference between these two: bfloat16's only
    where one of them computes, keeps or reduces in less than float32."""
    return (BITWISE, FLOAT32, BFLOAT16) if _rounds(a) or _rounds(b) else (BITWISE, FLOAT32)


def distance(a: float, b: float) -> float:
    """0 where neither is finite; infinite where one is not."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b)
    return math.inf if math.isfinite(a) or math.isfinite(b) else 0.0


def narrowest(bands: Sequence[Band], curves: Mapping[str, Sequence[tuple[float, float]]]) -> Band | None:
    """The first band that holds every pair of every curve."""
    for band in bands:
        if all(band.tolerances[key].allows(a, b) for key, pairs in curves.items() for a, b in pairs):
            return band
    return None


def _rounds(run: RunFolder) -> bool:
    """Whether anything of it is less than float32; of a run without a plan its config says it."""
    if run.plan is not None:
        dtypes = {dtype for unit in run.plan.units for dtype in (unit.param_dtype, unit.reduce_dtype)}
        said = [*dtypes, run.plan.storage_dtype, "float8" if run.plan.float8.linears else ""]
    else:
        said = [
            run.config.get(f"parallel.{key}", "") for key in ("param_dtype", "reduce_dtype", "storage_dtype")
        ]
    said.append(run.config.get("optim.state_dtype", ""))
    return any(dtype in REDUCED or dtype == "auto" for dtype in said)
