"""Predicted figures in README.md and docs/scaling.md are today's; every picture is taken by a command."""

from pathlib import Path

import pytest

from benchmarks import pictures
from benchmarks.scaling import PAGE, predict_row
from benchmarks.support.documents import ROOT, block_of, examples_of_today, predictions_of_today, refreshed
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.tools.processes import BenchError

PRINTED = ["why:", "- tp=1: 2 is 3.5% slower; 4 does not fit", "GPUs  tokens/s", "8     1,234", "16    2,345"]


def test_a_block_gets_todays_lines_at_its_width() -> None:
    block = "why:\n- tp=1: 2 is 1.5% slower; 4 does\n  not fit\n...\n16    9"
    today = "why:\n- tp=1: 2 is 3.5% slower; 4 does not fit\n...\n16    2,345"
    assert refreshed(block, PRINTED) == today
    assert block_of(f"a\n```\n{block}\n```\n", "why:") == block
    with pytest.raises(BenchError, match="change the page by hand: exposed 5%"):
        refreshed("exposed 5%", PRINTED)


def test_every_picture_is_taken_by_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in pictures.DOCS.glob("*.md")]
    drawn = {name for page in pages for _, name in pictures.DRAWN.findall(page)}
    kept = {path.name for path in pictures.DOCS.iterdir() if path.suffix in (".svg", ".png")}
    assert drawn | pictures.SIZES.keys() | {"step-measured.svg", "scaling.svg"} == kept
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match=r"browser: none of chromium.*\$PATH.*install.*predicted measured"):
        pictures.main([])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(3)
def test_the_readme_and_the_page_on_scaling_have_todays_figures() -> None:
    for block, today in predictions_of_today(ROOT / "README.md"):
        assert today == block, "python -m benchmarks.support.documents"
    rows = PAGE.read_text(encoding="utf-8").splitlines()
    for model, kind, gpus in (
        ("llama_8b", "h100-sxm", 8),
        ("llama_8b", "h200", 1024),
        ("llama_70b", "h200", 8),
    ):
        cells = predict_row(model, load_hardware()[kind], gpus).cells()
        assert f"| {' | '.join(cells)} |" in rows, "python -m benchmarks.scaling --write"


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_the_programs_of_the_readme_print_what_it_shows() -> None:
    pytest.importorskip("accelerate", reason="without it transformers splits no tensors")
    for block, today in examples_of_today(ROOT / "README.md"):
        assert today == block, "python -m benchmarks.support.documents"
