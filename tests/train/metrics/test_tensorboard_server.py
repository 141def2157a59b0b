"""The page of a real TensorBoard server, whose own loader reads the files in another language than the
library does."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshwright.train.metrics.tensorboard import CHARTS, COMPARED
from tests.support.launch import ROOT, environment
from tests.train.metrics.test_tensorboard import board_of, with_lr

pytestmark = pytest.mark.slow
STATUSES = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a server that shows a folder."""
    arguments = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    with subprocess.Popen(
        arguments, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as server:
        try:
            assert server.stdout is not None
            yield next(
                found.group()
                for line in server.stdout
                if (found := re.search(r"http://127\.0\.0\.1:\d+/", line))
            )
        finally:
            server.send_signal(signal.SIGTERM)


def ask(address: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_a_server_shows_charts_texts_and_a_row_for_each_run_also_of_one_that_was_resumed(
    tmp_path: Path,
) -> None:
    board_of(tmp_path / "a", with_lr(0.5), range(3))
    board_of(tmp_path / "a", with_lr(0.5), range(2, 5))
    board_of(tmp_path / "b", with_lr(0.25), range(3))
    with serving(tmp_path) as address:
        plugins = f"{address}data/plugin"
        deadline_s = time.monotonic() + 60
        while len(ask(f"{plugins}/scalars/tags")) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert [
            category["title"] for category in ask(f"{plugins}/custom_scalars/layout")["category"]
        ] == list(CHARTS)
        loss = ask(f"{plugins}/scalars/scalars?run=a/tb&tag=loss/eval")
        assert [step for _, step, _ in loss] == list(range(5))
        assert ask(f"{plugins}/text/text?run=b/tb&tag=config")[0]["text"] == "<p>a: 1</p>"
        asked = {
            "experimentName": "",
            "allowedStatuses": STATUSES,
            "colParams": [],
            "startIndex": 0,
            "sliceSize": 9,
        }
        rows = {row["name"]: row for row in ask(f"{plugins}/hparams/session_groups", asked)["sessionGroups"]}
        assert {name: row["hparams"]["optim.lr"] for name, row in rows.items()} == {"a/tb": 0.5, "b/tb": 0.25}
        metrics = ask(f"{plugins}/hparams/experiment", {"experimentName": ""})["metricInfos"]
        assert [metric["name"]["tag"] for metric in metrics] == list(COMPARED)
