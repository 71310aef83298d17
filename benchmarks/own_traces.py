"""Trains small models with PyTorch, traces every rank, fits half of the steps, predicts the rest.

    python benchmarks/own_traces.py --ranks 2 --steps 1200 --keep FOLDER    # tables in Markdown

Processes run on CPUs: `ddp`, `pp` (1F1B of torch.distributed.pipelining) and `fsdp`. Each runs
with and without a rank that sleeps in every forward, and with and without sequences of uneven
documents. Needs the extra `torch`. A measured step lasts from the first rank's start to the last
rank's end; the prediction comes from the traces alone. An error is predicted over measured, minus
one. The brackets hold the scatter of a figure, because few steps were measured. After a slash is
the same figure of the fitted steps, as measured. No law that is fitted to these steps can be
expected to be closer to the other steps.

`python benchmarks/accuracy.py --traces` replays traces of two jobs of others, fits them to some of
their steps and scores them on other steps. `independent` is the score of the same ops sampled one
by one from the pool of all workers, as if they shared nothing and workers were alike. Halves in
time order are reported, too. Where a job changes while it runs, its halves differ more than any
model could predict.
"""

import itertools as it
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import msgspec
import numpy as np


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
import prism_jax as prism
from prism_jax.data import Variation
from prism_jax.profile import replayed_step_times, traced_graph
from prism_jax.trace import outline, read_profile_traces, read_range_names, read_step_times
from validation.tables import Folder, Row, Rows, cells, line, options, table, table_of


# Of `score`, how columns of tables show its errors.
SCORES = {"mean": "{mean_error:scattered}", "p95": "{p95_error:scattered}"}
SCORES["std ratio"] = "{std_ratio[0]:.2f} ({std_ratio[1]:.2f})"


def trace_rows(folder: Folder) -> Rows:
    """The scores of all traces of a folder."""
    for path in sorted(folder.glob("*.parquet")):
        job = prism.load_job(path.with_name(f"{path.stem}_job.toml"))
        yield from _of_trace(path.stem, prism.read_trace(path, job))


def replay_error(trace) -> float:
    """How far the replay of a trace's ops is off its steps, at most."""
    again = replayed_step_times(*traced_graph(trace, outline(trace)))
    return float(np.max(np.abs(again / trace.step_times() - 1)))


def score(profile, measured: np.ndarray, num_samples: int) -> dict[str, list[float]]:
    """The scores of a profile's law on steps, each with its noise."""
    key = jax.random.key(0)
    law = prism.simulate(prism.compile_profile(profile), num_samples=num_samples, key=key)
    found = prism.score(law, measured, key=key)
    return {name: [value, found.noise[name]] for name, value in found.values.items()}


def _of_trace(name: str, trace) -> Rows:
    measured, error = trace.step_times(), replay_error(trace)
    half = len(measured) // 2
    even, odd, whole = slice(0, None, 2), slice(1, None, 2), slice(None)
    splits = {"even to odd": (even, odd), "odd to even": (odd, even), "whole": (whole, whole)}
    first, second = slice(half), slice(half, None)
    splits |= {"first to second half": (first, second), "second to first half": (second, first)}
    for split, (fitted, held) in splits.items():
        start = time.perf_counter()
        profile = prism.fit_profile(trace[fitted])
        fit_s = time.perf_counter() - start
        row: Row = {"trace": name, "split": split, "steps": len(measured[held])}
        row |= {"replay_error": error, "fit_s": fit_s, **score(profile, measured[held], 100_000)}
        apart = score(independent(trace[fitted], profile), measured[held], 100_000)
        yield row | {f"independent_{name}": found for name, found in apart.items()}


def independent(trace, profile):
    """The profile of a model that knows kinds of ops, but neither workers nor what ops share."""
    _, latencies = traced_graph(trace, profile.outline)
    pools = {kind: x[~np.isnan(x)] for kind, x in latencies.items()}
    laws = []
    for kind, pool in pools.items():
        cv = float(pool.std() / pool.mean()) if pool.mean() > 0 else 0.0
        if cv > 0:
            parameters = {"sigma": float(np.sqrt(np.log1p(cv**2)))}
            laws.append(Variation(kind, "residual", "lognormal", parameters))
    means = [msgspec.structs.replace(m, mean_s=float(pools[m.kind].mean())) for m in profile.means]
    return msgspec.structs.replace(profile, means=tuple(means), variability=tuple(laws))


def trace_table(rows: list[Row]) -> str:
    """In Markdown."""
    columns = {"trace": "{trace}", "fitted to, scored on": "{split}", **SCORES}
    columns |= {"KS": "{ks_aligned[0]:.2f} ({ks_aligned[1]:.2f})", "CRPS": "{crps_s[0]:.3g} s"}
    columns["CRPS, independent ops"] = "{independent_crps_s[0]:.3g} s"
    lines = [table_of(rows, columns), ""]
    for trace, error in {row["trace"]: 100 * row["replay_error"] for row in rows}.items():
        lines.append(f"The replay of `{trace}` is within {error:.2g} % of the measured steps.")
    lines.append(f"The longest fit takes {max(row['fit_s'] for row in rows):.0f} s.")
    return "\n".join(lines)


_MICROBATCHES = {"ddp": 2, "pp": 4, "fsdp": 1}
_LIMITS = {"mean_error": (-0.03, 0.03), "p95_error": (-0.05, 0.05), "std_ratio": (0.7, 1.4)}
_FORMS = ["{name}", "{ms:.1f} ms", SCORES["mean"] + " / {of_fitted[mean_error]:+.2%}"]
_FORMS += [SCORES["p95"] + " / {of_fitted[p95_error]:+.2%}"]
_FORMS += [SCORES["std ratio"] + " / {of_fitted[std_ratio]:.2f}"]


def main() -> None:
    keep, steps = (pathlib.Path, "a folder for the traces"), (300, "recorded steps (300)")
    given = options(__doc__, ranks=(4, "processes of a job (4)"), steps=steps, keep=keep)
    from benchmarks._own_jobs import OwnJob

    header = ("job", f"step time, {given.ranks} processes", "mean", "p95", "std ratio")
    print(table(header, []), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for kind, slow, uneven in it.product(_MICROBATCHES, (False, True), (False, True)):
            name = kind + "-slow" * slow + "-uneven" * uneven
            folder = (given.keep or pathlib.Path(temporary)) / name
            if not (folder / "step_times.csv").exists():
                sizes = (given.ranks, slow, uneven, given.steps, _MICROBATCHES[kind])
                record_jobs({folder: OwnJob(kind, *sizes)})
            rows.append(_scores(folder))
            print(line(cells(rows[-1], *_FORMS)), flush=True)
    print(f"\n{_summary(rows, given.ranks)}")


def record_jobs(jobs: dict[pathlib.Path, Any]) -> None:
    """Trains jobs (`OwnJob`) one after the other, by the same processes, and writes their traces,
    step times and job files, each to its folder."""
    import torch.multiprocessing as mp

    from benchmarks._own_jobs import run_ranks

    for folder in jobs:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "store").unlink(missing_ok=True)
    ranks = max(job.ranks for job in jobs.values())
    todo = [(job, str(folder)) for folder, job in jobs.items()]
    mp.start_processes(run_ranks, (todo,), nprocs=ranks, start_method="spawn")
    for folder, job in jobs.items():
        times = np.array([np.load(folder / f"times{rank}.npy") for rank in range(job.ranks)])
        seconds = times[..., 1].max(axis=0) - times[..., 0].min(axis=0)
        rows = "\n".join(f"{step},{x:.9f}" for step, x in enumerate(seconds))
        (folder / "step_times.csv").write_text(f"step,step_time_s\n{rows}\n")
        (folder / "names.toml").write_text('kind = "ranges"\nstep = "step (?P<step>[0-9]+)"\n')
        degree = "pp" if job.kind == "pp" else "dp"
        (folder / "job.toml").write_text(
            f'kind = "job"\nname = "{folder.name}"\n\n[layout]\n{degree} = {job.ranks}\n\n'
            f'[schedule]\nkind = "1f1b"\nnum_microbatches = {job.microbatches}\nblocking = false\n'
        )


def _scores(folder: pathlib.Path) -> Row:
    """Fits even steps of a recorded job and scores the odd ones; `of_fitted` are the errors of the
    measured fitted steps, relative to the scored ones."""
    from benchmarks._own_jobs import WARM_UP

    names = read_range_names(folder / "names.toml")
    trace = read_profile_traces(folder, prism.load_job(folder / "job.toml"), names=names)
    measured = read_step_times(folder / "step_times.csv")[trace.steps - WARM_UP]
    fitted, scored = measured[::2], measured[1::2]
    high, other = np.quantile(fitted, 0.95), np.quantile(scored, 0.95)
    means = {"mean_error": fitted.mean() / scored.mean() - 1, "p95_error": high / other - 1}
    row: Row = {"name": folder.name, "ms": 1e3 * scored.mean()}
    row["traced"] = trace.step_times().mean() / measured.mean() - 1
    row |= {"replay": replay_error(trace), **score(prism.fit_profile(trace[::2]), scored, 50_000)}
    row["of_fitted"] = {**means, "std_ratio": np.std(fitted, ddof=1) / np.std(scored, ddof=1)}
    return row


def _summary(rows: list[Row], ranks: int) -> str:
    """How many jobs are within each limit; in brackets, how many jobs' fitted steps are."""
    counts = []
    for name, (low, high) in _LIMITS.items():
        ours = sum(low <= row[name][0] <= high for row in rows)
        theirs = sum(low <= row["of_fitted"][name] <= high for row in rows)
        counts.append(f"{ours} ({theirs})")
    header = ("processes", "mean within 3 %", "p95 within 5 %", "std ratio from 0.7 to 1.4")
    traced, replay = (100 * max(abs(row[name]) for row in rows) for name in ("traced", "replay"))
    text = f"The mean step time in the traces is within {traced:.1f} % of the measured one, and "
    text += f"the replay within {replay:.2g} %."
    return f"{table(header, [(ranks, *counts)])}\n\n{text}"


if __name__ == "__main__":
    main()
