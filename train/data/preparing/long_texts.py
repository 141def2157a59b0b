"""Long documents, which the tokenizers library would need some hundred bytes of memory for each byte of,
taken in parts.

A tokenizer looks only a little around it when it decides how text falls into tokens; but what it does at the
ends of a text is its own affair (one puts a space in front, one strips the end). So each place to cut is
tried: the text around it must give the same ids whole and cut. Where no place does, the text stays whole.
"""

import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

PART_BYTES = 2**20
_AROUND_BYTES = 2000  # a tokenizer's pieces are far shorter
_TRIES = 8
# after a line's end, or before a space: no UTF-8 character is split
_PLACE = re.compile(rb"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")

Encode = Callable[[list[bytes]], list[NDArray[np.uint32]]]
OnPart = Callable[[int, int], None]  # its bytes and its ids


def encode_in_parts(encode: Encode, text: bytes, dtype: np.dtype, on_part: OnPart) -> list[NDArray[Any]]:
    """The ids of a text as `encode` gives them of the whole, part after part, each of which `on_part` hears
    of."""
    ids = []
    for part in cut_text(encode, text):
        ids.append(encode([part])[0].astype(dtype))
        on_part(len(part), len(ids[-1]))
    return ids


def cut_text(encode: Encode, text: bytes) -> Iterator[bytes]:
    """The text in parts of little more than PART_BYTES, the ids of which are together those of the text."""
    begin = 0
    while begin + 2 * PART_BYTES < len(text):
        places = (match.start() for match in _PLACE.finditer(text, begin + PART_BYTES))
        place = next((place for place in islice(places, _TRIES) if _may_cut(encode, text, place)), len(text))
        yield text[begin:place]
        begin = place
    if begin < len(text):
        yield text[begin:]


def _may_cut(encode: Encode, text: bytes, place: int) -> bool:
    """Whether the text around a place gives the same ids whole and cut there."""
    before, after = text[max(0, place - _AROUND_BYTES) : place], text[place : place + _AROUND_BYTES]
    # half characters at the far ends go
    before, after = (part.decode(errors="ignore").encode() for part in (before, after))
    left, right, whole = encode([before, after, before + after])
    return np.array_equal(np.concatenate([left, right]), whole)
