"""What a fault is: a snippet of the product's code, and what is put in its place."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault that the tests should notice.

    Args:
        name: what it is called in a record
        about: what is wrong with the code then, in a line
        found: code that stands exactly once in the product, wherever that is; one to three lines, with their
            indentation from the second one on
        becomes: what stands there instead
        tests: files that are about it, by path, which are tried first; one that is not there is passed over
    """

    name: str
    about: str
    found: str
    becomes: str
    tests: tuple[str, ...] = ()
