"""Every call of Python that has no answer is refused in one sentence: which says what was given and
what is allowed, and how near a name is.
"""

import functools as ft
import inspect
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
import prism_jax.schedule as ps
from prism_jax import latency
from prism_jax._estimate import Estimate
from prism_jax._misc import whole_number
from prism_jax.analysis import CRPS, improve, target
from prism_jax.calibration._observe import observe_runs
from prism_jax.cli._values import values
from prism_jax.data import Layer, load_model, parse_product, repeat_layers
from prism_jax.program import Sets, check_variability
from prism_jax.runs import RunCosts
from prism_jax.workload import Branches, Kernel, Segment, widen

from .helpers import (
    lognormal,
    made_law,
    negative_spread,
    one_kernel,
    pipeline_program,
    refusal,
    rich_program,
    small_model,
)
from .test_evaluate import split


_RUN: Any = {"num_samples": 640, "key": jax.random.key(0)}
_HUGE, _NAN = 10**400, math.nan
_OP, _LAW = prism.Op(1.0), made_law()
_KINDS: Any = {"x": lognormal(0.2)}
_DENSE = small_model(num_layers=6, name="dense")
_MODULES = {"mamba": {"mamba_num_heads": 32}}
_MIXED = small_model(layers=(Layer(("mamba", "mlp"), 3),), modules=_MODULES, num_layers=3)
_CONVOLUTION = {"mamba": {"kind": "convolution", "in_channels": 1024}}
_CONVOLVED = small_model(layers=(Layer(("mamba",)),), modules=_CONVOLUTION, num_layers=1)
_GEMM: Any = ((Kernel("gemm", "", 1.0), 1),)
_GATHER: Any = ((Kernel("all_gather", "", 1.0, "nvlink"), 1),)
_LAYER: Any = ((Segment(_GEMM), 1),)
_BESIDE = Branches((), (_GATHER,), (0.0, 0.0), _LAYER)


_NO_LISTS: Any = (0.1, "0.1", {"from": 0.1})
_SIZES: Any = ((repeat_layers, "num_layers"), (widen, "parameters"))


@ft.cache
def rich(num_replicas: int = 4):
    return rich_program(num_replicas)


def schedule(kind, num_microbatches, **options):
    return ps.make_schedule(kind, num_ranks=2, num_microbatches=num_microbatches, **options)


@ft.cache
def steady():
    """Its only GPU does not vary."""
    return pipeline_program(ps.OneFOneB(1, 1))


@ft.cache
def tailed():
    laws = prism.Variability(residual={"gemm": lognormal(0.05), "optimizer": lognormal(0.1)})
    return pipeline_program(ps.GPipe(1, 4), variability=laws, tail=one_kernel("optimizer", 3.0))


@ft.cache
def layouts(**changes: Any):
    job: Any = prism.load_job("megatron-22b-a100-8", ["cluster.num_nodes=4"])
    space = prism.LayoutSpace(tp=(8,), pp=(2,), virtual_stages=(2,), cp=(1,), microbatch_size=(1,))
    options = {"training": job.training, "kernels": job.kernels, "batch_size": 16, "space": space}
    options |= {"world_size": 16} | changes
    return prism.enumerate_layouts(job.model, job.cluster, **options)


def ranked(jobs=None, objective=None, **options):
    return prism.rank_layouts(layouts() if jobs is None else jobs, objective, **_RUN | options)


def placed(factors=None, **options):
    factors = np.ones(6) if factors is None else factors
    options = {"devices_per_node": 1} | _RUN | options
    return prism.place(rich(2), factors, **options)


# The calls that are only made, and what the sentence says, in this order.
_CALLS = [
    # Schedules.
    (lambda: ps.ZBV(2, 4, 1), "`virtual_stages=1` does not fit `zbv`, which has two stages"),
    (lambda: ps.VHalf(2, 4, 3), "`virtual_stages=3` does not fit `v-half`"),
    (lambda: ps.Hanayo(2, 4, 3), "`virtual_stages=3` does not fit `hanayo`, which has two"),
    (lambda: ps.DualPipeV(2, 3), "`num_microbatches=3` is too few for `dual-pipe-v` on 2 ranks"),
    (lambda: ps.DualPipe(3, 6), "`dual-pipe` has `num_ranks=3` and `num_microbatches=6`; use"),
    (lambda: ps.DualPipe(4, 6), "`num_microbatches=6` is too few for `dual-pipe` on 4 ranks"),
    (lambda: ps.Chimera(2, 3), "`chimera` has `num_ranks=2` and `num_microbatches=3`; use even"),
    (lambda: ps.ZBGreedy(2, 4, 3), "`virtual_stages=3` does not fit `zb-greedy`"),
    (lambda: ps.ZBGreedy(2, 4, 2, 1), "`memory_limit=1` is too small for a microbatch in 2"),
    (lambda: ps.ZBGreedy(2, 4, forward=(1.0,)), "`forward` has 1 costs, but there are 2 stages"),
    (lambda: ps.peak_in_flight(ps.ZBV(2, 4), until="B"), "`until='B'` is unknown; use 'I' or 'W'"),
    (lambda: ps.load_schedule("none.csv"), "cannot be read"),
    (lambda: schedule("1f1b", 4, virtual_stages=2), "`1f1b` has no `virtual_stages`, but"),
    (lambda: schedule("gpipe", 4, virtual_stages=2), "leave it out, or use one of `dual"),
    (lambda: schedule("looped-bfs", 4, microbatch_group_size=4), "has no `microbatch_gro"),
    (lambda: schedule("1f1b-interleaved", 4), "`1f1b-interleaved`; did you mean"),
    (lambda: schedule("1f1b", 0), "`num_microbatches=0` must be a positive integer"),
    # Laws of latencies.
    (lambda: latency.make_latency("log-normal", {}), "`log-normal`; did you mean `lognormal`"),
    (lambda: latency.make_latency("gamma", {"cvv": 0.1}), "of `gamma` `cvv`; did you mean `cv`"),
    (lambda: latency.make_latency("gamma", {}), "`gamma` lacks `cv`; give it a number"),
    (
        lambda: latency.make_latency("lognormal-mixture", {"sigma": 0.1}),
        "lacks `slow_weight` and `slow_factor`",
    ),
    (
        lambda: latency.make_latency(
            "lognormal-mixture", {"sigma": 0.1, "slow_weight": 1.5, "slow_factor": 2.0}
        ),
        "`slow_weight=1.5`; it must be between 0 and 1",
    ),
    (lambda: latency.LogNormal(1.0, -0.1), "`sigma=-0.1`; it must be finite and at least"),
    (lambda: latency.Constant(np.nan), "`Constant` got `value=nan`"),
    (lambda: latency.Normal(1.0, -1.0), "`std=-1.0`; it must be finite and at least 0."),
    (lambda: latency.Gamma(np.ones(2), np.array([0.1, -0.2])), "`Gamma` got `cv[1]=-0.2`"),
    (lambda: latency.Weibull(1.0, 0.0), "`Weibull` got `shape=0.0`; it must be positive"),
    (lambda: latency.ThreeMoment(1.0, 1.0, np.inf), "`skewness=inf`; it must be finite"),
    (lambda: latency.Empirical([1.0, 3.0, 2.0]), "got `table[2]=2.0`; ... non-decreasing"),
    (lambda: latency.Mixture([0, 0], (latency.Constant(1.0),) * 2), "`weights[0]=0.0`; ... not"),
    (lambda: latency.Mixture([1, -1], (latency.Constant(1.0),) * 2), "`weights["),
    (lambda: latency.Scaled(lognormal(0.1), -2.0), "`Scaled` got `factor=-2.0`"),
    (lambda: latency.Shifted(latency.LogNormal(1.0, -0.1), 2.0), "`LogNormal` got `sigma=-0.1`"),
    (lambda: latency.check(latency.Shifted(negative_spread(), 2.0)), "`sigma=-0.1`"),
    (lambda: latency.LogNormal(np.ones(2), np.ones(3)), "do not broadcast"),
    (lambda: latency.Gamma(np.ones(2), np.ones((1, 2))), "differ in rank"),
    (lambda: latency.Mixture([1.0], (latency.Constant(1.0),) * 2), "for 2 components"),
    (lambda: latency.Empirical([1.0, 2.0]), "at least 3 nodes"),
    (lambda: latency.empirical_from_samples([]), "at least one"),
    (lambda: latency.empirical_from_samples([np.nan]), "not finite"),
    (lambda: latency.empirical_from_samples([1.0], num_nodes=2), "use at least 3"),
    # Blocks and laws of a program.
    *(
        (lambda x=x: Branches(_GEMM, (_GATHER,), x), "must hold two numbers that are not negative")
        for x in ((-0.1, 0.0), (1.0, 2.0), (_NAN, 0.0))
    ),
    (lambda: Branches(_GEMM, ((),)), "Branches need at least one collective"),
    (lambda: Branches(_GEMM, (_GATHER,), (0.0, 0.0), _LAYER), "either `compute` or a block"),
    (lambda: Segment(_GEMM, None, (_BESIDE,)), "has nothing else"),
    (
        lambda: Branches((), (_GATHER,), (0.0, 0.0), ((Segment((), None, (_BESIDE,)), 1),)),
        "no block is within branches again",
    ),
    (lambda: Sets(jnp.ones((2, 3)), 4), "none shorter than the length"),
    (
        lambda: check_variability(prism.Variability(microbatch=Sets(-jnp.ones((2, 3)), 3))),
        "law of the microbatch factor",
    ),
    (lambda: rich_program(1, worker_step=negative_spread()), "law of the worker_step factor"),
    # Simulations and their laws.
    (
        lambda: prism.simulate(
            eqx.tree_at(lambda p: p.sinks.contention, rich(), jnp.ones(())), **_RUN
        ),
        "`program.sinks.contention` is an array",
    ),
    (
        lambda: prism.simulate(rich(4096), num_samples=2**21, key=_RUN["key"], allocations=2),
        "below 2^32",
    ),
    (lambda: prism.simulate(rich(), allocations=0, **_RUN), "at least 1"),
    (lambda: prism.simulate(rich(), allocations=321, **_RUN), "at least 1"),
    (
        lambda: prism.simulate(rich(), allocations=2, sampling="importance", **_RUN),
        "leave out `sampling='importance'`",
    ),
    (lambda: prism.simulate(steady(), allocations=2, **_RUN), "GPUs that differ"),
    (lambda: _LAW.run_mean_std(10), "allocations="),
    (lambda: _LAW.run_mean_std(0), "`num_steps=0`"),
    *(
        (
            lambda time=time: prism.simulate(rich(), **_RUN).run_mean_std(
                10, autocorrelation_time=time
            ),
            "`autocorrelation_time=",
        )
        for time in (0.9, 0, -1.0, _NAN, math.inf)
    ),
    (lambda: _LAW.sample(0, jax.random.key(1)), "`n=0` must be a whole number of at least 1"),
    (lambda: _LAW.quantile(1.1), "must lie"),
    (lambda: _LAW.quantile_interval(0.0), "must lie"),
    (lambda: _LAW.mean_interval(95), "must lie"),
    (lambda: _LAW.cdf(np.array([0.3, _NAN])), "a number of seconds"),
    (lambda: Estimate(2.0, 0.5).interval(95), "confidence level 95"),
    (lambda: prism.merge_laws([_LAW, _LAW]), "share a key"),
    (lambda: prism.merge_laws([]), "at least one law"),
    (lambda: prism.sample_step(rich(), quantile=1.5, key=_RUN["key"]), "`quantile=1.5` must be"),
    # Objectives and distances.
    (lambda: prism.Quantile(1.0), "must lie"),
    (lambda: prism.CVaR(-0.1), "must lie"),
    (lambda: prism.Exceedance(0.0), "must be"),
    (lambda: CRPS(np.array([1.0, -1.0])), "positive"),
    *(
        (lambda x=x: prism.wasserstein(np.asarray(x), np.ones(1)), "must be a list of finite step")
        for x in ([], [[1.0]], [_NAN], 1.0, [1j], ["a"])
    ),
    (lambda: observe_runs([]), "too few"),
    (lambda: observe_runs([np.ones(19)]), "1 run with 19 steps in all"),
    (lambda: observe_runs([np.ones(30), np.ones(3)]), "too few"),
    (lambda: observe_runs([np.append(np.ones(30), -1.0)]), "positive"),
    (lambda: observe_runs([np.append(np.ones(30), _NAN)]), "positive"),
    (lambda: observe_runs([np.ones(30)]), "of run 1 are equal"),
    # Analyses.
    (lambda: prism.sensitivity(rich(), prism.Mean(), parts=["gem"], **_RUN), "did you mean `gemm`"),
    (lambda: prism.sensitivity(rich(), prism.Mean(), shapley=["gemm"] * 2, **_RUN), "part twice"),
    (lambda: prism.sensitivity(rich(), prism.Mean(), shapley="gemm", **_RUN), "a list of parts"),
    (lambda: prism.sensitivity(rich(), prism.Mean(), **_RUN | {"num_samples": 31}), "at least 32"),
    (lambda: prism.slow_rank(rich(), 3, 1.2), "0 to 2"),
    (lambda: prism.slow_rank(rich(), 0, 0.0), "positive"),
    (lambda: prism.slow_rank(rich(), 0, 1.2, replicas=5), "1 to 4"),
    (lambda: prism.slow_rank(rich(), 1, 1.2, replicas=0), "1 to 4"),
    (lambda: prism.scale_kernel(rich(), "gem", 1.2), "did you mean"),
    (lambda: prism.Scenario(rich(), 0), "at least 1 replica"),
    (
        lambda: prism.what_if(rich(), {"x": prism.Scenario(rich(2), 1)}, **_RUN),
        "another graph or size",
    ),
    (lambda: target(tailed(), prism.Quantile(0.9), "gemm", 1.0, **_RUN), "without"),
    (lambda: target(tailed(), prism.Quantile(0.9), "gemm", 1e3, **_RUN), "times as much"),
    (lambda: target(tailed(), prism.Quantile(0.9), "gem", 15.0, **_RUN), "did you mean"),
    (lambda: improve(tailed(), prism.Std(), {"gem": 1.0}, 1.0, **_RUN), "did you mean"),
    (lambda: improve(tailed(), prism.Std(), {}, 1.0, **_RUN), "positive cost"),
    (lambda: improve(tailed(), prism.Std(), {"gemm": -1.0}, 1.0, **_RUN), "positive cost"),
    (lambda: improve(tailed(), prism.Std(), {"gemm": 1.0}, 0.0, **_RUN), "positive"),
    (
        lambda: improve(tailed(), prism.Std(), {"gemm": 1.0}, 1.0, num_iterations=0, **_RUN),
        "at least 1",
    ),
    (
        lambda: prism.sweep(rich(), {"variability.residual.gem.sigma": [1.0]}, **_RUN),
        "No parameter `variability.residual.gem",
    ),
    (lambda: prism.sweep(rich(), {"num_replicas": [2]}, **_RUN), "has the type int"),
    (lambda: prism.sweep(rich(), {"variability.rank.sigma": []}, **_RUN), "no values"),
    *(
        (
            lambda given=given: prism.sweep(rich(), {"variability.rank.sigma": given}, **_RUN),
            "sigma` was given ... 0.1 ... `; give a list",
        )
        for given in _NO_LISTS
    ),
    *(
        (lambda text=text: values(text), "--over")
        for text in ("a", "a=", "=3", "a=1:2", "a=1:2:0", "a=1:2:99999999", "a=1,,2", "a=x:2:3")
    ),
    # Placements.
    (lambda: placed(np.ones(5)), "number of factors is 5"),
    (lambda: placed(np.ones(6), devices_per_node=4), "several nodes"),
    (lambda: placed(np.ones(6), devices_per_node=6), "several nodes"),
    (lambda: placed(np.array([1, 1, 1, 0.0, 1, 1])), "positive"),
    (lambda: placed(np.array([1, 1, 1, _NAN, 1, 1])), "positive"),
    (lambda: placed(np.full(6, 1e300)), "positive number from 1e-6 to 1e6"),
    (lambda: placed(num_samples=31), "at least 32"),
    (lambda: placed(np.ones(6), objective=prism.Quantile(0.999), num_samples=64), "do not reach"),
    (lambda: placed(np.ones(6), objective=prism.Exceedance(99.0)), "some steps exceed"),
    (lambda: placed(devices_per_node=0), "several nodes"),
    # Layouts.
    (lambda: layouts(world_size=64), "more than the 32 devices ... a cluster of 8 nodes"),
    (lambda: layouts(world_size=0), "`world_size=0` must be a whole number"),
    (lambda: layouts(batch_size=0), "`batch_size=0` must be a whole number"),
    (lambda: layouts(space=prism.LayoutSpace(schedule=("2f2b",))), "No schedule `2f2b`"),
    (lambda: layouts(space=prism.LayoutSpace(tp=())), "no `tp` to choose"),
    (
        lambda: layouts(space=prism.LayoutSpace(zero=(4,))),  # pyright: ignore
        "space of layouts cannot be used",
    ),
    (lambda: ranked(objective=prism.Exceedance(1.0)), "does not rank layouts"),
    (lambda: ranked(objective=prism.Std()), "does not rank layouts"),
    (lambda: ranked(()), "no layouts to rank"),
    (lambda: ranked(num_samples=16), "num_samples"),
    (lambda: ranked(objective=prism.Quantile(0.9999)), "do not reach"),
    (lambda: ranked(top=0), "`top=0` must be"),
    (lambda: ranked(memory_margin=-1.0), "`memory_margin=-1.0` must be"),
    # Models and jobs.
    (lambda: repeat_layers(_MIXED, 4), "must be a multiple of 3 layers"),
    (lambda: repeat_layers(_DENSE, 100_001), "`num_layers=100001` must be at most 100,000"),
    (lambda: widen(_DENSE, 10**18), "gives `dense` 1,000,000,000,000,000,000 parameters"),
    (lambda: widen(load_model("stable-diffusion-2"), 10**9), "`hidden_size` of its own"),
    *(
        (lambda name=name, x=x, change=change: change(_DENSE, x), f"`{name}={x}` ... at least 1.")
        for change, name in _SIZES
        for x in (0, -1, 2.5, 3.0, _NAN, True, "a", None)
    ),
    # Those of other widths would not fit: the parameters of a wider model would not be true.
    (lambda: widen(load_model("dlrm-dcnv2"), 10**12), "`width` of the module ... is tied to the"),
    (lambda: widen(load_model("flux1-schnell"), 10**12), "`layer_sizes` of the module ... is tied"),
    (lambda: widen(_CONVOLVED, 10**12), "`in_channels` of the module ... is tied to the width"),
    *(
        (lambda text=text: parse_product(text), "not a product")
        for text in ("", "m**n", "*m", "m+n", "m*")
    ),
    # Runs.
    (
        lambda: prism.training_run(
            steady(), num_steps=100, key=_RUN["key"], costs=RunCosts(100.0, 1, 1, repair_power=11)
        ),
        "must be at most 5; give 0",
    ),
]


def costs_of(costs):
    return ps.evaluate(ps.OneFOneB(2, 3), forward=1, **costs)


_COSTS = [
    ({}, "The schedule has B ops but no `backward`; give their cost."),
    ({"backward_input": 1}, "The schedule has B ops but no `backward`"),
    ({"backward": np.ones((3, 2))}, "`backward` has the shape (3, 2); give a scalar, or an"),
    ({"backward": np.ones(3)}, "`backward` has the shape (3,)"),
    ({"backward": np.ones((2, 4))}, "here (2, 3)."),
    ({"backward": [[1, 1, 1], [1, _NAN, 1]]}, "`backward` is nan at (1, 1), but a cost is"),
    ({"backward": math.inf}, "`backward` is inf, but a cost is finite and not negative"),
    ({"backward": -1}, "`backward` is -1.0, but a cost is finite and not negative"),
    ({"backward": [[1, 2], [3]]}, "`backward` is not a number or an array of numbers"),
    ({"backward": 1, "overlap": "mean"}, "`overlap='mean'` is unknown; use 'sum' or 'max'."),
    ({"backward": 1, "send_recv": np.ones(2)}, "`send_recv` has the shape (2,); give a scalar"),
    ({"backward": 1, "send_recv": -1}, "`send_recv` is -1.0 at (0, 1), but a cost is"),
]


def split_costs_of(costs):
    return ps.evaluate(split(ps.OneFOneB(2, 3)), forward=1, **costs)


_SPLIT_COSTS = [
    ({"backward": 2}, "has I ops but no `backward_input`; give their cost"),
    ({"backward_input": 2}, "has W ops but no `backward_weight`; give their cost"),
]


def ordered(orders_and_ranks):
    """The orders of ranks, and the ranks of stages."""
    orders, ranks = orders_and_ranks
    return ps.CustomSchedule(orders, ranks)


_ORDERS = [
    (([["0F0", "0X0"]], [0]), "Op 1 of rank 0 is '0X0', which is no token; write the stage"),
    (([["0F0", "(0F1;0I0)OVERLAP_F_B"]], [0]), "which is no token"),
    (([["0F00"]], [0]), "which is no token"),
    (([["0F-1"]], [0]), "which is no token"),
    (([["0F0 0F1"]], [0]), "Op 0 of rank 0 is '0F0 0F1', which is no token"),
    (([["0F" + 30 * "1"]], [0]), "which is no token"),
    (([["0F0"], ["0B0"]], [0, 1]), "`0B0` (stage 0, microbatch 0) on rank 1 is out of place"),
    (([["0F0", "4F0"]], [0]), "`4F0` (stage 4, microbatch 0) on rank 0 is out of place"),
    (([["0F3", "0F3"]], [0]), "`0F3` (stage 0, microbatch 3) on rank 0 repeats `0F3`"),
    (([["0F3", "0B3", "0I3"]], [0]), "`0I3` (stage 0, microbatch 3) on rank 0 repeats `0B3`"),
    (([["0B2"]], [0]), "`0B2` (stage 0, microbatch 2) on rank 0 needs `0F2`, which no rank runs"),
    (
        ([["0F0"], ["1F1"]], [0, 1]),
        "`1F1` (stage 1, microbatch 1) on rank 1 needs `0F1` ... add it to the order of rank 0",
    ),
    (([["0F0", "0B0"], ["1F0"]], [0, 1]), "needs `1B0` or `1I0`, which no rank runs; add it to"),
    (([["0F0", "0W0"]], [0]), "`0W0` (stage 0, microbatch 0) on rank 0 needs `0I0`"),
    (([["0F0", "0B0", "0W0"]], [0]), "`0W0` (stage 0, microbatch 0) on rank 0 needs `0I0`"),
    (([["0B0", "0F0"]], [0]), "needs `0F0`, which that rank does not run before it"),
    (([["(0F0;0B0)OVERLAP_F_B"]], [0]), "needs `0F0`, which that rank does not run before it"),
    (([["0F0"]], [1]), "`stage_to_rank` puts stage 0 on rank 1, but there are orders for 1 ranks"),
    (([["0F0"]], [-1]), "`stage_to_rank` puts stage 0 on rank -1"),
    ((["0F0 0B0"], [0]), "The order of rank 0 is one string"),
    (([[]], [0]), "The orders hold no op"),
    (([], []), "The orders hold no op"),
]


def counted_in(make_and_name):
    """By each count that is no positive integer."""
    make, name = make_and_name
    for bad in (0, -1):
        refusal(lambda: make(bad), f"`{name}={bad}` must be a positive integer; use 1")  # noqa: B023
    return make(True)


_COUNTS = [
    ((make, name), f"`{name}=True` must be a positive integer; use 1")
    for make, name in [
        (lambda bad: ps.GPipe(bad, 1), "num_ranks"),
        (lambda bad: ps.OneFOneB(1, bad), "num_microbatches"),
        (lambda bad: ps.LoopedBFS(1, 1, bad), "virtual_stages"),
        (lambda bad: ps.InterleavedOneFOneB(bad, 1, 1), "num_ranks"),
        (lambda bad: ps.InterleavedOneFOneB(1, 1, 1, bad), "microbatch_group_size"),
    ]
]


def graph_of_ops(graph):
    """Without the check of types, which would refuse before."""
    return inspect.unwrap(prism.compile_graph)(**graph)


_GRAPHS = [
    ({"ops": []}, "at least one `Op`"),
    ({"ops": [prism.Op(1.0, after=[0])]}, "Op 0 waits for"),
    ({"ops": [prism.Op(1.0, after=[3])]}, "Op 0 waits for"),
    ({"ops": [_OP], "sinks": [1]}, "positions of ops, 0 to 0"),
    ({"ops": [_OP], "sinks": []}, "give at least one"),
    ({"ops": [prism.Op(1.0, rank=-1)]}, "`rank of op 0=-1` must be a whole number"),
    ({"ops": [prism.Op(-1.0)]}, "finite and not negative"),
    ({"ops": [prism.Op(negative_spread())]}, "`sigma=-0.1`"),
    ({"ops": [prism.Op(latency.LogNormal(np.ones(2), 0.1))]}, "batch shape"),
    ({"ops": [prism.Op(lognormal(s), kind="x") for s in (0.1, 0.2)]}, "not that of its kind `x`"),
    (
        {
            "ops": [prism.Op(lognormal(0.1), kind="x")],
            "variability": prism.Variability(residual=_KINDS),
        },
        "not that of its kind `x`",
    ),
    ({"ops": [_OP, prism.Op(1.0, after=0)]}, ""),  # pyright: ignore[reportArgumentType]
    ({"ops": [_OP, prism.Op(1.0, after=[10**30])]}, ""),
    ({"ops": [_OP, prism.Op(1.0, after=[False])]}, ""),
    ({"ops": [prism.Op(1.0, rank=0.5)]}, ""),  # pyright: ignore[reportArgumentType]
    ({"ops": [prism.Op(1.0, rank=10**9)]}, ""),
    ({"ops": [prism.Op(1.0, microbatch=10**9)]}, ""),
    ({"ops": [prism.Op(None)]}, ""),  # pyright: ignore[reportArgumentType]
    ({"ops": [prism.Op(_HUGE)]}, ""),
    ({"ops": [prism.Op(1.0, kind=3)]}, ""),  # pyright: ignore[reportArgumentType]
    ({"ops": 3}, ""),
    ({"ops": [_OP], "sinks": [0.0]}, ""),
    ({"ops": [_OP], "sinks": 0}, ""),
    ({"ops": [_OP], "num_replicas": 10**12}, ""),
    ({"ops": [_OP], "num_replicas": True}, ""),
    ({"ops": [_OP], "network_links": "network"}, ""),
    ({"ops": [_OP], "variability": 3}, ""),
]


def whole(value):
    return whole_number(value, "num_replicas", 1, 2**31 - 1)


_WHOLE = [
    *((x, "`num_replicas=") for x in (1.5, True, "3", None, 0, -1, _HUGE, _NAN)),
    (2**31, "must be at most"),
]


def asked_of_a_law(method_and_value):
    """Without the check of types, which would refuse before."""
    method, value = method_and_value
    return inspect.unwrap(getattr(prism.Law, method))(_LAW, value)


_METHODS = {"quantile": "quantile", "quantile_interval": "quantile", "cdf": "step time"}
_QUANTILES = [
    ((method, q), f"The {name} `")
    for method, name in _METHODS.items()
    for q in (_HUGE, "a", None, 1j, [0.5, "b"], _NAN, -1)
    if (method, q) != ("cdf", -1)
]

_DOORS = {
    (lambda call: call()): _CALLS,
    costs_of: _COSTS,
    split_costs_of: _SPLIT_COSTS,
    ordered: _ORDERS,
    counted_in: _COUNTS,
    graph_of_ops: _GRAPHS,
    whole: _WHOLE,
    asked_of_a_law: _QUANTILES,
}


@pytest.mark.parametrize(
    ("door", "given", "words"), [(door, *row) for door, rows in _DOORS.items() for row in rows]
)
def test_a_call_without_an_answer_is_refused_in_one_sentence(door, given, words):
    assert refusal(lambda: door(given), words).endswith(".")
