"""Tokenizers: bytes, built in, or any tokenizer.json of the `tokenizers` library."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.parallel.errors import one_line
from meshwright.parallel.structure import Natural
from meshwright.train.errors import DataError
from meshwright.train.files import read_bounded, read_json, user_path

BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>")  # of Llama 3, Llama 2, Gemma
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")  # the same, and GPT-2
CONFIG_BYTES = 2**24  # of a tokenizer_config.json; the largest list some ten thousand added tokens
FILE_BYTES = 2**28  # of a tokenizer.json; those with a quarter of a million tokens have 35 MB


@dataclass(frozen=True)
class TokenizerInfo:
    """What data made with a tokenizer must know of it.

    Args:
        name: bytes, or the name of the folder its file came from
        sha256: of tokenizer.json; "" for bytes
        vocab_size: its largest id + 1
        bos: id in front of each document, or None
        eos: id after each document
    """

    name: str
    sha256: str
    vocab_size: Natural
    bos: Natural | None
    eos: Natural

    @property
    def start(self) -> int:
        """The id that a text begins after: BOS, or without one what ends the document before."""
        return self.eos if self.bos is None else self.bos


class Tokenizer(Protocol):
    """Text to ids and back."""

    info: TokenizerInfo

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        """Ids of each text, which is UTF-8, without BOS and EOS. What looks like a special token is text too.

        Raises UnicodeDecodeError where a text must be UTF-8 and is not, and DataError where it has no ids.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; BOS, EOS and unknown ids are left out, broken UTF-8 is shown as such."""


class ByteTokenizer:
    """Every byte is a token; 256 ends a document."""

    info = TokenizerInfo("bytes", "", 257, None, 256)

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        return [np.frombuffer(text, np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer.json of the `tokenizers` library.

    `bos` and `eos` are as in DataConfig. With auto the tokenizer_config.json beside counts, then names that
    are known; where its add_bos_token is false there is no BOS. Its add_eos_token does not count: EOS
    separates documents, so each one has it.
    """

    def __init__(
        self, path: Path, bos: str = "auto", eos: str = "auto", info: TokenizerInfo | None = None
    ) -> None:
        """`info`: of data made with it, which then need not be found out. Raises DataError."""
        import tokenizers

        self.path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = read_bounded(self.path, FILE_BYTES)
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except BaseException as error:
            if not _is_refusal(error):
                raise
            raise DataError(
                f"data.tokenizer={path}: {self.path} is not a tokenizer.json that the tokenizers library "
                f"reads ({one_line(error, 300)}): name such a file, its folder, or bytes"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # of a text that spells one out: it must not end a document
        self._tokenizer.encode_special_tokens = True
        self.info = info or self._find_info(hashlib.sha256(content).hexdigest(), bos, eos)
        self._ends = [token for token in (self.info.bos, self.info.eos) if token is not None]
        spelled = [token for end in self._ends if (token := self._tokenizer.id_to_token(end))]
        self._tokenizer.add_special_tokens(spelled)  # some files have them as ordinary ones
        self._apart = _after_first_letter(spelled)

    def _find_info(self, sha256: str, bos: str, eos: str) -> TokenizerInfo:
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        said = _said_beside(self.path)
        none = bos == "none" or (bos == "auto" and said.get("add_bos_token") is False)
        bos_id = None if none else _find_token(ids, "bos", bos, said.get("bos_token"), BOS_NAMES, self.path)
        eos_id = _find_token(ids, "eos", eos, said.get("eos_token"), EOS_NAMES, self.path)
        if eos_id is None:
            special = ", ".join(_special(self._tokenizer)[:4])
            raise DataError(
                f"data.tokenizer={self.path} has none of {', '.join(EOS_NAMES)} to end a document with: name "
                f"its token with data.eos{f', such as one of {special}' if special else ''}"
            )
        return TokenizerInfo(self.path.resolve().parent.name, sha256, max(ids.values()) + 1, bos_id, eos_id)

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        words = [text.decode() for text in texts]
        found = self._ids_of(words)
        if not self._has_ends(found):
            return found
        return [
            self._take_apart(text) if self._has_ends([ids]) else ids
            for text, ids in zip(words, found, strict=True)
        ]

    def _ids_of(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:
            if not _is_refusal(error):
                raise
            raise DataError(
                f"data.tokenizer={self.path} cannot encode a text ({one_line(error, 300)}): use a tokenizer "
                "that has an id for every text"
            ) from None
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def _has_ends(self, found: list[NDArray[np.uint32]]) -> bool:
        """Whether BOS or EOS is among the ids of texts."""
        ids = np.concatenate(found) if found else np.empty(0, np.uint32)
        return any(bool((ids == end).any()) for end in self._ends)

    def _take_apart(self, text: str) -> NDArray[np.uint32]:
        """Ids of a text with BOS or EOS spelled out in it, where the tokenizer knows that as a word: it is
        cut in two there."""
        ids = np.concatenate(self._ids_of(self._apart.split(text)))
        if self._has_ends([ids]):
            raise DataError(
                f"data.tokenizer={self.path} gives the id of BOS or EOS "
                f"({' or '.join(map(str, self._ends))}) for a text: name other tokens with data.bos and "
                "data.eos"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def load_tokenizer(name: str, bos: str = "auto", eos: str = "auto") -> Tokenizer:
    """The tokenizer that data.tokenizer, data.bos and data.eos mean; auto is bytes. Raises DataError."""
    if name not in ("auto", "bytes"):
        return JsonTokenizer(user_path(name, "data.tokenizer"), bos, eos)
    if (bos, eos) not in (("auto", "auto"), ("none", "auto")):
        raise DataError(
            f"data.bos={bos} and data.eos={eos} name tokens, but data.tokenizer=bytes has none: leave them "
            "at auto"
        )
    return ByteTokenizer()


def padded_vocab_size(vocab_size: int, multiple: int = 128) -> int:
    """The next multiple, which tensor parallelism of every usual degree divides, and which suits GPU matrix
    products."""
    return -(-vocab_size // multiple) * multiple


def check_vocabulary(tokenizer: TokenizerInfo, vocab_size: int) -> None:
    """DataError if the model has fewer ids than the tokenizer."""
    if vocab_size < tokenizer.vocab_size:
        padded = padded_vocab_size(tokenizer.vocab_size)
        raise DataError(
            f"model.vocab_size={vocab_size} is smaller than the {tokenizer.vocab_size} ids of the tokenizer "
            f"{tokenizer.name}: use {tokenizer.vocab_size} or more, best {padded}, a multiple of 128, which "
            "every parallel.tp up to 128 that is a power of two divides"
        )


def _is_refusal(error: BaseException) -> bool:
    """Whether the tokenizers library cannot use a file or a text: it raises Exception itself, as for a word
    without an id, and where its Rust code gives up, an error that is no Exception and has no public name."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _said_beside(path: Path) -> dict[str, Any]:
    """bos_token, eos_token and add_bos_token of the tokenizer_config.json that Hugging Face puts beside; {}
    without one.

    Raises DataError.
    """
    config = path.with_name("tokenizer_config.json")
    if not config.is_file():
        return {}
    try:
        plain = read_json(config, CONFIG_BYTES)
        kinds = {"bos_token": str, "eos_token": str, "add_bos_token": bool}
        return {
            key: _checked(key, plain[key], kind) for key, kind in kinds.items() if plain.get(key) is not None
        }
    except (OSError, ValueError) as error:
        raise DataError(
            f"{config} cannot be read ({error}): mend it, or move it away and name data.bos and data.eos"
        ) from None


def _checked(key: str, value: Any, kind: type) -> Any:
    """A token, also where Hugging Face has it as {"content": ...}, or true or false. ValueError where it is
    no such thing."""
    found = value.get("content") if isinstance(value, dict) and kind is str else value
    if not isinstance(found, kind):
        raise ValueError(
            one_line(f"{key}={value}", 80) + f" is no {'token' if kind is str else 'true or false'}"
        )
    return found


def _after_first_letter(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches the place after the first letter of each token of more than one, wherever a text has it."""
    places = (f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in tokens if token[1:])
    return re.compile("|".join(places) or r"(?!)")


def _find_token(
    ids: dict[str, int], key: str, asked: str, said: str | None, names: Sequence[str], path: Path
) -> int | None:
    """Id of the token asked for; with auto of what tokenizer_config.json says, else of the first known name,
    else None."""
    token = asked if asked != "auto" else said or next((name for name in names if name in ids), None)
    if token is not None and token not in ids:
        raise DataError(f"data.{key}={one_line(token, 80)} is no token of {path}: name one of its vocabulary")
    return None if token is None else ids[token]


def _special(tokenizer: Any) -> list[str]:
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
