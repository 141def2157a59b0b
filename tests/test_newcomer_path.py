"""How much a newcomer has to read to follow an FSDP x TP run from the config to the optimizer step.

Counted are all lines of every file of ours of which any function runs on the way, however late it is imported.
"""

import pytest

from tests.support.launch import EAGER, ROOT, TINY, run, write_text
from train.config import parse_config
from train.data.tokens import load_corpus

MAX_LINES = 2720
MESH = ["--parallel.dp_shard=2", "--parallel.tp=2", "--train.steps=2"]
# Dynamo reads a compiled module's functions instead of calling them: the eager run shows those.
MODES = {"eager": EAGER, "compiled": ["--parallel.compile.backend=aot_eager"]}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> dict[str, int]:
    """Every file on the path, and its number of lines."""
    folder = tmp_path_factory.mktemp("path")
    data, files = write_text(folder), set()
    load_corpus(parse_config(data).data)  # tokenised beforehand, as for any run of a text but the first
    for mode, arguments in MODES.items():
        out = folder / mode
        tiny = [*TINY, "--model.n_heads=8", "--model.n_kv_heads=4"]
        result = run(4, str(out), *tiny, *data, *MESH, *arguments, module="tests.path_worker")
        assert result.returncode == 0, result.stderr
        files |= set(out.read_text().splitlines())
    return {name: len((ROOT / name).read_text().splitlines()) for name in sorted(files)}


def test_the_path_leads_through_the_files_one_would_expect(path: dict[str, int]) -> None:
    landmarks = {"models/llama.py", "models/loss.py", "parallel/tensor.py", "parallel/fsdp.py", "parallel/compile.py",
                 "train/config.py", "train/data/loader.py", "train/step.py"}  # fmt: skip
    assert landmarks <= path.keys()


def test_the_path_is_short(path: dict[str, int]) -> None:
    longest = sorted(path.items(), key=lambda item: -item[1])
    assert sum(path.values()) <= MAX_LINES, f"{sum(path.values())} lines: {longest}"
