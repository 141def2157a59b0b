"""Files of earlier versions, in this folder, still load: a checkpoint, plans, prepared tokens, a Hugging Face
export (README.md)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from tests.support.forks import ROOT
from tests.support.launch import read_metrics, read_status, run

HERE = Path(__file__).resolve().parent.relative_to(ROOT)  # commands run in ROOT
RUN, TOKENS, HUGGINGFACE, PLAN_8B = (HERE / name for name in ("run", "tokens", "huggingface", "plan_8b.yaml"))
CHECKPOINT = RUN / "checkpoints" / "step-00000004"
HSDP = HERE / "hsdp" / "step-00000004"  # the same tensors, saved by eight ranks
SAVED, STEPS = 4, 6
# Metrics of the next steps of README.md's run, continued by the code that had written the checkpoint.
LOSSES = {5: 4.470602512359619, 6: 4.441705703735352}
GRAD_NORMS = {5: 0.28765201568603516, 6: 0.30598199367523193}
EVAL_LOSS = 4.469822378007192
DATA_HASHES = {5: "00000003b38b2fcd", 6: "00000003d6d9a6f7"}
REORDERING = 1e-5  # relative, of a loss or gradient norm in float32 on another mesh; 2e-7 was measured
BY_FILE = [f"--parallel.plan={RUN / 'plan.yaml'}"]  # two shards x two tensor-parallel ranks, as saved
REMOVED = ("  tokens: []",)  # of float8
MESHES = {
    "one process": (1, ["--parallel.dp_shard=1", "--parallel.tp=1"]),
    "two shards": (2, ["--parallel.dp_shard=2", "--parallel.tp=1"]),
    "plan file": (4, BY_FILE),
}


def command(module: str, *arguments: str | Path, code: int = 0) -> str:
    """Return what `python -m MODULE ARGUMENTS` prints on stdout; it must end with this exit code."""
    result = run(1, *map(str, arguments), module=module)
    assert result.returncode == code, result.stdout + result.stderr
    printed: str = result.stdout
    return printed


def resume(folder: Path, processes: int, *arguments: str) -> Any:
    """Resume a copy of the committed run until STEPS; the result has returncode, stdout and stderr.

    The cache is new, so that every checksum of the tokens is compared.
    """
    shutil.copytree(ROOT / RUN, folder / "run")
    keys = [f"--config={RUN / 'config.yaml'}", f"--run.dir={folder / 'run'}", f"--train.steps={STEPS}"]
    data = [f"--data.source={TOKENS}", f"--data.cache_dir={folder / 'cache'}"]
    return run(processes, *keys, *data, *arguments)


def lost_lines(old: Path, new: Path) -> list[str]:
    """Return the lines of a committed file that today's file lacks, in this order. Additional lines are
    allowed, and so are lines that CHANGELOG.md lists as removed."""
    lines = iter(new.read_text().splitlines())
    kept = [line for line in (ROOT / old).read_text().splitlines() if line not in REMOVED]
    return [line for line in kept if line not in lines]


def test_every_byte_of_the_checkpoint_is_as_committed() -> None:
    report = json.loads(command("tools.checkpoint", "verify", CHECKPOINT, "--json"))
    assert report["verified"] == [str(CHECKPOINT)]


def test_the_checkpoint_of_hsdp_and_tensor_parallelism_has_the_same_tensors() -> None:
    report = json.loads(command("tools.checkpoint", "diff", CHECKPOINT, HSDP, "--json"))
    assert (report["same"], report["tensors"], report["compared"]) == (True, [], 84)


@pytest.mark.parametrize(("processes", "mesh"), MESHES.values(), ids=MESHES)
def test_the_run_goes_on_with_the_losses_it_had(processes: int, mesh: list[str], tmp_path: Path) -> None:
    result = resume(tmp_path, processes, *mesh)
    assert result.returncode == 0, result.stdout + result.stderr
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"], status["resumed_from"]) == ("finished", STEPS, SAVED)

    before, rows = read_metrics(ROOT / RUN), read_metrics(tmp_path / "run")
    assert {step: rows.pop(step) for step in before} == before
    assert {step: row["data_hash"] for step, row in rows.items()} == DATA_HASHES
    assert {step: row["loss"] for step, row in rows.items()} == pytest.approx(LOSSES, rel=REORDERING)
    assert {step: row["grad_norm"] for step, row in rows.items()} == pytest.approx(GRAD_NORMS, rel=REORDERING)
    assert rows[STEPS]["eval_loss"] == pytest.approx(EVAL_LOSS, rel=REORDERING)
    if mesh == BY_FILE:
        assert lost_lines(RUN / "plan.yaml", tmp_path / "run/plan.yaml") == []


def test_tokens_that_have_changed_are_refused(tmp_path: Path) -> None:
    """So the runs above have compared the checksums in the committed manifest."""
    tokens = shutil.copytree(ROOT / TOKENS, tmp_path / "tokens")
    content = bytearray((tokens / "train-00000.bin").read_bytes())
    content[100] ^= 1
    (tokens / "train-00000.bin").write_bytes(content)
    result = resume(tmp_path, 1, *MESHES["one process"][1], f"--data.source={tokens}")
    assert result.returncode == 2
    assert "train-00000.bin has changed since it was prepared" in result.stderr


def test_a_plan_of_8b_is_read_whole(tmp_path: Path) -> None:
    """A copy differs only in the value that was changed."""
    plan = yaml.safe_load((ROOT / PLAN_8B).read_text())
    plan["units"][1]["backward_prefetch"] = 2
    (tmp_path / "changed.yaml").write_text(json.dumps(plan))  # JSON is YAML
    report = json.loads(command("tools.plan", "diff", PLAN_8B, tmp_path / "changed.yaml", "--json"))
    assert [
        (difference["key"], difference["a"], difference["b"]) for difference in report["differences"]
    ] == [("backward_prefetch", 1, 2)]
    assert "layers.0 to layers.15" in report["differences"][0]["where"]


def test_a_plan_of_8b_is_saved_again_as_it_was(tmp_path: Path) -> None:
    """No line is lost; later versions may add keys."""
    kind = ["--config=llama_8b.yaml", "--gpus=32", "--gpu=h100-sxm"]
    command("tools.plan", *kind, f"--parallel.plan={PLAN_8B}", f"--save={tmp_path / 'again.yaml'}")
    assert lost_lines(PLAN_8B, tmp_path / "again.yaml") == []


def test_the_hugging_face_export_has_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    """The import equals the checkpoint's model, and an export equals the committed export."""
    command("tools.convert_hf", "import", HUGGINGFACE, tmp_path / "imported")
    report = json.loads(
        command("tools.checkpoint", "diff", CHECKPOINT, tmp_path / "imported", "--json", code=1)
    )
    kinds = {tensor["name"].split(".")[0] for tensor in report["tensors"]}
    assert kinds == {"optim"}, "an import has no optimizer, and its model must not differ"

    command("tools.convert_hf", "export", CHECKPOINT, tmp_path / "exported")
    then, now = (
        load_file(folder / "model.safetensors") for folder in (ROOT / HUGGINGFACE, tmp_path / "exported")
    )
    assert then.keys() == now.keys()
    assert all(now[name].equal(tensor) for name, tensor in then.items())


def test_transformers_loads_the_hugging_face_export() -> None:
    transformers = pytest.importorskip("transformers")
    folder = ROOT / HUGGINGFACE
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    weights = load_file(folder / "model.safetensors")
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in weights.items())
