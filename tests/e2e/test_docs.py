"""The commands of the README and of docs/: their keys every day, and one fifth of them as a reader would run
them, in one folder, each fifth on one day of five.

Commands that are too large for a laptop are made smaller (SMALLER: fewer processes, a tiny model under the
name of the same config), never left out, except those in ELSEWHERE, which another test runs. What a command
reads is made first (MAKERS) if no command of that day has made it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshwright.tools.plan.__main__ import read_options, show_kinds
from meshwright.train.config_parser import parse_config
from tests.support.forks import STACKS, Fork, fork_module
from tests.support.launch import ROOT, TINY, environment, family, kill
from tests.support.nested import NESTED

PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
DEVELOPERS = ("CONTRIBUTING.md", "AGENTS.md")  # their commands run tests
ELSEWHERE = {
    r"pytest -m 'not slow'": "the test suite itself: .ci/run starts it from the README",
    r"mine:build|mine\.py": "tests/e2e/test_your_model.py",
    r"tools\.dryrun": "tests/tools/dryrun: a download of 0.53 GB",
    r"https://HOST": "tests/e2e/test_stream_run.py",
    r"train\.main .*llama_8b.* --parallel\.plan=auto": "tests/e2e/test_auto_plan.py",
    r"^sbatch|^kubectl|configs/launch/nodes\.sh|test_launch_slurm": "tests/e2e/test_launch_*.py",
}
SMALL = " ".join([*TINY[:5], "--train.seq_len=64"])
# all blocks are traced once
BLOCKS_OF_8B = "--model.n_layers=4 --model.dim=4096 --model.n_heads=32 --model.ffn_dim=14336"
SMALL_QWEN = "--model.args.num_hidden_layers=2 --model.args.hidden_size=64 --model.args.vocab_size=264"
QUICK = "--parallel.compile.enabled=false --train.steps=2 --train.eval_every=0"
OVERRIDES = " ".join(f"--override {key[2:]}" for key in f"{SMALL} {QUICK}".split())
SMALLER = [  # pattern, replacement; all that match are applied in this order
    (r"^python3 -m venv .*pip install -q -e \. && ", ""),
    (r"--nproc-per-node 8", "--standalone --nproc-per-node 2"),
    (r"(?<!standalone )--nproc-per-node ([24])", r"--standalone --nproc-per-node \1"),
    (r"(train\.main .*llama_(?:1b|8b|8b_128k|70b|405b)\.yaml.*)", rf"\1 {SMALL} {QUICK}"),
    (r"(train\.main .*qwen3_8b\.yaml.*)", rf"\1 {SMALL_QWEN} {QUICK} --train.seq_len=64"),
    (r"(train\.main .*llama_debug\.yaml --.*)", r"\1 --parallel.compile.enabled=false"),  # except the first
    (r"(train\.main .*llama_debug\.yaml.*)", rf"\1 {SMALL} --train.steps=12"),
    (r"(executed_code .*)", rf"\1 {SMALL} {QUICK}"),
    (r"(train\.main .*start/config\.yaml.*)", rf"\1 {QUICK} --train.seq_len=32"),
    (r"/data/web", "web"),
    (r"--workers 16", "--workers 2"),
    (r"gpus=8\.\.\d+", "gpus=8..16"),
    (r"(tools\.plan .*llama_8b_128k.*)", rf"\1 {SMALL}"),
    (r"(tools\.plan (?!.*--timeline).*llama_(?:70b|405b)\.yaml.*)", rf"\1 {BLOCKS_OF_8B}"),
    (r"(tools\.sweep prefetch)", rf"\1 --processes 1 {OVERRIDES}"),
    (r"runs/a runs/b", "runs/llama_debug runs/profiled"),
    (r"--run_dir=/shared/runs", "--run_dir=runs"),
]
MAY_DIFFER = r"tools\.compare"  # exit code 1 means that two runs are not the same training
TIMEOUT_S = 420


def commands(page: str) -> list[str]:
    """The commands in a page's sh blocks, without comments; lines continued by a backslash are joined."""
    blocks = re.findall(
        r"^```sh\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"(^|\s)#\s.*", "", line).strip() for line in lines) if line]


def smaller(command: str) -> str:
    for pattern, replacement in SMALLER:
        command = re.sub(pattern, replacement, command)
    return command


PAGE_OF = dict[str, str]()  # command -> the first page that has it, in reading order
for page in PAGES:
    for command in commands(page):
        if not any(re.search(pattern, command) for pattern in ELSEWHERE):
            PAGE_OF.setdefault(command, Path(page).stem)
# What commands read, and the command that makes it; the first two are quicker than those of the pages.
DEBUG = "torchrun --nproc-per-node 2 -m train.main --config llama_debug.yaml"
MAKERS = {
    "runs/llama_debug": f"{DEBUG} --run.seed=0",
    "runs/profiled": f"{DEBUG} --run.dir=runs/profiled --profile.start=5 --profile.all_ranks=true",
    **{
        path: next(command for command in PAGE_OF if re.search(pattern, command))
        for path, pattern in {
            "web_tokens": "prepare_data.* web_tokens",
            "code_tokens": "prepare_data.* code_tokens",
            "start": "checkpoint import",
            "runs/mine": "train.main.* runs/mine",
            "HF_OUT": "checkpoint export",
            "sweeps/prefetch": "tools.sweep prefetch",
        }.items()
    },
}
SECONDS = {  # of a command, roughly, so that the days are about equal
    r"nproc.*(llama_debug\.yaml$|plan=auto)": 40,
    r"70b|405b|--min-gpus|--days|--sweep|--check|sweep prefetch": 15,
    r"train\.main|executed_code|tools\.plan|doctor|bench": 8,
}
DAYS = 10


def by_day() -> list[object]:
    """Return each command, as a parameter of a test, with its day."""
    costs = {
        command: next((cost for pattern, cost in SECONDS.items() if re.search(pattern, command)), 3)
        for command in PAGE_OF
    }
    load, days = [0] * DAYS, dict[str, int]()
    for command in sorted(PAGE_OF, key=lambda command: -costs[command]):
        days[command] = load.index(min(load))
        load[days[command]] += costs[command]
    return [
        pytest.param(
            command, id=f"{page}: {command[:90]}", marks=pytest.mark.sampled(DAYS, day=days[command])
        )
        for command, page in PAGE_OF.items()
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages assume."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from tests.support.hf_models import make_hf, save_hf

    folder = tmp_path_factory.mktemp("reader")
    for name in ("configs", "meshwright", "tools", "parallel", "models", "train", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("docs", "web", "corpus/deep"):
        (folder / name).mkdir(parents=True)
    text = "\n".join(f"the square of {n} is {n * n} and its half is {n / 2}" for n in range(3000))
    for i in range(4):
        (folder / "web" / f"{i}.txt").write_text(text)
    (folder / "mine.yaml").write_text(
        "config: llama_debug.yaml\nruns: {once: {}}\noverrides:\n"
        + "".join(f"  {key[2:].replace('=', ': ')}\n" for key in f"{SMALL} {QUICK}".split())
    )
    lines = "".join(f'{{"text": "{i} {text[:4000].replace(chr(10), " ")}"}}\n' for i in range(60))
    (folder / "wiki.jsonl").write_text(lines)
    subprocess.run(["gzip", "-k", "wiki.jsonl"], cwd=folder, check=True)
    (folder / "wiki.jsonl.gz").rename(folder / "corpus/deep/a.jsonl.gz")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        text.splitlines(), trainers.BpeTrainer(vocab_size=250, special_tokens=["<unk>", "</s>"])
    )
    for name in ("TOKENIZER_DIR", "HF_DIR"):
        (folder / name).mkdir()
        tokenizer.save(str(folder / name / "tokenizer.json"))
        (folder / name / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    save_hf(folder / "HF_DIR", make_hf(max_position_embeddings=128))
    (folder / "FSDP.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\nfsdp_config:\n"
        "  fsdp_version: 2\n  fsdp_activation_checkpointing: true\n"
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", by_day())
def test_a_command_of_the_docs_works(command: str, place: Path) -> None:
    run_command(command, place)
    for picture in re.findall(r"--timeline docs/(\S+\.svg)", command):
        from tests.support.pictures import assert_alike

        # If this fails, the picture in docs is outdated: run the command again.
        assert_alike((ROOT / "docs" / picture).read_text(), (place / "docs" / picture).read_text())


def run_command(command: str, place: Path) -> None:
    """Run a command, after those that make what it reads. A new run does not resume another command's."""
    line = smaller(command)
    own = run_folder(line)
    if own:
        shutil.rmtree(place / own, ignore_errors=True)
    for path, maker in MAKERS.items():
        reads = re.search(rf"(?<![\w.-]){path}(?![\w.=-])", line) and path != own and maker != command
        if reads and not (place / path).exists():
            run_command(maker, place)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = environment(PYTHONPATH=str(ROOT), PATH=path)
    if line.startswith("tensorboard"):
        see_board(line, place, env)
        return
    code, out, err = run_line(line, place, env)
    codes = (0, 1) if re.search(MAY_DIFFER, command) else (0,)
    assert code in codes, f"{line}\n{out[-2000:]}\n{err[-3000:]}"
    assert "Traceback" not in err


def run_folder(line: str) -> str:
    """Return the folder of the run that a line trains, "" for other commands."""
    named = re.search(r"--run\.dir[= ](\S+)", line)
    config = re.search(r"torchrun .*--config (\w+)\.yaml", line)
    return named[1] if named else f"runs/{config[1]}" if config else ""


def run_line(line: str, place: Path, env: dict[str, str]) -> tuple[int, str, str]:
    """Run a line; return exit code, stdout and stderr. `python -m` and torchrun are forked, with the
    arguments split by bash; any other line is run by bash. After TIMEOUT_S all its processes are killed."""
    known = re.match(r"python -m (\S+)|torchrun(?= )", line)
    if known is None:
        pipe, shell_command = subprocess.PIPE, ["bash", "-c", line]
        shell = subprocess.Popen(shell_command, cwd=place, env=env, stdout=pipe, stderr=pipe, text=True)
        with shell, ended(shell):
            out_text, err_text = shell.communicate(timeout=TIMEOUT_S)
            return shell.returncode, out_text, err_text
    assert not re.search(r"[|&;<>]", line), f"a list of commands or a redirection needs bash: {line}"
    split = ["bash", "-c", f"printf '%s\\0' {line[known.end() :]}"]
    printed = subprocess.run(split, cwd=place, capture_output=True, text=True, check=True).stdout
    arguments = printed.split("\0")[:-1]
    with tempfile.TemporaryDirectory() as name:
        out, err = Path(name) / "out", Path(name) / "err"
        process = fork_module(
            NESTED,
            known[1] or "torch.distributed.run",
            *filter(None, arguments),
            output=out,
            errors=err,
            env=env,
            folder=place,
        )
        with ended(process):
            try:
                code = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                for pid in family(process.pid):
                    os.kill(pid, STACKS)
                time.sleep(2)
                printed = "\n".join(path.read_text()[-6000:] for path in (out, err))
                pytest.fail(f"{line}\nstill runs after {TIMEOUT_S} s\n{printed}")
            return code, out.read_text(), err.read_text()


@contextmanager
def ended(process: Fork | subprocess.Popen[str]) -> Iterator[None]:
    """Context that at its end kills the process and all its descendants, in any session."""
    try:
        yield
    finally:
        if process.poll() is None:
            kill(family(process.pid))


def see_board(line: str, place: Path, env: dict[str, str]) -> None:
    """Start TensorBoard and check that its server lists the run."""
    board = subprocess.Popen(
        shlex.split(f"{line} --port 0"), cwd=place, env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        address = next(match[0] for text in board.stderr or () if (match := re.search(r"http://\S+", text)))
        until = time.monotonic() + 60
        while "loss" not in (tags := read(f"{address}data/plugin/scalars/tags")) and time.monotonic() < until:
            time.sleep(1)
        assert "loss" in tags
    finally:
        board.terminate()
        board.communicate(timeout=30)


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as response:
        return response.read().decode()


def test_the_keys_of_every_command_are_those_of_its_tool() -> None:
    """Of tools.plan and of training; no plan is made."""
    for command in PAGE_OF:
        tool = re.search(r"-m (train\.main|tools\.plan)(?= )", command)
        if tool:
            # a file that an earlier command writes
            arguments = shlex.split(command[tool.end() :].replace("start/config.yaml", "llama_debug.yaml"))
            if tool[1] == "train.main" or not show_kinds(arguments):
                (parse_config if tool[1] == "train.main" else read_options)(arguments)


def test_every_link_leads_somewhere() -> None:
    for page in (*PAGES, *DEVELOPERS):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "@@" not in text, f"{page} contains the placeholder @@"
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    listed = sorted(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert listed == sorted(path.removeprefix("docs/") for path in {*PAGES} - {"README.md", "docs/README.md"})


def test_every_tool_and_config_that_the_pages_name_is_there() -> None:
    for page in (*PAGES, *DEVELOPERS):
        text = (ROOT / page).read_text(encoding="utf-8")
        for module in re.findall(
            r"python -m (?:meshwright\.)?((?:tools|train|tests|benchmarks)(?:\.[a-z]\w*)+)", text
        ):
            path = ROOT / module.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").exists(), f"{page}: {module}"
        for path in re.findall(
            r"`((?:tests|configs|docs|tools|train|parallel|models|benchmarks)/[\w/.-]+\.\w+)`", text
        ):
            assert (ROOT / path).exists() or (ROOT / "tests" / path).exists(), f"{page}: {path}"
