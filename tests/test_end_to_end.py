"""The law of a step, and its derivatives, against the simulation of `independent`."""

import dataclasses
import functools as ft
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_jax.analysis import Quantile, estimate
from prism_jax.data import load_job
from prism_jax.engine import simulate
from prism_jax.latency import Scaled
from prism_jax.lowering import job_parts
from prism_jax.program import Network, Stall, Variability
from prism_jax.schedule import order_of

from .helpers import compile_with, lognormal, lower_job
from .independent import Laws, Step, simulate_steps, steps_of_laws


_CHANGES = (
    "layout.dp=8",
    "num_nodes=8",
    "schedule.kind=1f1b",
    "schedule.virtual_stages=1",
    "schedule.blocking=false",
    "training.overlap_grad_reduce=false",
    "model.num_layers=4",
    "model.vocab_size=4096",  # So that the stages take about as long as one another.
)
_LAWS = Laws(
    residual={
        "host": 0.0,  # A constant, which varies with the whole step alone.
        "gemm": 0.05,
        "attention": 0.05,
        "loss": 0.05,
        "norm": 0.1,
        "elementwise": 0.1,
        "embedding": 0.1,
        "optimizer": 0.1,
        "all_gather": 0.15,
        "reduce_scatter": 0.15,
        "all_reduce": 0.3,
        "send_recv": 0.3,
    },
    rank=0.03,
    step=0.02,
    worker_step=0.015,
    microbatch=0.03,
    network=(0.2, 1.25),
    stalls={"gemm": (3e-5, 4e-3, 0.5)},
)
_BATCHES, _STEPS, _SAMPLES = 16, 3_000, 200_000

pytestmark = pytest.mark.slow


@ft.cache
def _job():
    path = pathlib.Path(__file__).parents[1] / "examples" / "job.toml"
    return load_job(path, _CHANGES)


@ft.cache
def _step() -> Step:
    job = _job()
    workload, cluster = lower_job(job), job_parts(job).cluster
    assert (job.layout.pp, job.layout.dp, job.layout.tp) == (4, 8, 2)
    assert job.schedule.num_microbatches == 8
    return Step(
        forward=workload.forward,
        backward=workload.backward,
        send_recv=workload.send_recv,
        reductions=workload.reduce_scatter,
        tail=workload.tail,
        orders=order_of(job.schedule, job.layout).orders(),
        members=job.layout.tp,
        replicas=job.layout.dp,
        network_links=frozenset(link.name for link in cluster.links[1:]),
    )


@ft.cache
def _program():
    job, stalls = _job(), _LAWS.stalls.items()
    variability = Variability(
        residual={kind: lognormal(sigma) for kind, sigma in _LAWS.residual.items()},
        rank=lognormal(_LAWS.rank),
        step=lognormal(_LAWS.step),
        worker_step=lognormal(_LAWS.worker_step),
        microbatch=lognormal(_LAWS.microbatch),
        network=Network(*map(jnp.asarray, _LAWS.network)),
        stalls={
            kind: Stall(jnp.asarray(rate), Scaled(lognormal(sigma), jnp.asarray(median)))
            for kind, (rate, median, sigma) in stalls
        },
    )
    return compile_with(job, variability)


def test_the_law_is_that_of_every_kernel_drawn():
    batches = [simulate_steps(_step(), _LAWS, _STEPS, seed) for seed in range(_BATCHES)]
    law = simulate(_program(), num_samples=_SAMPLES, key=jax.random.key(0))
    half = {q: np.diff(law.quantile_interval(q))[0] / 2 / 1.96 for q in (0.95, 0.99)}
    figures = {
        "mean": (np.mean, law.mean, law.errors.mean),
        "std": (np.std, law.std, law.errors.std),
        "p95": (ft.partial(np.quantile, q=0.95), law.quantile(0.95), half[0.95]),
        "p99": (ft.partial(np.quantile, q=0.99), law.quantile(0.99), half[0.99]),
    }
    # What the noise may be at most, so that the comparison says something.
    most = {"mean": 2e-4, "std": 0.01, "p95": 5e-4, "p99": 1e-3}
    for name, (figure, found, error) in figures.items():
        expected = figure(np.concatenate(batches))
        scatter = np.std([figure(steps) for steps in batches], ddof=1) / np.sqrt(_BATCHES)
        noise = np.hypot(error, scatter)
        assert noise < most[name] * expected, name
        assert abs(found - expected) < 4 * noise, (name, found, expected, noise)


def _changed(name: str, by: float) -> Laws:
    """The laws with one parameter `by` as much larger."""
    if name == "gemm":
        return dataclasses.replace(_LAWS, means={"gemm": 1 + by})
    if name == "slowdown":
        probability, slowdown = _LAWS.network
        return dataclasses.replace(_LAWS, network=(probability, slowdown * (1 + by)))
    return dataclasses.replace(_LAWS, **{name: getattr(_LAWS, name) * (1 + by)})


def _near_p95(laws: list[Laws], seed: int) -> list[float]:
    """Averages over quantiles around p95 scatter a third as much as that of p95 alone."""
    steps = steps_of_laws(_step(), laws, 8_000, seed)
    return [float(np.quantile(times, np.linspace(0.92, 0.98, 13)).mean()) for times in steps]


def test_derivatives_of_p95_are_differences_of_every_kernel_drawn():
    """With respect to the logarithms of parameters; differences are of common random numbers."""
    program = _program()
    gradient = eqx.filter_grad(estimate)(
        program, Quantile(0.95), num_samples=_SAMPLES, key=jax.random.key(1)
    )
    place = program.latencies.kinds.index("gemm")
    gemm = np.array(program.latencies.kind) == place
    laws, slopes = program.variability, gradient.variability
    found = {"gemm": np.sum(np.asarray(program.latencies.mean * gradient.latencies.mean)[gemm])}
    found["slowdown"] = laws.network.slowdown * slopes.network.slowdown
    for name in ("rank", "step", "microbatch"):
        found[name] = getattr(laws, name).sigma * getattr(slopes, name).sigma
    changes = {name: 0.2 if name in ("rank", "step", "microbatch") else 0.02 for name in found}
    changed = [_changed(name, sign * by) for name, by in changes.items() for sign in (1, -1)]
    more, less = np.mean([_near_p95(changed, s) for s in range(100, 104)], axis=0).reshape(-1, 2).T
    for name, difference in zip(found, more - less, strict=True):
        expected = difference / (2 * changes[name])
        assert found[name] == pytest.approx(expected, rel=0.05), name
