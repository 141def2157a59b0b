"""A record that is written after every case, and gone on with by the next call."""

import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.tools.bench import harness
from meshwright.tools.processes import BenchError

# in one record
SAME = (("hardware", "gpu"), ("hardware", "cpu"), ("versions", "torch"), ("figures", "shape"))


class CaseRecord:
    """Cases by name: {state: measured | failed | absent, reason, config, runs: [figures], commits}. With no
    path nothing is kept."""

    def __init__(self, path: Path | None, document: dict[str, Any]) -> None:
        self.path, self.document = path, document

    @property
    def cases(self) -> dict[str, Any]:
        cases: dict[str, Any] = self.document["figures"]["cases"]
        return cases

    def runs(self, name: str) -> int:
        """How many runs of a case need not be made again; of one that failed or is absent no more are
        made."""
        case = self.cases.get(name, {"state": "none", "runs": []})
        return len(case["runs"]) if case["state"] in ("measured", "none") else 1_000_000

    def forget(self, name: str) -> None:
        """Measure it again."""
        self.cases.pop(name, None)

    def add(self, name: str, config: Any, figures: dict[str, Any]) -> None:
        """One more run of a case."""
        case = self.cases.setdefault(
            name, {"state": "measured", "reason": None, "config": config, "runs": [], "commits": []}
        )
        case["runs"].append(figures)
        self._stamp(case)

    def give_up(self, name: str, state: str, config: Any, reason: str) -> None:
        """A case that failed, or whose peer is absent; runs that went well before are kept."""
        case = self.cases.setdefault(name, {"config": config, "runs": [], "commits": []})
        case |= {"state": "measured" if case["runs"] else state, "reason": reason}
        self._stamp(case)

    def _stamp(self, case: dict[str, Any]) -> None:
        case["commits"].append(harness.find_versions()["commit"])
        case["date"] = datetime.date.today().isoformat()
        self.save()

    def save(self) -> None:
        """Write the file by one rename: a call that is cut off leaves a whole one."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text(
            json.dumps(harness.without_names(self.document), indent=2) + "\n", encoding="utf-8"
        )
        os.replace(partial, self.path)


def open_record(
    name: str | None, command: Sequence[str], shape: str, folder: Path | None = None
) -> CaseRecord:
    """The newest record of that name, else a new one; None: one that is not kept. Raises BenchError where the
    newest is of another machine, torch or shape."""
    folder = folder or harness.RECORDS
    document = harness.make_document("gpu", command, None, {"shape": shape, "cases": {}})
    if name is None:
        return CaseRecord(None, document)
    harness.check_name(name)
    found = sorted(folder.glob(f"????-??-??-{name}.json"))
    if not found:
        return CaseRecord(folder / f"{document['date']}-{name}.json", document)
    kept: dict[str, Any] = json.loads(found[-1].read_text(encoding="utf-8"))
    for section, key in SAME:
        before, now = kept[section].get(key), document[section].get(key)
        if before != now:
            raise BenchError(
                f"--record {name}: {found[-1].name} is of {key} {before}, here it is {now}. Name another "
                "record"
            )
    return CaseRecord(found[-1], kept)
