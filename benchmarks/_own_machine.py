"""A training step in JAX on the CPU of this machine, predicted from its kernels, which are measured
just before: `examples/one_device.toml`, in bf16 with parameters and Adam in float32. In the same
rounds as the step, kernels would find its data in the caches in place of their own.
"""

import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import prism_jax as prism
from prism_jax.measure import calls_for, save_machine, split_scatter, time_calls

from ._tables import table


_JOB = pathlib.Path(__file__).parents[1] / "examples/one_device.toml"
_SECONDS = 40.0
_STEPS = 65_536


def own_rows(_: pathlib.Path) -> list[dict[str, Any]]:
    """The mean and the tail of the step."""
    job = prism.load_job(_JOB)
    (calls,) = calls_for(job, jax.devices()[:1], _SECONDS)
    kernels = time_calls([calls], _SECONDS)
    measured = _seconds_of(_training_step(job))
    scatter = split_scatter(kernels.seconds, kernels.kinds)
    with tempfile.TemporaryDirectory() as folder:
        save_machine(folder, kernels, scatter, "python benchmarks/accuracy.py --own-machine")
        words = (f"cluster={folder}/cluster.toml", "num_nodes=1", "allow_implausible=true")
        own = prism.load_job(_JOB, words)
        program = prism.compile_job(own)
        law = prism.simulate(program, num_samples=_STEPS, key=jax.random.key(0))
    p50, p95 = np.quantile(measured, (0.5, 0.95))
    of_law = law.quantile(0.95) / law.quantile(0.5) - 1
    figures = {"mean (s)": (measured.mean(), law.mean), "p95/p50 - 1": (p95 / p50 - 1, of_law)}
    return [
        {"figure": name, "measured": float(one), "predicted": float(other)}
        for name, (one, other) in figures.items()
    ]


def _seconds_of(step: Callable[[], Any]) -> np.ndarray:
    """The times of steps one after the other, for as long as kernels were measured."""
    jax.block_until_ready(step())
    times = [time.perf_counter()]
    while times[-1] - times[0] < _SECONDS:
        jax.block_until_ready(step())
        times.append(time.perf_counter())
    return np.diff(times)


def own_table(rows: list[dict[str, Any]]) -> str:
    """A table in Markdown."""
    cells = []
    for row in rows:
        one, other = row["measured"], row["predicted"]
        cells.append((row["figure"], f"{one:.4g}", f"{other:.4g}", f"{other / one:.3f}"))
    return table(("figure", "measured", "predicted", "predicted over measured"), cells)


def _training_step(job: Any) -> Any:
    """A function that runs one step of training the job's model."""
    model, training = job.model, job.training
    rows, hidden, words = training.microbatch_size, model.hidden_size, model.vocab_size
    tokens = jnp.arange(rows * training.sequence_length, dtype=jnp.int32) % words
    shapes = {"qkv": (hidden, 3 * hidden), "out": (hidden, hidden), "inner": (hidden,)}
    shapes |= {"up": (hidden, model.ffn_size), "down": (model.ffn_size, hidden), "norm": (hidden,)}

    def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
        key = jax.random.key(0)
        return {n: 0.05 * jax.random.normal(key, s, jnp.float32) for n, s in shapes.items()}

    weights = [drawn(shapes) for _ in range(model.num_layers)]
    weights.append(drawn({"last": (hidden,), "words": (words, hidden)}))

    def norm(x, weight):
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return (wide * scale * weight[None]).astype(x.dtype)

    def loss(weights: list[dict[str, jax.Array]]) -> jax.Array:
        *layers, ends = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), weights)
        x = ends["words"][tokens]
        for wide, layer in zip(weights, layers, strict=False):
            qkv = norm(x, wide["norm"]) @ layer["qkv"]
            qkv = qkv.reshape(rows, -1, 3 * model.num_heads, 64)
            mixed = jax.nn.dot_product_attention(*jnp.split(qkv, 3, axis=2), is_causal=True)
            x = x + mixed.reshape(x.shape) @ layer["out"]
            x = x + jax.nn.gelu(norm(x, wide["inner"]) @ layer["up"]) @ layer["down"]
        logits = (norm(x, weights[-1]["last"]) @ ends["words"].T).astype(jnp.float32)
        right = jnp.take_along_axis(logits, tokens[:, None], axis=1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=1, keepdims=True) - right)

    @jax.jit
    def step(state: Any) -> Any:
        weights, first, second = state
        gradients = jax.grad(loss)(weights)
        size = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradients)))
        gradients = jax.tree.map(lambda g: g / jnp.maximum(size, 1.0), gradients)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, gradients)
        change = jax.tree.map(lambda m, v: 1e-4 * m / (jnp.sqrt(v) + 1e-8), first, second)
        return jax.tree.map(jnp.subtract, weights, change), first, second

    zeros = jax.tree.map(jnp.zeros_like, weights)
    return lambda: step((weights, zeros, zeros))
