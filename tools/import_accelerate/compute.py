"""Rules for what accelerate computes in, and compiles: `mixed_precision` and `dynamo_config`.

Read in accelerate 1.15.0: state.py (precision of FSDP, TF32), utils/dataclasses.py (DynamoBackend,
TorchDynamoPlugin), utils/constants.py (TORCH_DYNAMO_MODES).
"""

from typing import Any

from meshwright.tools.import_accelerate.verdict import (
    Given,
    Rule,
    Verdict,
    as_bool,
    as_choice,
    dropped,
    mapped,
    refused,
)

BACKENDS = ("inductor", "aot_eager", "eager")
MODES = ("default", "reduce-overhead", "max-autotune")  # accelerate's TORCH_DYNAMO_MODES


def mixed_precision(value: Any, given: Given) -> Verdict:
    """accelerate's FSDP reduces in the dtype that it computes in; its DistributedDataParallel reduces float32
    gradients."""
    precision = as_choice(value, ("no", "fp16", "bf16", "fp8"))
    if precision == "fp16":
        return refused(
            "float16 needs a gradient scaler, which this trainer does not have: use bf16, which has "
            "float32's range"
        )
    if precision == "fp8":
        return refused("float8 is not in this version: use bf16")
    param = "bfloat16" if precision == "bf16" else "float32"
    if precision == "bf16" and str(given.get("distributed_type")).upper() == "FSDP":
        note = (
            "accelerate also reduces gradients in bfloat16 with FSDP; --parallel.reduce_dtype=float32 is "
            "the safer choice"
        )
        settings = {"parallel.param_dtype": param, "parallel.reduce_dtype": "bfloat16"}
        return mapped("computation and reduction in bfloat16, weights kept in float32", settings, note)
    settings = {"parallel.param_dtype": param, "parallel.reduce_dtype": "float32"}
    return mapped("computation; weights and reduction in float32", settings)


def old_fp16(value: Any, given: Given) -> Verdict:
    """What mixed_precision was called once."""
    return mixed_precision("fp16", given) if as_bool(value) else dropped("it is off")


def dynamo_backend(value: Any, given: Given) -> Verdict:
    """Of accelerate's backends, those that train here without further packages."""
    if value is False or str(value).lower() == "no":
        return mapped("nothing is compiled", {"parallel.compile.enabled": False})
    try:
        backend = as_choice(value, BACKENDS)
    except ValueError:
        return refused(f"it is no backend for training here: use {', '.join(BACKENDS)} or no")
    settings = {"parallel.compile.enabled": True, "parallel.compile.backend": backend}
    if str(given.get("mixed_precision", "no")).lower() in ("no", "false"):
        settings["parallel.compile.float32_matmul_precision"] = "high"
        return mapped(
            "blocks and head are compiled",
            settings,
            "accelerate allows TF32 when it compiles without mixed "
            "precision, so float32_matmul_precision is high",
        )
    return mapped("blocks and head are compiled", settings)


def _dynamo_mode(value: Any, given: Given) -> Verdict:
    mode = as_choice(value, MODES)
    backend = str(given.get("dynamo_backend", "no")).lower()
    if backend in ("no", "false"):
        return dropped("nothing is compiled")
    if mode != "default" and backend != "inductor":
        return refused(f"mode {mode} is for backend inductor, not {backend}: use default")
    notes = (
        [f"{mode} may use CUDA graphs; max-autotune-no-cudagraphs is the mode without them"]
        if mode != "default"
        else []
    )
    return mapped("the same", {"parallel.compile.mode": mode}, *notes)


def _dynamo_dynamic(value: Any, given: Given) -> Verdict:
    return mapped("the same", {"parallel.compile.dynamic": as_bool(value)})


def _whole_graph(value: Any, given: Given) -> Verdict:
    return dropped(
        "true is what is done" if as_bool(value) else "blocks are always compiled without graph breaks"
    )


def _regional(value: Any, given: Given) -> Verdict:
    return dropped(
        "true is what is done"
        if as_bool(value)
        else "blocks are always compiled one by one, never the whole model"
    )


DYNAMO_RULES: dict[str, Rule] = {
    "dynamo_backend": dynamo_backend,
    "dynamo_mode": _dynamo_mode,
    "dynamo_use_fullgraph": _whole_graph,
    "dynamo_use_dynamic": _dynamo_dynamic,
    "dynamo_use_regional_compilation": _regional,
}
