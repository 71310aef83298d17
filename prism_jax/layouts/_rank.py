"""Ranks layouts by a figure of their laws: the one with the shortest predicted step first."""

import contextlib
import itertools as it
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from jaxtyping import PRNGKeyArray

from .._interrupt import interruptible, left_working
from .._misc import check_type, whole_number
from ..analysis import (
    AbstractObjective,
    Quantile,
    alike,
    check_num_steps,
    check_objective,
    check_steps,
)
from ..data import Job
from ..random import check_key
from ..workers import run_tasks
from ._best_first import BestFirst, EndedError, Watch
from ._enumerate import check_memory_margin, schedule_of
from ._ranking import Ranking, Search, made, works_of
from ._simulate import Kept, simulate_jobs


# How many layouts are simulated at once by workers, after the first.
_WAVE = 16
# Jobs of a call, at most; and how many calls there are, at least, so that all workers have work.
_MOST = 8
_CALLS = 16


class NothingFitsError(ValueError):
    """No job fits into the memory of its devices."""


def rank_layouts(
    jobs: Sequence[Job],
    objective: AbstractObjective | None = None,
    *,
    num_samples: int | None = 16_384,
    key: PRNGKeyArray | None = None,
    top: int = 20,
    memory_margin: float | None = None,
    budget: float | None = None,
    out: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> Ranking:
    """Ranks layouts by a figure of the law of their step time.

    Layouts are simulated in the order of their predicted steps, the shortest first. The search ends
    when the next prediction is longer than the objective of the `top`-th best so far. A step that
    varies takes longer on average than one that does not, so none of the remaining layouts can be
    among the first `top` by mean, or by a figure above the mean. All layouts use common random
    numbers: the same key and the same step ids.

    If steps have different numbers of tokens, times are compared per token, or per sample where a
    model has no words.

    **Arguments:**

    - `jobs`: the layouts, as jobs from [`enumerate_layouts`][] or any other jobs.
    - `objective`: `Mean()`, `Quantile(q)` or `CVaR(q)`; by default the 95 % quantile.
    - `num_samples`: how many steps to simulate of each layout. `None` simulates none, and ranks the
        first `top` by their predictions.
    - `key`: a `jax.random` key. Without simulation there need not be one.
    - `top`: how many layouts to be sure of; as many as there are jobs simulates all.
    - `memory_margin`: leaves out layouts that do not leave this share of a device's memory free;
        `None` keeps all.
    - `budget`: ends the search after so many seconds. As the order is fixed, a longer budget only
        adds layouts.
    - `out`: a folder to which each layout is written as soon as it is simulated. Layouts that are
        already there, of a search for the same jobs, are not simulated again.
    - `executor`: simulates several layouts in parallel, a few in each call. It can be any
        `concurrent.futures.Executor`, such as a [`RayExecutor`][]. The results are the same.
    - `progress`: whether to print the best so far on stderr, at once and every ten seconds.

    **Returns:**

    A [`Ranking`][]. After Ctrl-C it holds what was known until then.

    **Raises:**

    `ValueError` if there are no jobs, if the objective is not a time, if no job fits or can be
    simulated, or if `out` holds something else. `BrokenExecutor` if workers died.
    """
    objective = Quantile(0.95) if objective is None else objective
    _check(jobs, objective, num_samples, key, top, memory_margin)
    search = Search(jobs, *works_of(jobs), objective, num_samples, top)
    with interruptible() as interrupt:
        watch = Watch(budget, interrupt, search.progress if progress else None)
        search.queue = BestFirst(jobs, memory_margin, search.scaled, watch)
        with contextlib.suppress(EndedError):
            if num_samples is None:
                search.order = [*it.islice(search.queue, top)]
            else:
                assert key is not None
                kept = Kept(out, jobs, objective, num_samples, key)
                _simulate_all(search, key, kept, executor, watch)
    search.ended = watch.ended
    if not search.found:
        if search.ended and search.queue.predicted:  # What is known is predicted.
            first = sorted(search.queue.predicted, key=search.predicted)
            search.order, search.num_samples = first[:top], None
        elif num_samples is not None or not search.order:
            _nothing(search)
    return made(search)


def _simulate_all(
    search: Search, key: PRNGKeyArray, kept: Kept, executor: Executor | None, watch: Watch
) -> None:
    """Simulates layout after layout, until no other can be among the first `top`. The figures of
    those that are kept are taken from there.
    """
    jobs, options = search.jobs, (search.objective, search.num_samples, key)

    def simulate(numbers: Sequence[int]) -> None:
        search.order += numbers
        for number in numbers:
            if number in kept.known:
                search.add(number, kept.known[number])
        left = [number for number in numbers if number not in kept.known]
        # Programs of one schedule share compiled code.
        most = min(max(len(left) // _CALLS, 1), _MOST)
        calls = alike(left, lambda number: schedule_of(jobs[number]), most)
        tasks = [([jobs[number] for number in some], *options) for some in calls]
        for which, results in run_tasks(simulate_jobs, tasks, workers, watch):
            for number, found in zip(calls[which], results, strict=True):
                search.add(number, found)
                kept.write(jobs[number], number, search.queue.predicted[number], found)

    queue, size = iter(search.queue), search.top if executor else 1
    with _own_thread(executor) as workers:
        while wave := [*it.islice(queue, size)]:
            last = search.last()
            near = [number for number in wave if search.predicted(number) < last]
            simulate(near)
            if len(near) < len(wave):
                break
            size = _WAVE if executor else 1
    if executor:  # What one process would not have simulated.
        values = dict(search.found)
        search.found.clear()
        for number in search.order:
            if number in values and search.predicted(number) < search.last():
                search.found[number] = values[number]


@contextlib.contextmanager
def _own_thread(executor: Executor | None) -> Iterator[Executor]:
    """The executor, or a thread of this process: while XLA compiles in it, the search can end."""
    if executor is not None:
        yield executor
        return
    thread = ThreadPoolExecutor(1)
    try:
        yield thread
    except EndedError:
        left_working()
        raise
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def check_ranks(objective: AbstractObjective) -> None:
    """Raises a `ValueError` unless an objective is a time that falls when all steps get shorter."""
    check_objective(objective)
    if objective.unit != "s" or not objective.monotone:
        raise ValueError(
            f"{objective} does not rank layouts; use `Mean()`, `Quantile(q)` or `CVaR(q)`."
        )


def _check(jobs, objective, num_samples, key, top, memory_margin) -> None:
    if not len(jobs):
        raise ValueError("There are no layouts to rank; give at least one job.")
    for job in jobs:
        check_type(job, Job, "job to rank", "give what `enumerate_layouts` or `load_job` gives")
    check_ranks(objective)
    if num_samples is not None:
        check_key(key)
        check_num_steps(num_samples)
        check_steps(objective, num_samples)
    whole_number(top, "top")
    check_memory_margin(memory_margin or 0.0)


def _nothing(search: Search) -> None:
    """Raises what there is to say where no layout was found."""
    queue = search.queue
    if search.ended == "interrupted":
        raise KeyboardInterrupt
    if search.ended:
        raise ValueError("The budget ended before any layout was predicted; give more seconds.")
    if queue.refused:
        raise ValueError(f"None of the jobs can be simulated: {next(iter(queue.refused.values()))}")
    raise NothingFitsError(
        f"None of the {queue.num_too_large:,} layouts leaves the memory free that it must; use "
        "more GPUs, or a smaller `memory_margin`."
    )
