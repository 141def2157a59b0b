"""Every kind of wrong input ends with exit code 2 and one message that has the rule, the value, the place and
what to do; nothing is written."""

import shlex
import shutil
from pathlib import Path

import pytest

from tests.support.launch import EAGER, TINY, run
from tests.support.wrong_inputs import TOOLS, TRAIN, WRONG_FILES, WRONG_PLANS

SMALL = ["--config=llama_debug.yaml", *TINY, *EAGER, "--parallel.param_dtype=float32"]


@pytest.fixture(scope="module")
def inputs(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wrong files, and damaged copies of a good checkpoint, plan and prepared data."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, text in WRONG_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    text = data[0].removeprefix("--data.source=")
    trained = run(1, *SMALL, *data, "--train.steps=2", "--checkpoint.every=2", f"--run.dir={folder / 'run'}")
    assert trained.returncode == 0, trained.stderr
    prepared = run(1, text, str(folder / "prepared"), "--workers", "1", module="tools.prepare_data")
    assert prepared.returncode == 0, prepared.stderr
    plan = (folder / "run/plan.yaml").read_text()
    (folder / "plan.yaml").write_text(plan)
    for name, (old, new) in WRONG_PLANS.items():
        assert old in plan, f"{name} replaces {old!r}, which is not in the plan"
        (folder / name).write_text(plan.replace(old, new, 1))
    damage(folder / "run/checkpoints/step-00000002", folder, "")
    damage(folder / "prepared", folder, "prepared-")
    return folder


def damage(good: Path, folder: Path, prefix: str) -> None:
    """Copy a good folder four times: one copy stays good, the others get one fault each."""
    copies = {name: folder / f"{prefix}{name}" for name in ("good", "changed", "lacks", "manifest")}
    for copy in copies.values():
        shutil.copytree(good, copy)
    largest = max(good.iterdir(), key=lambda path: path.stat().st_size).name
    content = bytearray((copies["changed"] / largest).read_bytes())
    content[-1] ^= 1
    (copies["changed"] / largest).write_bytes(content)
    (copies["lacks"] / largest).unlink()
    (copies["manifest"] / "manifest.json").write_text("{")


def check(module: str, arguments: list[str], facts: tuple[str, ...], inputs: Path) -> None:
    before = sorted(inputs.rglob("*"))
    result = run(1, *arguments, module=module)
    assert result.returncode == 2, f"{result.stdout[-1000:]}\n{result.stderr[-2000:]}"
    assert "Traceback" not in result.stderr
    missing = [fact for fact in facts if fact.replace("{tmp}", str(inputs)) not in result.stderr]
    assert not missing, f"the message lacks {missing}:\n{result.stderr}"
    assert sorted(inputs.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("line", "facts"), TRAIN, ids=[line for line, _ in TRAIN])
def test_a_wrong_input_of_a_run_is_refused_with_its_facts(
    line: str, facts: tuple[str, ...], inputs: Path, data: list[str], tmp_path: Path
) -> None:
    added = shlex.split(line.replace("{tmp}", str(inputs)))
    own = f"--run.dir={tmp_path / 'run'}"
    check("train.main", [*SMALL, *data, "--train.steps=1", own, *added], facts, inputs)
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("line", "facts"), TOOLS, ids=[line for line, _ in TOOLS])
def test_a_wrong_input_of_a_tool_is_refused_with_its_facts(
    line: str, facts: tuple[str, ...], inputs: Path, tmp_path: Path
) -> None:
    module, *arguments = shlex.split(
        line.replace("{tmp}", str(inputs)).replace("{own}", str(tmp_path / "own"))
    )
    check(module, arguments, facts, inputs)
    assert not any(tmp_path.iterdir())
