"""tools.bench scale: every case equals the output of tools.plan, and what fits nowhere has its reason."""

import json
from typing import Any

import pytest

from meshwright.tools.bench.__main__ import main
from meshwright.tools.plan.__main__ import main as plan_tool
from meshwright.train.errors import ConfigError
from tests.support.launch import TINY

pytestmark = [pytest.mark.slow, pytest.mark.sampled(10, together="bench-planner")]
Output = pytest.CaptureFixture[str]
KEYS = [
    *TINY[:5],
    "--parallel.activation_checkpoint=none",
    "--parallel.compile.enabled=false",
    "--train.micro_batch_size=1",
    "--train.seq_len=64",
]
SCALE = ["scale", "--config", "llama_debug", "--gpus=8..16", "--gpu", "h200", "--sequences-per-gpu=2", *KEYS]


def test_both_ways_at_every_number_of_gpus_as_tools_plan_predicts_them(capsys: Output) -> None:
    main([*SCALE, "--json"])
    cells: dict[str, Any] = json.loads(capsys.readouterr().out)["figures"]["cases"]
    order = [(cell["way"], cell["gpus"]) for cell in cells.values()]
    assert order == [("planner", 8), ("fsdp", 8), ("planner", 16), ("fsdp", 16)]
    for cell in cells.values():
        choices = cell["choices"]
        data_parallel = choices["dp_replicate"] * choices["dp_shard"]
        assert data_parallel * choices["tp"] == cell["gpus"]
        assert choices["micro_batch_size"] * choices["accumulation"] * data_parallel == 2 * cell["gpus"]
    chosen, fsdp = (cells[f"llama_debug h200 16 {way}"] for way in ("planner", "fsdp"))
    assert fsdp["choices"]["tp"] == fsdp["choices"]["dp_replicate"] == 1
    assert chosen["tokens_per_s_per_gpu"] >= fsdp["tokens_per_s_per_gpu"] * 0.99
    job = ["--config=llama_debug", "--gpus=16", "--gpu=h200", "--train.global_batch_size=32", *KEYS]
    plan_tool([*job, "--parallel.plan=auto", "--json"])
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    for key in ("step_time_s", "reserved_gib", "mfu", "exposed_share"):
        assert chosen[key] == predicted[key]


def test_what_fits_nowhere_has_its_reason_and_what_cannot_be_begun_is_refused(capsys: Output) -> None:
    main([*SCALE, "--train.micro_batch_size=3"])
    out = capsys.readouterr().out
    assert "llama_debug, 8 h200, planner: train.global_batch_size=16 must be a multiple" in out
    assert "llama_debug, 16 h200, fsdp: train.global_batch_size=32 must be a multiple" in out
    with pytest.raises(ConfigError, match=r"parallel\.plan"):
        main(["scale", "--parallel.plan=manual"])
    with pytest.raises(ConfigError, match="there is no folder"):
        main([*SCALE, "--picture=/nowhere/scale.svg"])
