"""train/data/tokenizer.py: any tokenizer.json gives the ids of the tokenizers library, and its BOS and EOS
are found."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from meshwright.train.data.tokenizer import ByteTokenizer, TokenizerInfo, load_tokenizer
from meshwright.train.errors import DataError
from tests.support.texts import odd_texts, train_bpe


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(tmp_path_factory.mktemp("of") / "small")


def with_special(path: Path, folder: Path, *special: str, **config: object) -> Path:
    """Copy a tokenizer with other special tokens, and a tokenizer_config.json if `config` has keys; with the
    key `template` None without the post-processor."""
    plain = json.loads(path.read_text())
    plain["post_processor"] = config.pop("template", plain["post_processor"])
    for i, old in enumerate(("<s>", "</s>")):
        plain["model"]["vocab"][special[i]] = plain["model"]["vocab"].pop(old)
        plain["added_tokens"][i]["content"] = special[i]
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(plain))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_bytes_are_their_own_ids_and_256_ends_a_document() -> None:
    tokenizer = load_tokenizer("auto")
    assert tokenizer.info == load_tokenizer("bytes").info == TokenizerInfo("bytes", "", 257, None, 256)
    text = bytes(range(256))
    (ids,) = tokenizer.encode([text])
    assert ids.tolist() == list(text)
    assert tokenizer.decode([*"é".encode(), 256, 300, 0xFF]) == "é\ufffd"
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode([]) == []


def test_ids_are_those_of_the_library_and_come_back_as_the_text(bpe: Path) -> None:
    tokenizer, library = load_tokenizer(str(bpe)), tokenizers.Tokenizer.from_file(str(bpe))
    texts = [text.replace("<s>", "").replace("</s>", "") for text in odd_texts(300, seed=20)]
    found = tokenizer.encode([text.encode() for text in texts])
    assert [ids.tolist() for ids in found] == [
        library.encode(text, add_special_tokens=False).ids for text in texts
    ]
    assert all(ids.dtype == np.uint32 for ids in found)
    assert [tokenizer.decode(ids.tolist()) for ids in found] == texts
    assert tokenizer.info == TokenizerInfo("small", tokenizer.info.sha256, 600, 0, 1)
    assert load_tokenizer(str(bpe.parent)).info == tokenizer.info, "the folder is the same tokenizer"


def test_what_looks_like_a_special_token_in_a_text_is_text(bpe: Path) -> None:
    """Otherwise a document that spells out </s> would end there."""
    tokenizer, library = load_tokenizer(str(bpe)), tokenizers.Tokenizer.from_file(str(bpe))
    (ids,) = tokenizer.encode([b"a</s>b<s>"])
    assert 1 in library.encode("a</s>b<s>").ids
    assert not {0, 1} & set(ids.tolist())
    assert tokenizer.decode(ids.tolist()) == "a</s>b<s>"
    assert tokenizer.decode([0, *ids.tolist(), 1]) == "a</s>b<s>"


def test_bos_and_eos_that_the_file_has_as_ordinary_tokens_never_come_out_of_text(
    bpe: Path, tmp_path: Path
) -> None:
    plain = json.loads(bpe.read_text())
    for added in plain["added_tokens"]:
        added["special"] = False
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(plain))
    ours, usual = load_tokenizer(str(tmp_path)), load_tokenizer(str(bpe))
    assert tokenizers.Tokenizer.from_file(str(file)).encode("a</s>b<s>").ids == [0, 66, 1, 67, 0]
    assert ours.encode([b"a</s>b<s>"])[0].tolist() == usual.encode([b"a</s>b<s>"])[0].tolist()
    assert ours.decode([0, 66, 1]) == "a"
    assert ours.info.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_nor_where_the_model_itself_knows_them_as_words(tmp_path: Path) -> None:
    """A Unigram model knows them as words, with the best score."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -5.0) for letter in "abs<>/")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("a</s>b").ids == [2, 1, 3]
    ours = load_tokenizer(str(tmp_path))
    found = [ids.tolist() for ids in ours.encode([b"ab", b"a</s>b</s>", b"</"])]
    assert found == [[2, 3], [2, 5, 7, 4, 6, 3, 5, 7, 4, 6], [5, 7]]
    with pytest.raises(DataError, match=r"id of BOS or EOS \(4\).*data\.bos and data\.eos"):
        load_tokenizer(str(tmp_path), eos="s").encode([b"ass"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"bos_token": ["<s>"]}', r"bos_token=\['<s>'\] .*token"),
        ('{"eos_token": {"content": 7}}', r"eos_token=\{'content': 7\} .*token"),
        ('{"add_bos_token": "no"}', r"add_bos_token=no .*true or false"),
    ],
)
def test_what_is_said_beside_must_have_its_types(
    config: str, message: str, bpe: Path, tmp_path: Path
) -> None:
    shutil.copy(bpe, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(DataError, match=rf"tokenizer_config\.json cannot be read \(.*{message}"):
        load_tokenizer(str(tmp_path))


def test_truncation_padding_and_templates_of_the_file_do_not_count(bpe: Path, tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(bpe))
    library.enable_truncation(3)
    library.enable_padding(length=50)
    both = [("<s>", 0), ("</s>", 1)]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=both
    )
    library.save(str(tmp_path / "tokenizer.json"))
    text = b"the quick brown fox " * 10
    (plain,), (ids,) = (load_tokenizer(str(path)).encode([text]) for path in (bpe, tmp_path))
    assert ids.tolist() == plain.tolist()
    assert len(ids) > 10


PLAIN, NO_TEMPLATE = ("<s>", "</s>"), {"template": None}
TOKENS: list[tuple[tuple[str, str], dict[str, object], str, str, tuple[int | None, int]]] = [
    # the special tokens 0 and 1, the config beside the file, data.bos and data.eos; BOS and EOS
    (("<|begin_of_text|>", "<|end_of_text|>"), {}, "auto", "auto", (0, 1)),
    (("<bos>", "<|endoftext|>"), {}, "auto", "auto", (0, 1)),
    (("other", "</s>"), {}, "auto", "auto", (0, 1)),
    (PLAIN, NO_TEMPLATE, "auto", "auto", (None, 1)),
    (PLAIN, {**NO_TEMPLATE, "bos_token": "<s>"}, "auto", "auto", (None, 1)),
    (PLAIN, {**NO_TEMPLATE, "bos_token": "</s>", "add_bos_token": True}, "auto", "auto", (None, 1)),
    (PLAIN, {**NO_TEMPLATE, "bos_token": "<s>", "add_bos_token": True}, "auto", "auto", (0, 1)),
    (("<a>", "<b>"), {"bos_token": "<a>", "eos_token": {"content": "<b>"}}, "auto", "auto", (0, 1)),
    (PLAIN, {"bos_token": None, "eos_token": "<s>"}, "auto", "auto", (None, 0)),
    (PLAIN, {"bos_token": {"content": "<s>"}, "add_bos_token": True}, "auto", "auto", (0, 1)),
    (PLAIN, {"bos_token": "<s>", "add_bos_token": False, "add_eos_token": False}, "auto", "auto", (None, 1)),
    (PLAIN, {"add_bos_token": False}, "<s>", "auto", (0, 1)),
    (PLAIN, {}, "none", "auto", (None, 1)),
    (PLAIN, {"eos_token": "</s>"}, "</s>", "<s>", (1, 0)),
    (PLAIN, {}, "</s>", "</s>", (None, 1)),
]


@pytest.mark.parametrize("number", range(len(TOKENS)))
def test_bos_and_eos_are_as_asked_as_said_beside_or_known(number: int, bpe: Path, tmp_path: Path) -> None:
    special, config, bos, eos, expected = TOKENS[number]
    info = load_tokenizer(str(with_special(bpe, tmp_path / "other", *special, **config)), bos, eos).info
    assert (info.bos, info.eos) == expected
    assert info.start == (info.eos if info.bos is None else info.bos)


def test_a_tokenizer_that_cannot_be_used_is_refused_with_the_way_out(bpe: Path, tmp_path: Path) -> None:
    unknown = with_special(bpe, tmp_path / "unknown", "other", "another")
    with pytest.raises(
        DataError, match=r"has none of .*<\|end_of_text\|>.*data\.eos.*such as one of other, another"
    ):
        load_tokenizer(str(unknown))
    with pytest.raises(DataError, match=r"data\.eos=<nothing> .*token of .*tokenizer\.json.*vocabulary"):
        load_tokenizer(str(bpe), "auto", "<nothing>")
    for name, content in (("broken.json", "{"), ("other.json", "{}"), ("binary.json", "\udcff")):
        (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(
            DataError,
            match=rf"data\.tokenizer=.*{name}.* tokenizer\.json .*tokenizers library.*bytes",
        ):
            load_tokenizer(str(tmp_path / name))
    with pytest.raises(DataError, match=r"data\.tokenizer=nowhere"):
        load_tokenizer("nowhere")
    with pytest.raises(DataError, match=r"data\.bos=<s> .*data\.tokenizer=bytes .*auto"):
        load_tokenizer("bytes", "<s>", "auto")
