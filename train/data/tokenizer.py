"""Tokenizers: built-in bytes, or any tokenizer.json of the `tokenizers` library."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.parallel.errors import one_line
from meshwright.parallel.structure import Natural
from meshwright.train.errors import DataError
from meshwright.train.files import read_bounded, read_json, user_path

EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")  # of Llama 3, Llama 2, Gemma, GPT-2
FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
# what transformers reads of a tokenizer
FILES = (FILE, CONFIG, "special_tokens_map.json", "tokenizer.model", "chat_template.jinja")
CONFIG_BYTES = 2**24  # limit of a tokenizer_config.json; the largest list some ten thousand added tokens
FILE_BYTES = 2**28  # limit of a tokenizer.json; those with a quarter of a million tokens have 35 MB


@dataclass(frozen=True)
class TokenizerInfo:
    """The properties of a tokenizer that are stored with the data made with it. `name`: bytes, or that of the
    folder of its tokenizer.json; `sha256`: of this file, "" for bytes; `vocab_size`: the largest id + 1;
    `bos`, `eos`: the ids in front of each document (None: none) and after it."""

    name: str
    sha256: str
    vocab_size: Natural
    bos: Natural | None
    eos: Natural

    @property
    def start(self) -> int:
        """The id in front of a text: BOS, or without BOS the EOS of the document before."""
        return self.eos if self.bos is None else self.bos


class Tokenizer(Protocol):
    """Converts text to ids and ids to text."""

    info: TokenizerInfo

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        """Return the ids of each UTF-8 text, without BOS and EOS; spelled-out special tokens are plain text.

        Raises UnicodeDecodeError if the tokenizer needs UTF-8 and a text is not, DataError if a text has no
        ids.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; BOS, EOS and unknown ids are left out, invalid UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """Every byte is a token; id 256 ends a document."""

    info = TokenizerInfo("bytes", "", 257, None, 256)

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        return [np.frombuffer(text, np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer.json of the `tokenizers` library.

    `bos` and `eos` are as in DataConfig. For EOS, which ends every document, auto takes the token of the
    tokenizer_config.json in the same folder, then a known name; for BOS, the token that the tokenizer puts in
    front of a text, by its post-processor or by add_bos_token of that file. A BOS that is EOS is left out: it
    would separate documents twice.
    """

    def __init__(
        self, path: Path, bos: str = "auto", eos: str = "auto", info: TokenizerInfo | None = None
    ) -> None:
        """Load the file. `info` is that of data made with it; without it, or if it is of another file, it is
        derived. Raises DataError."""
        import tokenizers

        self.path = path / FILE if path.is_dir() else path
        try:
            content = read_bounded(self.path, FILE_BYTES)
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except BaseException as error:
            if not _is_library_error(error):
                raise
            raise DataError(
                f"data.tokenizer={path}: {self.path} is not a tokenizer.json that the tokenizers library "
                f"can read ({one_line(error, 300)}): use such a file, its folder, or bytes"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # a special token that a text spells out must not end the document
        self._tokenizer.encode_special_tokens = True
        sha256 = hashlib.sha256(content).hexdigest()
        self.info = info if info and info.sha256 == sha256 else self._find_info(sha256, bos, eos)
        self._ends = [token for token in (self.info.bos, self.info.eos) if token is not None]
        spelled = [token for end in self._ends if (token := self._tokenizer.id_to_token(end))]
        self._tokenizer.add_special_tokens(spelled)  # some files list them as ordinary tokens
        self._split_pattern = _after_first_letter(spelled)

    def _find_info(self, sha256: str, bos: str, eos: str) -> TokenizerInfo:
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        config = _read_tokenizer_config(self.path)
        eos_id = _find_token(ids, "eos", eos, config.get("eos_token"), EOS_NAMES, self.path)
        bos_id = self._find_bos(ids, bos, config)
        if eos_id is None:
            added = self._tokenizer.get_added_tokens_decoder().values()
            special = ", ".join([token.content for token in added if token.special][:4])
            raise DataError(
                f"data.tokenizer={self.path} has none of the known EOS tokens {', '.join(EOS_NAMES)}: set "
                "data.eos to the token that ends a document"
                f"{f', such as one of {special}' if special else ''}"
            )
        name, size = self.path.resolve().parent.name, max(ids.values()) + 1
        return TokenizerInfo(name, sha256, size, None if bos_id == eos_id else bos_id, eos_id)

    def _find_bos(self, ids: dict[str, int], bos: str, config: dict[str, Any]) -> int | None:
        adds, token = config.get("add_bos_token"), config.get("bos_token")
        if bos == "none" or (bos == "auto" and adds is False):
            return None
        if bos != "auto" or (adds and token):
            return _find_token(ids, "bos", bos, token, (), self.path)
        with suppress(Exception):  # the library's, of a model without an id for the letter
            encoding = self._tokenizer.encode("a")
            return encoding.ids[0] if encoding.special_tokens_mask[:1] == [1] else None
        return None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        decoded = [text.decode() for text in texts]
        encoded = self._ids_of(decoded)
        if not self._has_ends(encoded):
            return encoded
        return [
            self._encode_split(text) if self._has_ends([ids]) else ids
            for text, ids in zip(decoded, encoded, strict=True)
        ]

    def _ids_of(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:
            if not _is_library_error(error):
                raise
            raise DataError(
                f"data.tokenizer={self.path} cannot encode a text ({one_line(error, 300)}): use a tokenizer "
                "that has an id for every text"
            ) from None
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def _has_ends(self, encoded: list[NDArray[np.uint32]]) -> bool:
        """Whether BOS or EOS is among the ids of texts."""
        ids = np.concatenate(encoded) if encoded else np.empty(0, np.uint32)
        return any(bool((ids == end).any()) for end in self._ends)

    def _encode_split(self, text: str) -> NDArray[np.uint32]:
        """Ids of a text that spells out BOS or EOS, for a tokenizer whose model has that as a word: the text
        is split inside the word."""
        ids = np.concatenate(self._ids_of(self._split_pattern.split(text)))
        if self._has_ends([ids]):
            raise DataError(
                f"data.tokenizer={self.path} encodes a text to the id of BOS or EOS "
                f"({' or '.join(map(str, self._ends))}): set other tokens with data.bos and data.eos"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """Return the files of a tokenizer by name: its tokenizer.json at `path`, which may have another name, and
    those beside it that transformers reads. Raises OSError and ValueError."""
    files = {name: path if name == FILE else path.with_name(name) for name in FILES}
    return {name: read_bounded(file, FILE_BYTES) for name, file in files.items() if file.is_file()}


def byte_tokenizer_json() -> bytes:
    """Return a tokenizer.json that gives the ids of ByteTokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # the library writes a byte as the letter of its number, or if that cannot be shown as one from 256 on
    shown = [byte for byte in range(256) if chr(byte) in pre_tokenizers.ByteLevel.alphabet()]
    hidden = {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*shown}))}
    made = Tokenizer(models.BPE({**{chr(byte): byte for byte in shown}, **hidden}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([EOS_NAMES[-1]])
    return made.to_str().encode()


def name_tokens(files: Mapping[str, bytes], info: TokenizerInfo) -> dict[str, bytes]:
    """Return the files of a tokenizer with a tokenizer_config.json that names EOS, BOS if there is one, and a
    class that every version of transformers has, where it names none."""
    if FILE not in files:
        return dict(files)
    from tokenizers import Tokenizer

    library, config = Tokenizer.from_str(files[FILE].decode()), json.loads(files.get(CONFIG, "{}"))
    ids = {"eos_token": info.eos, "bos_token": info.bos}
    named: dict[str, Any] = {key: library.id_to_token(i) for key, i in ids.items() if i is not None}
    named |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    named |= {key: value for key, value in config.items() if value not in (None, "TokenizersBackend")}
    return {**files, CONFIG: (json.dumps({**config, **named}, indent=2) + "\n").encode()}


def load_tokenizer(name: str, bos: str = "auto", eos: str = "auto") -> Tokenizer:
    """Load the tokenizer of data.tokenizer, data.bos and data.eos; auto is bytes. Raises DataError."""
    if name not in ("auto", "bytes"):
        return JsonTokenizer(user_path(name, "data.tokenizer"), bos, eos)
    if (bos, eos) not in (("auto", "auto"), ("none", "auto")):
        raise DataError(
            f"data.bos={bos} and data.eos={eos} name tokens, but data.tokenizer=bytes has none: leave them "
            "at auto"
        )
    return ByteTokenizer()


def padded_vocab_size(vocab_size: int) -> int:
    """Round a vocabulary size up to a multiple of 128, which every usual tp degree divides, and with which
    GPU matrix multiplications are fast."""
    return -(-vocab_size // 128) * 128


def check_vocabulary(tokenizer: TokenizerInfo, vocab_size: int) -> None:
    """DataError if the model has fewer ids than the tokenizer."""
    if vocab_size < tokenizer.vocab_size:
        padded = padded_vocab_size(tokenizer.vocab_size)
        raise DataError(
            f"model.vocab_size={vocab_size} is smaller than the {tokenizer.vocab_size} ids of the tokenizer "
            f"{tokenizer.name}: use {tokenizer.vocab_size} or more, best {padded}, a multiple of 128, which "
            "is divisible by every parallel.tp that is a power of two up to 128"
        )


def _is_library_error(error: BaseException) -> bool:
    """Whether the tokenizers library raised an error for a file or a text.

    It raises Exception itself, e.g. for a word without an id. A panic of its Rust code is not an Exception
    and its class has no public name.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _read_tokenizer_config(path: Path) -> dict[str, Any]:
    """Read bos_token, eos_token and add_bos_token from the tokenizer_config.json next to a tokenizer.json; {}
    if there is none.

    Raises DataError.
    """
    config = path.with_name(CONFIG)
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
            f"{config} cannot be read ({error}): fix it, or remove it and set data.bos and data.eos"
        ) from None


def _checked(key: str, value: Any, kind: type) -> Any:
    """The value as a token (also from {"content": ...}, as Hugging Face writes it) or as a bool. ValueError
    if it has another type."""
    content = value.get("content") if isinstance(value, dict) and kind is str else value
    if not isinstance(content, kind):
        raise ValueError(
            one_line(f"{key}={value}", 80) + f" is not {'a token' if kind is str else 'true or false'}"
        )
    return content


def _after_first_letter(tokens: Sequence[str]) -> re.Pattern[str]:
    """A pattern for the place after the first letter of each of these tokens with more than one letter."""
    places = (f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in tokens if token[1:])
    return re.compile("|".join(places) or r"(?!)")


def _find_token(
    ids: dict[str, int], key: str, requested: str, configured: str | None, names: Sequence[str], path: Path
) -> int | None:
    """The id of the requested token; auto: that of tokenizer_config.json or the first known name, or None."""
    token = configured or next((name for name in names if name in ids), None)
    token = token if requested == "auto" else requested
    if token is not None and token not in ids:
        raise DataError(
            f"data.{key}={one_line(token, 80)} is not a token of {path}: use a token of its vocabulary"
        )
    return None if token is None else ids[token]
