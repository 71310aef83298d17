"""The calls that are measured: the kernels of a job, each with the floating-point operations or the
bytes that `workload` counts for it.
"""

import dataclasses
import functools as ft
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..data import Job, Layout, Model, ScheduleConfig, Training, load_cluster, load_kernels
from ..lowering import job_parts
from ..workload import Kernel, lower, rows_of


# Kernels that move more bytes than this, which fit into no cache, are no faster for each byte.
MOST_BYTES = 2**28
_MOVING = ("norm", "elementwise", "embedding", "loss", "optimizer", "copies")
ATTENTION = re.compile(
    r"\S+ (\d+)x(\d+)x(\d+)x(\d+)x(\d+)(\+\d+)?( all)?(?: window(\d+))? (forward|backward)"
)


@dataclasses.dataclass(frozen=True)
class KernelCall:
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


def grid_job(level: int) -> Job:
    """The job of a level of the grid: a dense layer on one device, of a width that each level
    doubles, from 256 on.
    """
    hidden = 256 * 2**level
    model = Model(
        hidden_size=hidden,
        vocab_size=16 * hidden,
        num_layers=1,
        num_heads=hidden // min(64 * 2 ** (level // 2), 128),
        ffn_size=4 * hidden,
        bias=False,
    )
    cluster = load_cluster("dgx-h100", 1)
    return Job(
        Layout(),
        ScheduleConfig("1f1b", 1),
        model=model,
        cluster=cluster,
        training=Training(2, min(2 * hidden, 4096)),
        kernels=load_kernels(cluster),
    )


def compute_kernels(job: Job) -> list[Kernel]:
    """The different kernels that a job computes with, in the order of their names.

    **Raises:**

    A `ValueError` of one sentence if the job has no model.
    """
    if job.model is None:
        raise ValueError(f"The job `{job.name}` has no model; give a job with one.")
    ranks = tuple(range(job.layout.pp)) * job.schedule.virtual_stages
    load = lower(job_parts(job), ranks)
    blocks = {*load.forward, *load.backward, load.tail}
    rows = (row for block in blocks for segment, _ in block for row, _ in rows_of(segment))
    kernels = {kernel for row in rows for kernel, _ in row if kernel.link is None}
    return sorted(kernels, key=lambda kernel: (kernel.kind, kernel.size))


def calls_of(job: Job) -> list[KernelCall]:
    """The calls of a job's kernels on JAX's default device, where their arguments stay.

    Products are in bf16, whatever the job has. Of kernels that move bytes, the smallest elementwise
    one, a residual, is a sum, and all others are a GELU; norms, embeddings and losses are those of
    a forward. Heads of attention have as many keys as queries and the size of keys throughout;
    attention of a part of a sequence is left out, and has the efficiency of other attention.
    """
    key = jax.random.key(0)

    @ft.cache
    def array(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
        return 0.02 * jax.random.normal(key, shape, dtype)

    return [*_calls(compute_kernels(job), job, array)]


def _calls(
    kernels: list[Kernel], job: Job, array: Callable[..., jax.Array]
) -> Iterator[KernelCall]:
    """The calls, with a function that makes their arguments."""
    for kernel in kernels:
        if kernel.kind == "gemm":
            yield _product(kernel, array)
        elif kernel.kind == "convolution":
            yield _convolution(kernel, array)
        elif match := ATTENTION.fullmatch(kernel.size):
            yield _attention(kernel, match, array)
    moves = {(k.kind, int(k.size.partition("B")[0])) for k in kernels if k.kind in _MOVING}
    sums = min((size for kind, size in moves if kind == "elementwise"), default=0)
    for kind, size in sorted({(kind, min(size, MOST_BYTES)) for kind, size in moves}):
        run = _move("sum" if (kind, size) == ("elementwise", sums) else kind, size, job, array)
        yield KernelCall(kind, "", size, run)


def stream_calls() -> list[KernelCall]:
    """A copy and a sum of arrays that fit into no cache: the bandwidth of the main memory."""
    copied, summed = (jnp.ones(MOST_BYTES // width, jnp.float32) for width in (8, 12))
    return [
        KernelCall("copies", "", MOST_BYTES, _launch(jnp.negative, copied)),
        KernelCall("elementwise", "", MOST_BYTES, _launch(jnp.add, summed, summed)),
    ]


def _product(kernel: Kernel, array: Callable[..., jax.Array]) -> KernelCall:
    """A product; that of the gradient of a matrix has a transpose, and is added in float32."""
    _, shape, *added = kernel.size.split()
    *batch, m, n, k = map(int, shape.split("x"))
    right = array((*batch, k, n))
    if "added" in added:
        total, left = array((*batch, m, n), jnp.float32), array((*batch, k, m))
        run = _launch(lambda t, x, g: t + (x.mT @ g).astype(t.dtype), total, left, right)
    else:
        run = _launch(jnp.matmul, array((*batch, m, k)), right)
    flop = 2 * math.prod(map(int, shape.split("x")))  # Of the first, where it stands for several.
    return KernelCall("gemm", "bf16", flop, run, {} if batch else {"m": m, "n": n, "k": k})


def _convolution(kernel: Kernel, array: Callable[..., jax.Array]) -> KernelCall:
    """A convolution of images as square as can be, or the gradient of its images or its weights."""
    sizes = re.findall(r"\d+", kernel.size.split(maxsplit=1)[1])
    images, pixels, outputs, inputs, size, _, stride = map(int, sizes)
    rows = max(n for n in range(1, math.isqrt(pixels) + 1) if pixels % n == 0)
    layouts = ("NHWC", "HWIO", "NHWC")
    on = {"padding": "SAME", "dimension_numbers": layouts, "window_strides": (stride, stride)}
    convolve = ft.partial(jax.lax.conv_general_dilated, **on)
    read = array((images, rows * stride, pixels // rows * stride, inputs))
    weights = array((size, size, inputs, outputs))
    made = array((images, rows, pixels // rows, outputs))
    argument = {"forward": None, "dgrad": 0, "wgrad": 1}[kernel.size.split()[-1]]
    if argument is None:
        run = _launch(convolve, read, weights)
    else:  # What only the other gradient needs is not compiled.
        run = _launch(lambda x, w, g: jax.vjp(convolve, x, w)[1](g)[argument], read, weights, made)
    return KernelCall("convolution", "bf16", kernel.flop, run)


def _attention(kernel: Kernel, match: re.Match[str], array: Callable[..., jax.Array]) -> KernelCall:
    """The core of attention, or its backward alone, whose argument is what its forward keeps."""
    batch, heads, queries, keys, size = map(int, match.groups()[:5])
    narrower, everything, window, phase = match.groups()[5:]
    limits = {"is_causal": not everything, "local_window_size": window and (int(window) - 1, 0)}
    core = ft.partial(jax.nn.dot_product_attention, **limits)
    q, kv = array((batch, queries, heads, size)), array((batch, keys, heads, size))
    if phase == "backward":
        made, pull = _compiled(ft.partial(jax.vjp, core), q, kv, kv)(q, kv, kv)
        run = _launch(lambda pull, gradient: pull(gradient), pull, jnp.ones_like(made))
        return KernelCall("attention_backward", "bf16", kernel.flop, run)
    shape = {"batch": batch, "sequence": keys, "heads": heads, "kv_heads": heads}
    shape |= {"head_dim": size, "causal": int(not everything), "window": int(window or 0)}
    run = _launch(core, q, kv, kv)
    return KernelCall("attention", "bf16", kernel.flop, run, {} if narrower else shape)


def _move(kind: str, size: int, job: Any, array: Callable[..., jax.Array]) -> Callable[[], Any]:
    """A kernel that moves so many bytes: four for each value, unless it sums, or is in float32."""
    hidden = job.model.hidden_size
    rows = max(size // (4 * hidden), 1)
    words = job.model.vocab_size or rows  # Tables of a recommender are larger than what is read.
    if kind == "norm":
        return _launch(_norm, array((rows, hidden)))
    if kind == "embedding":
        chosen = jnp.arange(rows, dtype=jnp.int32) % words
        return _launch(lambda table, chosen: table[chosen], array((words, hidden)), chosen)
    if kind == "loss":
        logits = array((-(-size // (20 * words)), words))
        return _launch(lambda x: jnp.mean(jax.nn.logsumexp(x.astype(jnp.float32), axis=1)), logits)
    if kind == "optimizer":
        return _launch(_adam, *(array((-(-size // 30),), jnp.float32),) * 4)
    if kind == "sum":
        return _launch(jnp.add, *(array((-(-size // 6),)),) * 2)
    return _launch(jnp.negative if kind == "copies" else jax.nn.gelu, array((-(-size // 4),)))


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def _adam(master: jax.Array, gradient: jax.Array, first: jax.Array, second: jax.Array) -> Any:
    first = 0.9 * first + 0.1 * gradient
    second = 0.95 * second + 0.05 * gradient * gradient
    master = master - 1e-4 * first / (jnp.sqrt(jnp.abs(second)) + 1e-8)
    return master, first, second, master.astype(jnp.bfloat16)


def _launch(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return ft.partial(_compiled(function, *arguments), *arguments)


def _compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    # JAX's own attention relies on its defaults, which a program may have made stricter.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.jit(function).lower(*arguments).compile()
