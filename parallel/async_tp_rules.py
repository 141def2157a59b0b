"""What a plan with async tensor parallelism must keep to."""

from meshwright.parallel.plan import Plan


def async_tp_mistakes(plan: Plan, place: str) -> list[str]:
    """Inductor cuts collectives up beside products, and only those that gather or scatter tokens."""
    mistakes = []
    if plan.mesh.tp == 1:
        mistakes.append(f"{place}async_tp=true, but tp=1 has no collectives: use false, or tp > 1")
    elif not plan.tensor.sequence_parallel:
        mistakes.append(
            f"{place}async_tp=true needs sequence_parallel=true, whose gathers and scatters stand beside "
            f"products: "
            "an all-reduce cannot be cut up so"
        )
    if not plan.compile.enabled or plan.compile.backend != "inductor":
        mistakes.append(
            f"{place}async_tp=true is done by inductor, and blocks are not compiled by it: use "
            "compile.backend=inductor, or async_tp=false"
        )
    return mistakes
