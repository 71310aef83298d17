"""A ranking of jobs, as a table and as JSON."""

from typing import Any

from .._summary import Column, Table, picked, plain
from ._cost import cost_columns, cost_of
from ._options import Given


def as_json(found: Any, top: int, given: Given) -> dict[str, Any]:
    return {
        **picked(found, "objective", "unit", "num_simulated", "num_samples", "ended", "notes"),
        "num_layouts": found.num_given,
        "layouts": [_row(one) | cost_of(given, one) for one in found.layouts[:top]],
        "best_by_mean": _row(found.best_by_mean),
        "loss_of_best_by_mean": plain(found.loss),
    }


def _row(one: Any) -> dict[str, Any]:
    job = one.job
    figures = ("gpus", "rank", "rank_by_mean", "value", "behind", "mean", "p95", "p99", "mfu")
    return {
        "name": job.name,
        **picked(job, "layout", "schedule"),
        **picked(job.training, "microbatch_size", "zero", "recompute"),
        **picked(one, *figures, "per_unit", "tokens_per_s"),
        "predicted_s": one.prediction.mean,
        "memory_bytes": one.memory_bytes,
    }


def as_table(found: Any, top: int, given: Given) -> Table:
    """The first `top` jobs, and how much longer the objective of the best job by mean is."""
    simulated = found.num_samples > 0
    by_unit = Column(f"per {found.unit}", "per_unit", ".4g", "µs", scale=1e6)
    columns = (
        Column("rank"),
        *([Column("by mean", "rank_by_mean")] if simulated else []),
        Column("layout", "job.name"),
        Column("GPUs", "gpus"),
        _rounded("objective" if simulated else found.objective, "value"),
        *([by_unit] if found.unit != "step" else []),
        Column("behind", unit="s"),
        *(_rounded(name, name) for name in ("mean", "p95", "p99") if simulated),
        Column("GB", "memory_bytes", ".1f", scale=1e-9),
        Column("MFU", "mfu", ".1f", "%", scale=100),
        Column("tokens/s/GPU", lambda one: one.tokens_per_s / one.gpus, ",.0f"),
        *cost_columns(given),
    )
    per = "" if found.unit == "step" else f" per {found.unit}"
    title = f"by {found.objective}{per}; {found.num_given:,} layouts"
    if not simulated:
        return Table(columns, found.layouts, f"{title}, none simulated", found.notes, top)
    title += (
        f", of which {found.num_simulated:,} were simulated: {found.num_samples:,} steps each, "
        "with common random numbers"
    )
    best = found.best_by_mean
    note = "The best is also the best by mean."
    if best.rank > 1:
        note = f"The best by mean, {best.job.name}, is {found.loss} s worse by {found.objective}."
    return Table(columns, found.layouts, title, (note, *found.notes), top)


def _rounded(name: str, of: str) -> Column:
    """A figure with the digits that it supports, without its error."""
    return Column(name, f"{of}.value", unit="s", error=f"{of}.standard_error")
