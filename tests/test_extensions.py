"""A family, a schedule and an objective from outside the package; what every shipped one keeps."""

import dataclasses
import itertools as it
import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.scipy.special import ndtr, ndtri

import prism_jax as prism
import prism_jax.latency as pl
from prism_jax._misc import subclasses
from prism_jax.data import ScheduleConfig, Variation
from prism_jax.latency._scores import expectation
from prism_jax.lowering import job_parts
from prism_jax.schedule import AbstractSchedule, make_schedule, op_graph, schedules
from prism_jax.workload import block_mean, lower

from .helpers import by_numpy, event_loop_ends, lognormal, pipeline_program, random_dag, refusal
from .test_trace import _made_trace, _plain


_KEY = jax.random.key(11)
# Of mean one and skewed, with a spread that all families can have.
_SOME = np.random.default_rng(0).gamma(40.0, size=10_000)
_SOME /= _SOME.mean()


class Uniform(pl.AbstractLatency):
    """A uniform latency, given by its mean and coefficient of variation."""

    in_files = pl.InFiles(
        "uniform", ("cv",), lambda cv: Uniform(jnp.ones(()), jnp.asarray(cv, float))
    )

    location: jax.Array
    cv: jax.Array

    @property
    def batch_shape(self):
        return self.location.shape

    @property
    def _reach(self):
        return math.sqrt(3) * self.cv * self.location

    def from_normal(self, z):
        return self.location + self._reach * (2 * ndtr(jnp.asarray(z, self.dtype)) - 1)

    def to_normal(self, x):
        return ndtri(0.5 + 0.5 * (jnp.asarray(x, self.dtype) - self.location) / self._reach)

    def mean(self):
        return self.location

    def variance(self):
        return (self.cv * self.location) ** 2

    def third_moment(self):
        return jnp.zeros_like(self.location)

    def rules(self):
        return ()


def _moments_of_uniform(mean, variance, skewness):
    cv = math.sqrt(variance) / mean
    return {"cv": cv} if cv < 1 / math.sqrt(3) else None


@dataclasses.dataclass(frozen=True)
class LastInFirstOut(AbstractSchedule):
    """All forwards, then all backwards, the last microbatch first, as in the paper of GPipe."""

    kind = "last-in-first-out"

    num_ranks: int
    num_microbatches: int

    @property
    def stage_to_rank(self):
        return tuple(range(self.num_ranks))

    def orders(self):
        microbatches = range(self.num_microbatches)
        return [
            [f"{s}F{m}" for m in microbatches] + [f"{s}B{m}" for m in reversed(microbatches)]
            for s in range(self.num_ranks)
        ]


class EntropicRisk(prism.analysis.AbstractObjective):
    """The logarithm of the mean of exp(a x), over a."""

    a: float = eqx.field(static=True)

    def value(self, steps):
        return float(np.log(np.mean(np.exp(self.a * steps))) / self.a)

    def slope(self, steps, width):
        return np.exp(self.a * steps) / np.sum(np.exp(self.a * steps))

    def influence(self, steps, width):
        grown = np.exp(self.a * steps)
        return (grown / np.mean(grown) - 1) / self.a


def _job(overrides=()) -> Any:
    return prism.load_job("megatron-22b-a100-8", overrides)


def _check_law(program, steps, num_samples=100_000):
    """Mean and p95 of a program against steps that NumPy drew."""
    law = prism.simulate(program, num_samples=num_samples, key=_KEY, sampling="plain")
    noise = np.sqrt(1 / len(steps) + 1 / num_samples)
    assert law.mean == pytest.approx(np.mean(steps), abs=4 * np.std(steps) * noise)
    below, p95, above = np.quantile(steps, [0.94, 0.95, 0.96])
    error = np.sqrt(0.95 * 0.05) * noise * (above - below) / 0.02
    assert float(law.quantile(0.95)) == pytest.approx(p95, abs=4 * error)


def _diamond(law):
    return prism.compile_graph(
        [
            prism.Op(law),
            prism.Op(law, after=[0]),
            prism.Op(law, after=[0]),
            prism.Op(0.5, after=[1, 2]),
        ]
    )


def _diamond_steps(cv, uniform):
    first, second, third = 2 * (1 + math.sqrt(3) * cv * (2 * uniform - 1))
    return first + np.maximum(second, third) + 0.5


@pytest.mark.slow
def test_a_family():
    uniform = np.random.default_rng(0).random((3, 400_000))
    program = _diamond(Uniform(jnp.asarray(2.0), jnp.asarray(0.2)))
    _check_law(program, _diamond_steps(0.2, uniform))
    for objective, tolerance in ((prism.Mean(), 0.01), (prism.Quantile(0.95), 0.03)):
        gradient = eqx.filter_grad(prism.estimate)(
            program, objective, num_samples=200_000, key=_KEY
        )
        ends = [objective.value(_diamond_steps(cv, uniform)) for cv in (0.21, 0.19)]
        slope = (ends[0] - ends[1]) / 0.02
        found = float(gradient.variability.residual["law 0"].cv)
        assert found == pytest.approx(slope, rel=tolerance)


def test_a_family_in_a_file():
    """Named in the table of a profile, a family is that class; its mistakes are sentences."""
    assert isinstance(pl.make_latency("uniform", {"cv": 0.1}), Uniform)
    job = _job()

    def compiled(**parameters):
        laws = (Variation("gemm", "residual", "uniform", parameters),)
        kernels = msgspec.structs.replace(job.kernels, variability=laws)
        return prism.compile_job(msgspec.structs.replace(job, kernels=kernels))

    law = compiled(cv=0.3).variability.residual["gemm"]
    assert isinstance(law, Uniform)
    assert law.cv == 0.3
    refusal(compiled, "residual of `gemm`: The latency family `uniform` lacks")


def test_a_family_is_fitted_to_a_trace(monkeypatch):
    """Of all registered families, it predicts uniform ops best."""
    # Not for other tests, whose fits also go through all classes.
    monkeypatch.setattr(Uniform, "from_moments", staticmethod(_moments_of_uniform))

    def latency(kind, worker, call, rng):
        return rng.uniform(0.01, 0.03) if kind == "optimizer" else _plain(kind, worker, call, rng)

    job = prism.Job(prism.Layout(dp=2, pp=2), ScheduleConfig("1f1b", 4), name="made")
    profile = prism.fit_profile(_made_trace(job, 200, latency))
    (law,) = (v for v in profile.variability if v.kernel == "optimizer")
    assert law.family == "uniform"
    assert law.parameters["cv"] == pytest.approx(0.5 / math.sqrt(3), rel=0.1)
    assert isinstance(prism.compile_profile(profile).variability.residual["optimizer"], Uniform)
    assert Uniform.fit(np.array([0.01, 0.01, 4.0])) is None


@pytest.mark.parametrize("family", [name for name in pl.families() if pl.fit_latency(name, _SOME)])
def test_a_family_has_the_moments_that_it_is_fitted_to(family):
    law = pl.make_latency(family, pl.fit_latency(family, _SOME) or {})
    assert float(law.variance() / law.mean() ** 2) == pytest.approx(_SOME.var(), rel=0.02)


def test_families_that_cannot_have_the_moments_of_samples():
    assert pl.LogNormal.fit(np.ones(5)) is None
    assert pl.ShiftedLogNormal.fit(2 - _SOME) is None
    assert pl.Empirical.fit(_SOME) is None


def _last_in_first_out(forward, backward, send):
    """When each rank ends, by its recursion; latencies are (ranks, microbatches, ...)."""
    ranks, microbatches = forward.shape[:2]
    free = [0.0] * ranks
    for m in range(microbatches):
        came = 0.0
        for s in range(ranks):
            free[s] = np.maximum(free[s], came) + forward[s, m]
            came = free[s] + send
    for m in reversed(range(microbatches)):
        came = 0.0
        for s in reversed(range(ranks)):
            free[s] = np.maximum(free[s], came) + backward[s, m]
            came = free[s] + send
    return np.array(free)


def test_a_schedule():
    variability = prism.Variability(residual={"gemm": lognormal(0.1)})
    program = pipeline_program(LastInFirstOut(3, 4), variability=variability)
    z = np.random.default_rng(0).standard_normal((2, 3, 4, 100_000))
    factors = np.exp(0.1 * z - 0.005)
    _check_law(program, _last_in_first_out(factors[0], 2 * factors[1], 0.05).max(axis=0))


def test_a_schedule_of_a_job():
    """As an object and by its name, against constant blocks by hand."""
    job = _job(["layout.tp=2", "layout.pp=4"])
    schedule = LastInFirstOut(4, 8)

    def compiled(schedule):
        parts = (job.model, job.layout, schedule, job.cluster)
        options = {"training": job.training, "kernels": job.kernels}
        return prism.compile_program(*parts, variability=prism.Variability(), **options)

    program = compiled(schedule)
    config = ScheduleConfig(kind="last-in-first-out", num_microbatches=8)
    assert program == compiled(config)
    work = lower(job_parts(msgspec.structs.replace(job, schedule=config)), range(4))
    (send,) = {kernel.mean for kernel in work.send_recv.values()}
    forward, backward = (
        np.array([[block_mean(block)] * 8 for block in blocks])
        for blocks in (work.forward, work.backward)
    )
    ends = _last_in_first_out(forward, backward, send)
    reduced = ends + [block_mean(block) for block in work.reduce_scatter]
    law = prism.simulate(program, num_samples=1_024, key=_KEY, sampling="plain")
    assert law.mean == pytest.approx(max(reduced) + block_mean(work.tail), rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "match"),
    [
        (LastInFirstOut(2, 4), "for 2 pipeline ranks, but `layout.pp` is 1"),
        (
            prism.CustomSchedule([["0F0", "1F0", "2F0"]], [0, 0, 0], chains=[(0, 0), (1, 2)]),
            "are 3, 2 and 1; layers can only be distributed over chains",
        ),
    ],
)
def test_schedules_that_do_not_fit_a_job_are_refused(schedule, match):
    job = _job()
    parts = (job.model, job.layout, schedule, job.cluster)
    with pytest.raises(ValueError, match=match):
        prism.compile_program(*parts, training=job.training, kernels=job.kernels)


def test_a_placement_of_stages_that_are_not_dealt_in_turns():
    """In a V the ends of the model share a rank, whose embeddings need no reduction."""
    order = ["0F0", "1F0", "2F0", "3F0", "3B0", "2B0", "1B0", "0B0"]
    ranks = (0, 1, 1, 0)
    tokens = [[t for t in order if ranks[int(t[0])] == r] for r in (0, 1)]
    job = _job(["layout.tp=4", "layout.pp=2"])

    def reduced(tied, stage_to_rank):
        model = msgspec.structs.replace(job.model, tied_embeddings=tied)
        config = ScheduleConfig(kind="x", num_microbatches=1, virtual_stages=2)
        changed = msgspec.structs.replace(job, model=model, schedule=config)
        work = lower(job_parts(changed), stage_to_rank)
        assert set(work.send_recv) == {(0, 1), (1, 0)}
        return [block_mean(block) for block in work.reduce_scatter]

    assert min(reduced(True, (0, 1, 0, 1))) > 0
    assert reduced(True, ranks) == [0, 0]
    schedule = prism.CustomSchedule(tokens, ranks)
    parts = (job.model, job.layout, schedule, job.cluster)
    program = prism.compile_program(*parts, training=job.training, kernels=job.kernels)
    assert program.num_ops == 8 + 4  # The middle of the V sends nothing.


@pytest.mark.slow
def test_an_objective():
    objective = EntropicRisk(1.5)
    uniform = np.random.default_rng(0).random((3, 400_000))
    program = _diamond(Uniform(jnp.asarray(2.0), jnp.asarray(0.2)))
    options = {"num_samples": 100_000, "key": _KEY}
    expected = _diamond_steps(0.2, uniform)
    noise = np.std(objective.influence(expected, 1.0)) * np.sqrt(1 / 400_000 + 1 / 100_000)
    found, gradient = eqx.filter_value_and_grad(prism.estimate)(program, objective, **options)
    assert float(found) == pytest.approx(objective.value(expected), abs=4 * noise)
    ends = [
        prism.estimate(eqx.tree_at(lambda p: p.latencies.mean, program, mean), objective, **options)
        for mean in (program.latencies.mean * 1.001, program.latencies.mean * 0.999)
    ]
    slope = float(ends[0] - ends[1]) / 0.002
    whole = float(jnp.sum(gradient.latencies.mean * program.latencies.mean))
    assert whole == pytest.approx(slope, rel=1e-3)
    table = prism.sensitivity(program, objective, num_samples=20_000, key=_KEY)
    assert table.unit == "s"


_SLOW = {"gamma", "lognormal-mixture", "lognormal-outliers"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in _SLOW else n for n in pl.families()]
)
def test_every_family(name):
    """The two directions agree, moments are those of the draws, and a graph can hold it."""
    of = pl.families()[name]
    shapes = {"std": 0.2, "shape": 4.0, "shift": 0.5, "skewness": 0.5, "slow_factor": 2.0}
    shapes |= {"sigma": 0.2, "cv": 0.2, "slow_weight": 0.1}
    shapes |= {"outlier_share": 0.1, "outlier_excess": 2.0, "outlier_sigma": 0.5}
    law = pl.make_latency(name, {parameter: shapes[parameter] for parameter in of.parameters})
    z, draws = np.linspace(-3, 3, 13), np.random.default_rng(0).standard_normal(20_000)
    assert law.batch_shape == ()

    @by_numpy
    def run(law):
        def deviation(z):
            from_mean = law.from_normal(z) - law.mean()
            return jnp.stack([from_mean, from_mean**2, from_mean**3])

        x, widened = law.from_normal(z), [pl.scale_spread(law, factor) for factor in (0.0, 1.0)]
        moments = jnp.stack([law.mean(), law.variance(), law.third_moment()])
        of_widened = [(wide.mean(), wide.variance()) for wide in widened]
        both_ways = x, law.to_normal(x), law.from_normal(0.0)
        return (
            *both_ways,
            moments,
            expectation(deviation, law.dtype),
            of_widened,
            law.from_normal(draws),
        )

    x, score, middle, (mean, *moments), (first, *others), of_widened, steps = run(law)
    assert np.all(np.diff(x) >= 0)
    if moments[0] > 0:
        np.testing.assert_allclose(score, z, atol=1e-6)
    assert abs(first) < 1e-4 * mean
    np.testing.assert_allclose(moments, others, rtol=0.05, atol=1e-6)
    sigma = pl.log_sigma(law)
    if sigma is not None:
        np.testing.assert_allclose(x, middle * np.exp(np.asarray(sigma) * z), rtol=1e-9)
    for factor, (mean_of_wide, variance) in zip((0.0, 1.0), of_widened, strict=True):
        np.testing.assert_allclose(mean_of_wide, mean, rtol=1e-4)
        np.testing.assert_allclose(variance, factor * moments[0], rtol=1e-6, atol=1e-12)
    _check_law(prism.compile_graph([prism.Op(law)]), np.asarray(steps), num_samples=20_000)


@pytest.mark.parametrize("kind", schedules())
def test_every_schedule(kind):
    """By its name and as an object it is the same program, and each op is there once."""
    config = ScheduleConfig(kind=kind, num_microbatches=4)
    options = {} if "virtual_stages" not in _fields(kind) else {"virtual_stages": 2}
    schedule = make_schedule(kind, num_ranks=2, num_microbatches=4, **options)
    _check_ops(schedule)
    job = _job(["layout.tp=4", "layout.pp=2"])
    config = msgspec.structs.replace(config, **options)
    first, second = (
        prism.compile_program(
            job.model, job.layout, one, job.cluster, training=job.training, kernels=job.kernels
        )
        for one in (config, schedule)
    )
    assert first == second
    graph = op_graph(schedule, blocking=schedule.blocking)
    assert first.num_ops == graph.num_ops
    assert np.sum(first.ops.is_send_recv) == np.sum(graph.is_send_recv)


def _check_ops(schedule):
    """Each stage runs the forward and the backward, whole or in its halves, of each microbatch."""
    ops = re.findall(r"(\d+)([FBIW])(\d+)", " ".join(it.chain(*schedule.orders())))
    chains = len(schedule.chain_starts)
    pairs = {(str(s), str(m)) for s in range(schedule.num_stages) for m in range(4 // chains)}
    of = {phase: [(s, m) for s, p, m in ops if p == phase] for phase in "FBIW"}
    assert all(len(set(found)) == len(found) for found in of.values())
    assert set(of["F"]) == pairs == {*of["B"], *of["I"]}
    assert set(of["W"]) == set(of["I"])
    assert not {*of["B"]} & {*of["I"]}


def _fields(kind):
    return {field.name for field in dataclasses.fields(schedules()[kind])}  # pyright: ignore


_OBJECTIVES = [
    prism.Mean(),
    prism.Std(),
    prism.Quantile(0.9),
    prism.CVaR(0.8),
    prism.Exceedance(1.0),
    prism.CRPS(np.array([0.7, 0.9])),
    prism.Wasserstein(np.array([0.7, 0.9])),
    EntropicRisk(2.0),
]


def test_all_objectives_are_among_those():
    every = subclasses(prism.analysis.AbstractObjective)
    every = {one for one in every if not one.__name__.startswith("Abstract")}
    assert {type(one) for one in _OBJECTIVES} == every


@pytest.mark.parametrize("objective", _OBJECTIVES, ids=lambda one: type(one).__name__)
def test_every_objective(objective):
    """What it says of itself is so, and a step counts as its weight says."""
    rng = np.random.default_rng(0)
    steps = rng.gamma(4.0, 0.2, 20_000)
    assert objective.unit in ("s", "1")
    assert 0 < objective.share <= 1
    assert (objective.exceeds is not None) <= (objective.unit == "1")
    for scale in (0.01, 0.1):
        slower = steps + scale * rng.random(len(steps))
        assert objective.value(slower) >= objective.value(steps) or not objective.monotone
    influence = objective.influence(steps, 0.1)
    assert abs(np.mean(influence)) < 1e-9 * np.abs(influence).max()
    # Weights that grow for slow steps, by counting each step as often as its weight says.
    often = rng.random(len(steps)) < 0.05 * (steps > np.median(steps))
    moved = objective.value(np.concatenate([steps, steps[often]])) - objective.value(steps)
    first = np.sum(influence[often]) / (len(steps) + np.sum(often))
    assert moved == pytest.approx(first, rel=0.25)
    slope = objective.slope(steps, 0.1)
    direct = (objective.value(steps * 1.01) - objective.value(steps * 0.99)) / 0.02
    assert np.sum(slope * steps) == pytest.approx(direct, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_any_graph_of_constants_equals_the_event_loop(seed):
    rng = np.random.default_rng(seed)
    predecessors = random_dag(seed, num_ops=30)
    ranks = rng.integers(0, 3, 30)
    latencies = rng.exponential(size=30)
    ops = [
        prism.Op(float(x), after=before, rank=int(rank), link="wire" if rank == 2 else None)
        for x, before, rank in zip(latencies, predecessors, ranks, strict=True)
    ]
    expected = np.array(event_loop_ends(predecessors, latencies.tolist()))
    ids = jnp.arange(1, dtype=jnp.uint32)
    ends = prism.sample_replica_ends(prism.compile_graph(ops), ids, _KEY)
    assert np.array_equal(ends[:, 0], [expected[ranks == rank].max() for rank in range(3)])
    ends = prism.sample_replica_ends(prism.compile_graph(ops, sinks=[4, 7]), ids, _KEY)
    assert ends.max() == max(expected[4], expected[7])


def test_a_graph_of_laws_equals_numpy_and_the_event_loop():
    predecessors = random_dag(3, num_ops=25)
    rng = np.random.default_rng(3)
    sigmas = rng.choice([0.0, 0.1, 0.3], 25)
    means = rng.uniform(0.5, 2.0, 25)
    ops = [
        prism.Op(pl.LogNormal(mean, sigma) if sigma else pl.Constant(mean), after=before)
        for mean, sigma, before in zip(means, sigmas, predecessors, strict=True)
    ]
    z = rng.standard_normal((25, 100_000))
    latencies = means[:, None] * np.exp(sigmas[:, None] * z)
    ends = np.zeros_like(latencies)
    for op, before in enumerate(predecessors):
        ends[op] = latencies[op] + (ends[list(before)].max(axis=0) if before else 0)
    for i in range(5):
        assert np.array_equal(ends[:, i], event_loop_ends(predecessors, latencies[:, i].tolist()))
    _check_law(prism.compile_graph(ops), ends.max(axis=0))


def test_ops_of_one_kind_share_a_law_and_factors():
    """By means and a variability, with a factor of a rank that communication has not."""
    ops = [
        prism.Op(1.0, kind="work", rank=0),
        prism.Op(2.0, kind="work", rank=1),
        prism.Op(0.5, kind="wire", after=[0, 1], link="wire"),
    ]
    variability = prism.Variability(residual={"work": lognormal(0.1)}, rank=lognormal(0.2))
    program = prism.compile_graph(ops, variability=variability, num_replicas=2)
    assert program.latencies.kinds == ("work", "wire")
    rng = np.random.default_rng(0)
    z = rng.standard_normal((2, 2, 2, 200_000))
    ranks = np.exp(0.2 * z[0] - 0.02)
    work = np.array([1.0, 2.0])[:, None, None] * np.exp(0.1 * z[1] - 0.005) * ranks
    _check_law(program, work.max(axis=(0, 1)) + 0.5)


@pytest.mark.parametrize("make", [lognormal, lambda cv: prism.latency.Gamma(1.0, cv)])
def test_laws_of_a_kind_that_differ_by_a_factor_are_one_law(make):
    """As if its ops had only means: laws made in a loop, and one that was given for the kind."""
    factors = (1.0, 2.0, 0.3)
    residual = {"x": make(0.1)}
    laws = [prism.latency.Scaled(make(0.1), factor) for factor in factors]
    means = [float(law.mean()) for law in laws]
    given = prism.Variability(residual=residual)
    for latencies in (laws, means):
        ops = [prism.Op(one, after=[*range(i)], kind="x") for i, one in enumerate(latencies)]
        program = prism.compile_graph(ops, variability=given)
        assert program.variability == given
        np.testing.assert_allclose(program.latencies.mean, means, rtol=1e-12)
    ops = [prism.Op(one, kind="x") for one in laws]
    assert prism.compile_graph(ops).variability.residual == {"x": laws[0]}
