"""The guard of the house's rebuilding: records what commands do, compares two records. Deleted at its end.

    python -m tests.support.house_guard record OUT.json [--root CHECKOUT] [--only PART,PART] [--all]
    python -m tests.support.house_guard compare BEFORE.json AFTER.json [--only PART,PART] [--rename OLD=NEW]

`record` starts the commands of a checkout as a user would, in processes of their own, and imports nothing of
the product: it runs against a tree before its modules move, and after. The cases are in house_guard_cases.py.
COMMANDS says what each command is called: a tree without `train/main.py` is asked for
`meshwright/train/main.py`. Each part has a folder and a HOME of its own, so a record does not depend on what
ran before. What a machine or a moment decides (paths, times, speeds, resident memory) is replaced by <names>;
all else stays as it is, numbers with all their digits. Two commands run at a time; four ranks only in two
short runs. `--all` adds fake_gpu, which fetches 0.5 GB.

`compare` ends with 0 if nothing differs, else with 1 and every difference: where it is, and both values.
`--rename`, any number of times, puts NEW for OLD in BEFORE: for what was renamed on purpose, as "-m tools.=-m
meshwright.tools.".
"""

import argparse
import contextlib
import difflib
import gzip
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import house_guard_cases as cases

HERE = Path(__file__).resolve().parents[2]
# What a command of the cases is called: python -m NAME, with the first of PREFIXES under which it is there.
TOOLS = (
    *("plan", "simulate", "trace", "bench", "sweep", "compare", "doctor", "checkpoint", "convert_hf"),
    *("prepare_data", "eval", "generate", "import_accelerate"),
)
COMMANDS = {"train": "train.main", **{name: f"tools.{name}" for name in TOOLS}}
PREFIXES = ("", "meshwright.")
FAKE_GPU_RECORD = "tests.fake_gpu.record"  # the command that writes the record of the fake GPU's steps ...
FAKE_GPU_FILE = "tests/fake_gpu/record.json"  # ... into this file of the checkout in which it runs
FAKE_GPU_CACHE = os.environ.get("MESHWRIGHT_TESTS_CACHE", str(Path.home() / ".cache/meshwright-tests"))
LIMIT_S = 900.0
AT_ONCE = 2  # commands of one process each
LONGEST_TEXT = 40_000  # of a file, in characters; of a longer one its checksum is recorded
SHOWN_LINES, SHOWN_CHARACTERS = 60, 400  # of a difference
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "CC", "CXX")
FIXED_VARIABLES = {
    **{"OMP_NUM_THREADS": "1", "COLUMNS": "120", "LINES": "40", "NO_COLOR": "1", "TERM": "dumb"},
    **{"LC_ALL": "C.UTF-8", "TZ": "UTC", "USER": "guard"},
    "PYTHONHASHSEED": "0",  # tools.plan --check lists collectives of equal size in the order of a set
}
# Keys of metrics.jsonl and of the tools' documents whose values are measured: not recorded.
MEASURED = re.compile(r"(mfu\w*|peak_memory_gib|reserved_memory_gib|seconds|tokens_per_s_per_gpu|\w+_s)$")
# What is replaced in every text, besides paths.
PLACEHOLDERS = [
    (re.compile(pattern, re.MULTILINE), put)
    for pattern, put in (
        (r"events\.out\.tfevents\.[\w.-]+?(\.ended)?$", r"events.out.tfevents.<when>\1"),
        (r"tokens-[0-9a-f]{16}", "tokens-<key>"),
        (r"compiling took [\d.]+ s \([^)]*\)", "compiling took <time>"),
        (r"[\d.]+ MB/s in [\d.]+ s", "<speed> in <time>"),
        (r"\d+ (s|min|h) +(?=<tmp>\S*/checkpoints/)", "<age> "),
        (r"[\d,.]+ tokens/s  [\d.]+ GiB", "<speed> tokens/s  <memory> GiB"),
        (
            r"training waited [\d.]+ s, committed after [\d.]+ s",
            "training waited <time>, committed after <time>",
        ),
        (r"[\d.]+ GiB in [\d.]+ s, [\d.]+ GB/s", "<size> in <time>"),
        (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[\d.]*", "<date>"),
        (r"\d+(\.\d+)? (s|min|h|seconds|minutes|hours) ago", "<time> ago"),
    )
]
GRAPHS = re.compile(r"(\d+) graphs loaded from it, (\d+) compiled")  # which rank compiles first decides
# Lines of torch and torchrun that tell of time, processes or the profiler; not the product's.
NOT_OURS = re.compile(r"^(USDT:|[WIE]\d{4} |\[[WIE]\d{4} |\[rank\d+\]:\[W)")


# ---- starting commands


@dataclass
class Part:
    """Where a part of the record is made: the checkout, and a folder of its own with a HOME."""

    root: Path
    folder: Path
    home: Path
    seconds: list[tuple[float, str]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """The variables of a command: no others of whoever records."""
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        temporary = self.home / "temporary"
        temporary.mkdir(parents=True, exist_ok=True)
        own = {"HOME": str(self.home), "TMPDIR": str(temporary), "PYTHONPATH": str(self.root)}
        return {**kept, **FIXED_VARIABLES, **own}

    def command(self, line: str, own: Path) -> list[str]:
        """What is started for a line of the cases; a number in front is that of the ranks."""
        words = shlex.split(fill(line, tmp=str(self.folder), own=str(own)))
        ranks = int(words.pop(0)) if words[0].isdigit() else 0
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        return [
            sys.executable,
            "-m",
            *(launcher if ranks else ()),
            module_of(self.root, COMMANDS[words[0]]),
            *words[1:],
        ]

    def run(self, line: str, own: Path | None = None) -> dict[str, Any]:
        """Exit code and output of a line of the cases."""
        began_s = time.monotonic()
        code, out, err = start(self.command(line, own or self.folder / "own"), self.root, self.environment())
        self.seconds.append((time.monotonic() - began_s, line))
        err = "\n".join(text for text in err.splitlines() if not NOT_OURS.match(text))
        return {"exit": code, "out": self.document(out), "err": self.words(err)}

    def words(self, text: str) -> str:
        """The text without what a machine or a moment decides."""
        paths = {self.home: "<home>", self.folder: "<tmp>", self.root: "<root>", Path(sys.prefix): "<python>",
                 Path(sys.base_prefix): "<base python>"}  # fmt: skip
        for path, put in sorted(paths.items(), key=lambda item: -len(str(item[0]))):
            text = text.replace(str(path), put)
        for pattern, put in PLACEHOLDERS:
            text = pattern.sub(put, text)
        return GRAPHS.sub(lambda found: f"{int(found[1]) + int(found[2])} graphs", text)

    def document(self, out: str) -> Any:
        """Output: the document if it is JSON, else its text."""
        text = self.words(out)
        if text.startswith(("{", "[")):
            try:
                return json.loads(text)
            except ValueError:
                pass
        return text


def fill(line: str, **places: str) -> str:
    """The line with its {names} replaced; short ones hold others."""
    short = {**cases.SHORT, "last": cases.LAST_OF_C, "before": cases.BEFORE_OF_C}
    for name, text in [*short.items(), *short.items(), *places.items()]:
        line = line.replace(f"{{{name}}}", text)
    return line


def module_of(root: Path, name: str) -> str:
    """The module of that name, with the prefix under which this checkout itself has it."""
    for prefix in PREFIXES:
        path = root / (prefix + name).replace(".", "/")
        if path.with_suffix(".py").exists() or (path / "__main__.py").exists():
            return prefix + name
    raise SystemExit(f"{root} has no {name}: COMMANDS and PREFIXES of {__file__} say where commands are")


def start(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[int | str, str, str]:
    """Exit code ("too long" if it was killed), stdout and stderr."""
    pipe: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    pipe |= {"text": True, "errors": "replace", "start_new_session": True}
    with subprocess.Popen(command, cwd=folder, env=environment, **pipe) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            return "too long", out, err
    return process.returncode, out, err


def table(text: str) -> Iterator[tuple[str, list[str]]]:
    """Name and commands of each case of a table (tests/support/house_guard_cases.py)."""
    name = ""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("   "):
            lines[-1] += " " + line.strip()
        elif line.startswith("  "):
            lines.append(line.strip())
        elif line:
            if lines:
                yield name, lines
            name, lines = line, []
    yield name, lines


def run_chains(part: Part, text: str, finish: Callable[[Path], Any] | None = None) -> dict[str, Any]:
    """Every case of a table, two at a time; `finish` says what to record of a case's folder."""

    def run_chain(numbered: tuple[int, tuple[str, list[str]]]) -> tuple[str, Any]:
        number, (name, lines) = numbered
        own = part.folder / f"own-{number:02d}"
        own.mkdir()
        results: dict[str, Any] = {line: part.run(line, own) for line in lines}
        files = (finish or (lambda folder: files_of(part, folder)))(own)
        return name, results | ({"files": files} if files else {})

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(pool.map(run_chain, enumerate(table(text))))


def run_each(part: Part, lines: Mapping[str, str]) -> dict[str, Any]:
    """The result of each line, two at a time. What a line calls {own} is not there."""

    def run_one(numbered: tuple[int, tuple[str, str]]) -> tuple[str, Any]:
        number, (name, line) = numbered
        return name, part.run(line, part.folder / f"own-{number:03d}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(pool.map(run_one, enumerate(lines.items())))


# ---- what is recorded of files


def files_of(part: Part, folder: Path) -> dict[str, Any]:
    """Every file below a folder: its text where that is one and short, else its checksum."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {part.words(str(path.relative_to(folder))): content_of(part, path) for path in paths}


def content_of(part: Part, path: Path) -> Any:
    content = path.read_bytes()
    try:
        text = part.words(content.decode()) if path.suffix != ".safetensors" else None
    except UnicodeDecodeError:
        text = None
    if text is None or "\0" in text:
        return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}"
    if path.name == "manifest.json":  # the config of a checkpoint holds the paths of its run
        text = re.sub(r'("config.yaml": \{)[^}]*\}', r"\1<holds paths>}", text)
        text = re.sub(r'^ "sha256": "\w+"', ' "sha256": "<of all of this>"', text, flags=re.MULTILINE)
    if len(text) > LONGEST_TEXT:
        return f"{len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()}"
    return text


def without_measured(value: Any) -> Any:
    """A document whose measured figures are replaced."""
    if isinstance(value, dict):
        measured = {
            key for key, one in value.items() if MEASURED.match(key) and not isinstance(one, (dict, list))
        }
        return {key: "<measured>" if key in measured else without_measured(one) for key, one in value.items()}
    return [without_measured(one) for one in value] if isinstance(value, list) else value


def keys_of(value: Any) -> Any:
    """The keys of a document; of a list those that its elements have together."""
    if isinstance(value, dict):
        return {key: keys_of(one) for key, one in value.items()}
    if isinstance(value, list):
        merged: dict[str, Any] = {}
        for one in value:
            merged |= keys_of(one) if isinstance(one, dict) else {}
        return ["each", merged]
    return "<value>"


def trace_of(document: Any) -> Any:
    """Of what tools.trace says: its keys, and how many collectives of each kind there were."""
    if not isinstance(document, dict):
        return document
    counts = [f"{one['count']} {one['collective']} {one['axis']}" for one in document["communication"]]
    return {"keys": keys_of(document), "communication": sorted(counts)}


def record_run(part: Part, name: str) -> dict[str, Any]:
    """What a run has left in its folder."""
    folder = part.folder / name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = sorted(part.words(str(path.relative_to(folder))) for path in folder.rglob("*") if path.is_file())
    return {
        "metrics": [without_measured(row) for row in rows],
        "files": files,
        "status.json": json.loads(part.words((folder / "status.json").read_text())),
        "config.yaml": part.words((folder / "config.yaml").read_text()),
        "plan.yaml": part.words((folder / "plan.yaml").read_text()),
        "checkpoints": files_of(part, folder / "checkpoints"),
        "compiled": {path.name: compiled_graphs(path) for path in sorted(folder.rglob("*.compile.json"))},
        "tensorboard": tags_of(folder / "tb"),
    }


def compiled_graphs(path: Path) -> list[str]:
    """The graphs of a rank in their order, without their times and the places of the code."""
    graphs = json.loads(path.read_text())
    return [f"{graph['function'].split(' (')[0]}, {graph['phase']}, {sorted(graph)}" for graph in graphs]


def tags_of(folder: Path) -> dict[str, Any]:
    """TensorBoard's tags, and how many points the curves have."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = {kind: sorted(found) for kind, found in events.Tags().items() if isinstance(found, list)}
    return tags | {"scalars": {tag: len(events.Scalars(tag)) for tag in tags["scalars"]}}


# ---- texts that commands read


def write_texts(folder: Path, count: int = 40) -> None:
    """Text files that can be learned, the same every time."""
    (folder / "texts").mkdir()
    for number, text in enumerate(make_texts(count)):
        (folder / "texts" / f"{number:02d}.txt").write_text(text)


def make_texts(count: int, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    words = ["".join(draw.choice("abcdefghijklmnopé") for _ in range(draw.randint(2, 8))) for _ in range(200)]
    return [" ".join(draw.choice(words) for _ in range(draw.randint(1, 900))) + "\n" for _ in range(count)]


def write_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """A small byte-level tokenizer.json with <s> and </s>."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=sorted(alphabet), show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(content)


# ---- the parts


def print_config(part: Part) -> Any:
    """The resolved config of every shipped one, and the commands of every shipped sweep."""
    configs = sorted(path.name for path in (part.root / "configs").glob("llama_*.yaml"))
    sweeps = sorted(path.stem for path in (part.root / "configs/experiments").glob("*.yaml"))
    lines = {name: f"train --config {name} --print_config" for name in configs}
    lines |= {f"sweep {name}": f"sweep {name} --dry-run --folder {{own}}" for name in sweeps}
    lines |= {f"slurm {name}": f"sweep {name} --slurm --folder {{own}} --processes 8" for name in sweeps[:1]}
    return run_each(part, lines)


def help_texts(part: Part) -> Any:
    return run_each(part, {name: f"{name} -h" for name in cases.HELP.replace("\n", " ").strip().split(", ")})


def plans(part: Part) -> Any:
    return without_buffers(run_chains(part, cases.PLANS))


def without_buffers(value: Any) -> Any:
    """What tools.plan says, without the most memory of buffers that it predicts. That varies:
    parallel/planner/tracing/eager.py knows weights by the addresses of their storages, which others get
    later."""
    if isinstance(value, list):
        return [without_buffers(one) for one in value]
    if isinstance(value, str):
        return re.sub(r"^(buffers +)[\d.]+", r"\1<varies>", value, flags=re.MULTILINE)
    if not isinstance(value, dict):
        return value
    if value.get("name") == "buffers":  # of --check
        return value | {"predicted": "<varies>", "difference": "<varies>"}
    inner = {key: without_buffers(one) for key, one in value.items()}
    if isinstance(value.get("predicted"), dict):
        inner["predicted"]["memory"]["buffers"] = "<varies>"
    return inner


def simulations(part: Part) -> Any:
    return run_chains(part, cases.SIMULATIONS)


def runs(part: Part) -> Any:
    """Real runs under torchrun: their output line by line, and what they leave."""
    recorded: dict[str, Any] = {}
    for name, starts in make_runs(part).items():
        recorded[name] = {f"start {number}": console_of(one) for number, one in enumerate(starts, 1)}
        recorded[name]["folder"] = record_run(part, name.split(":")[0])
    return recorded


def make_runs(part: Part) -> dict[str, list[dict[str, Any]]]:
    """The runs of the cases, each with the results of its starts."""
    write_texts(part.folder)
    return {name: [part.run(line) for line in lines] for name, lines in table(cases.RUNS)}


def console_of(result: dict[str, Any]) -> dict[str, Any]:
    """The lines of a run; those of saves apart, which come when the disk is ready."""
    lines = str(result["out"]).splitlines()
    saved = sorted(line for line in lines if line.startswith("saved "))
    return {**result, "out": [line for line in lines if line not in saved], "saved": saved}


def tokens(part: Part) -> Any:
    """Prepared data of every kind of source."""
    write_texts(part.folder)
    texts = make_texts(600, seed=2)
    records = [json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)]
    (part.folder / "records.jsonl").write_text("".join(records))
    bodies = "".join(json.dumps({"body": text}) + "\n" for text in texts[:100]).encode()
    (part.folder / "bodies.jsonl.gz").write_bytes(gzip.compress(bodies, mtime=0))
    write_tokenizer(part.folder / "bpe", texts)
    recorded: dict[str, Any] = without_measured(run_chains(part, cases.TOKENS))
    return recorded | {"files": files_of(part, part.folder / "out")}


def checkpoint_tools(part: Part) -> Any:
    """The tools that read runs and checkpoints, on those of the part runs."""
    if not (part.folder / "texts").exists():
        make_runs(part)
    recorded: dict[str, Any] = without_measured(run_chains(part, cases.CHECKPOINT_TOOLS))
    for result in [*recorded["ls"].values(), *recorded["compare"].values()]:
        if isinstance(result["out"], str):
            out = re.sub(
                r"^(tokens/s|step time, s|peak memory, GiB)  .*$",
                r"\1  <measured>",
                result["out"],
                flags=re.M,
            )
            result["out"] = re.sub("  +", "  ", out)  # the width of columns is that of what is measured
    for result in recorded["trace"].values():
        result["out"] = trace_of(result["out"])
    return recorded


def must_work(part: Part, line: str) -> None:
    result = part.run(line)
    if result["exit"] != 0:
        raise SystemExit(f"{line}\nends with {result['exit']}:\n{result['out']}\n{result['err']}")


def wrong_inputs(part: Part) -> Any:
    """What each mistake says, and its exit code."""
    write_texts(part.folder)
    write_wrong_files(part)
    own = "{small} --run.dir={own} --train.steps=1 --train.eval_every=0 {eager}"
    lines = {line: f"train {own} {line}" for _, wrong in table(cases.WRONG_TRAIN) for line in wrong}
    lines |= {line: line for _, wrong in table(cases.WRONG_TOOLS) for line in wrong}
    recorded = run_each(part, lines)
    return {name: {**result, "err": last_words(result["err"])} for name, result in recorded.items()}


def last_words(err: str) -> str:
    """Of a traceback only its end, as lines of code move. Not this machine's memory, and what fits in it."""
    if "Traceback (most" in err:
        return "Traceback ... " + err.strip().splitlines()[-1]
    if "CPU (no GPU) has" in err:
        err = re.sub(r"has [\d.]+ GiB for", "has <memory> GiB for", err)
        return re.sub(r"^  Fits: .*$", "  Fits: <...>", err, flags=re.MULTILINE)
    return err


def write_wrong_files(part: Part) -> None:
    """Broken files, and copies of a good checkpoint, plan and prepared data, each with one fault."""
    folder = part.folder
    for name, text in cases.WRONG_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    must_work(part, "train {small} --run.dir={tmp}/run --train.steps=2 --train.eval_every=0 {eager}")
    must_work(part, "prepare_data {tmp}/texts {tmp}/prepared --workers 1")
    plan = (folder / "run/plan.yaml").read_text()
    (folder / "plan.yaml").write_text(plan)
    for name, (old, new) in cases.WRONG_PLANS.items():
        if old not in plan:
            raise SystemExit(f"the plan file has no {old!r}, which {name} of the cases is made of:\n{plan}")
        (folder / name).write_text(plan.replace(old, new, 1))
    damage(folder / "run/checkpoints/step-00000002", folder, "")
    damage(folder / "prepared", folder, "prepared-")


def damage(good: Path, folder: Path, prefix: str) -> None:
    """Copies of a good folder, each with a fault of another kind, and one without."""
    copies = {name: folder / f"{prefix}{name}" for name in ("good", "changed", "lacks", "manifest")}
    for copy in copies.values():
        shutil.copytree(good, copy)
    largest = max(good.iterdir(), key=lambda path: path.stat().st_size).name
    flip_byte(copies["changed"] / largest)
    (copies["lacks"] / largest).unlink()
    (copies["manifest"] / "manifest.json").write_text("{")


def fake_gpu(part: Part) -> Any:
    """The record of the fake GPU's steps, made in a copy of the checkout."""
    copy = part.folder / "checkout"
    shutil.copytree(part.root, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "runs", ".venv"))
    (copy / FAKE_GPU_FILE).unlink()
    fetching = {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_"))
    }
    pip = Path.home() / ".config/pip/pip.conf"
    fetching |= {"PIP_CONFIG_FILE": str(pip)} if pip.exists() else {}
    own = {"PYTHONPATH": str(copy), "MESHWRIGHT_TESTS_CACHE": FAKE_GPU_CACHE}
    environment = {**part.environment(), **fetching, **own}
    code, out, err = start([sys.executable, "-m", FAKE_GPU_RECORD], copy, environment)
    if code != 0:
        raise SystemExit(f"{FAKE_GPU_RECORD} ends with {code}:\n{out[-3000:]}\n{err[-3000:]}")
    return json.loads((copy / FAKE_GPU_FILE).read_text())


PARTS: dict[str, Callable[[Part], Any]] = {
    "print_config": print_config,
    "help": help_texts,
    "plans": plans,
    "simulations": simulations,
    "tokens": tokens,
    "wrong_inputs": wrong_inputs,
    "runs": runs,
    "checkpoint_tools": checkpoint_tools,
    "fake_gpu": fake_gpu,
}


def record(out: Path, root: Path, names: Sequence[str], scratch: Path) -> None:
    """Make the parts one after another, in folders of `scratch`; the file is written anew after each."""
    recorded: dict[str, Any] = {"made with": versions()}
    for name in names:
        began_s = time.monotonic()
        folder = scratch / ("runs" if name == "checkpoint_tools" else name)
        folder.mkdir(exist_ok=True)
        part = Part(root.resolve(), folder, scratch / f"home_{name}")
        recorded[name] = PARTS[name](part)
        said = f"{name}: {time.monotonic() - began_s:.0f} s, {len(part.seconds)} commands; longest: "
        longest = ", ".join(f"{seconds:.0f} s {line[:50]}" for seconds, line in sorted(part.seconds)[:-4:-1])
        print(said + longest, file=sys.stderr, flush=True)
        out.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")


def versions() -> dict[str, str]:
    """What else decides figures and words."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torchao", "transformers", "tokenizers", "numpy", "jsonargparse", "pyarrow"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# ---- comparing


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Each place where two records differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            inner = f"{place} / {key}" if place else key
            if key not in after:
                yield f"{inner}\n    only before: {shorten(before[key])}"
            elif key not in before:
                yield f"{inner}\n    only after: {shorten(after[key])}"
            else:
                yield from differences(before[key], after[key], inner)
        if list(before) != list(after) and before.keys() == after.keys():
            yield f"{place}\n    the order of the keys: {shorten(list(before))} -> {shorten(list(after))}"
    elif isinstance(before, list) and isinstance(after, list) and not (texts(before) and texts(after)):
        if len(before) != len(after):
            yield f"{place}\n    {len(before)} entries -> {len(after)} entries"
        for index, (one, other) in enumerate(zip(before, after, strict=False)):
            yield from differences(one, other, f"{place} / {index}")
    elif type(before) is not type(after) or before != after:
        yield f"{place}\n{in_words(before, after)}"


def texts(value: list[Any]) -> bool:
    """Whether they are lines of a text."""
    return all(isinstance(one, str) for one in value)


def in_words(before: Any, after: Any) -> str:
    """Two values that differ; lines of text as a unified diff."""
    one, other = (side.splitlines() if isinstance(side, str) else side for side in (before, after))
    if (
        not (isinstance(one, list) and isinstance(other, list))
        or max(len(one), len(other)) < 2
        or one == other
    ):
        return f"    {shorten(before)} -> {shorten(after)}"
    diff = list(difflib.unified_diff(one, other, "before", "after", n=1, lineterm=""))
    more = [f"... {len(diff) - SHOWN_LINES} lines more"] if len(diff) > SHOWN_LINES else []
    return "\n".join(f"    {shorten(line, plain=True)}" for line in [*diff[:SHOWN_LINES], *more])


def shorten(value: Any, plain: bool = False) -> str:
    text = value if plain else json.dumps(value, ensure_ascii=False)
    more = f" ... ({len(text)} characters)" if len(text) > SHOWN_CHARACTERS else ""
    return text[:SHOWN_CHARACTERS] + more


def renamed(value: Any, renames: Sequence[tuple[str, str]]) -> Any:
    """A record in which one text stands for another, in keys too."""
    if isinstance(value, str):
        for old, new in renames:
            value = value.replace(old, new)
        return value
    if isinstance(value, dict):
        return {renamed(key, renames): renamed(one, renames) for key, one in value.items()}
    return [renamed(one, renames) for one in value] if isinstance(value, list) else value


def compare(before: Path, after: Path, names: Sequence[str], renames: Sequence[tuple[str, str]]) -> int:
    """Print every difference; 1 if there is one."""
    records = [json.loads(path.read_text()) for path in (before, after)]
    if names:
        records = [{name: one[name] for name in names if name in one} for one in records]
    found = list(differences(renamed(records[0], renames), records[1]))
    for line in found:
        print(line)
    counts = Counter(line.split(" / ")[0].splitlines()[0] for line in found)
    words = ", ".join(f"{count} in {name}" for name, count in counts.items())
    print(f"{len(found)} differences: {words}" if found else f"equal: {', '.join(records[0])}")
    return int(bool(found))


def split_rename(text: str) -> tuple[str, str]:
    old, equal, new = text.partition("=")
    if not (old and equal):
        raise argparse.ArgumentTypeError(f"{text} must be OLD=NEW")
    return old, new


def split_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("out", type=Path)
    recorder.add_argument("--root", type=Path, default=HERE)
    recorder.add_argument("--all", action="store_true", help="fake_gpu too")
    comparer = commands.add_parser("compare")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    comparer.add_argument("--rename", type=split_rename, action="append", default=[], metavar="OLD=NEW")
    for one in (recorder, comparer):
        one.add_argument("--only", type=split_names, default=[], metavar="PART,PART")
    options = parser.parse_args()
    if options.command == "compare":
        return compare(options.before, options.after, options.only, options.rename)
    names = options.only or [name for name in PARTS if options.all or name != "fake_gpu"]
    with tempfile.TemporaryDirectory(prefix="guard", dir="/tmp") as scratch:
        record(options.out, options.root, names, Path(scratch).resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
