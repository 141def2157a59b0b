"""The results for all faults: a JSON file that is written after each one, so that an interrupted run can
resume."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """The result for one fault: the test that caught it and how, "" for none; seconds; the number of tests
    run; and the commit it was tried at."""

    caught: bool
    test: str
    how: str
    seconds: float
    ran: int
    commit: str


@dataclass
class Record:
    """Outcomes by fault, in the order of the table, and the commit at which the last faults were tried."""

    path: Path
    commit: str = ""
    faults: dict[str, Outcome] = field(default_factory=dict)

    @property
    def caught(self) -> int:
        return sum(outcome.caught for outcome in self.faults.values())

    def write(self) -> None:
        faults = {name: asdict(outcome) for name, outcome in self.faults.items()}
        content = {"commit": self.commit, "caught": self.caught, "of": len(faults), "faults": faults}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


def read_record(path: Path) -> Record:
    """Return the existing record, or an empty one."""
    if not path.exists():
        return Record(path)
    plain = json.loads(path.read_text(encoding="utf-8"))
    return Record(
        path, plain["commit"], {name: Outcome(**outcome) for name, outcome in plain["faults"].items()}
    )


def to_line(name: str, outcome: Outcome, width: int = 0) -> str:
    """Return the line of one fault in the table."""
    result = outcome.test or f"SURVIVED {outcome.ran} tests {outcome.how}".rstrip()
    return f"{name:{width}}  {outcome.seconds:5.0f} s  {result}"


def to_table(record: Record) -> str:
    """Return a line for each fault, with its commit if that is not the record's."""
    width = max(map(len, record.faults), default=0)
    lines = [
        to_line(name, outcome, width)
        + (f"  (at {outcome.commit})" if outcome.commit != record.commit else "")
        for name, outcome in record.faults.items()
    ]
    return "\n".join([*lines, f"{record.caught} of {len(record.faults)} caught"])
