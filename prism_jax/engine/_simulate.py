"""`simulate`: the host loop over chunks of a run."""

import dataclasses
import time
from typing import Literal

import jax
import numpy as np

from .._interrupt import interruptible, progress_bar
from .._misc import whole_number
from ..law import Accumulator, Errors, Law, grid_of
from ..program import Program, digest
from ..step import Chances, effective_samples
from ._check import check_num_samples, check_program
from ._explicit import Explicit
from ._pilot import Pilot, chosen, draw_pilot, rule_of_replicas
from ._run import (
    Advance,
    Chunk,
    Draws,
    Run,
    all_draws,
    decided_chunks,
    errors_of,
    prepare,
    step_times,
)
from ._sampling import AbstractSampling, named


def simulate(
    program: Program,
    *,
    num_samples: int = 1_000_000,
    key: "jax.Array",
    replicas: Literal["auto", "vector", "exact", "explicit"] = "auto",
    sampling: Literal["auto", "plain", "importance"] = "auto",
    allocations: int | None = None,
    progress: bool = False,
) -> Law:
    """Simulates steps and returns the law of the step time.

    Work runs in tiles of fixed size on all of JAX's devices. The same key gives the same bits on
    any number of devices of the same kind. The memory that a run needs does not grow with
    `num_samples`.

    **Arguments:**

    - `program`: the step to simulate.
    - `num_samples`: how many steps to simulate (at least 1).
    - `key`: a `jax.random` key.
    - `replicas`: how the slowest of the data-parallel replicas is found. `"vector"` picks it from
        samples of one replica. `"exact"` does this for each pipeline rank separately, and is
        slower. `"explicit"` simulates every replica of every step. `"auto"` is the vector rule
        unless a pilot run finds that its mean or 95 % quantile is more than 0.05 % below that of
        the exact rule, which is then used. This happens where ranks tie and their gradient
        reductions vary much.
    - `sampling`: how replica samples are drawn. `"plain"` draws them independently. `"importance"`
        is importance sampling: half of the samples are shifted to be slow, along the mean gradient
        of the replica's end, and all are weighted. It suits extreme quantiles, and numbers of
        replicas too large for plain samples to resolve the slowest; it draws a quarter as many
        samples as there are steps. `"auto"` is plain sampling unless fewer than 20 samples would
        lie beyond the 95 % quantile of the slowest replica and a pilot run finds that importance
        sampling has more support there.
    - `allocations`: by default, the factors of the GPUs are drawn anew for each step. With a number
        `K`, `K` sets of GPUs (allocations) are drawn, the steps are divided among them (at least
        two to each), and all replicas are simulated. The law is then of all these steps, and
        `Law.allocations` and `Law.run_mean_std` are available. Its intervals come from the
        differences between allocations: that of the standard deviation needs 20 of them, that of
        p50 needs 40, and those of p5 and p95 need 400.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A [`Law`][], which says how samples were drawn and how the slowest replica was found. Ctrl-C
    ends the run early; the law is then of the steps so far, and `Law.interrupted` is true.

    **Raises:**

    `ValueError` for an invalid option, or for a program whose latencies are not finite.
    """
    num_samples = check_num_samples(num_samples)
    check_program(program, key)
    if allocations is not None:
        _check_allocations(program, num_samples, replicas, sampling, allocations)
        replicas = "explicit"
    _check_options(program, num_samples, replicas, sampling)
    started = time.perf_counter()
    run = prepare(program, key)
    # The grid is that of a pilot, which finds the tail. It does not depend on the sampling, so that
    # laws of one program can be merged.
    pilot = draw_pilot(run)
    grid = grid_of(pilot.steps())
    if replicas == "explicit":
        how: AbstractSampling = Explicit(allocations)
    else:
        how = chosen(run, num_samples, pilot) if sampling == "auto" else _named(sampling, pilot)
    run = dataclasses.replace(run, sampling=how)
    rule = rule_of_replicas(pilot) if replicas == "auto" else replicas
    compiled = time.perf_counter()
    draws = all_draws(run, num_samples)
    # Each sample is drawn, then decides steps.
    with progress_bar(2 * num_samples, progress, "steps", "sample") as advance:
        law = _law(run, draws, grid, rule == "exact", advance)
    return dataclasses.replace(
        law,
        requested=num_samples,
        sampling=how.name,
        replicas=rule,
        compile_s=compiled - started,
        run_s=time.perf_counter() - compiled,
    )


def _named(name: str, pilot: Pilot) -> AbstractSampling:
    """The sampling of a name, with the leading axes of the pilot if it has them."""
    mine = pilot.run.sampling
    return mine if mine is not None and mine.name == name else named(name, pilot.run)


def _law(
    run: Run, draws: list[Draws], grid: tuple[float, float], exact: bool, advance: Advance
) -> Law:
    """The law of all chunks, or, after Ctrl-C, of the steps so far."""
    sampling = draws[0].sampling
    about = {"program": digest(run.program), "keys": (tuple(np.asarray(run.key).tolist()),)}
    laws: list[Law] = []
    first: Errors | None = None
    with interruptible() as interrupt:
        try:
            for chunk in decided_chunks(run, draws, exact=exact, advance=advance):
                accumulator = Accumulator(grid)
                try:
                    for steps in step_times(run, [chunk], advance=advance):
                        accumulator.add(steps)
                finally:
                    if accumulator.num_samples:
                        # Whole chunks of one run have the errors of the first.
                        whole = accumulator.num_samples == chunk.draws.steps
                        errors = first if whole else None
                        if errors is None:
                            errors = errors_of(chunk.decision, accumulator.first_steps())
                        laws.append(_law_of_chunk(run.chances, chunk, accumulator, errors, about))
                        first = errors
                laws = sampling.compacted(laws)
        except KeyboardInterrupt:
            if not laws:
                raise
        law = sampling.merged(laws)
        # An interrupted law says how many steps it has, so the interrupt needs no message.
        interrupt.late = interrupt.take() and not law.interrupted
    return law


def _law_of_chunk(
    chances: Chances, chunk: Chunk, accumulator: Accumulator, errors: Errors, about
) -> Law:
    return accumulator.law(
        errors,
        requested=chunk.draws.steps,
        effective_samples=effective_samples(chances, chunk.decision.kept),
        compile_s=0.0,
        run_s=0.0,
        **about,
    )


def _check_allocations(program, num_samples, replicas, sampling, allocations) -> None:
    if whole_number(allocations, "allocations") > max(num_samples // 2, 1):
        raise ValueError(
            f"`allocations={allocations}` must be at least 1 and no more than half of "
            f"`num_samples` = {num_samples}, because each needs two to be told apart from the rest."
        )
    fits = {"replicas": (replicas, "explicit"), "sampling": (sampling, "plain")}
    for name, (given, only) in fits.items():
        if given not in ("auto", only):
            raise ValueError(
                f"`allocations` simulates every replica; leave out `{name}={given!r}`."
            )
    if program.variability.rank is None:
        raise ValueError(
            "`allocations` needs GPUs that differ, but the program's `variability.rank` is `None`; "
            "give it a law, or leave `allocations` out."
        )


def _check_options(program, num_samples, replicas, sampling) -> None:
    if not isinstance(replicas, str) or replicas not in ("auto", "vector", "exact", "explicit"):
        raise ValueError(
            f"`replicas={replicas!r}` must be 'auto', 'vector', 'exact' or 'explicit'."
        )
    if not isinstance(sampling, str) or sampling not in ("auto", "plain", "importance"):
        raise ValueError(f"`sampling={sampling!r}` must be 'auto', 'plain' or 'importance'.")
    if replicas == "explicit":
        if sampling == "importance":
            raise ValueError(
                f"`sampling={sampling!r}` draws samples of one replica, so it does not go with "
                "`replicas='explicit'`."
            )
        if num_samples * program.num_replicas >= 2**32:
            raise ValueError(
                f"{num_samples} steps of {program.num_replicas} explicit replicas are too many; "
                "their product must be below 2^32."
            )
