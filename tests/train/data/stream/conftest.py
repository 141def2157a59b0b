"""A server of an empty folder, one for each file of tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.flaky_server import FlakyServer, flaky_server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def running(served: Path) -> Iterator[FlakyServer]:
    with flaky_server(served) as server:
        yield server
