"""Jobs ranked by a figure of the step time, with what a training on them costs."""

from typing import Any

import msgspec

from .._summary import Column, Table, picked, plain
from ..data import load_job
from . import _load, _prism as prism
from ._options import ALLOW_OOM, COST, OBJECTIVE, OVER, RANDOM, Given, Output, command
from ._values import changes_of, count, objective, points, tokens


@command(
    OBJECTIVE,
    RANDOM,
    OVER,
    ALLOW_OOM,
    COST,
    how={"jobs": {"nargs": "+"}, "--samples": (count, 16_384), "--parameters": tokens},
)
def compare(given: Given) -> Output:
    """Rank jobs, or variants of one job, by a figure of the step time, or of the time per token.

    jobs JOB  shipped jobs (`prism-jax jobs`), or .toml files
    --samples N  steps for each job (16384)
    --parameters N  widen or narrow each model to N parameters, such as 8e9

    example: prism-jax compare gpt3-175b-h100-4096 --over schedule.virtual_stages=3,6,12
    """
    of = objective(given.objective)
    check_cost(given)
    jobs = []
    for name in given.jobs:
        for changes in map(changes_of, points(given.over)):
            job = load_job(name, [*given.overrides, *changes])
            model = job.model
            if model is not None and given.parameters is not None:
                model = prism.workload.widen(model, given.parameters)
            changed = {"model": model, "name": ", ".join([job.name, *changes])}
            jobs.append(msgspec.structs.replace(job, **changed))
    if len(jobs) < 2:
        raise ValueError(
            "One job was given, and nothing to compare it with; give two jobs, or values of a key "
            "with `--over`."
        )
    for job in () if given.allow_oom else jobs:
        prism.prediction.check_memory(job)
    _load.use_all_cores()
    found = prism.layouts.rank_layouts(jobs, of, top=len(jobs), **_load.options_of(given))
    _load.tell_notes(jobs)
    return Output(as_json(found, len(jobs), given), [as_table(found, len(jobs), given)])


def check_cost(given: Given) -> None:
    """Raises a `ValueError` for a price without a number of tokens."""
    if given.price is not None and given.tokens is None:
        raise ValueError("`--price` needs to know for how much; give `--tokens`, too.")


def cost(given: Given, gpus: int, seconds: float) -> dict[str, float]:
    """The GPU hours of so many GPUs for so long, and their price if there is one."""
    hours = gpus * seconds / 3600
    return {"gpu_hours": hours} | ({} if given.price is None else {"cost": hours * given.price})


def _cost_of(given: Given, one: Any) -> dict[str, float]:
    """The cost of training on the given tokens, if any, at the throughput of a ranked layout."""
    if given.tokens is None:
        return {}
    return cost(given, one.gpus, given.tokens / one.tokens_per_s)


def as_json(found: Any, top: int, given: Given) -> dict[str, Any]:
    """A ranking, as `--json` prints it, with its first `top` jobs."""
    return {
        **picked(found, "objective", "unit", "num_simulated", "num_samples", "ended", "notes"),
        "num_layouts": found.num_given,
        "layouts": [_row(one, given) | _cost_of(given, one) for one in found.layouts[:top]],
        "best_by_mean": _row(found.best_by_mean, given),
        "loss_of_best_by_mean": plain(found.loss),
    }


def _widened(given: Given) -> bool:
    """Whether the models were given a number of parameters, which only `compare` does."""
    return getattr(given, "parameters", None) is not None


def _size_of(one: Any) -> dict[str, int]:
    """The width and the number of parameters of a ranked job's model."""
    model = one.job.model
    return {"hidden_size": model.hidden_size, "parameters": prism.workload.count_parameters(model)}


def _row(one: Any, given: Given) -> dict[str, Any]:
    job = one.job
    figures = ("gpus", "rank", "rank_by_mean", "value", "behind", "mean", "p95", "p99", "mfu")
    return {
        "name": job.name,
        **(_size_of(one) if _widened(given) else {}),
        **picked(job, "layout", "schedule"),
        **picked(job.training, "microbatch_size", "zero", "recompute"),
        **picked(one, *figures, "per_unit", "tokens_per_s"),
        "predicted_s": one.prediction.mean,
        "memory_bytes": one.memory_bytes,
    }


_SIZES = (
    Column("width", "job.model.hidden_size", ",d"),
    Column("parameters", lambda one: _size_of(one)["parameters"], ",d"),
)


def as_table(found: Any, top: int, given: Given) -> Table:
    """The first `top` jobs, and how much longer the objective of the best job by mean is."""
    simulated, best = found.num_samples > 0, found.best_by_mean
    by_unit = Column(f"per {found.unit}", "per_unit", ".4g", "µs", scale=1e6)
    columns = (
        Column("rank"),
        *([Column("by mean", "rank_by_mean")] if simulated else []),
        Column("layout", "job.name"),
        *(_SIZES if _widened(given) else ()),
        Column("GPUs", "gpus"),
        _rounded("objective" if simulated else found.objective, "value"),
        *([by_unit] if found.unit != "step" else []),
        Column("behind", unit="s"),
        *(_rounded(name, name) for name in ("mean", "p95", "p99") if simulated),
        Column("GB", "memory_bytes", ".1f", scale=1e-9),
        Column("MFU", "mfu", ".1f", "%", scale=100),
        Column("tokens/s/GPU", lambda one: one.tokens_per_s / one.gpus, ",.0f"),
        *(
            Column(
                name.replace("gpu_hours", "GPU hours"),
                lambda one, name=name: _cost_of(given, one)[name],
                ",.0f",
            )
            for name in _cost_of(given, best)
        ),
    )
    per = "" if found.unit == "step" else f" per {found.unit}"
    title = f"by {found.objective}{per}; {found.num_given:,} layouts"
    if not simulated:
        return Table(columns, found.layouts, f"{title}, none simulated", found.notes, top)
    title += (
        f", of which {found.num_simulated:,} were simulated: {found.num_samples:,} steps each, "
        "with common random numbers"
    )
    note = "The best is also the best by mean."
    if best.rank > 1:
        note = f"The best by mean, {best.job.name}, is {found.loss} s worse by {found.objective}."
    return Table(columns, found.layouts, title, (note, *found.notes), top)


def _rounded(name: str, of: str) -> Column:
    """A figure with the digits that it supports, without its error."""
    return Column(name, f"{of}.value", unit="s", error=f"{of}.standard_error")
