"""`python -m tools.import_accelerate FSDP.yaml`: convert an accelerate config to a config of this trainer.

Of two keys that contradict each other, the one that accelerate uses wins; where its launcher replaces a value
by a default, the file's value is used, with a note.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from shlex import quote
from typing import Any

from meshwright.parallel.errors import PlanError, each_line, one_line
from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.yaml_io import YamlError, load_mapping, load_value, to_yaml
from meshwright.tools.cli import new_parser, run_tool, to_json
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning.resolve import plan_run

DESCRIPTION = """example:
  python -m tools.import_accelerate FSDP.yaml > my.yaml            FSDP.yaml: the file of `accelerate config`

It prints the config of this trainer for an accelerate FSDP config and, on stderr, what becomes of each key;
what this trainer lacks is refused. Such files have no model and no data: put a config with them first, as in
  torchrun --nproc-per-node 8 -m train.main --config llama_8b --config my.yaml
"""
TABLE = load_mapping(Path(__file__).with_suffix(".yaml"))
NOTES, DEFAULTS = TABLE.pop("notes"), TABLE.pop("defaults")
ROWS = {place + key: row for place in TABLE for keys, row in TABLE[place].items() for key in keys.split()}
SECTIONS = dict(place.split(".") for place in TABLE if place)  # each with the prefix of its keys
TRUE, FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")  # its str_to_bool
STRATEGY, RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
Values = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the config, and on stderr what becomes of every key. Raises ConfigError."""
    parser = new_parser("import_accelerate", "FSDP.yaml", DESCRIPTION)
    parser.add_argument("file", metavar="FILE", type=Path, help="accelerate's YAML")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    imported = convert(options.file)
    if options.json:
        print(to_json(imported))
        return
    print(f"# Imported from {options.file} by tools.import_accelerate. Launch:\n# {imported['launch']}")
    print(to_yaml(imported["config"]), end="")
    items = [f"  {item}: {becomes}" for item, becomes in imported["items"].items()]
    notes = [f"note: {note}" for note in imported["notes"]]
    print("keys:", *items, *notes, "launch:", f"  {imported['launch']}", sep="\n", file=sys.stderr)


def convert(file: Path) -> dict[str, Any]:
    """Return the config, nested as in YAML, what becomes of each key, the launch command, and notes. Raises
    ConfigError, also for a plan that is impossible with any model."""
    given, items, settings = read_file(file)
    notes = [*decide(given, settings)]
    try:
        job = parse_config([f"--{key}={_text(value)}" for key, value in settings.items()]).job
        plan_run(job, given["num_processes"])
    except (ConfigError, PlanError) as error:
        lines = str(error).splitlines()
        # the config before this one may replace the default model and sequence length
        if not all(" must divide model." in line or " must divide train.seq_len" in line for line in lines):
            raise ConfigError("\n".join(one_line(f"{file}, imported: {line}") for line in lines)) from None
        notes += [f"checked with the default model only: {line}" for line in lines]
    config: dict[str, Any] = {}
    for key, value in sorted(settings.items(), key=lambda setting: setting[0].split(".")[0]):
        *sections, name = key.split(".")
        reduce(lambda table, section: table.setdefault(section, {}), sections, config)[name] = value
    notes.append(NOTES["model"])
    document = {"source": str(file), "config": config, "items": items}
    return document | {"launch": launch_line(given), "notes": notes}


def read_file(file: Path) -> tuple[Values, dict[str, str], Values]:
    """Return the values by plain names, what becomes of each key, and the settings of single keys. Raises
    ConfigError with everything that is refused."""
    try:
        config = load_mapping(file)
    except YamlError as error:
        raise ConfigError(str(error)) from None
    if not config:
        raise ConfigError(f"{file}: the file is empty; expected the YAML that `accelerate config` writes")
    given, settings, items, refused = Values(), Values(), dict[str, str](), list[str]()
    kind = str(config.get("distributed_type")).upper().replace("FALSE", "NO")
    if kind in ("MULTI_GPU", "MULTI_CPU", "NO") and config.pop("fsdp_config", None):
        items["fsdp_config"] = f"distributed_type {kind} does not read it, as in accelerate"
    for key, name, value in flatten(config):
        plain, item = name.rpartition(".")[2], f"{one_line(key, 300)}={_text(value)}"
        how, items[item] = ROWS.get(name, ("unknown", unknown(name)))
        try:
            if plain in given:
                raise ValueError(f"the file has {plain} twice: delete one of them")
            if value is not None:
                given[plain] = None
                given[plain] = read(value, how, items[item])
        except ValueError as error:
            refused.append(f"{item}: {error}")
        if value is None:
            items[item] = "it has no value"
        elif match := re.match(r"sets ([\w.]+)(?: ([\w|]+))?", items[item]):
            names = ["True", "False"] if how == "bool" else how.lstrip("#").split("|")
            ours = dict(zip(names, (match[2] or "").split("|"), strict=False)).get(str(given[plain]))
            settings[match[1]] = load_value(ours) if ours else given[plain]
    if refused := [*refused, *contradictions(given)]:
        raise ConfigError(each_line("\n".join(f"{file}: {line}" for line in refused)))
    if kind == "NO":
        given["num_processes"] = given.get("num_machines", 1)
    return DEFAULTS | given, items, settings


def flatten(config: Values) -> Iterator[tuple[str, str, Any]]:
    """Yield each key as it is written, its name in ROWS, and its value."""
    for key, value in config.items():
        if key not in SECTIONS or not isinstance(value, dict):
            yield key, key, value
            continue
        for inner, leaf in value.items():
            yield f"{key}.{inner}", f"{key}.{SECTIONS[key]}{inner.removeprefix(SECTIONS[key])}", leaf


def unknown(name: str) -> str:
    """Return why a name that is not in ROWS is refused."""
    if name in SECTIONS:
        return "it is a section and needs a mapping of keys to values"
    same_end = [known for known in ROWS if known.rpartition(".")[2] == name]
    hint = f" Did you mean {same_end[0]}?" if same_end else nearest(name, [*ROWS, *SECTIONS])
    return f"unknown key.{hint or ' Remove it.'}"


def read(value: Any, how: str, why: str) -> Any:
    """Return a value as a row of TABLE says, with `why` it may be refused. Raises ValueError."""
    texts = [str(each).strip().lower() for each in (value if isinstance(value, list) else [value])]
    text, kind, names = texts[0], how.partition("#")[0], how.removeprefix("bool").lstrip("#").split("|")
    if how == "unknown" or (how == "off" and {*texts} - {"", "none", "{}", *FALSE}):
        raise ValueError(why)
    if how in ("any", "off"):
        return value
    if how.isdecimal():
        if type(value) in (int, str) and text.isdecimal() and int(text) >= int(how):
            return int(text)
        raise ValueError(f"it must be an integer of at least {how}")
    if kind == "bool" and text in {*TRUE, *FALSE} and (text != "1" or how == "bool"):
        return text in TRUE
    if how == "bool":
        raise ValueError("it must be true or false")
    known = {name.upper(): name for name in names}
    numbers = {str(number): name for number, name in enumerate(names, 1) if "#" in how}
    for part in ",".join(texts).upper().split(","):
        ours = (known | numbers).get("NO" if value is False else part.strip())
        if not ours:
            or_number = f" Or a number, 1 to {len(names)}" if numbers else ""
            near = nearest(part, known)
            raise ValueError(f"it must be one of {', '.join(names)}.{near}{or_number} ({why})")
    return ours


def contradictions(given: Values) -> Iterator[str]:
    """Yield what is missing, contradicts another key, or is not in this trainer. None: refused already."""
    kind, processes = given.get("distributed_type", ""), given.get("num_processes", 0)
    machines, size = given.get("num_machines") or 1, given.get("parallelism_config_sp_size") or 1
    if kind == "":
        yield "distributed_type: the key is missing: set it to one of FSDP, MULTI_GPU, MULTI_CPU, NO"
    if processes == 0 and kind != "NO":
        yield "num_processes: the key is missing: set it to the number of processes on all machines together"
    if processes and processes % machines and kind != "NO":
        yield f"num_processes={processes}: it must be a multiple of num_machines={machines}"
    if size > 1:
        yield f"sp_size={size}: sequence parallelism by DeepSpeed is not in this version: set it to 1"


def launch_line(given: Values) -> str:
    """Return the command that starts the run, the same on every machine."""
    machines, per_machine = given["num_machines"], given["num_processes"] // given["num_machines"]
    address = f"{given.get('main_process_ip') or 'HOST'}:{given.get('main_process_port') or 29500}"
    launcher = f"torchrun --nproc-per-node {per_machine}" if given["num_processes"] > 1 else "python"
    if machines > 1:
        launcher = f"torchrun --nnodes {machines} --nproc-per-node {per_machine} --rdzv-backend c10d "
        launcher += f"--rdzv-endpoint {quote(address)}"
    gpus = "" if given["gpu_ids"] == "all" else f"CUDA_VISIBLE_DEVICES={quote(str(given['gpu_ids']))} "
    return f"{gpus}{launcher} -m train.main --config MODEL.yaml --config CONFIG.yaml"


def decide(given: Values, settings: Values) -> Iterator[str]:
    """Set what several keys decide, and yield notes. accelerate's FSDP reduces gradients in the dtype of the
    computation, its DistributedDataParallel in float32; fsdp_min_num_params is 100,000,000 by default."""
    fsdp, backend = given["distributed_type"] == "FSDP", given.get("dynamo_backend")
    if given["distributed_type"].startswith("MULTI_"):
        settings["parallel.strategy"] = "ddp"
    if dtype := settings.get("parallel.param_dtype"):
        settings["parallel.reduce_dtype"] = dtype if fsdp else "float32"
    settings["parallel.compile.enabled"] = compiled = backend not in (None, "no")
    if backend is None:
        yield NOTES["eager"]
    if compiled:
        settings["parallel.compile.backend"] = backend
        settings |= {} if dtype == "bfloat16" else {"parallel.compile.float32_matmul_precision": "high"}
    if (steps := given["gradient_accumulation_steps"]) > 1:
        inner = given.get("parallelism_config_cp_size", 1) * given.get("parallelism_config_tp_size", 1)
        settings["train.micro_batch_size"] = 1
        settings["train.global_batch_size"] = steps * (given["num_processes"] // inner)
        reduced = "every_micro_batch" if given.get("sync_each_batch") else "last_micro_batch"
        settings |= {"parallel.reduce_gradients": reduced} if fsdp else {}
    if policy := given.get("fsdp_auto_wrap_policy"):
        least = given.get("fsdp_min_num_params", 100_000_000) if policy == "SIZE_BASED_WRAP" else 0
        settings["parallel.unit_min_params"] = least
    yield from decide_sharding(given, settings)


def decide_sharding(given: Values, settings: Values) -> Iterator[str]:
    """Set the strategy, and yield notes. accelerate reads STRATEGY with fsdp_version 1, RESHARD with 2.

    A hybrid strategy shards within each machine and replicates across machines. On several machines the
    degrees are written out, so that they do not depend on how processes are later spread over machines.
    """
    version, machines = given["fsdp_version"], given["num_machines"]
    key, other = (STRATEGY, RESHARD) if version == "1" else (RESHARD, STRATEGY)
    if key in given and other in given:
        yield NOTES["twice"].format(key, _text(given[key]), other, _text(given[other]), version)
    key = key if key in given else other
    name = given.get(key)
    if version == "2" and isinstance(name, bool):
        settings["parallel.reshard_after_forward"], name = name, None
    if name is None:
        return
    if isinstance(name, bool):
        name = "FULL_SHARD" if name else "SHARD_GRAD_OP"
    if version == "2" or (key == RESHARD and name != "FULL_SHARD"):
        yield NOTES[f"other_key_{version}"].format(name)
    degrees_given = any(key.startswith("parallelism_config_") for key in given)
    spread = name.startswith("HYBRID") and machines > 1 and not degrees_given
    if spread:
        per_machine = given["num_processes"] // machines
        settings |= {"parallel.dp_replicate": machines, "parallel.dp_shard": per_machine}
    elif not degrees_given:
        settings["parallel.strategy"] = name.lower()
    if name != "NO_SHARD" and (degrees_given or spread):
        settings["parallel.reshard_after_forward"] = name in ("FULL_SHARD", "HYBRID_SHARD")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else one_line(value, 300)


if __name__ == "__main__":
    run_tool(main)
