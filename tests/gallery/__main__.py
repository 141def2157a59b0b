"""`python -m tests.gallery`: run the gallery, and write its table into docs/proof.md."""

import re
import tempfile
import time
from pathlib import Path

from tests.gallery.faults import FAULTS
from tests.gallery.test_gallery import reports_on

PAGE = Path(__file__).parents[2] / "docs" / "proof.md"
BEGIN, END = "<!-- written by `python -m tests.gallery` -->\n", "<!-- end of what it writes -->"


def main() -> None:
    """Print one line for each fault, and write the table."""
    rows, caught, ones = [], 0, 0
    for fault in FAULTS:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = reports_on(fault, Path(folder))
        seconds = time.monotonic() - start
        first = found["wrong"].differences[0] if found["wrong"].differences else None
        says = "nothing" if first is None else f"{first.run}: {first.name}: {first.kind or 'differs'}"
        one = "NO" if found["one"].same else "yes"
        caught += found["right"].same and not found["wrong"].same
        ones += one == "yes"
        rows.append(f"| {fault.what} | {fault.where} | {says} | {one} | {seconds:.1f} |")
        print(rows[-1], flush=True)
    head = "| fault | where | the report's first line | in one place | seconds |\n|---|---|---|---|---|\n"
    told = f"\nCaught: {caught} of {len(FAULTS)}; in one place {ones} of {len(FAULTS)}.\n"
    text = BEGIN + head + "\n".join(rows) + "\n" + told + END
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: text, page, flags=re.S))


if __name__ == "__main__":
    main()
