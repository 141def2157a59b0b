"""Hand-written run folders and a parser of HTML pages, for the tests of sweeps and comparisons."""

import json
import math
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

VOID = {"meta", "link", "img", "br", "wbr", "hr", "input"}
SHAPE = {"model.dim": 32, "model.n_layers": 2, "model.n_heads": 4, "model.n_kv_heads": 2, "model.ffn_dim": 64}


def write_spec(place: Path, name: str = "study", **keys: Any) -> Path:
    """Write a sweep's YAML file with a small model."""
    spec = {"config": "llama_debug.yaml", "processes": 2, "folder": str(place / name), **keys}
    spec["overrides"] = {**SHAPE, "train.steps": 20, "metrics.every": 1, **keys.get("overrides", {})}
    path = place / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path


def row(step: int, loss: float | None = None, **more: Any) -> dict[str, Any]:
    """A row of metrics.jsonl, by default with a falling loss."""
    loss = 6.0 / (1 + step / 10) if loss is None else loss
    figures = {
        "step": step,
        "loss": loss if math.isfinite(loss) else None,
        "grad_norm": 1.0 + 1 / step,
        "lr": 1e-3,
    }
    figures |= {
        "tokens_per_s": 1000.0,
        "step_time_s": 0.256,
        "peak_memory_gib": 0.5,
        "data_hash": f"{step:016x}",
    }
    return figures | more


def write_run(
    folder: Path,
    rows: Iterable[Mapping[str, Any]],
    state: str = "finished",
    config: Mapping[str, Any] | None = None,
    **status: Any,
) -> Path:
    """Write a run's folder with these rows, in this order."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(rows)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    last = max((row["step"] for row in rows), default=0)
    (folder / "status.json").write_text(
        json.dumps({"state": state, "step": last, "resumed_from": None, "reason": "", **status})
    )
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(dict(config)))
    return folder


class Page(HTMLParser):
    """The elements of a page. An element that is not closed, or that loads anything from outside, is an
    AssertionError."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base"), tag
        for name, value in attrs:
            self._check(name, value or "")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def _check(self, name: str, value: str) -> None:
        """Links and url() may refer only to markers and clips of the page's own charts; xmlns loads
        nothing."""
        assert name not in ("src", "srcset", "action"), name
        assert not name.startswith("on"), name
        if name in ("href", "xlink:href"):
            assert value.startswith("#"), (name, value)
        elif not name.startswith("xmlns"):
            assert not [part for part in ("url(", "//") if part in value.replace("url(#", "")], (name, value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        for name, value in attrs:
            self._check(name, value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            assert not [part for part in ("url(", "@import", "//") if part in data], data
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)
