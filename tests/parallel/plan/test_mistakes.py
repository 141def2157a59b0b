"""Mistakes name fields of the plan file or config keys; one table maps one to the other."""

import dataclasses
from typing import Any

import pytest

from meshwright.parallel.config import CompileConfig, ParallelConfig
from meshwright.parallel.plan.mistakes import KEYS, Mistake, contradictions, file_line, key_line
from meshwright.parallel.plan.schema import ContextPlan, Float8Plan, MeshPlan, Plan, TensorPlan, UnitPlan
from meshwright.train.config import Config
from tests.support.plans import MODEL, plan_of

SECTIONS = {
    "mesh": MeshPlan,
    "tensor": TensorPlan,
    "context": ContextPlan,
    "float8": Float8Plan,
    "compile": CompileConfig,
    "units": UnitPlan,
}
# from the model; only for edits by hand
NO_KEYS = {"modules", "unsharded", "context.cores", "units.unshard_in_backward", "units.output_dtype"}


def names(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def test_every_field_that_a_key_decides_is_in_the_table() -> None:
    fields = names(Plan) - SECTIONS.keys()
    for section, cls in SECTIONS.items():
        fields |= {f"{section}.{name}" for name in names(cls)}
    assert KEYS.keys() - {"mesh"} == fields - NO_KEYS


@pytest.mark.parametrize("key", sorted(set(KEYS.values())))
def test_every_key_in_the_table_is_one_of_the_config(key: str) -> None:
    value: Any = Config()
    for name in key.split("."):
        value = getattr(value, name)


@pytest.mark.parametrize(
    ("mistake", "in_file", "for_keys"),
    [
        (Mistake("mesh.tp", "=3 is odd"), "mesh: tp=3 is odd", "parallel.tp=3 is odd"),
        (Mistake("attention", "=a is b"), "attention=a is b", "parallel.attention=a is b"),
        (Mistake("compile.mode", "=a is b"), "compile.mode=a is b", "parallel.compile.mode=a is b"),
        (Mistake("float8.linears", ": a is b"), "float8: linears: a is b", "parallel.float8.linears: a is b"),
        (
            Mistake("units.param_dtype", "=a is b", ("layers.0",)),
            "unit layers.0: param_dtype=a is b",
            "parallel.param_dtype=a is b",
        ),
        (
            Mistake("units.param_dtype", "=a is b", ("embed", "layers.0", "head")),
            "units embed to head (3): param_dtype=a is b",
            "parallel.param_dtype=a is b",
        ),
        (
            Mistake("mesh", "the plan is for 8", key_message=": 8 is odd"),
            "the plan is for 8",
            "parallel: 8 is odd",
        ),
        (Mistake("tensor.styles", "wq is a"), "tensor: wq is a", "tensor: wq is a"),
        (Mistake("attention", "=a\nb is c"), "attention=a b is c", "parallel.attention=a b is c"),
    ],
    ids=str,
)
def test_a_mistake_in_the_words_of_a_file_and_of_keys(mistake: Mistake, in_file: str, for_keys: str) -> None:
    assert (file_line(mistake), key_line(mistake)) == (in_file, for_keys)


def test_a_strategy_is_named_for_the_mesh_that_it_makes() -> None:
    mistake = Mistake("mesh", "the plan is for 8", key_message=": 8 is odd")
    assert key_line(mistake, "ddp") == "parallel.strategy=ddp: 8 is odd"
    assert key_line(Mistake("mesh.tp", "=3 is odd"), "ddp") == "parallel.tp=3 is odd"


def test_each_key_that_says_other_than_the_file_is_named_once() -> None:
    """Also if it decides two fields of the plan, such as compile.enabled."""
    other = ParallelConfig(plan="f", tp=2, tp_modules=("head",), compile=CompileConfig(enabled=False))
    lines = contradictions(other, plan_of(), MODEL)
    expected = (
        ("parallel.tp=2", "the plan file f has 1"),
        ("parallel.tp_modules=('head',)", "the plan file f"),
        ("parallel.compile.enabled=false", "the plan file f has true"),
    )
    for line, words in zip(lines, expected, strict=True):
        assert all(word in line for word in (*words, ": remove the key, or edit the file")), line
