"""The calls that are measured: the kernels of a dense layer, of its ends and of the optimizer, each
with the floating-point operations or the bytes that `workload` counts for it.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..data import Job


# Larger arrays are no faster for each byte.
_MOST_PARAMETERS = 2**26
# As many bytes as no cache holds.
_STREAMED = 2**27


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """The sizes of a dense layer on one device, and of the ends of its model.

    **Attributes:**

    - `sequences`, `sequence`: how many sequences, and how many tokens each of them has.
    - `hidden`, `ffn`: the width of the hidden states, and that between the matrices of the MLP.
    - `heads`, `kv_heads`, `head_size`: of attention.
    - `vocabulary`: words that the head tells apart.
    - `parameters`: how many the optimizer updates.
    - `activation`: `gelu`, `squared_relu`, `swiglu` or `geglu`.
    - `rotary`: whether queries and keys are rotated by their position.
    """

    sequences: int
    sequence: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    parameters: int
    activation: str = "gelu"
    rotary: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a kernel.

    **Attributes:**

    - `kernel`: as in an `efficiency.csv`.
    - `dtype`: of a matrix product or of attention; empty for kernels that only move bytes.
    - `size`: floating-point operations with a `dtype`, else the bytes that are read and written.
    - `run`: launches it, and returns arrays that are ready when it has ended.
    - `shape`: the columns of `prism-jax fit-kernels`; empty if that does not read such a kernel.
    """

    kernel: str
    dtype: str
    size: float
    run: Callable[[], Any]
    shape: Mapping[str, float] = dataclasses.field(default_factory=dict)


def sizes_of_job(job: Job) -> LayerSizes:
    """The sizes of a job's layers on one device, as its layout divides them.

    **Raises:**

    A `ValueError` of one sentence if the job has no dense layers, which alone are measured.
    """
    model, layout, training = job.model, job.layout, job.training
    if model is None or training is None or model.num_heads is None or model.ffn_size is None:
        raise ValueError(
            f"The job `{job.name}` has no model with `num_heads` and `ffn_size`; give a job of a "
            "dense transformer, or leave `--job` out for a grid of shapes."
        )
    heads, kv_heads = (
        n // layout.tp for n in (model.num_heads, model.num_kv_heads or model.num_heads)
    )
    size = model.head_size or model.hidden_size // model.num_heads
    gates = 2 if model.activation in ("swiglu", "geglu") else 1
    ffn, words = model.ffn_size // layout.tp, -(-model.vocab_size // layout.tp)
    matrices = model.hidden_size * ((2 * heads + 2 * kv_heads) * size + (gates + 1) * ffn)
    layers = -(-model.num_layers // layout.pp)
    return LayerSizes(
        sequences=training.microbatch_size,
        sequence=training.sequence_length // layout.cp,
        hidden=model.hidden_size,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        vocabulary=words,
        parameters=layers * matrices + (words + 2 * layers + 1) * model.hidden_size,
        activation=model.activation,
        rotary=model.position == "rotary",
    )


def sizes_of_grid(level: int) -> LayerSizes:
    """The sizes of a level of the grid; each level has layers of twice the width, from 256 on."""
    hidden = 256 * 2**level
    size = min(64 * 2 ** (level // 2), 128)
    heads = hidden // size
    sequence = min(2 * hidden, 4096)
    return LayerSizes(
        2, sequence, hidden, 4 * hidden, heads, heads, size, 16 * hidden, 28 * hidden**2
    )


def layer_calls(sizes: LayerSizes) -> list[Call]:
    """The calls of the kernels of a layer and its ends, forward and backward, on JAX's default
    device, where their arguments stay. Products and activations are in bf16.

    Backwards are those of JAX, without their forward.
    """
    key = jax.random.key(0)

    @ft.cache
    def array(shape: tuple[int, ...], kind: Any = jnp.bfloat16) -> jax.Array:
        return 0.02 * jax.random.normal(key, shape, kind)

    return [
        *_products(sizes, array),
        *_attention(sizes, array),
        *_moves(sizes, array),
    ]


def stream_calls() -> list[Call]:
    """Copies and sums of arrays that fit into no cache: the bandwidth of the main memory."""
    array = jnp.ones(_STREAMED // 4, jnp.float32)
    return [
        Call("copies", "", 2 * _STREAMED, _launch(jnp.negative, array)),
        Call("elementwise", "", 3 * _STREAMED, _launch(jnp.add, array, array)),
    ]


def _products(sizes: LayerSizes, array: Callable[..., jax.Array]) -> Iterator[Call]:
    """Each matrix forward, the gradient of its input, and its own, which is added in float32."""
    tokens, hidden, gates = sizes.sequences * sizes.sequence, sizes.hidden, _gates(sizes)
    width, kv = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    matrices = [(width + 2 * kv, hidden), (hidden, width), (gates * sizes.ffn, hidden)]
    for n, k in (*matrices, (hidden, sizes.ffn), (sizes.vocabulary, hidden)):
        x, weight, gradient = array((tokens, k)), array((k, n)), array((tokens, n))
        total = array((k, n), jnp.float32)
        flop = 2.0 * tokens * n * k
        runs = (
            ((tokens, n, k), _launch(lambda x, w: x @ w, x, weight)),
            ((tokens, k, n), _launch(lambda g, w: g @ w.T, gradient, weight)),
            (
                (k, n, tokens),
                _launch(lambda t, x, g: t + (x.T @ g).astype(t.dtype), total, x, gradient),
            ),
        )
        for shape, run in runs:
            yield Call("gemm", "bf16", flop, run, dict(zip("mnk", shape, strict=True)))


def _attention(sizes: LayerSizes, array: Callable[..., jax.Array]) -> Iterator[Call]:
    """Causal attention: two products forward, five backward, of half of the pairs."""
    batch, sequence, heads, size = sizes.sequences, sizes.sequence, sizes.heads, sizes.head_size
    q = array((batch, sequence, heads, size))
    kv = array((batch, sequence, sizes.kv_heads, size))
    flop = 2.0 * batch * heads * sequence**2 / 2 * size
    shape = {"batch": batch, "sequence": sequence, "heads": heads, "kv_heads": sizes.kv_heads}
    yield Call("attention", "bf16", 2 * flop, _launch(core, q, kv, kv), shape | {"head_dim": size})
    yield Call("attention_backward", "bf16", 5 * flop, _backward(core, q, kv, kv))


def _moves(sizes: LayerSizes, array: Callable[..., jax.Array]) -> Iterator[Call]:
    """What only moves bytes."""
    tokens, hidden, ffn, gates = (
        sizes.sequences * sizes.sequence,
        sizes.hidden,
        sizes.ffn,
        _gates(sizes),
    )
    states, values, words = array((tokens, hidden)), tokens * hidden, sizes.vocabulary
    target = jnp.arange(tokens, dtype=jnp.int32) % words

    def both(
        kernel: str, sent: float, back: float, function: Any, *arguments: Any
    ) -> Iterator[Call]:
        yield Call(kernel, "", sent, _launch(function, *arguments))
        yield Call(kernel, "", back, _backward(function, *arguments))

    yield from both("norm", 4 * values, 6 * values, norm, states, array((hidden,), jnp.float32))
    yield Call("elementwise", "", 6 * values, _launch(jnp.add, states, states))
    inner = array((tokens, gates * ffn))
    moved = 2 * tokens * (gates + 1) * ffn, 2 * tokens * (2 * gates + 1) * ffn
    yield from both("elementwise", *moved, activation(sizes.activation), inner)
    if sizes.rotary:
        turned = array((tokens, sizes.heads + sizes.kv_heads, sizes.head_size))
        yield Call("elementwise", "", 4 * turned.size, _launch(rotate, turned))
    table = array((words, hidden), jnp.float32)
    yield from both("embedding", 4 * values, 10 * values, lambda table: table[target], table)
    logits = array((tokens, words))
    yield from both(
        "loss", 20 * logits.size, 10 * logits.size, ft.partial(cross_entropy, target), logits
    )
    master = array((min(sizes.parameters, _MOST_PARAMETERS),), jnp.float32)
    yield Call("optimizer", "", 4 * master.size, _launch(jnp.vdot, master, master))
    yield Call("optimizer", "", 30 * master.size, _launch(adam, master, master, master, master))


def core(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of `(sequences, tokens, heads, size)`, as JAX computes it on the device."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The RMS norm of the last axis, computed in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale * weight[None]).astype(x.dtype)


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation of an MLP; one with a gate takes both halves in one array."""
    if name == "squared_relu":
        return lambda x: jnp.square(jax.nn.relu(x))
    if name == "gelu":
        return jax.nn.gelu
    inner = jax.nn.silu if name == "swiglu" else jax.nn.gelu
    return lambda x: inner(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :]


def rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding of `(tokens, heads, size)`."""
    half = x.shape[2] // 2
    angles = jnp.arange(x.shape[0], dtype=jnp.float32)[:, None, None]
    sine, cosine = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)


def cross_entropy(target: jax.Array, logits: jax.Array) -> jax.Array:
    """The mean cross entropy of `(tokens, words)`, computed in float32."""
    wide = logits.astype(jnp.float32)
    right = jnp.take_along_axis(wide, target[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(wide, axis=1) - right)


def adam(master: jax.Array, gradient: jax.Array, first: jax.Array, second: jax.Array) -> Any:
    """A step of Adam in float32: parameters and both moments, and the parameters in 16 bits."""
    first = 0.9 * first + 0.1 * gradient
    second = 0.95 * second + 0.05 * gradient * gradient
    master = master - 1e-4 * first / (jnp.sqrt(jnp.abs(second)) + 1e-8)
    return master, first, second, master.astype(jnp.bfloat16)


def _gates(sizes: LayerSizes) -> int:
    return 2 if sizes.activation in ("swiglu", "geglu") else 1


def _launch(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return ft.partial(_compiled(function, *arguments), *arguments)


def _backward(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """The backward alone: what its forward keeps is computed here, and given to each call."""
    made, pull = _compiled(ft.partial(jax.vjp, function), *arguments)(*arguments)
    return _launch(lambda pull, gradient: pull(gradient), pull, jnp.ones_like(made))


def _compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    # JAX's own attention relies on its defaults, which a program may have made stricter.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.jit(function).lower(*arguments).compile()
