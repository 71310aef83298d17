"""Traces of two jobs: replayed, fitted to some of their steps and scored on other steps.

`independent` is the score of the same ops sampled one by one from the pool of all workers, as if
they shared nothing and workers were alike. Halves in time order are reported, too. Where a job
changes while it runs, its halves differ more than any model could predict. An error is predicted
over measured, minus one. The brackets hold the scatter of each figure, because few steps were
measured.
"""

import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import msgspec
import numpy as np

import prism_jax as prism
from prism_jax.data import Variation
from prism_jax.program import op_latencies, replay, step_graph
from prism_jax.trace import outline

from ._tables import scattered, table


def trace_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The scores of all traces of a folder."""
    for path in sorted(folder.glob("*.parquet")):
        job = prism.load_job(path.with_name(f"{path.stem}_job.toml"))
        yield from _of_trace(path.stem, prism.read_trace(path, job))


def replay_error(trace) -> float:
    """How far the replay of a trace's ops is off its steps, at most."""
    step = step_graph(trace.job, outline(trace))
    again = replay(step, op_latencies(trace, step))
    return float(np.max(np.abs(again / trace.step_times() - 1)))


def score(profile, measured: np.ndarray, num_samples: int) -> dict[str, list[float]]:
    """The scores of a profile's law on steps, each with its noise."""
    key = jax.random.key(0)
    law = prism.simulate(prism.compile_profile(profile), num_samples=num_samples, key=key)
    found = prism.score(law, measured, key=key)
    return {name: [value, found.noise[name]] for name, value in found.values.items()}


def _of_trace(name: str, trace) -> Iterator[dict[str, Any]]:
    measured, error = trace.step_times(), replay_error(trace)
    half = len(measured) // 2
    splits = {
        "even to odd": (slice(0, None, 2), slice(1, None, 2)),
        "odd to even": (slice(1, None, 2), slice(0, None, 2)),
        "whole": (slice(None), slice(None)),
        "first to second half": (slice(0, half), slice(half, None)),
        "second to first half": (slice(half, None), slice(0, half)),
    }
    for split, (fitted, held) in splits.items():
        start = time.perf_counter()
        profile = prism.fit_profile(trace[fitted])
        fit_s = time.perf_counter() - start
        row: dict[str, Any] = {"trace": name, "split": split, "steps": len(measured[held])}
        row |= {"replay_error": error, "fit_s": fit_s, **score(profile, measured[held], 100_000)}
        apart = score(independent(trace[fitted], profile), measured[held], 100_000)
        yield row | {f"independent_{name}": found for name, found in apart.items()}


def independent(trace, profile):
    """The profile of a model that knows kinds of ops, but neither workers nor what ops share."""
    step = step_graph(trace.job, profile.outline)
    latencies, kinds = op_latencies(trace, step), np.array(step.kind)
    pools = {kind: latencies[kinds == kind] for kind in dict.fromkeys(step.kind)}
    laws = []
    for kind, pool in pools.items():
        cv = float(pool.std() / pool.mean()) if pool.mean() > 0 else 0.0
        if cv > 0:
            parameters = {"sigma": float(np.sqrt(np.log1p(cv**2)))}
            laws.append(Variation(kind, "residual", "lognormal", parameters))
    means = [msgspec.structs.replace(m, mean_s=float(pools[m.kind].mean())) for m in profile.means]
    return msgspec.structs.replace(profile, means=tuple(means), variability=tuple(laws))


def trace_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    header = ("trace", "fitted to, scored on", "mean", "p95", "std ratio", "KS", "CRPS")
    header += ("CRPS, independent ops",)
    cells = (
        (
            row["trace"],
            row["split"],
            *(scattered(*row[k]) for k in ("mean_error", "p95_error")),
            *("{:.2f} ({:.2f})".format(*row[k]) for k in ("std_ratio", "ks_aligned")),
            *(f"{row[k][0]:.3g} s" for k in ("crps_s", "independent_crps_s")),
        )
        for row in rows
    )
    lines = [table(header, cells), ""]
    for trace, error in {row["trace"]: 100 * row["replay_error"] for row in rows}.items():
        lines.append(f"The replay of `{trace}` is within {error:.2g} % of the measured steps.")
    lines.append(f"The longest fit takes {max(row['fit_s'] for row in rows):.0f} s.")
    return "\n".join(lines)
