"""A fault: a snippet of the product's code, and its replacement."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault that the tests should detect.

    Args:
        name: its name in a record
        about: what is wrong with the code, in one line
        found: code that occurs exactly once in the product; one to three lines, with their indentation
            from the second line on
        becomes: its replacement
    """

    name: str
    about: str
    found: str
    becomes: str
