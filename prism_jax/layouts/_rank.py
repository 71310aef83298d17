"""Ranks layouts by a figure of their laws: by prediction, then simulation by successive halving."""

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from jaxtyping import PRNGKeyArray

from .._progress import progress_bar
from ..analysis import (
    AbstractObjective,
    Bootstrapped,
    Quantile,
    check_num_steps,
    check_objective,
    check_steps,
    combined,
)
from ..data import Job
from ..prediction import Prediction, predict
from ..random import check_key
from ..workers import run_tasks
from ._enumerate import schedule_of
from ._ranking import RankedLayout, Ranking
from ._simulate import FIGURES, buckets, chunks, simulate_chunk


# Each round has this many times the samples of the round before it.
_MORE = 4
_FEWEST = 1024  # In a round,
_FEWEST_BEYOND = 48  # of which so many reach as far as the objective.
# A layout stays in while it is so many standard errors, or fewer, behind the last that must.
_ERRORS = 2


class _State(NamedTuple):
    """The state of a search.

    **Attributes:**

    - `jobs`: all jobs.
    - `bucket`: the shape bucket of each job that is simulated.
    - `found`: the figures of each simulated job from its last round.
    - `refused`: why some jobs cannot be simulated.
    """

    jobs: Sequence[Job]
    bucket: dict[int, int]
    found: dict[int, Bootstrapped]
    refused: dict[int, str]


class _How(NamedTuple):
    """How layouts are simulated; see `rank_layouts`."""

    objective: AbstractObjective
    key: PRNGKeyArray
    executor: Executor | None
    progress: bool


def rank_layouts(
    jobs: Sequence[Job],
    objective: AbstractObjective | None = None,
    *,
    num_samples: int = 16_384,
    key: PRNGKeyArray,
    top: int = 20,
    margin: float | None = 0.05,
    executor: Executor | None = None,
    progress: bool = False,
) -> Ranking:
    """Ranks layouts by a figure of the law of their step time.

    First, the step of every layout is predicted without variability. The layouts whose predicted
    step is within `margin` of the shortest, and at least `top` layouts, are simulated. Then all
    other layouts are simulated whose predicted step is shorter than the objective of the `top`-th
    best so far. A step that varies takes longer on average than one that does not, so none of the
    remaining layouts can be among the first `top` by mean, or by a figure above the mean.

    The better half of the simulated layouts is simulated again with four times as many samples,
    until they have `num_samples` (successive halving). All layouts use common random numbers: the
    same key and the same step ids.

    **Arguments:**

    - `jobs`: the layouts, as jobs from [`enumerate_layouts`][] or any other jobs.
    - `objective`: `Mean()`, `Quantile(q)` or `CVaR(q)`; by default the 95 % quantile.
    - `num_samples`: how many steps to simulate of each layout in the last round.
    - `key`: a `jax.random` key.
    - `top`: how many layouts at least are simulated to the end.
    - `margin`: see above, as a share of the shortest predicted step; `None` simulates all layouts.
    - `executor`: simulates several layouts in parallel, a few in each call. It can be any
        `concurrent.futures.Executor`, such as a [`RayExecutor`][]. The results are the same.
    - `progress`: whether to show bars on stderr.

    **Returns:**

    A [`Ranking`][].

    **Raises:**

    `ValueError` if there are no jobs, if the objective is not a time, or if no job can be
    simulated. `BrokenExecutor` if workers died.
    """
    objective = Quantile(0.95) if objective is None else objective
    check_key(key)
    _check(jobs, objective, num_samples, top, margin)
    predictions, refused = _predicted(jobs, progress)
    state = _State(jobs, {}, {}, refused)
    order = sorted(predictions, key=lambda i: predictions[i].mean)
    if not order:
        raise ValueError(f"None of the jobs can be simulated: {next(iter(refused.values()))}")
    shortest = predictions[order[0]].mean
    within = math.inf if margin is None else (1 + margin) * shortest
    alive = [i for k, i in enumerate(order) if k < top or predictions[i].mean <= within]
    how = _How(objective, key, executor, progress)
    for round_, count in enumerate(_rounds(objective, num_samples, len(alive), top)):
        _simulate(state, alive, count, how)
        if not state.found:
            raise ValueError(f"None of the jobs can be simulated: {next(iter(refused.values()))}")
        if round_ == 0:
            last = sorted(_value(state, i) for i in state.found)[:top][-1]
            missed = [i for i in order if predictions[i].mean < last and i not in {*alive}]
            _simulate(state, missed, count, how)
            alive = [i for i in (*alive, *missed) if i in state.found]
        if count < num_samples:
            alive = _better_half(state, alive, top)
    return _ranking(state, predictions, alive, objective, num_samples)


def check_ranks(objective: AbstractObjective) -> None:
    """Raises a `ValueError` unless an objective is a time that falls when all steps get shorter."""
    check_objective(objective)
    if objective.unit != "s" or not objective.monotone:
        raise ValueError(
            f"{objective} does not rank layouts; use `Mean()`, `Quantile(q)` or `CVaR(q)`."
        )


def _check(jobs, objective, num_samples, top, margin) -> None:
    if not len(jobs):
        raise ValueError("There are no layouts to rank; give at least one job.")
    others = [job for job in jobs if not isinstance(job, Job)]
    if others:
        raise ValueError(
            f"A {type(others[0]).__name__} was given in place of a job to rank; give what "
            "`enumerate_layouts` or `load_job` gives."
        )
    check_ranks(objective)
    check_num_steps(num_samples)
    check_steps(objective, num_samples)
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ValueError(f"`top={top!r}` must be a whole number of at least 1.")
    if margin is not None and not (math.isfinite(margin) and margin >= 0):
        raise ValueError(f"`margin={margin!r}` must be finite and not negative.")


def _predicted(jobs: Sequence[Job], progress: bool) -> tuple[dict[int, Prediction], dict[int, str]]:
    """The predicted step of each job, and why some jobs have none."""
    found: dict[int, Prediction] = {}
    refused: dict[int, str] = {}
    with progress_bar(len(jobs), progress, "predict", "layout") as advance:
        for number in sorted(range(len(jobs)), key=lambda i: schedule_of(jobs[i])):
            try:
                found[number] = predict(jobs[number])
            except ValueError as error:
                refused[number] = str(error)
            advance(1)
    return found, refused


def _rounds(objective: AbstractObjective, num_samples: int, number: int, top: int) -> list[int]:
    """The number of samples in each round; one round if all jobs are simulated to the end."""
    rounds = [num_samples]
    least = max(_FEWEST, _FEWEST_BEYOND / objective.share)
    while number > top * 2 ** (len(rounds) - 1) and rounds[0] // _MORE >= least:
        rounds.insert(0, rounds[0] // _MORE)
    return rounds


def _simulate(state: _State, numbers: list[int], count: int, how: _How) -> None:
    new = [i for i in numbers if i not in state.bucket]
    first = len({*state.bucket.values()})
    state.bucket.update(
        zip(new, (first + b for b in buckets([state.jobs[i] for i in new])), strict=True)
    )
    options = {"num_samples": count, "key": how.key}
    work = [*chunks(numbers, state.jobs, state.bucket, how.objective, **options)]
    with progress_bar(len(numbers), how.progress, f"{count:,} steps", "layout") as advance:
        for which, results in run_tasks(simulate_chunk, [(one,) for one in work], how.executor):
            for number, found in zip(work[which].numbers, results, strict=True):
                if isinstance(found, str):
                    state.refused[number] = found
                    state.found.pop(number, None)
                else:
                    state.found[number] = found
            advance(len(results))


def _value(state: _State, number: int, figure: str = "objective") -> float:
    return float(state.found[number].values[FIGURES.index(figure)])


def _better_half(state: _State, alive: list[int], top: int) -> list[int]:
    """The better half, at least `top`, those that may still be as good, and the best by mean."""
    ordered = sorted(alive, key=lambda i: _value(state, i))
    sure = min(max(top, -(-len(ordered) // 2)), len(ordered))
    last = state.found[ordered[sure - 1]]
    kept = ordered[:sure]
    for i in ordered[sure:]:
        behind = _difference(state.found[i], last)
        if behind.values[0] <= _ERRORS * behind.scatter[0]:
            kept.append(i)
    return [*dict.fromkeys((*kept, min(alive, key=lambda i: _value(state, i, "mean"))))]


def _difference(one: Bootstrapped, other: Bootstrapped) -> Bootstrapped:
    """By how much the objective of one job is above that of another, from the same steps."""
    return combined(lambda x, y: x[:, :1] - y[:, :1], one, other)


def _ranking(
    state: _State,
    predictions: dict[int, Prediction],
    alive: list[int],
    objective: AbstractObjective,
    num_samples: int,
) -> Ranking:
    ordered = sorted((i for i in alive if i in state.found), key=lambda i: _value(state, i))
    by_mean = sorted(ordered, key=lambda i: _value(state, i, "mean"))
    best = state.found[ordered[0]]
    layouts = []
    for rank, i in enumerate(ordered, 1):
        value, mean, p95, p99 = state.found[i].estimates()
        (behind,) = _difference(state.found[i], best).estimates()
        by = by_mean.index(i) + 1
        layouts.append(
            RankedLayout(state.jobs[i], predictions[i], value, behind, mean, p95, p99, rank, by)
        )
    loss = next(one.behind for one in layouts if one.rank_by_mean == 1)
    return Ranking(
        objective=str(objective),
        layouts=tuple(layouts),
        num_given=len(state.jobs),
        num_simulated=len(state.found),
        num_samples=num_samples,
        loss=loss,
        notes=_notes(state, predictions, layouts),
    )


def _notes(
    state: _State, predictions: dict[int, Prediction], layouts: Sequence[RankedLayout]
) -> tuple[str, ...]:
    notes = []
    pruned = [one.mean for i, one in predictions.items() if i not in state.found]
    if pruned:
        notes.append(
            f"{len(pruned):,} layouts were not simulated: the shortest of them takes "
            f"{min(pruned):.5g} s without variability."
        )
    if state.refused:
        why = next(iter(state.refused.values()))
        notes.append(f"{len(state.refused):,} layouts cannot be simulated; the first: {why}")
    gpus = sorted({one.gpus for one in layouts})
    if len(gpus) > 1:
        notes.append(
            f"The jobs have {', '.join(f'{n:,}' for n in gpus)} GPUs: compare tokens/s for each of "
            "them, not step times."
        )
    tokens = [one.prediction.tokens_per_s * one.prediction.mean for one in layouts]
    if max(tokens) > (1 + 1e-9) * min(tokens):
        notes.append(
            f"A step has {min(tokens):,.0f} to {max(tokens):,.0f} tokens: compare tokens/s, not "
            "step times."
        )
    return tuple(notes)
