"""Ranks layouts by a figure of their laws: the one with the shortest predicted step first."""

import contextlib
import hashlib
import itertools as it
import os
import pathlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import jax
import msgspec
import numpy as np

from .. import _devices
from .._interrupt import interruptible
from .._misc import check_type, whole_number
from .._progress import said_how_far, say_how_far
from ..analysis import (
    AbstractObjective,
    Jackknifed,
    Mean,
    Quantile,
    Std,
    alike,
    check_num_steps,
    check_objective,
    check_steps,
    jackknifed,
    open_parts,
    write_part,
)
from ..data import Job
from ..engine import simulated_steps
from ..prediction import memory
from ..program import compile_job
from ..random import check_key, key_data
from ..workers import run_tasks
from ._enumerate import check_memory_margin, schedule_of
from ._ranking import Ranking, made
from ._search import FIGURES, EndedError, Search, Watch, best_first, works_of


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
    key: "jax.Array | None" = None,
    top: int = 20,
    yours: Job | None = None,
    memory_margin: float | None = None,
    budget: float | None = None,
    out: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> Ranking:
    """Ranks layouts by a figure of the law of their step time.

    Layouts are simulated in the order of their predicted steps, the shortest first. The search ends
    when no other layout can be among the first `top`. A step that varies takes longer on average
    than one that does not, so the prediction of a layout is a lower bound on its mean, and on its
    `CVaR`. Its quantile at `q` may be below its mean, by at most `sqrt((1 - q) / q)` standard
    deviations; the largest of those simulated, as a share of the mean, is taken for all. If the
    prediction of a simulated layout is above the mean of its own steps, no layout is left out
    because of its prediction. All layouts use common random numbers: the same key and the same step
    ids.

    If steps have different numbers of tokens, times are compared per token, or per sample where a
    model has no words.

    **Arguments:**

    - `jobs`: the layouts, as jobs from [`enumerate_layouts`][] or any other jobs.
    - `objective`: `Mean()`, `Quantile(q)` or `CVaR(q)`; by default the 95 % quantile.
    - `num_samples`: how many steps to simulate of each layout. `None` simulates none, and ranks the
        first `top` by their predictions.
    - `key`: a `jax.random` key. Without simulation there need not be one.
    - `top`: how many layouts to be sure of; as many as there are jobs simulates all.
    - `yours`: a job that is ranked with the others, whatever its prediction: it is simulated first.
        It may be one of them, and needs no free memory.
    - `memory_margin`: leaves out layouts that do not leave this share of what is usable of a
        device's memory free; `None` keeps all.
    - `budget`: ends the search after so many seconds. As the order is fixed, a longer budget only
        adds layouts.
    - `out`: a folder to which each layout is written as soon as it is simulated. Layouts that are
        already there, of a search for the same jobs, are not simulated again.
    - `executor`: simulates several layouts in parallel, a few in each call. It can be any
        `concurrent.futures.Executor`, such as a
        [`RayExecutor`][prism_jax.workers.RayExecutor]. The results are the same.
    - `progress`: whether to print the best so far on stderr, at once and every ten seconds.

    **Returns:**

    A [`Ranking`][]. After Ctrl-C it holds what was known until then.

    **Raises:**

    `ValueError` if there are no jobs, if the objective is not a time, if no job fits or can be
    simulated, or if `out` holds something else. `BrokenExecutor` if workers died.
    """
    objective = Quantile(0.95) if objective is None else objective
    _check([*jobs, *([] if yours is None else [yours])], objective, num_samples, key, top)
    check_memory_margin(memory_margin or 0.0)
    jobs, own_number = _with_yours(jobs, yours)
    search = Search(jobs, *works_of(jobs), objective, num_samples, top, memory_margin, own_number)
    with interruptible() as interrupt, said_how_far(search.progress, progress):
        watch = Watch(budget, interrupt)
        queue = best_first(search, watch)
        queue = _telling(queue) if progress else queue
        with contextlib.suppress(EndedError):
            if num_samples is None:
                first = it.islice(queue, top + (search.yours is not None))
                search.order = sorted(first, key=search.predicted)
            else:
                assert key is not None
                folder = None if out is None else pathlib.Path(out)
                _simulate_all(search, queue, key, folder, executor, watch)
    search.ended = watch.ended
    if not search.results:
        if search.ended and search.predictions:  # What is known is predicted.
            first = sorted(search.predictions, key=search.predicted)
            search.order, search.num_samples = first[:top], None
        elif num_samples is not None or not search.order:
            _nothing(search)
    return made(search)


def _telling(numbers: Iterator[int]) -> Iterator[int]:
    """The same numbers; what is known with the first of them is said at once."""
    for count, number in enumerate(numbers):
        if count == 0:
            say_how_far()
        yield number


def _simulate_all(
    search: Search,
    queue: Iterator[int],
    key: "jax.Array",
    folder: pathlib.Path | None,
    executor: Executor | None,
    watch: Watch,
) -> None:
    """Simulates layout after layout, until no other can be among the first `top`. The figures of
    those that a folder holds are taken from there, and those of others are added.
    """
    jobs, options = search.jobs, (search.objective, search.num_samples, key)
    digest = _digest(search, key)
    known = {} if folder is None else open_parts(folder, digest, "search")

    def simulate(numbers: Sequence[int]) -> None:
        search.order += numbers
        for number in numbers:
            if number in known:
                search.add(number, _figures(known[number]))
        missing = [number for number in numbers if number not in known]
        # Programs of one schedule share compiled code.
        most = min(max(len(missing) // _CALLS, 1), _MOST)
        calls = alike(missing, lambda number: schedule_of(jobs[number]), most)
        tasks = [([jobs[number] for number in call], *options) for call in calls]
        for which, results in run_tasks(simulate_jobs, tasks, workers, watch):
            for number, result in zip(calls[which], results, strict=True):
                search.add(number, result)
                if folder is not None:
                    write_part(folder, _row(search, number, result), digest)

    size = search.top if executor else 1
    with _own_thread(executor) as workers:
        while wave := [*it.islice(queue, size)]:
            near = [*it.takewhile(lambda number: not search.leaves_out(number), wave)]
            simulate(near)
            values = {
                number: search.results.pop(number) for number in near if number in search.results
            }
            for number in near:  # Without what one process would not have simulated.
                if search.leaves_out(number):
                    return
                if number in values:
                    search.results[number] = values[number]
            if len(near) < len(wave):
                return
            size = _WAVE if executor else 1


def simulate_jobs(
    jobs: Sequence[Job], objective: AbstractObjective, num_samples: int, key: "jax.Array"
) -> list[Jackknifed | str]:
    """The `FIGURES` of each job; of one that cannot be simulated, why.

    All have the same key and ids of steps, so that what the steps of two jobs share, such as the
    step's own factor and the network's regime, cancels in their difference.
    """
    figures = [objective, Mean(), Quantile(0.95), Quantile(0.99), Std()]
    options: dict[str, Any] = {"num_samples": num_samples, "key": key}
    results: list[Jackknifed | str] = []
    for job in jobs:
        try:
            simulated = simulated_steps(compile_job(job), **options)
        except ValueError as error:
            results.append(str(error))
        else:
            results.append(jackknifed(simulated, figures))
    return results


def _row(search: Search, number: int, result: Jackknifed | str) -> dict[str, Any]:
    """What a folder keeps of a layout."""
    job = search.jobs[number]
    row: dict[str, Any] = {
        "row": number,
        "layout": job.name,
        "predicted_s": search.predictions[number].mean,
        "memory_bytes": memory(job).fullest.bytes,
        "refused": result if isinstance(result, str) else None,
    }
    if not isinstance(result, str):
        row |= {f"{name}_s": x for name, x in zip(FIGURES, result.values.tolist(), strict=True)}
        row |= {"without": result.without.tolist(), "support": result.support.tolist()}
    return row


def _figures(row: dict[str, Any]) -> Jackknifed | str:
    """The figures of a layout that is kept; of one that cannot be simulated, why."""
    if row["refused"]:
        return row["refused"]
    columns = [row[f"{name}_s"] for name in FIGURES], row["without"], row["support"]
    return Jackknifed(*map(np.array, columns))


def _digest(search: Search, key: "jax.Array") -> str:
    """A digest of a search. Most of its jobs share their model, machine and kernels."""
    digest = hashlib.sha256()
    shared: dict[int, int] = {}
    for job in search.jobs:
        for part in (job.model, job.cluster, job.kernels):
            if id(part) not in shared:
                shared[id(part)] = len(shared)
                digest.update(msgspec.json.encode(part))
        of_job = (job.layout, job.schedule, job.training, job.name)
        which = [shared[id(part)] for part in (job.model, job.cluster, job.kernels)]
        digest.update(msgspec.json.encode((of_job, which)))
    words = [int(word) for word in key_data(key)]
    digest.update(msgspec.json.encode([str(search.objective), search.num_samples, *words, FIGURES]))
    return digest.hexdigest()


@contextlib.contextmanager
def _own_thread(executor: Executor | None) -> Iterator[Executor]:
    """The executor, or a thread of this process: while XLA compiles in it, the search can end."""
    if executor is not None:
        yield executor
        return
    # The default device may be set for the caller's thread alone.
    setting = jax.default_device(_devices.default())
    thread = ThreadPoolExecutor(1, initializer=setting.__enter__)
    try:
        yield thread
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def check_ranks(objective: AbstractObjective) -> None:
    """Raises a `ValueError` unless an objective is a time that falls when all steps get shorter."""
    check_objective(objective)
    if objective.unit != "s" or not objective.monotone:
        raise ValueError(
            f"{objective} does not rank layouts; use `Mean()`, `Quantile(q)` or `CVaR(q)`."
        )


def _with_yours(jobs: Sequence[Job], yours: Job | None) -> tuple[Sequence[Job], int | None]:
    """The jobs with your job, and its number."""
    if yours is None:
        return jobs, None
    for number, job in enumerate(jobs):
        if msgspec.structs.replace(job, name=yours.name) == yours:
            return jobs, number
    return [*jobs, yours], len(jobs)


def _check(jobs, objective, num_samples, key, top) -> None:
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


def _nothing(search: Search) -> None:
    """Raises what there is to say where no layout was found."""
    if search.ended == "interrupted":
        raise KeyboardInterrupt
    if search.ended:
        raise ValueError("The budget ended before any layout was predicted; give more seconds.")
    if search.refused:
        raise ValueError(
            f"None of the jobs can be simulated: {next(iter(search.refused.values()))}"
        )
    raise NothingFitsError(
        f"None of the {search.num_too_large:,} layouts leaves the memory free that it must; use "
        "more GPUs, or a smaller `memory_margin`."
    )
