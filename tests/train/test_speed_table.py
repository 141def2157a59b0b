"""The table of docs/speed.md: its keys, defaults and tests are those of the code."""

from functools import reduce

import pytest

from meshwright.train.config import Config
from tests.support.launch import ROOT

TABLE = (
    (ROOT / "docs" / "speed.md")
    .read_text(encoding="utf-8")
    .partition("## The table")[2]
    .partition("\n## ")[0]
)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TABLE.splitlines()
    if line.startswith("| `")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_table_of_speed_is_that_of_the_code(row: list[str]) -> None:
    key, _, default, _, test, _ = row
    value = reduce(getattr, key.strip("`").split("."), Config())
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = f"[{', '.join(value)}]" if isinstance(value, tuple) else text
    assert default.startswith(f"`{text}`")
    assert test.startswith("none") or (ROOT / test.strip("`")).is_file()


def test_the_table_has_every_key_of_compiling() -> None:
    documented = {row[0].strip("`") for row in ROWS}
    keys = {f"parallel.compile.{key}" for key in Config().parallel.compile.__dataclass_fields__}
    assert keys - {"parallel.compile.on_recompile"} <= documented
