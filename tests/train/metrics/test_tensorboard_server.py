"""The page of a real TensorBoard server, which reads the files with its own loader, not with the Python
library."""

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

pytestmark = [pytest.mark.slow, pytest.mark.sampled(5)]
STATUSES = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Start a server for a folder and yield its address."""
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
                match.group()
                for line in server.stdout
                if (match := re.search(r"http://127\.0\.0\.1:\d+/", line))
            )
        finally:
            server.send_signal(signal.SIGTERM)


def query(address: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def test_a_server_shows_charts_texts_and_a_row_for_each_run_also_of_one_that_was_resumed(
    tmp_path: Path,
) -> None:
    board_of(tmp_path / "a", with_lr(0.5), range(3))
    board_of(tmp_path / "a", with_lr(0.5), range(2, 5))
    board_of(tmp_path / "b", with_lr(0.25), range(3))
    with serving(tmp_path) as address:
        plugins = f"{address}data/plugin"
        deadline_s = time.monotonic() + 60
        while len(query(f"{plugins}/scalars/tags")) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert [
            category["title"] for category in query(f"{plugins}/custom_scalars/layout")["category"]
        ] == list(CHARTS)
        loss = query(f"{plugins}/scalars/scalars?run=a/tb&tag=loss/eval")
        assert [step for _, step, _ in loss] == list(range(5))
        assert query(f"{plugins}/text/text?run=b/tb&tag=config")[0]["text"] == "<p>a: 1</p>"
        body = {
            "experimentName": "",
            "allowedStatuses": STATUSES,
            "colParams": [],
            "startIndex": 0,
            "sliceSize": 9,
        }
        rows = {row["name"]: row for row in query(f"{plugins}/hparams/session_groups", body)["sessionGroups"]}
        assert {name: row["hparams"]["optim.lr"] for name, row in rows.items()} == {"a/tb": 0.5, "b/tb": 0.25}
        metrics = query(f"{plugins}/hparams/experiment", {"experimentName": ""})["metricInfos"]
        assert [metric["name"]["tag"] for metric in metrics] == list(COMPARED)
