"""A ranking of jobs, as a table and as JSON."""

from typing import Any

from ._catalogue import table
from ._json import plain


def as_json(found: Any, top: int) -> dict[str, Any]:
    return {
        "objective": found.objective,
        "num_layouts": found.num_given,
        "num_simulated": found.num_simulated,
        "num_samples": found.num_samples,
        "layouts": [_row(one) for one in found.layouts[:top]],
        "best_by_mean": _row(found.best_by_mean),
        "loss_of_best_by_mean": plain(found.loss),
        "notes": list(found.notes),
    }


def _row(one: Any) -> dict[str, Any]:
    import msgspec

    job = one.job
    estimates = {k: getattr(one, k) for k in ("value", "behind", "mean", "p95", "p99")}
    return {
        "name": job.name,
        "gpus": one.gpus,
        "layout": msgspec.to_builtins(job.layout),
        "schedule": msgspec.to_builtins(job.schedule),
        "microbatch_size": job.training.microbatch_size,
        "zero": job.training.zero,
        "recompute": job.training.recompute,
        "rank": one.rank,
        "rank_by_mean": one.rank_by_mean,
        **{name: plain(estimate) for name, estimate in estimates.items()},
        "predicted_s": one.prediction.mean,
        "memory_bytes": one.prediction.memory_bytes,
        "mfu": plain(one.mfu),
        "tokens_per_s": one.tokens_per_s,
    }


def as_text(found: Any, top: int) -> str:
    """The first `top` jobs, and how much longer the objective of the best job by mean is."""
    header = ("rank", "by mean", "layout", "GPUs", "objective", "behind", "mean", "p95", "p99")
    header += ("GB", "MFU", "tokens/s/GPU")
    rows = [
        (
            one.rank,
            one.rank_by_mean,
            one.job.name,
            one.gpus,
            f"{one.value.value:.5g} s",
            f"{one.behind.value:+.2g} +- {one.behind.standard_error:.1g} s",
            f"{one.mean.value:.5g} s",
            f"{one.p95.value:.5g} s",
            f"{one.p99.value:.5g} s",
            f"{one.prediction.memory_bytes / 1e9:.1f}",
            f"{100 * one.mfu:.1f} %",
            f"{one.tokens_per_s / one.gpus:,.0f}",
        )
        for one in found.layouts[:top]
    ]
    best = found.best_by_mean
    lines = [
        f"by {found.objective}; {found.num_given:,} layouts, of which {found.num_simulated:,} were "
        f"simulated and {len(found.layouts):,} to the end: {found.num_samples:,} steps each, with "
        "common random numbers",
        "",
        table(header, rows),
        "",
    ]
    if best.rank == 1:
        lines.append("The best is also the best by mean.")
    else:
        lines.append(
            f"The best by mean, {best.job.name}, is {found.loss} s worse by {found.objective}."
        )
    return "\n".join([*lines, *found.notes])
