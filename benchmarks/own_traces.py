"""Trains small models with PyTorch, traces every rank, fits half of the steps, predicts the rest.

    python benchmarks/own_traces.py                  # a table in Markdown; --json for one object
    python benchmarks/own_traces.py --only pp --keep FOLDER

Four processes run on CPUs: `ddp`, `pp` (1F1B of torch.distributed.pipelining) and `fsdp`. Each runs
with and without a rank that sleeps in every forward, and with and without sequences of uneven
documents. Needs the extra `torch`. A measured step lasts from the first rank's start to the last
rank's end; the prediction comes from the traces alone. An error is predicted over measured, minus
one. The brackets hold the scatter of a figure, because few steps were measured. After a slash is
the same figure of the fitted steps, as measured. No law that is fitted to these steps can be
expected to be closer to the other steps.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np


ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

KINDS = ("ddp", "pp", "fsdp")
_LIMITS = {"mean_error": (-0.03, 0.03), "p95_error": (-0.05, 0.05), "std_ratio": (0.7, 1.4)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Predictions of small jobs trained here.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", choices=KINDS, help="one of them")
    parser.add_argument("--ranks", type=int, default=4, help="processes of a job (4)")
    parser.add_argument("--steps", type=int, default=300, help="recorded steps (300)")
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for the traces")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if not arguments.json:
        header = ("job", f"step time, {arguments.ranks} processes", "mean", "p95", "std ratio")
        print("| " + " | ".join(header) + " |\n|" + "---|" * len(header), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for kind in (arguments.only,) if arguments.only else KINDS:
            for slow in (False, True):
                for uneven in (False, True):
                    name = kind + "-slow" * slow + "-uneven" * uneven
                    folder = (arguments.keep or pathlib.Path(temporary)) / name
                    if not (folder / "step_times.csv").exists():
                        record(folder, kind, slow, uneven, arguments.steps, arguments.ranks)
                    rows.append({"job": name, **score_folder(folder)})
                    if not arguments.json:
                        print(line(rows[-1]), flush=True)
    print(json.dumps({"own": rows}) if arguments.json else f"\n{summary(rows, arguments.ranks)}")


def record(
    folder: pathlib.Path, kind: str, slow: bool, uneven: bool, steps: int, ranks: int = 4
) -> None:
    """Trains a job and writes its traces, step times and job file."""
    from benchmarks._own_jobs import OwnJob

    microbatches = {"ddp": 2, "pp": 4, "fsdp": 1}[kind]
    record_jobs({folder: OwnJob(kind, ranks, slow, uneven, steps, microbatches)})


def record_jobs(jobs: dict[pathlib.Path, Any]) -> None:
    """Trains jobs (`OwnJob`) one after the other, by the same processes, each to its folder."""
    import torch.multiprocessing as mp

    from benchmarks._own_jobs import run_rank_of_jobs

    for folder in jobs:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "store").unlink(missing_ok=True)
    ranks = max(job.ranks for job in jobs.values())
    todo = [(job, str(folder)) for folder, job in jobs.items()]
    mp.start_processes(run_rank_of_jobs, (todo,), nprocs=ranks, start_method="spawn")
    for folder, job in jobs.items():
        _describe(folder, job)


def _describe(folder: pathlib.Path, job: Any) -> None:
    """Writes the step times and the job file of a recorded job."""
    times = np.array([np.load(folder / f"times{rank}.npy") for rank in range(job.ranks)])
    seconds = times[..., 1].max(axis=0) - times[..., 0].min(axis=0)
    rows = "\n".join(f"{step},{x:.9f}" for step, x in enumerate(seconds))
    (folder / "step_times.csv").write_text(f"step,step_time_s\n{rows}\n")
    (folder / "names.toml").write_text('kind = "ranges"\nstep = "step (?P<step>[0-9]+)"\n')
    degree = "pp" if job.kind == "pp" else "dp"
    (folder / "job.toml").write_text(
        f'kind = "job"\nname = "{folder.name}"\n\n[layout]\n{degree} = {job.ranks}\n\n[schedule]\n'
        f'kind = "1f1b"\nnum_microbatches = {job.microbatches}\nblocking = false\n'
    )


def score_folder(folder: pathlib.Path) -> dict[str, Any]:
    """Fits even steps of a recorded job and scores the odd ones."""
    import jax

    import prism_jax as prism
    from benchmarks._own_jobs import WARM_UP
    from prism_jax.program import op_latencies, replay, step_graph
    from prism_jax.trace import outline, read_profile_traces, read_range_names, read_step_times

    start = time.perf_counter()
    job, names = prism.load_job(folder / "job.toml"), read_range_names(folder / "names.toml")
    trace = read_profile_traces(folder, job, names=names)
    read_s = time.perf_counter() - start
    measured = read_step_times(folder / "step_times.csv")
    measured = measured[trace.steps - WARM_UP]
    step = step_graph(trace.job, outline(trace))
    again = replay(step, op_latencies(trace, step))
    profile = prism.fit_profile(trace[::2])
    key = jax.random.key(0)
    law = prism.simulate(prism.compile_profile(profile), num_samples=50_000, key=key)
    found = prism.score(law, measured[1::2], key=key)
    row: dict[str, Any] = {"steps": len(measured), "read_s": read_s}
    row["mean_s"] = float(measured[1::2].mean())
    row["traced"] = float(trace.step_times().mean() / measured.mean() - 1)
    row["replay"] = float(np.max(np.abs(again / trace.step_times() - 1)))
    row["notes"] = list(profile.fitted.notes)
    row |= {k: [v, found.noise[k]] for k, v in found.values.items()}
    row["of_fitted_steps"] = _halves(measured[::2], measured[1::2])
    return row


def _halves(fitted: np.ndarray, scored: np.ndarray) -> dict[str, float]:
    """Errors of the measured fitted steps, relative to the scored steps."""
    return {
        "mean_error": float(fitted.mean() / scored.mean() - 1),
        "p95_error": float(np.quantile(fitted, 0.95) / np.quantile(scored, 0.95) - 1),
        "std_ratio": float(np.std(fitted, ddof=1) / np.std(scored, ddof=1)),
    }


def line(row: dict[str, Any]) -> str:
    """A row of a table in Markdown."""
    halves = row["of_fitted_steps"]
    percent = [
        f"{100 * row[k][0]:+.2f} % ({100 * row[k][1]:.2f}) / {100 * halves[k]:+.2f} %"
        for k in ("mean_error", "p95_error")
    ]
    value, noise = row["std_ratio"]
    ratio = f"{value:.2f} ({noise:.2f}) / {halves['std_ratio']:.2f}"
    return f"| {row['job']} | {1e3 * row['mean_s']:.1f} ms | {' | '.join([*percent, ratio])} |"


def summary(rows: list[dict[str, Any]], ranks: int) -> str:
    """How many jobs are within each limit; in brackets, how many jobs' fitted steps are."""
    cells = []
    for name, (low, high) in _LIMITS.items():
        ours = sum(low <= row[name][0] <= high for row in rows)
        theirs = sum(low <= row["of_fitted_steps"][name] <= high for row in rows)
        cells.append(f"{ours} ({theirs})")
    traced, replay = (100 * max(abs(row[name]) for row in rows) for name in ("traced", "replay"))
    return (
        "| processes | mean within 3 % | p95 within 5 % | std ratio from 0.7 to 1.4 |\n"
        f"|---|---|---|---|\n| {ranks} | {' | '.join(cells)} |\n\n"
        f"The mean step time in the traces is within {traced:.1f} % of the measured one, and the "
        f"replay within {replay:.2g} %."
    )


if __name__ == "__main__":
    main()
