"""Trains small models with PyTorch, traces every rank, fits half of the steps, predicts the rest.

    python benchmarks/own_traces.py --ranks 2 --steps 1200 --keep FOLDER    # tables in Markdown

Processes run on CPUs: `ddp`, `pp` (1F1B of torch.distributed.pipelining) and `fsdp`. Each runs
with and without a rank that sleeps in every forward, and with and without sequences of uneven
documents. Needs the extra `torch`. A measured step lasts from the first rank's start to the last
rank's end; the prediction comes from the traces alone. An error is predicted over measured, minus
one. The brackets hold the scatter of a figure, because few steps were measured. After a slash is
the same figure of the fitted steps, as measured. No law that is fitted to these steps can be
expected to be closer to the other steps.
"""

import argparse
import itertools as it
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
import prism_jax as prism
from benchmarks._tables import line, percent, scattered, table
from benchmarks._traces import replay_error, score
from prism_jax.trace import read_profile_traces, read_range_names, read_step_times


_MICROBATCHES = {"ddp": 2, "pp": 4, "fsdp": 1}
_LIMITS = {"mean_error": (-0.03, 0.03), "p95_error": (-0.05, 0.05), "std_ratio": (0.7, 1.4)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Predictions of small jobs trained here.")
    parser.add_argument("--ranks", type=int, default=4, help="processes of a job (4)")
    parser.add_argument("--steps", type=int, default=300, help="recorded steps (300)")
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for the traces")
    arguments = parser.parse_args()
    from benchmarks._own_jobs import OwnJob

    header = ("job", f"step time, {arguments.ranks} processes", "mean", "p95", "std ratio")
    print(table(header, []), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for kind, slow, uneven in it.product(_MICROBATCHES, (False, True), (False, True)):
            name = kind + "-slow" * slow + "-uneven" * uneven
            folder = (arguments.keep or pathlib.Path(temporary)) / name
            if not (folder / "step_times.csv").exists():
                sizes = (arguments.ranks, slow, uneven, arguments.steps, _MICROBATCHES[kind])
                record_jobs({folder: OwnJob(kind, *sizes)})
            rows.append(_scores(folder))
            print(_line(name, rows[-1]), flush=True)
    print(f"\n{_summary(rows, arguments.ranks)}")


def record_jobs(jobs: dict[pathlib.Path, Any]) -> None:
    """Trains jobs (`OwnJob`) one after the other, by the same processes, and writes their traces,
    step times and job files, each to its folder."""
    import torch.multiprocessing as mp

    from benchmarks._own_jobs import run_rank_of_jobs

    for folder in jobs:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "store").unlink(missing_ok=True)
    ranks = max(job.ranks for job in jobs.values())
    todo = [(job, str(folder)) for folder, job in jobs.items()]
    mp.start_processes(run_rank_of_jobs, (todo,), nprocs=ranks, start_method="spawn")
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


def _scores(folder: pathlib.Path) -> dict[str, Any]:
    """Fits even steps of a recorded job and scores the odd ones; `of_fitted` are the errors of the
    measured fitted steps, relative to the scored ones."""
    from benchmarks._own_jobs import WARM_UP

    names = read_range_names(folder / "names.toml")
    trace = read_profile_traces(folder, prism.load_job(folder / "job.toml"), names=names)
    measured = read_step_times(folder / "step_times.csv")[trace.steps - WARM_UP]
    fitted, scored = measured[::2], measured[1::2]
    high, other = np.quantile(fitted, 0.95), np.quantile(scored, 0.95)
    means = {"mean_error": fitted.mean() / scored.mean() - 1, "p95_error": high / other - 1}
    return {
        "mean_s": scored.mean(),
        "traced": trace.step_times().mean() / measured.mean() - 1,
        "replay": replay_error(trace),
        **score(prism.fit_profile(trace[::2]), scored, 50_000),
        "of_fitted": {**means, "std_ratio": np.std(fitted, ddof=1) / np.std(scored, ddof=1)},
    }


def _line(name: str, row: dict[str, Any]) -> str:
    fitted, of_means = row["of_fitted"], ("mean_error", "p95_error")
    errors = (f"{scattered(*row[k])} / {percent(fitted[k], 2)}" for k in of_means)
    ratio = "{:.2f} ({:.2f})".format(*row["std_ratio"])
    ratio = f"{ratio} / {fitted['std_ratio']:.2f}"
    return line((name, f"{1e3 * row['mean_s']:.1f} ms", *errors, ratio))


def _summary(rows: list[dict[str, Any]], ranks: int) -> str:
    """How many jobs are within each limit; in brackets, how many jobs' fitted steps are."""
    cells = []
    for name, (low, high) in _LIMITS.items():
        ours = sum(low <= row[name][0] <= high for row in rows)
        theirs = sum(low <= row["of_fitted"][name] <= high for row in rows)
        cells.append(f"{ours} ({theirs})")
    header = ("processes", "mean within 3 %", "p95 within 5 %", "std ratio from 0.7 to 1.4")
    traced, replay = (100 * max(abs(row[name]) for row in rows) for name in ("traced", "replay"))
    return (
        f"{table(header, [(ranks, *cells)])}\n\nThe mean step time in the traces is within "
        f"{traced:.1f} % of the measured one, and the replay within {replay:.2g} %."
    )


if __name__ == "__main__":
    main()
