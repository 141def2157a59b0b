"""Documents in sequences: packed, masked, or one per sequence; reading across shards, mixtures, and
errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.models.config import LlamaConfig
from meshwright.models.llama import Llama
from meshwright.models.loss import IGNORE_INDEX
from meshwright.train.data.sample_order import CYCLE, SampleOrder, count_draws, draw, shares
from meshwright.train.data.sequences import Batch, BatchShape, SequenceShape, count_sequences, read_batch
from meshwright.train.data.token_store import Source, TokenStream
from meshwright.train.errors import DataError
from meshwright.train.evaluation import score_sets
from meshwright.train.model.trained_model import loss_of_forward
from tests.support import stores

BOS, EOS = 1, 2
FEW = settings(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])


def split_of(documents: list[list[int]], cuts: tuple[int, ...] = ()) -> TokenStream:
    """A split of these documents, in shards that end after `cuts` documents."""
    return stores.split_of(
        *(documents[a:b] for a, b in zip((0, *cuts), (*cuts, len(documents)), strict=True))
    )


def rows(*indices: int) -> np.ndarray:
    return np.array([(0, index) for index in indices])


documents_strategy = st.lists(
    st.lists(st.integers(3, 60000), min_size=1, max_size=30), min_size=1, max_size=12
)


@settings(FEW, max_examples=100)
@given(documents=documents_strategy, data=st.data())
def test_a_split_reads_as_one_stream_wherever_its_shards_end(documents, data):
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, len(documents) - 1))))) if len(documents) > 1 else ()
    split, stream = split_of(documents, cuts), [t for d in documents for t in d]
    ends = np.cumsum([len(d) for d in documents]).tolist()
    assert (split.tokens, split.documents) == (len(stream), len(documents))
    assert [split.document(i) for i in range(len(documents))] == list(zip([0, *ends[:-1]], ends, strict=True))
    first = data.draw(st.integers(0, len(stream) - 1))
    last = data.draw(st.integers(first + 1, len(stream)))
    out = np.empty(last - first, np.int64)
    split.read(first, out)
    assert out.tolist() == stream[first:last]
    assert split.ends_between(first, last).tolist() == [end for end in ends if first < end <= last]


DOCUMENTS = [[BOS, 10, 11, EOS], [BOS, EOS], [BOS, 20, 21, 22, 23, 24, 25, 26, 27, 28, EOS], [BOS, 30, EOS]]


def test_a_document_mask_knows_where_each_document_begins_and_lets_no_target_cross():
    shape = SequenceShape(8, packing=True, document_mask=True, start_id=None, vocab_size=100)
    batch = read_batch([split_of(DOCUMENTS, (2,))], rows(0, 1), shape)
    assert batch.tokens.tolist() == [[1, 10, 11, 2, 1, 2, 1, 20], [21, 22, 23, 24, 25, 26, 27, 28]]
    assert batch.first.tolist() == [[0, 0, 0, 0, 4, 4, 6, 6], [0] * 8]
    ignored = IGNORE_INDEX
    assert batch.targets.tolist() == [
        [10, 11, 2, ignored, 2, ignored, 20, 21],
        [22, 23, 24, 25, 26, 27, 28, 2],
    ]


def test_without_packing_every_document_is_a_sequence_clipped_or_padded():
    shape = SequenceShape(6, packing=False, document_mask=False, start_id=None, vocab_size=100)
    split = split_of(DOCUMENTS)
    assert count_sequences(split, shape) == 4
    batch = read_batch([split], rows(0, 2), shape)
    assert batch.first is None
    assert batch.tokens.tolist() == [[1, 10, 11, 2, 2, 2], [1, 20, 21, 22, 23, 24]]
    assert batch.targets.tolist() == [[10, 11, 2, *[IGNORE_INDEX] * 3], [20, 21, 22, 23, 24, 25]]


def test_the_place_of_a_wrong_id_is_right_behind_a_start_id_too():
    shape = SequenceShape(5, packing=False, document_mask=False, start_id=EOS, vocab_size=30)
    with pytest.raises(DataError, match=r"token id 40 .* byte 6 \(token 3\)"):
        read_batch([split_of([[10, 11, EOS], [40, EOS]])], rows(1), shape)


def test_a_document_without_a_bos_of_its_own_begins_after_the_end_of_another():
    shape = SequenceShape(5, packing=False, document_mask=False, start_id=EOS, vocab_size=100)
    batch = read_batch([split_of([[10, 11, EOS], [5, EOS]])], rows(0, 1), shape)
    assert batch.tokens.tolist() == [[EOS, 10, 11, EOS, EOS], [EOS, 5, EOS, EOS, EOS]]
    assert batch.targets.tolist() == [[10, 11, EOS, -100, -100], [5, EOS, -100, -100, -100]]


@pytest.mark.parametrize(("packing", "seq_len", "row"), [(True, 4, 3), (False, 20, 2)])
def test_an_id_beyond_the_vocabulary_is_refused_with_file_and_offset(packing, seq_len, row):
    message = r"token id 28 .*model\.vocab_size=28: .*/train-00001\.bin, byte 18 \(token 9\).*prepare"
    shape = SequenceShape(seq_len, packing, document_mask=False, start_id=None, vocab_size=28)
    with pytest.raises(DataError, match=message):
        read_batch([split_of(DOCUMENTS, (2,))], rows(row), shape)


@pytest.fixture(scope="module")
def model() -> Llama:
    model = Llama(
        LlamaConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=100, max_seq_len=128)
    )
    model.initialise(seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and parameter.dim() > 1:
                parameter.mul_(10)  # sharp attention, so that a wrong mask changes the loss
    return model


def loss_and_gradients(model: Llama, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = sum(model(b.tokens, b.targets, b.first) for b in batches)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def alone(document: list[int]) -> Batch:
    return Batch(torch.tensor([document[:-1]]), torch.tensor([document[1:]]))


def assert_trains_as_alone(model: Llama, batch: Batch, documents: list[list[int]]) -> float:
    """The loss, which with the gradients is that of the documents as batches of their own."""
    loss, gradients = loss_and_gradients(model, [batch])
    expected_loss, expected = loss_and_gradients(model, [alone(document) for document in documents])
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, gradient in gradients.items():
        atol = 1e-5 * expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=atol, msg=name)
    return loss


def test_packed_documents_that_are_kept_apart_train_as_documents_alone(model):
    generator = np.random.default_rng(0)
    documents = [[BOS, *generator.integers(3, 100, size).tolist(), EOS] for size in (5, 1, 17, 9, 2, 3, 15)]
    shape = SequenceShape(sum(map(len, documents)), True, True, None, 100)
    packed = read_batch([split_of([*documents, [BOS, EOS]], (3,))], rows(0), shape)
    loss = assert_trains_as_alone(model, packed, documents)
    crossing = loss_and_gradients(model, [Batch(packed.tokens, packed.targets)])[0]
    assert abs(crossing - loss) > 1e-3 * loss, "attention across documents changes the loss"


def test_padded_documents_train_as_documents_alone_whatever_the_padding_is(model):
    documents = [[BOS, 10, 11, 12, EOS], [BOS, 40, EOS]]
    batch = read_batch([split_of(documents)], rows(0, 1), SequenceShape(12, False, False, None, 100))
    loss = assert_trains_as_alone(model, batch, documents)
    padded = batch.tokens.masked_fill(batch.targets == IGNORE_INDEX, 77)
    assert loss_and_gradients(model, [Batch(padded, batch.targets)])[0] == loss


# Mixtures


@settings(FEW, max_examples=100)
@given(weights=st.lists(st.floats(1e-4, 100), min_size=1, max_size=6).map(tuple))
def test_shares_are_the_weights_to_a_ten_thousandth(weights):
    counts = shares(weights)
    assert sum(counts) == CYCLE
    assert min(counts) >= 1
    if min(weights) / sum(weights) > 1 / CYCLE:
        assert all(
            abs(n - w / sum(weights) * CYCLE) < 1 + len(weights) for n, w in zip(counts, weights, strict=True)
        )


@settings(FEW, max_examples=50)
@given(first=st.integers(0, 3 * CYCLE), count=st.integers(1, 500), seed=st.integers(0, 5))
def test_each_source_is_drawn_from_in_its_own_order_without_gaps_wherever_one_begins(first, count, seed):
    weights = (0.6, 0.3, 0.1)
    before = count_draws(first, weights, seed)
    sources, places = draw(first, count, weights, seed)
    for source in range(3):
        drawn = places[sources == source]
        assert drawn.tolist() == list(range(before[source], before[source] + len(drawn)))
    assert count_draws(first + count, weights, seed) == [
        b + int((sources == s).sum()) for s, b in enumerate(before)
    ]


def test_a_mixture_draws_by_weight_and_each_source_runs_through_epochs_of_its_own():
    splits = [split_of([[3, 4, 5, 6, EOS]] * n) for n in (40, 8)]
    shape = SequenceShape(5, packing=False, document_mask=False, start_id=None, vocab_size=100)
    order = SampleOrder(
        tuple(Source(f"s{i}", w, s) for i, (w, s) in enumerate(zip((3.0, 1.0), splits, strict=True))),
        shape,
        0,
    )
    order_rows = order.rows(0, CYCLE)
    assert [(order_rows[:, 0] == s).sum() for s in (0, 1)] == [7500, 2500]
    second = order_rows[order_rows[:, 0] == 1, 1]
    assert all(sorted(second[i : i + 8]) == list(range(8)) for i in range(0, 2400, 8))
    counts = {"sequences/s0": 7500.0, "sequences/s1": 2500.0, "epoch/s0": 7500 / 40, "epoch/s1": 2500 / 8}
    assert order.progress(CYCLE) == counts
    assert np.array_equal(np.concatenate([order.rows(0, 77), order.rows(77, 23)]), order_rows[:100])


# Scores


class OneBitOff(torch.nn.Module):
    """A model whose loss is exactly one bit per token."""

    def forward(self, tokens, targets, first, divisor=None, positions=None):
        return (targets != IGNORE_INDEX).sum() * math.log(2)


@pytest.mark.parametrize(
    ("packing", "masked", "start_id", "predicted"),
    [(True, False, None, 19), (True, True, None, 16), (False, False, None, 16), (False, False, EOS, 20)],
)
def test_bits_per_byte_are_all_bits_by_all_bytes(packing, masked, start_id, predicted, monkeypatch):
    split, one_rank = split_of(DOCUMENTS), BatchShape(2, 1, 0, 1)
    shape = SequenceShape(6 if packing else 30, packing, masked, start_id, 100)
    monkeypatch.setattr("meshwright.parallel.sharded_model.dist.all_reduce", lambda value, group: None)
    of_set = (OneBitOff(), {"set": split}, shape, one_rank, 0, torch.device("cpu"), None, loss_of_forward)
    score = score_sets(*of_set)["set"]
    assert score.tokens == predicted
    assert score.bits_per_byte == pytest.approx(predicted / split.text_bytes)
