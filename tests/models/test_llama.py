"""The model's initial weights, loss, causality, units and config checks. tests/models/test_hf.py compares
logits and gradients with transformers."""

import dataclasses

import pytest
import torch
from torch import Tensor

from meshwright.models.config import LlamaConfig, RopeScaling
from meshwright.models.llama import INIT_STD, SHARDING, Llama

SCALING = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32)
CONFIG = LlamaConfig(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=97, max_seq_len=128, rope_theta=1e4
)
SEQ_LEN = 100  # longer than a block of the CPU attention


def build(config: LlamaConfig = CONFIG, seed: int = 0) -> Llama:
    model = Llama(config)
    model.initialise(seed)
    return model


def make_loud(model: Llama) -> Llama:
    """Make weights so large and norms so uneven that attention is far from uniform and every part matters."""
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(len(fqn))
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else parameter * 8)
    return model


def make_tokens(batch: int = 2, seq_len: int = SEQ_LEN, seed: int = 1) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (batch, seq_len), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_built_on_meta_gets_every_parameter_and_buffer_as_one_built_on_the_cpu(tied: bool) -> None:
    config = dataclasses.replace(CONFIG, tie_embeddings=tied, rope_scaling=SCALING)
    with torch.device("meta"):
        late = Llama(config)
    assert all(t.is_meta for t in (*late.parameters(), *late.buffers()))
    late.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*late.parameters(), *late.buffers()):
            tensor.fill_(torch.nan)
    late.initialise(3)
    early = build(config, 3)
    for kind in ("named_parameters", "named_buffers"):
        ours, others = dict(getattr(late, kind)()), dict(getattr(early, kind)())
        assert ours.keys() == others.keys()
        for fqn, tensor in ours.items():
            assert tensor.isfinite().all(), fqn
            assert torch.equal(tensor, others[fqn]), fqn
    assert (late.head.output.weight is late.tok_embeddings.weight) is tied


def test_initial_weights_are_decided_by_the_seed() -> None:
    first, same_seed, other_seed = (dict(build(seed=seed).named_parameters()) for seed in (5, 5, 6))
    for fqn, weight in first.items():
        assert torch.equal(weight, same_seed[fqn]), fqn
        assert torch.equal(weight, other_seed[fqn]) is (weight.dim() == 1), (
            f"{fqn}: exactly the norms are equal for all seeds"
        )


def test_no_two_parameters_start_alike() -> None:
    matrices = {fqn: w for fqn, w in build().named_parameters() if w.dim() > 1}
    starts = {fqn: (w / w.std()).flatten()[:8] for fqn, w in matrices.items()}
    for fqn, start in starts.items():
        assert [name for name, values in starts.items() if torch.allclose(values, start, rtol=0.1)] == [fqn]


def test_initial_weights_depend_on_the_number_of_layers_by_the_residual_scaling_alone() -> None:
    shallow, deep = (dict(build(dataclasses.replace(CONFIG, n_layers=n)).named_parameters()) for n in (2, 4))
    for fqn, weight in shallow.items():
        residual = fqn.endswith(("wo.weight", "w2.weight"))
        torch.testing.assert_close(deep[fqn], weight / 2**0.5 if residual else weight)
    assert shallow["layers.0.attention.wq.weight"].std().item() == pytest.approx(INIT_STD, rel=0.05)
    assert shallow["layers.0.feed_forward.w2.weight"].std().item() == pytest.approx(INIT_STD / 2, rel=0.05)
    assert torch.equal(shallow["layers.0.ffn_norm.weight"], torch.ones(CONFIG.dim))


@pytest.mark.parametrize("position", [1, 63, 64, 99])
def test_a_token_does_not_change_earlier_logits(position: int) -> None:
    model, tokens = make_loud(build()), make_tokens()
    changed = tokens.clone()
    changed[:, position] = (tokens[:, position] + 1) % CONFIG.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-5)
    assert not torch.allclose(after[:, position], before[:, position])


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        *(({name: 0}, [f"model.{name}=0", "at least 1"]) for name in ("dim", "n_heads", "vocab_size")),
        ({"n_layers": -1}, ["model.n_layers=-1", "at least 1"]),
        ({"n_kv_heads": 8}, ["model.n_kv_heads=8", "divide", "model.n_heads=4"]),
        ({"dim": 62}, ["model.dim=62", "model.n_heads=4"]),
        ({"dim": 68}, ["model.dim=68", "even multiple", "model.n_heads=4"]),
    ],
    ids=str,
)
def test_a_shape_that_cannot_be_is_refused_with_key_value_and_rule(
    change: dict[str, int], facts: list[str]
) -> None:
    with pytest.raises(ValueError, match="must") as error:
        dataclasses.replace(CONFIG, **change)
    assert all(fact in str(error.value) for fact in facts)


def test_every_weight_has_a_tensor_parallel_style_and_every_style_a_weight() -> None:
    names = {fqn.removesuffix(".weight") for fqn, _ in Llama(CONFIG).named_parameters()}
    styled = {pattern for table in SHARDING.values() for pattern, style in table.items() if style != "loss"}
    assert names == {pattern.replace("*", str(i)) for pattern in styled for i in range(CONFIG.n_layers)}
    assert sum(map(len, SHARDING.values())) == len(styled) + 1, (
        "no weight belongs to two parts, and the loss has no weight"
    )
