"""`simulate`: the host loop over parts of a run."""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import equinox as eqx
import numpy as np
from jaxtyping import PRNGKeyArray

from ..law import Law, merge_allocations, merge_parts, merge_randomisations
from ..program import Program, digest
from ._accumulate import grid_of
from ._check import check_num_samples, check_plan, check_program
from ._compose import compose, run_steps
from ._decide import Chances, Decision, chances, decide
from ._draw import (
    RANDOMISATIONS,
    Draws,
    automatic_sampling,
    draw_replicas,
    explicit_replicas,
    find_lead,
    parts,
    pilot_key,
)
from ._plan import Plan, make_plan
from ._progress import progress_bar
from ._random import KeyData, key_data
from ._replicas import Replicas


_T = TypeVar("_T")
_PILOT_SAMPLES = 4096
_MOST_SOBOL = 2**24

make_plan_jit = eqx.filter_jit(make_plan)


def simulate(
    program: Program,
    *,
    num_samples: int = 1_000_000,
    key: PRNGKeyArray,
    replicas: Literal["vector", "exact", "explicit"] = "vector",
    sampling: Literal["auto", "plain", "importance", "sobol"] = "auto",
    allocations: int | None = None,
    progress: bool = False,
) -> Law:
    """Simulates steps and returns the law of the step time.

    Work runs in tiles of fixed size on all of JAX's devices. One key gives the same bits whatever
    the devices. What is kept of a run has a fixed size, whatever `num_samples`.

    **Arguments:**

    - `program`: what to simulate.
    - `num_samples`: how many steps (at least 1).
    - `key`: a `jax.random` key.
    - `replicas`: how the slowest of the data-parallel replicas is found. `"vector"` picks it from
        samples of one replica; `"exact"` does so for each pipeline rank apart (slower, a check);
        `"explicit"` simulates every replica of every step.
    - `sampling`: how replica samples are drawn. `"importance"` draws half of them slow, along the
        mean gradient of their end, and weighs them: for quantiles far out, and for more replicas
        than samples can show; it draws a quarter as many as there are steps. `"sobol"` takes
        quasi-random points for the axes that matter most, in 16 randomisations, whose scatter gives
        the intervals: for means. `"auto"` is plain, or importance sampling where fewer than 20
        samples would lie beyond the 95 % quantile of the slowest replica.
    - `allocations`: by default the law is of one step on GPUs that are drawn anew for each step.
        With a number, so many sets of GPUs are drawn, and the steps are divided among them; all
        replicas are simulated. The law is of all these steps, its intervals are from how much the
        allocations differ, and `allocation_means` and `run_mean_std` tell them apart.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A [`Law`][]. Ctrl-C ends the run early: the law is then of the steps so far, and says so.

    **Raises:**

    `ValueError` for a bad option, or a program whose latencies are not finite.
    """
    check_program(program, key)
    num_samples = check_num_samples(num_samples)
    if allocations is not None:
        _check_allocations(program, num_samples, replicas, allocations)
        replicas, sampling = "explicit", "plain"
    _check_options(program, num_samples, replicas, sampling)
    started = time.perf_counter()
    plan = make_plan_jit(program)
    check_plan(plan)
    way: str = sampling
    if way == "auto":
        way = automatic_sampling(program, num_samples, replicas)
    lead = find_lead(plan, way)
    words = key_data(key)
    about = {"program": digest(program), "keys": (tuple(int(word) for word in words),)}
    likely = chances(program)
    run = _Run(plan, words, likely, _pilot_grid(plan, likely), replicas, about)
    compiled = time.perf_counter()
    all_draws = [
        Draws(way, lead, first, steps, number if allocations else None)
        for number, (first, steps) in enumerate(parts(program, num_samples, way, allocations))
    ]
    with progress_bar(2 * num_samples, progress) as advance:  # Drawn, then composed.
        law = _run_parts(run, all_draws, advance)
    return dataclasses.replace(
        law,
        requested=num_samples,
        sampling=way,
        compile_s=compiled - started,
        run_s=time.perf_counter() - compiled,
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """What the parts of a run have in common."""

    plan: Plan
    key: KeyData
    likely: Chances
    grid: tuple[float, float]
    replicas: str
    about: dict[str, Any]


def _run_parts(run: _Run, all_draws: list[Draws], advance: Callable[[int], object]) -> Law:
    """The law of all parts, or, after Ctrl-C, of the steps so far."""
    merge = merge_parts
    if all_draws[0].sampling == "sobol":
        merge = merge_randomisations
    elif all_draws[0].allocation is not None:
        merge = merge_allocations
    draw = explicit_replicas if run.replicas == "explicit" else draw_replicas
    laws: list[Future[Law]] = []
    first: Future[Law] | None = None
    # A thread finishes a part while the devices draw the next. Only it makes large arrays, since
    # each thread keeps memory of its own.
    with ThreadPoolExecutor(1) as host:
        for draws in all_draws:
            kept, finished = draw(run.plan, run.key, draws, advance)
            if not kept.drawn:
                break
            steps = draws.steps if finished else kept.drawn
            decision, not_interrupted = _patient(host.submit(_decide, run, kept, steps))
            finished &= not_interrupted
            accumulator, composed = compose(run.plan, decision, run.key, steps, run.grid, advance)
            if not accumulator.num_samples:
                break
            finished &= composed
            laws.append(host.submit(_law, run, draws, kept, decision, accumulator, first))
            first = laws[0] if first is None and merge is not merge_allocations else first
            if not finished:
                break
            if len(laws) == RANDOMISATIONS and merge is merge_parts:
                laws = [host.submit(_pooled, laws)]  # So that memory stays flat.
        if not laws:
            raise KeyboardInterrupt
        return merge([_patient(law)[0] for law in laws])


def _patient(future: Future[_T]) -> tuple[_T, bool]:
    """The result of what ends soon, and whether no Ctrl-C came meanwhile."""
    finished = True
    while True:
        try:
            return future.result(), finished
        except KeyboardInterrupt:
            finished = False


def _decide(run: _Run, kept: Replicas, steps: int) -> Decision:
    return decide(
        run.plan.program,
        run.likely,
        kept,
        run.key,
        steps,
        explicit=run.replicas == "explicit",
        rule="exact" if run.replicas == "exact" else "vector",
    )


def _law(run: _Run, draws: Draws, kept, decision, accumulator, first: Future[Law] | None) -> Law:
    """The law of a part. Whole parts have the errors of the first."""
    return accumulator.law(
        decision,
        first.result() if first and accumulator.num_samples == draws.steps else None,
        requested=draws.steps,
        effective_samples=kept.effective_samples(),
        compile_s=0.0,
        run_s=0.0,
        **run.about,
    )


def _pooled(laws: list[Future[Law]]) -> Law:
    return merge_parts([law.result() for law in laws])


def _pilot_grid(plan: Plan, likely: Chances) -> tuple[float, float]:
    words = key_data(pilot_key())
    kept, finished = draw_replicas(plan, words, Draws("plain", None, 0, _PILOT_SAMPLES))
    steps: list[np.ndarray] = []
    if finished:
        decision = decide(plan.program, likely, kept, words, _PILOT_SAMPLES)
        finished = run_steps(plan, decision, words, _PILOT_SAMPLES, steps.append)
    if not finished:
        raise KeyboardInterrupt
    return grid_of(np.concatenate(steps))


def _check_allocations(program, num_samples, replicas, allocations) -> None:
    if isinstance(allocations, bool) or not isinstance(allocations, int | np.integer):
        raise ValueError(f"`allocations={allocations!r}` must be a whole number of at least 1.")
    if not 1 <= allocations <= num_samples:
        raise ValueError(
            f"`allocations={allocations}` must be at least 1 and no more than the {num_samples} "
            "steps that are divided among them."
        )
    if replicas == "exact":
        raise ValueError("`allocations` simulates every replica; leave out `replicas='exact'`.")
    if program.variability.rank is None:
        raise ValueError(
            "`allocations` needs GPUs that differ, but the program's `variability.rank` is none; "
            "give it a law, or leave `allocations` out."
        )


def _check_options(program, num_samples, replicas, sampling) -> None:
    if replicas not in ("vector", "exact", "explicit"):
        raise ValueError(f"`replicas={replicas!r}` must be 'vector', 'exact' or 'explicit'.")
    if sampling not in ("auto", "plain", "importance", "sobol"):
        raise ValueError(
            f"`sampling={sampling!r}` must be 'auto', 'plain', 'importance' or 'sobol'."
        )
    if replicas == "explicit":
        if sampling in ("importance", "sobol"):
            raise ValueError(
                f"`sampling={sampling!r}` draws samples of one replica, so it goes with "
                "`replicas='vector'` only."
            )
        if num_samples * program.num_replicas >= 2**32:
            raise ValueError(
                f"{num_samples} steps of {program.num_replicas} explicit replicas are too many; "
                "their product must be below 2^32."
            )
    if replicas == "exact" and sampling in ("importance", "sobol"):
        raise ValueError(f"`sampling={sampling!r}` goes with `replicas='vector'` only.")
    if sampling == "sobol" and num_samples > _MOST_SOBOL:
        raise ValueError(
            f"`sampling='sobol'` holds the points of a sixteenth of its steps in memory and takes "
            f"up to {_MOST_SOBOL:,} steps, not {num_samples:,}; lower them, or use 'plain'."
        )
