"""Traces of two jobs: replayed, fitted to some of their steps and scored on other steps.

`independent` is the score of the same ops sampled one by one from the pool of all workers, as if
they shared nothing and workers were alike. Halves in time order are reported, too. Where a job
changes while it runs, its halves differ more than any model could predict. An error is predicted
over measured, minus one. The brackets hold the scatter of each figure, because few steps were
measured.
"""

import pathlib
import time
from typing import Any

import numpy as np


def all_trace_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The scores of all traces of a folder."""
    return [
        row
        for path in sorted(folder.glob("*.parquet"))
        for row in trace_rows(path, path.with_name(f"{path.stem}_job.toml"))
    ]


def trace_rows(path: pathlib.Path, job_path: pathlib.Path) -> list[dict[str, Any]]:
    """The scores of one trace."""
    import jax

    import prism_jax as prism
    from prism_jax.program import op_latencies, replay, step_graph
    from prism_jax.trace import outline

    trace = prism.read_trace(path, prism.load_job(job_path))
    step = step_graph(trace.job, outline(trace))
    measured = trace.step_times()
    again = replay(step, op_latencies(trace, step))
    error = float(np.max(np.abs(again / measured - 1)))
    half = len(measured) // 2
    splits = {
        "even to odd": (slice(0, None, 2), slice(1, None, 2)),
        "odd to even": (slice(1, None, 2), slice(0, None, 2)),
        "whole": (slice(None), slice(None)),
        "first to second half": (slice(0, half), slice(half, None)),
        "second to first half": (slice(half, None), slice(0, half)),
    }
    rows = []
    for name, (fitted, held) in splits.items():
        start = time.perf_counter()
        profile = prism.fit_profile(trace[fitted])
        fit_s = time.perf_counter() - start
        row: dict[str, Any] = {"trace": path.stem, "split": name, "steps": len(measured[held])}
        row |= {"replay_error": error, "fit_s": fit_s}
        for model, of in (("", profile), ("independent_", independent(trace[fitted], profile))):
            key = jax.random.key(0)
            law = prism.simulate(prism.compile_profile(of), num_samples=100_000, key=key)
            found = prism.score(law, measured[held], key=jax.random.key(0))
            row |= {f"{model}{k}": [v, found.noise[k]] for k, v in found.values.items()}
        rows.append(row)
    return rows


def independent(trace, profile):
    """The profile of a model that knows kinds of ops, but neither workers nor what ops share."""
    import msgspec

    from prism_jax.data import Variation
    from prism_jax.program import op_latencies, step_graph

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
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        percent = [
            f"{100 * v:+.2f} % ({100 * n:.2f})" for v, n in (row["mean_error"], row["p95_error"])
        ]
        ratio, ks = (f"{row[k][0]:.2f} ({row[k][1]:.2f})" for k in ("std_ratio", "ks_aligned"))
        scores = [f"{row[k][0]:.3g} s" for k in ("crps_s", "independent_crps_s")]
        cells = (row["trace"], row["split"], *percent, ratio, ks, *scores)
        lines.append("| " + " | ".join(cells) + " |")
    replays = {row["trace"]: row["replay_error"] for row in rows}
    lines.append("")
    for trace, error in replays.items():
        lines.append(
            f"The replay of `{trace}` is within {100 * error:.2g} % of the measured steps."
        )
    lines.append(f"The longest fit takes {max(row['fit_s'] for row in rows):.0f} s.")
    return "\n".join(lines)
