"""Shipped jobs of well-known runs, beside what was published of them; and the shipped recommender
and models of images, with what is not known of them assumed another way (`assumed.toml`).

And a training step in JAX on the CPU of this machine, predicted from its kernels, which are
measured just before: `examples/one_device.toml`, in bf16 with parameters and Adam in float32. In
the same rounds as the step, kernels would find its data in the caches in place of their own.
"""

import pathlib
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

import prism_jax as prism
from prism_jax.data import list_names
from prism_jax.measure import calls_for, save_machine, split_scatter, time_calls

from .means import VARIABILITY
from .published import published
from .rows import words
from .tables import Folder, Row, Rows, error_of, table_of


# A job of the size of another's, and jobs whose rows `means` has by family.
_NOT = ("llama-3.1-405b-h100-65536", "dit-xl-2-a100-8", "latte-xl-2-a100-8")
_RECOMMENDER, _IMAGES = "dlrm-dcnv2-gb300-64", "flux1-gb300-72"
_ADAPTERS = "llama-2-70b-lora-gh200-16"
_UNET, _VIDEO = "stable-diffusion-2-a100-8", "latte-xl-2-a100-8"
_ASSUMED = words("assumed")
_FRAMES = 'model.layers=[{modules = ["adaln", "spatial", "mlp"], repeat = 14}]'
# Golden et al. 2023 (arXiv:2312.14385), abstract: of models of images with fused attention, and of
# attention in models of videos.
_PUBLISHED = {"convolutions": "up to 44 %", "attention across frames": "over 60 %"}


def flagship_rows(folder: Folder) -> Rows:
    """A row for each shipped job with a measured mean or median; `folder` is not read."""
    for name in list_names("job"):
        job = prism.load_job(name)
        measured = job.measured and (job.measured.mean_s or job.measured.p50_s)
        if measured and name not in _NOT:
            low, high = prism.expected_error(job).interval()
            mean = prism.predict(job).mean
            row = {"job": name, "measured": measured, "predicted": VARIABILITY * mean}
            yield {**row, "low": low * mean, "high": high * mean}


def flagship_table(rows: list[Row]) -> str:
    """In Markdown."""
    columns = {"job": "{job}", "published (s)": "{measured:.4g}"}
    columns["predicted (s)"] = "{predicted:.4g}"
    columns |= {"error": "{error:+.1%}", "90 % interval (s)": "{low:.4g} .. {high:.4g}"}
    return table_of(rows, columns)


def _as_assumed(name: str) -> dict[str, Any]:
    return {about: prism.load_job(name, keys) for about, keys in _ASSUMED[name].items()}


def _predicted(jobs: dict[str, Any]) -> Rows:
    measured = jobs["as shipped"].measured.mean_s
    for about, job in jobs.items():
        seconds = VARIABILITY * prism.predict(job).mean
        yield {"assumed": about, "predicted": seconds, "error": seconds / measured - 1}


def recommender_rows(folder: Folder) -> Rows:
    """A row for each assumption; `folder` is not read."""
    jobs = _as_assumed(_RECOMMENDER)
    shipped = jobs["as shipped"]
    for about, sharding in _ASSUMED["sharding"].items():
        shared = {"sharding": sharding, "shards": None}
        modules = {name: dict(module) for name, module in shipped.model.modules.items()}
        tables = modules["features"]["tables"]
        tables = [one if "data_parallel" in one.values() else one | shared for one in tables]
        modules["features"]["tables"] = tables
        model = msgspec.structs.replace(shipped.model, modules=modules)
        jobs[about] = msgspec.structs.replace(shipped, model=model)
    return _predicted(jobs)


def recommender_table(rows: list[Row]) -> str:
    """In Markdown."""
    columns = {_RECOMMENDER: "{assumed}", "predicted (ms)": "{predicted:.2fm}"}
    return table_of(rows, columns | {"error": "{error:+.0%}"})


def adapter_rows(folder: Folder) -> Rows:
    """A row for each assumption, and one for each published step with adapters."""
    yield from _predicted(_as_assumed(_ADAPTERS))
    for one in published(folder):
        if one.job and one.job.training and one.job.training.adapters:
            row = {"table": one.table, "name": one.name, "measured": one.seconds}
            row["predicted"] = VARIABILITY * prism.predict(one.job).mean
            yield row | {"error": error_of(row)}


def adapter_table(rows: list[Row]) -> str:
    """Two tables in Markdown."""
    columns = {"predicted (s)": "{predicted:.3f}", "error": "{error:+.0%}"}
    assumed = [row for row in rows if "assumed" in row]
    steps = [row for row in rows if "assumed" not in row]
    step = {"published step": "{table}: {name}", "measured (s)": "{measured:.4g}"}
    of_assumed = table_of(assumed, {_ADAPTERS: "{assumed}"} | columns)
    return f"{of_assumed}\n\n{table_of(steps, step | columns)}"


def image_rows(folder: Folder) -> Rows:
    """FLUX.1 by what is `assumed`, then shares of time; `folder` is not read."""
    yield from _predicted(_as_assumed(_IMAGES))
    for about, job in _as_assumed(_UNET).items():
        seconds = prism.predict(job).breakdown
        share = seconds["convolution"] / sum(seconds.values())
        yield {"of": "convolutions", "job": f"{_UNET}, {about}", "share": share}
    for about, keys in _ASSUMED[_VIDEO].items():
        alone = [*keys, _FRAMES, "model.num_layers=14"]
        jobs = (prism.load_job(_VIDEO, words) for words in (alone, keys))
        within, both = (prism.predict(job).breakdown["attention"] for job in jobs)
        share = 1 - within / both
        yield {"of": "attention across frames", "job": f"{_VIDEO}, {about}", "share": share}


def image_table(rows: list[Row]) -> str:
    """Two tables in Markdown."""
    assumed = [row for row in rows if "assumed" in row]
    shares = [row | {"published": _PUBLISHED[row["of"]]} for row in rows if "of" in row]
    first = {_IMAGES: "{assumed}", "predicted (s)": "{predicted:.3f}", "error": "{error:+.0%}"}
    second = {"share of": "{of}", "job": "{job}", "predicted": "{share:.0%}"}
    second["published"] = "{published}"
    return f"{table_of(assumed, first)}\n\n{table_of(shares, second)}"


_JOB = pathlib.Path(__file__).parents[1] / "examples/one_device.toml"
_SECONDS = 40.0
_STEPS = 65_536


def own_machine_rows(_: pathlib.Path) -> list[Row]:
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
    mean = {"figure": "mean (s)", "measured": float(measured.mean()), "predicted": float(law.mean)}
    tail = {"figure": "p95/p50 - 1", "measured": float(p95 / p50 - 1), "predicted": float(of_law)}
    return [mean, tail]


def _seconds_of(step) -> np.ndarray:
    """The times of steps one after the other, for as long as kernels were measured."""
    jax.block_until_ready(step())
    times = [time.perf_counter()]
    while times[-1] - times[0] < _SECONDS:
        jax.block_until_ready(step())
        times.append(time.perf_counter())
    return np.diff(times)


def own_machine_table(rows: list[Row]) -> str:
    """A table in Markdown."""
    columns = {"figure": "{figure}", "measured": "{measured:.4g}", "predicted": "{predicted:.4g}"}
    columns["predicted over measured"] = "{ratio:.3f}"
    return table_of([row | {"ratio": 1 + error_of(row)} for row in rows], columns)


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
