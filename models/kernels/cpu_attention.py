"""Causal attention on a CPU: torch's flash forward, with a faster backward.

torch's CPU backward processes one head at a time and spends most of its time in small matrix products; this
one processes blocks of queries over many heads by batched matrix products
(benchmarks/records/2026-11-21-attention.json compares them). The reference is
`scaled_dot_product_attention`.

Shapes: B batch, N query heads, K key-value heads, G = N / K query heads that share one, T tokens, t tokens
with a query (the last ones), H head dim, Q queries of a block, J keys that they attend to.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
BLOCK = 64  # queries per block: among 32, 64 and 128 the fastest or close to it for head dims 16 to 64
SCORES_BYTES = 2 * 2**20  # of one block's scores for a batch of sequences: they fit into a core's caches


@torch.library.custom_op("meshwright::cpu_causal_attention", mutates_args=())
def causal_attention(
    q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, first_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(H), causal) v of q[B, N, t, H] -> out[B, N, t, H], and the log-sum-exp of the
    scores, float32 [B, N, t].

    With first[B, T], the position in its sequence at which each token's document begins, each document
    attends only to itself.
    """
    shared = q_BNTH.shape[1] // k_BKTH.shape[1]
    k, v = (x.repeat_interleave(shared, dim=1) if shared > 1 else x for x in (k_BKTH, v_BKTH))
    if first_BT is None:
        return _flash(q_BNTH, k, v)
    out, lse = _like_flash(q_BNTH)
    for queries, keys in _documents(first_BT, q_BNTH.shape[2]):
        out[queries], lse[queries] = _flash(q_BNTH[queries], k[keys], v[keys])
    return out, lse


def _flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """torch's flash forward, whose queries are aligned with the first keys: the keys before all queries are
    attended to in a second call, and the results weighted by their log-sum-exps."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    before = k.shape[2] - q.shape[2]
    out, lse = flash(q, k[:, :, before:], v[:, :, before:], 0.0, True)
    if not before:
        return out, lse
    earlier, earlier_lse = flash(q, k[:, :, :before], v[:, :, :before], 0.0, False)
    both_lse = torch.logaddexp(lse, earlier_lse)
    weights = ((each - both_lse).exp()[..., None] for each in (lse, earlier_lse))
    both = sum(part.float() * weight for part, weight in zip((out, earlier), weights, strict=True))
    return both.to(out.dtype), both_lse  # type: ignore[union-attr]


def _like_flash(q_BNTH: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized outputs with the memory layout of torch's kernel."""
    B, N, T, _ = q_BNTH.shape
    out = torch.empty_like(q_BNTH.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return out, q_BNTH.new_empty((B, T, N), dtype=torch.float32).transpose(1, 2)


At = tuple[slice, slice, slice]  # sequences, heads, tokens


def _documents(first_BT: Tensor, queries: int) -> Iterator[tuple[At, At]]:
    """Yield the places of every document's queries and of its keys, where it has queries: those of the last
    `queries` tokens."""
    T = first_BT.shape[1]
    before = T - queries
    for b, first in enumerate(first_BT.tolist()):
        starts = [t for t in range(T) if first[t] == t]
        for start, end in zip(starts, [*starts[1:], T], strict=True):
            if end > before:
                sequence, heads = slice(b, b + 1), slice(None)
                yield (
                    (sequence, heads, slice(max(start - before, 0), end - before)),
                    (sequence, heads, slice(start, end)),
                )


@causal_attention.register_fake
def _(q_BNTH: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
    return _like_flash(q_BNTH)


@torch.library.custom_op("meshwright::cpu_causal_attention_backward", mutates_args=())
def causal_attention_backward(
    grad_BNTH: Tensor,
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    first_BT: Tensor | None,
    out_BNTH: Tensor,
    lse_BNT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; recompute probabilities from the log-sum-exp, block by block."""
    queries, T = q_BNTH.shape[2], k_BKTH.shape[2]
    dq, dk, dv = _empty_gradients(q_BNTH, k_BKTH, v_BKTH)
    if first_BT is not None and queries < T:  # keys of documents without queries
        dk.zero_(), dv.zero_()
    per_sequence = q_BNTH.shape[1] * min(BLOCK, queries) * T * q_BNTH.element_size()
    batch_size = max(1, SCORES_BYTES // per_sequence)
    batches = [
        (slice(first, first + batch_size), slice(None), slice(None))
        for first in range(0, q_BNTH.shape[0], batch_size)
    ]
    places = zip(batches, batches, strict=True) if first_BT is None else _documents(first_BT, queries)
    for at, keys in places:
        _batch_backward(
            *(x[at] for x in (grad_BNTH, q_BNTH)),
            *(x[keys] for x in (k_BKTH, v_BKTH)),
            *(x[at] for x in (out_BNTH, lse_BNT, dq)),
            *(x[keys] for x in (dk, dv)),
        )
    return dq, dk, dv


@causal_attention_backward.register_fake
def _(grad_BNTH: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return _empty_gradients(*inputs[:3])


def _empty_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


def _batch_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Write dq[B, N, t, H], dk and dv[B, K, T, H] of a batch of sequences; arguments as in
    `causal_attention_backward`.

    With P the probabilities: dv = P^T grad, dS = P * (grad v^T - sum(grad * out)), dq = dS k and dk = dS^T q,
    up to the scale (FlashAttention, arXiv 2205.14135, algorithm 4). Scores and sums over blocks are float32.
    P is computed by exp2: on AVX-512 torch's exp2 takes a third of the time of its exp, and does not slow
    down for tiny results.
    """
    B, N, queries, H = q.shape
    _, K, T, _ = k.shape
    before = T - queries  # keys before the first query's
    G, scale = N // K, H**-0.5
    delta = (grad.float() * out.float()).sum(-1).to(q.dtype)
    by_kv_head = [
        x.reshape(B * K, G, queries, -1) for x in (q, q.float() * (scale * LOG2_E), grad, lse * LOG2_E, delta)
    ]
    k, v, dq = k.reshape(B * K, T, H), v.reshape(B * K, T, H), dq.view(B * K, G, queries, H)
    kT32, vT = k.float().transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    dk32, dv32 = torch.zeros(2, B * K, T, H)
    future = torch.full((BLOCK, BLOCK), -torch.inf).triu_(1)
    score_buffer, grad_buffer = (
        torch.empty(B * N * min(BLOCK, queries) * T, dtype=t) for t in (torch.float32, q.dtype)
    )
    for first in range(0, queries, BLOCK):
        last = min(first + BLOCK, queries)
        n, seen = last - first, before + last
        q_b, q32_b, grad_b, lse_b, delta_b = (
            x[:, :, first:last].reshape(B * K, G * n, -1) for x in by_kv_head
        )
        scores, d_scores = (
            x[: B * N * n * seen].view(B * K, G * n, seen) for x in (score_buffer, grad_buffer)
        )
        torch.bmm(q32_b, kT32[:, :, :seen], out=scores)
        scores.view(B * K, G, n, seen)[..., before + first :] += future[:n, :n]
        probabilities = scores.sub_(lse_b).exp2_().to(q.dtype)
        torch.bmm(grad_b, vT[:, :, :seen], out=d_scores).sub_(delta_b).mul_(probabilities)
        dv32[:, :seen] += torch.bmm(probabilities.transpose(1, 2), grad_b)
        dk32[:, :seen] += torch.bmm(d_scores.transpose(1, 2), q_b)
        dq[:, :, first:last] = torch.bmm(d_scores, k[:, :seen]).view(B * K, G, n, H)
    dq.mul_(scale)
    dk.copy_(dk32.mul_(scale).view_as(dk))
    dv.copy_(dv32.view_as(dv))


def _save_for_backward(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: None) -> tuple[Tensor | None, ...]:
    return *causal_attention_backward(grad_out, *ctx.saved_tensors), None


causal_attention.register_autograd(_backward, setup_context=_save_for_backward)
