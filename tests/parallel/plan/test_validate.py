"""validate: edits of a plan are accepted, or refused with rule, value, place and fix."""

import dataclasses
from typing import Any

import pytest

from meshwright.parallel.config import CompileConfig
from meshwright.parallel.plan.mistakes import file_line
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.plan.validate import validate
from tests.support.plans import BLOCK, MODEL, SEQ_LEN, TIED, change, make_model, plan_of


def check(plan: Plan, model: ModelUnits = MODEL, world_size: int = 8, seq_len: int = SEQ_LEN) -> None:
    assert validate(plan, model, world_size, seq_len) == []


def refusal(plan: Plan, model: ModelUnits = MODEL, world_size: int = 8, seq_len: int = SEQ_LEN) -> str:
    lines = [file_line(mistake) for mistake in validate(plan, model, world_size, seq_len)]
    assert lines
    assert len(lines) == len(set(lines)), "a mistake is reported once"
    return "\n".join(lines)


def replace_tensor(plan: Plan, **keys: Any) -> Plan:
    return dataclasses.replace(plan, tensor=dataclasses.replace(plan.tensor, **keys))


def restyle(plan: Plan, changes: dict[str, str | None]) -> Plan:
    """The plan with the styles of some patterns changed, added, or removed (None)."""
    styles = {
        pattern: style for pattern, style in {**plan.tensor.styles, **changes}.items() if style is not None
    }
    return replace_tensor(plan, styles=styles)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"dp_replicate": 2, "reshard_after_forward": 2},
        {"dp_replicate": 8, "cpu_offload": True},
        {"tp": 2},
        {"tp": 4, "dp_replicate": 2, "sequence_parallel": False},
        {"tp": 8, "loss_parallel": False},
        {"tp": 2, "tp_modules": ("attention",)},
        {"tp": 2, "tp_modules": ()},
        {"activation_checkpoint": "selective", "param_dtype": "bfloat16"},
        {"activation_checkpoint": "selective", "selective_policy": "every:2"},
        {"activation_checkpoint": "budget", "activation_budget": 0.0},
        {"unit_min_params": 2 * BLOCK, "activation_checkpoint": "full", "forward_prefetch": 7},
        {"compile": CompileConfig(enabled=False)},
        {"compile": CompileConfig(backend="eager_noexcept")},
    ],
    ids=str,
)
def test_what_make_plan_makes_is_accepted(keys: dict[str, Any], tied: bool) -> None:
    model = make_model(tied=tied)
    check(plan_of(model=model, **keys), model)


# Mistakes of the entire plan


def test_another_number_of_processes_is_named() -> None:
    report = refusal(plan_of(), world_size=4)
    words = ("the plan's mesh", "8 processes", "this run has 4", ": start 8, or make a new plan")
    assert [word for word in words if word not in report] == [], report


@pytest.mark.parametrize(
    ("planned", "model", "odd"),
    [
        (make_model(5), MODEL, "(7, the model has 6; first difference: layers.4 instead of head"),
        (make_model(3), MODEL, "(5, the model has 6; first difference: head instead of layers.3"),
        (
            dataclasses.replace(MODEL, modules=dict([*MODEL.modules.items()][:-1]), units=MODEL.units[:-1]),
            MODEL,
            "(5, the model has 6; first difference: head",
        ),
        (
            dataclasses.replace(MODEL, modules=dict([*MODEL.modules.items()][::-1]), units=MODEL.units[::-1]),
            MODEL,
            "head instead of embed",
        ),
    ],
    ids=["deeper", "shallower", "headless", "order"],
)
def test_a_plan_for_another_model_says_the_first_difference(
    planned: ModelUnits, model: ModelUnits, odd: str
) -> None:
    report = refusal(plan_of(model=planned), model)
    assert odd in report
    assert "make a new plan for this model" in report
    assert "\n" not in report


def test_processes_and_modules_come_in_one_report() -> None:
    assert refusal(plan_of(), make_model(3), 4).count("\n") == 1


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp"])
@pytest.mark.parametrize("degree", [0, -2])
def test_degrees_are_at_least_one(axis: str, degree: int) -> None:
    plan = plan_of()
    report = refusal(dataclasses.replace(plan, mesh=dataclasses.replace(plan.mesh, **{axis: degree})))
    assert report == f"mesh: {axis}={degree} must be at least 1"


def without(plan: Plan, index: int) -> Plan:
    return dataclasses.replace(plan, units=(*plan.units[:index], *plan.units[index + 1 :]))


def swapped(plan: Plan, index: int) -> Plan:
    units = list(plan.units)
    units[index : index + 2] = units[index : index + 2][::-1]
    return dataclasses.replace(plan, units=tuple(units))


UNITS = [
    (without(plan_of(), 2), MODEL, ["units: layers.1 is in no unit", "add it to one"]),
    (
        change(plan_of(), 2, modules=("layers.11",)),
        MODEL,
        ["unit layers.11: this model has no module layers.11", "Did you mean layers.1?"],
    ),
    (
        change(plan_of(), 2, modules=("layers.0", "layers.1")),
        MODEL,
        ["unit layers.0: module layers.0 is in 2 units", "list it once"],
    ),
    (
        change(plan_of(), 2, modules=("layers.1", "layers.1")),
        MODEL,
        ["unit layers.1: module layers.1 is in 2 units", "list it once"],
    ),
    (
        swapped(plan_of(), 1),
        MODEL,
        ["unit layers.0", "after layers.1", "list units in the order of the forward"],
    ),
    (swapped(plan_of(model=TIED), 3), TIED, ["unit layers.3", "after embed+head"]),
    (
        dataclasses.replace(plan_of(), tensor=plan_of(model=TIED).tensor),
        TIED,
        ["unit embed: embed and head share a parameter", "in one unit"],
    ),
]


@pytest.mark.parametrize(("plan", "model", "words"), UNITS, ids=lambda v: v[0] if isinstance(v, list) else "")
def test_every_module_is_in_one_unit_in_the_forwards_order(
    plan: Plan, model: ModelUnits, words: list[str]
) -> None:
    report = refusal(plan, model)
    assert [word for word in words if word not in report] == [], report
    assert "\n" not in report


def test_units_may_be_joined_and_cut_by_hand() -> None:
    plan = plan_of()
    joined = without(change(plan, 2, modules=("layers.0", "layers.1")), 1)
    check(joined)
    with_embedding = without(change(plan, 1, modules=("embed", "layers.0")), 0)
    check(with_embedding)


# Single units

EDITS = [
    ({"reshard_after_forward": 3}, ["reshard_after_forward=3", "dp_shard=8", "true, false, 2, 4 "]),
    ({"reshard_after_forward": -4}, ["reshard_after_forward=-4", "dp_shard=8"]),
    ({"reshard_after_forward": 0}, ["reshard_after_forward=0", "dp_shard=8"]),
    ({"reshard_after_forward": 8}, ["reshard_after_forward=8", "be smaller"]),
    ({"reduce_gradients": "last"}, ["reduce_gradients=last", "every_micro_batch, last_micro_batch"]),
    ({"output_dtype": "fp32"}, ["output_dtype=fp32", "float32, bfloat16"]),
    ({"output_dtype": "float16"}, ["output_dtype=float16", "gradient scaler"]),
    ({"reduce_dtype": "float16"}, ["reduce_dtype=float16", "gradient scaler"]),
    ({"reduce_dtype": "float64"}, ["reduce_dtype=float64", "float32, bfloat16"]),
    ({"activation_checkpoint": "some"}, ["activation_checkpoint=some", "none, full, selective, budget"]),
    ({"activation_checkpoint": "budget", "activation_budget": -0.5}, ["activation_budget=-0.5", "between 0"]),
    (
        {"activation_checkpoint": "budget", "activation_budget": 0.5, "compiled": False},
        ["budget", "compiling is off"],
    ),
    ({"activation_budget": 0.5}, ["activation_budget=0.5", "activation_checkpoint=budget", "use 1.0"]),
    ({"activation_checkpoint": "selective"}, ["saved_ops=[]", "keeps nothing", "full"]),
    (
        {"activation_checkpoint": "selective", "saved_ops": ("aten.mmm",)},
        ["saved_ops: 'aten.mmm'", "not an operator"],
    ),
    (
        {"activation_checkpoint": "selective", "saved_ops": ("matmul",)},
        ["saved_ops: 'matmul'", "not an operator"],
    ),
    (
        {"activation_checkpoint": "selective", "saved_ops": ("every:2",)},
        ["saved_ops: 'every:2'", "not an operator"],
    ),
    (
        {"activation_checkpoint": "selective", "saved_ops": ("aten.mm,aten.silu",)},
        ["'aten.mm,aten.silu'", "aten.mm or aten.mm/2"],
    ),
    (
        {"activation_checkpoint": "selective", "saved_ops": ("aten.mm", " aten.silu")},
        ["saved_ops: ' aten.silu'"],
    ),
    ({"saved_ops": ("aten.mm",)}, ["saved_ops=['aten.mm']", "activation_checkpoint=selective", "use []"]),
    (
        {"activation_checkpoint": "full", "saved_ops": ("aten.mm",)},
        ["saved_ops", "activation_checkpoint=selective"],
    ),
    ({"forward_prefetch": -1}, ["forward_prefetch=-1", "0 (none)"]),
    ({"backward_prefetch": -7}, ["backward_prefetch=-7", "0 (none)"]),
]


@pytest.mark.parametrize(("edit", "words"), EDITS, ids=str)
def test_a_wrong_value_is_named_with_its_unit_and_way_out(edit: dict[str, Any], words: list[str]) -> None:
    report = refusal(change(plan_of(), 3, **edit))
    assert [word for word in ("unit layers.2: ", *words) if word not in report] == [], report
    assert "\n" not in report


@pytest.mark.parametrize(
    ("index", "edit", "words"),
    [
        (
            0,
            {"activation_checkpoint": "full"},
            ["unit embed: activation_checkpoint=full", "blocks", "use none"],
        ),
        (
            5,
            {"activation_checkpoint": "full"},
            ["unit head: activation_checkpoint=full is for blocks", "use none"],
        ),
        (0, {"compiled": True}, ["unit embed: compiled=true", "compiles none of its modules", "use false"]),
        (
            5,
            {"output_dtype": "bfloat16"},
            ["unit head: output_dtype=bfloat16 would round the loss", "use same"],
        ),
    ],
)
def test_embedding_and_head_are_no_blocks(index: int, edit: dict[str, Any], words: list[str]) -> None:
    report = refusal(change(plan_of(), index, **edit))
    assert [word for word in words if word not in report] == [], report


def test_a_mistake_in_an_entry_of_many_units_is_said_once() -> None:
    plan = plan_of()
    for index in range(1, 5):
        plan = change(plan, index, reshard_after_forward=3, reduce_dtype="half")
    lines = refusal(plan).splitlines()
    assert len(lines) == 2
    assert all(line.startswith("units layers.0 to layers.3 (4): ") for line in lines)


def test_compiled_units_contradict_compiling_switched_off() -> None:
    plan = dataclasses.replace(plan_of(), compile=CompileConfig(enabled=False))
    report = refusal(plan)
    assert report.startswith("units layers.0 to head (5): compiled=true contradicts compile.enabled=false")
    assert report.endswith(": change one of them")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CompileConfig(mode="fast"), "compile.mode=fast is not one of default"),
        (
            CompileConfig(backend="eager", mode="max-autotune"),
            "compile.mode=max-autotune is for backend inductor, not eager",
        ),
        (
            CompileConfig(backend="inducter"),
            "compile.backend=inducter is not a backend of this torch. Did you mean inductor?",
        ),
    ],
)
def test_compiler_settings_are_checked(config: CompileConfig, words: str) -> None:
    assert refusal(dataclasses.replace(plan_of(), compile=config)).startswith(words)


# Prefetch lists

LISTS = [
    (
        "forward_prefetch",
        ("layers.9",),
        ["names layers.9", "not a unit of this plan", "Did you mean layers."],
    ),
    ("forward_prefetch", ("layers.2",), ["names the unit itself", "remove it"]),
    ("forward_prefetch", ("layers.3", "layers.3"), ["names layers.3 twice"]),
    ("forward_prefetch", ("layers.1",), ["names layers.1", "the forward needs earlier", "list later units"]),
    (
        "forward_prefetch",
        ("head", "layers.3"),
        ["=['head', 'layers.3']", "the forward needs them: use layers.3, head"],
    ),
    ("backward_prefetch", ("head",), ["names head", "the backward needs earlier", "list later units"]),
    ("backward_prefetch", ("layers.2",), ["names the unit itself"]),
    (
        "backward_prefetch",
        ("layers.0", "layers.1"),
        ["=['layers.0', 'layers.1']", "the backward needs them: use layers.1, layers.0"],
    ),
    ("backward_prefetch", ("layers.1", "layers.7"), ["names layers.7", "not a unit of this plan"]),
]


@pytest.mark.parametrize(("key", "names", "words"), LISTS, ids=str)
def test_a_prefetch_list_names_units_to_come_in_order_once(
    key: str, names: tuple[str, ...], words: list[str]
) -> None:
    report = refusal(change(plan_of(), 3, **{key: names}))
    assert [word for word in (f"unit layers.2: {key}", *words) if word not in report] == [], report
    assert "\n" not in report


def test_a_right_list_is_accepted() -> None:
    plan = change(
        plan_of(), 2, forward_prefetch=("layers.2", "layers.3", "head"), backward_prefetch=("layers.0",)
    )
    check(change(plan, 5, backward_prefetch=("layers.3", "layers.2", "layers.0"), forward_prefetch=()))


def test_a_unit_that_stays_gathered_is_not_prefetched_in_backward() -> None:
    plan = change(plan_of(), 2, reshard_after_forward=False)
    report = refusal(change(plan, 3, backward_prefetch=("layers.1",)))
    assert report.startswith(
        "unit layers.2: backward_prefetch names layers.1, which stays gathered after its forward"
    )
    check(change(plan, 1, forward_prefetch=("layers.1",)))


def test_only_embeddings_may_stay_sharded_in_the_backward() -> None:
    check(change(plan_of(), 0, unshard_in_backward=True))
    report = refusal(change(plan_of(), 2, unshard_in_backward=False))
    assert report.startswith("unit layers.1: unshard_in_backward=false is for units of embeddings")
    assert "use true" in report
    report = refusal(change(plan_of(model=TIED), 4, unshard_in_backward=False), model=TIED)
    assert report.startswith("unit embed+head: unshard_in_backward=false")


def test_a_unit_that_the_backward_does_not_gather_is_not_prefetched_there() -> None:
    report = refusal(change(plan_of(), 1, backward_prefetch=("embed",)))
    for word in ("unit layers.0: backward_prefetch names embed", "unshard_in_backward=false", "remove it"):
        assert word in report


def test_an_unsharded_unit_is_not_prefetched() -> None:
    plan = plan_of(dp_replicate=8)
    for key, name in (("forward_prefetch", "layers.3"), ("backward_prefetch", "layers.1")):
        report = refusal(change(plan, 3, **{key: (name,)}))
        assert report.startswith(f"unit layers.2: {key} names {name}, which dp_shard=1 leaves unsharded")
        assert report.endswith("use 0")


def test_tied_embeddings_come_first_in_forward_and_in_backward() -> None:
    plan = plan_of(model=TIED)
    check(change(plan, 4, forward_prefetch=("layers.0", "layers.1"), backward_prefetch=("layers.3",)), TIED)
    report = refusal(change(plan, 0, forward_prefetch=("embed+head",)), TIED)
    assert "unit layers.0: forward_prefetch names embed+head, which the forward needs earlier" in report
    assert "which the backward needs earlier" in refusal(
        change(plan, 0, backward_prefetch=("embed+head",)), TIED
    )


# The dtype that each module returns


def test_a_unit_computes_in_what_the_one_before_hands_on() -> None:
    plan = change(plan_of(), 2, param_dtype="bfloat16")
    mistakes = (
        ("unit layers.0 returns float32", "unit layers.1 computes in bfloat16", "=bfloat16 on layers.0"),
        ("unit layers.1 returns bfloat16", "unit layers.2 computes in float32", "=float32 on layers.1"),
    )
    for line, words in zip(refusal(plan).splitlines(), mistakes, strict=True):
        ways_out = ("set output_dtype=", "set the same param_dtype on both")
        assert [word for word in (*words, *ways_out) if word not in line] == [], line
    check(change(change(plan, 1, output_dtype="bfloat16"), 2, output_dtype="float32"))


def test_a_cast_that_nobody_wants_is_refused() -> None:
    assert "unit layers.0 returns bfloat16, but unit layers.1 computes in float32" in refusal(
        change(plan_of(), 1, output_dtype="bfloat16")
    )


def test_the_head_may_hand_on_float32_and_tied_units_cast_nothing() -> None:
    check(change(plan_of(param_dtype="bfloat16"), 5, output_dtype="float32"))
    tied = plan_of(model=TIED, param_dtype="bfloat16")
    assert refusal(change(tied, 4, output_dtype="float32"), TIED).startswith(
        "unit embed+head: output_dtype=float32 is for units of one module: use same"
    )
    lines = refusal(change(tied, 4, param_dtype="float32"), TIED).splitlines()
    assert lines[0] == (
        "unit embed+head returns float32, but unit layers.0 computes in bfloat16: "
        "set the same param_dtype on both"
    ), "the only way out for a unit of several modules"


# Tensor parallel styles

TP = plan_of(tp=2)
RESTYLED = [
    ({"layers.*.wq": "colwize"}, ["tensor: layers.*.wq: colwize", "Did you mean colwise?"]),
    ({"layers.*.wq": "rowwise"}, ["part attention", "layers.*.wq is rowwise, must be colwise"]),
    ({"layers.*.wq": "whole_colwise"}, ["part attention", "layers.*.wq is whole_colwise, must be colwise"]),
    ({"layers.*.wq": None}, ["part attention", "layers.*.wq is missing, must be colwise"]),
    ({"head.output": "gathered_logits"}, ["part head", "head.output is gathered_logits, must be logits"]),
    (
        {"layers.*.wz": "colwise"},
        ["tensor: layers.*.wz is not one of this model's patterns.", "Did you mean"],
    ),
    (
        {"layers.1.wq": "whole_colwise"},
        ["tensor: layers.1.wq is not one of this model's patterns.", "layers.*.wq"],
    ),
]


@pytest.mark.parametrize(("changes", "words"), RESTYLED, ids=str)
def test_a_part_is_split_or_whole_in_all_of_its_weights(
    changes: dict[str, str | None], words: list[str]
) -> None:
    report = refusal(restyle(TP, changes))
    assert [word for word in words if word not in report] == [], report
    assert "\n" not in report


def test_a_part_may_be_left_whole_by_hand() -> None:
    check(
        restyle(TP, {pattern: f"whole_{TP.tensor.styles[pattern]}" for pattern in MODEL.styles["attention"]})
    )
    check(restyle(TP, {"head.output": "gathered_logits", "head.loss": None}))


def test_tied_parts_are_split_together() -> None:
    model = TIED
    plan = restyle(plan_of(model=model, tp=2), {"embed": "whole_vocab"})
    report = refusal(plan, model)
    words = ("tensor: ", "embedding and head share a weight", ": split both or neither")
    assert [word for word in words if word not in report] == [], report
    check(plan_of(model=model, tp=2, tp_modules=("attention",)), model)


def test_styles_and_degree_belong_together() -> None:
    split_of_one = replace_tensor(plan_of(), styles=TP.tensor.styles)
    for plan, degree in ((replace_tensor(TP, styles={}), "tp > 1"), (split_of_one, "tp=1")):
        report = refusal(plan)
        assert report.startswith(f"tensor: {degree} ")
        assert "styles" in report
        assert report.endswith(": make a new plan")


def test_the_degree_divides_what_the_split_parts_have() -> None:
    plan = dataclasses.replace(TP, mesh=dataclasses.replace(TP.mesh, dp_shard=1, tp=24))
    assert refusal(plan, world_size=24).splitlines() == [
        "mesh: tp=24 must divide model.n_heads=16. Use 1, 2, 4 or 8.",
        "mesh: tp=24 must divide model.n_kv_heads=8. Use 1, 2, 4 or 8.",
        "mesh: tp=24 must divide train.seq_len=64. Use 1, 2, 4 or 8.",
    ]


def test_a_longer_sequence_than_planned_for_is_checked_too() -> None:
    assert refusal(TP, seq_len=65) == "mesh: tp=2 must divide train.seq_len=65. Use 1."
    check(replace_tensor(TP, sequence_parallel=False), seq_len=65)


def test_tokens_shared_out_among_one_tp_rank_are_refused() -> None:
    report = refusal(replace_tensor(plan_of(), sequence_parallel=True))
    words = ("tensor: sequence_parallel=true", "tp=1", "use false")
    assert [word for word in words if word not in report] == [], report
