"""tools.bench data: a small measurement is complete and deletes its files, and its parts measure what their
names state."""

import json
from pathlib import Path

import pytest

from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.speed.data import QUICK

pytestmark = [pytest.mark.slow, pytest.mark.sampled(10, together="bench-data")]


def test_the_whole_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "--quick", f"--folder={tmp_path}", "--json"])
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert list(tmp_path.iterdir()) == []
    assert figures["size"]["store_gb"] == QUICK.store_gb
    assert all(figures["loader_tokens_s"][cache]["median"] > 0 for cache in ("cold", "warm"))
    assert figures["data_wait"]["pretend_step_s"] == pytest.approx(16 * 1024 / (8 * 10_471))
    assert all(figures["tokenising"]["mb_s"][name]["min"] > 0 for name in ("library", "prepare"))
