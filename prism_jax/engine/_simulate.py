"""`simulate`: the host loop over the pools of a run."""

import dataclasses
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from .._interrupt import interruptible
from .._misc import whole_number
from .._progress import progress_bar
from ..law import Errors, Law, law_of
from ..program import Program, digest
from ._check import check_num_samples, check_program
from ._explicit import explicit
from ._pools import (
    Drawn,
    PooledSteps,
    drawn_pools,
    effective_samples,
    pool_draws,
    pool_of,
    pooled_steps,
    room_of,
    steps_that_look,
)
from ._run import Advance, Run, prepare
from ._sampling import Draws, sampling_named


# For how many seconds JAX has compiled in a thread.
_compiling = threading.local()


def _hear(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event.startswith("/jax/core/compile/"):  # To trace, to lower, and to compile.
        _compiling.seconds = getattr(_compiling, "seconds", 0.0) + duration_secs


jax.monitoring.register_event_duration_secs_listener(_hear)


def simulate(
    program: Program,
    *,
    num_samples: int = 1_000_000,
    key: "jax.Array",
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
    - `sampling`: how samples of one replica are drawn. `"plain"` draws them independently: as many
        as there are steps, and at least 64 for each of a step's replicas, up to 2^19.
        `"importance"` is importance sampling: half of the samples are shifted to be slow, along the
        mean gradient of the replica's end, and all are weighted. It suits extreme quantiles, and
        numbers of replicas too large for plain samples to resolve the slowest; it draws a quarter
        as many samples as there are steps. `"auto"` is `"plain"`.
    - `allocations`: by default, the factors of the GPUs are drawn anew for each step. With a number
        `K`, `K` sets of GPUs (allocations) are drawn, the steps are divided among them (at least
        two to each), and all replicas are simulated. The law is then of all these steps, and
        `Law.allocations` and `Law.run_mean_std` are available. Its intervals come from the
        differences between allocations: that of the standard deviation needs 20 of them, that of
        p50 needs 40, and those of p5 and p95 need 400.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A [`Law`][], which says how samples were drawn. Ctrl-C ends the run early; the law is then of
    the steps so far, and `Law.interrupted` is true.

    **Raises:**

    `ValueError` for an invalid option, or for a program whose latencies are not finite.
    """
    num_samples = check_num_samples(num_samples)
    check_program(program, key)
    if allocations is not None:
        _check_allocations(program, num_samples, sampling, allocations)
    _check_sampling(sampling)
    started = time.perf_counter()
    run = prepare(program, key)
    if allocations is not None:
        run = explicit(run, allocations)
    else:
        name = "plain" if sampling == "auto" else sampling
        run = dataclasses.replace(run, sampling=sampling_named(name, program, run.plan))
    prepared, _compiling.seconds = time.perf_counter(), 0.0
    # Each sample is drawn, then decides steps.
    with (
        progress_bar(2 * num_samples, progress, "steps", "sample") as advance,
        interruptible() as interrupt,
    ):
        draws = pool_draws(run, num_samples)
        law = law_of_pools(run, draws, drawn_pools(run, draws, advance), advance)
        interrupt.take()  # The law says how many steps it has.
    compile_s = _compiling.seconds
    run_s = time.perf_counter() - prepared - compile_s
    times = {"compile_s": prepared - started + compile_s, "run_s": run_s}
    return dataclasses.replace(law, program=digest(program), **times)


def law_of_pools(
    run: Run,
    draws: Sequence[Draws],
    pools: Iterable[Drawn],
    advance: Advance = lambda steps: None,
) -> Law:
    """The law of all pools, or, after Ctrl-C, of the steps so far."""
    sampling, num_samples = run.sampling, sum(pool.steps for pool in draws)
    room = room_of(run, draws)
    fields: Any = {"keys": (tuple(np.asarray(run.key).tolist()),), "sampling": sampling.name}
    laws: list[Law] = []
    first: Errors | None = None
    with interruptible():
        try:
            for number, drawn in enumerate(pools):

                def steps_of(looks: int, drawn=drawn, number=number) -> PooledSteps:
                    pool = pool_of(run, drawn, looks, room, number)
                    return pooled_steps(run, (pool,), drawn.steps)

                steps = steps_that_look(run, steps_of)
                advance(drawn.steps)
                part = steps.counted()
                # Whole pools of one run have the errors of the first.
                is_whole = drawn.steps == drawn.draws.steps
                errors = first if first is not None and is_whole else steps.errors(part)
                first = errors if is_whole else first
                effective = effective_samples(run, drawn)
                fields |= {"requested": drawn.draws.steps, "effective_samples": effective}
                laws = sampling.compacted([*laws, law_of(part, drawn.steps, errors, **fields)])
        except KeyboardInterrupt:
            if not laws:
                raise
        return dataclasses.replace(sampling.merged(laws), requested=num_samples)


def _check_allocations(program, num_samples, sampling, allocations) -> None:
    if whole_number(allocations, "allocations") > max(num_samples // 2, 1):
        raise ValueError(
            f"`allocations={allocations}` must be at least 1 and no more than half of "
            f"`num_samples` = {num_samples}, because each needs two to be told apart from the rest."
        )
    if sampling not in ("auto", "plain"):
        raise ValueError(
            f"`allocations` simulates every replica; leave out `sampling={sampling!r}`."
        )
    if program.variability.rank is None:
        raise ValueError(
            "`allocations` needs GPUs that differ, but the program's `variability.rank` is `None`; "
            "give it a law, or leave `allocations` out."
        )
    if num_samples * program.num_replicas >= 2**32:
        raise ValueError(
            f"{num_samples} steps of {program.num_replicas} replicas are too many for "
            "`allocations`, which simulates each; their product must be below 2^32."
        )


def _check_sampling(sampling) -> None:
    if not isinstance(sampling, str) or sampling not in ("auto", "plain", "importance"):
        raise ValueError(f"`sampling={sampling!r}` must be 'auto', 'plain' or 'importance'.")
