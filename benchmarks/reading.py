"""How much memory it takes to read a large trace.

    python benchmarks/reading.py             # 10^8 rows, 1.5 GB on disk; --json for one JSON object
    python benchmarks/reading.py --kineto 1  # 1 GB of JSON of the PyTorch profiler

A trace is made in a temporary folder and read by a separate process. It is a table of 64 workers,
or the PyTorch profiler's JSON of one worker.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np


ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

_DP, _PP, _MICROBATCHES, _STEPS = 8, 8, 32, 200


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of reading a large trace.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=float, default=1e8)
    parser.add_argument("--kineto", type=float, metavar="GB", help="so much JSON of a profiler")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        of_profiler = arguments.child.endswith(".json")
        print(json.dumps((read_kineto if of_profiler else read)(arguments.child)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.kineto:
            from benchmarks._large_kineto import write_kineto

            path = pathlib.Path(folder) / "rank0.json"
            size = {"gb": write_kineto(path, 1e9 * arguments.kineto) / 1e9}
            text = "{gb:.2f} GB of JSON: peak memory {peak_gib:.2f} GiB, {s_per_gb:.0f} s per GB"
        else:
            path = pathlib.Path(folder) / "trace.parquet"
            size = {"rows": write(path, arguments.rows)}
            text = "{rows:,} rows: peak memory {peak_gib:.2f} GiB, {read_s:.0f} s"
        words = [sys.executable, __file__, "--child", str(path)]
        child = subprocess.run(words, check=True, capture_output=True, text=True)
    result = size | json.loads(child.stdout)
    if arguments.kineto:
        result["s_per_gb"] = result["read_s"] / result["gb"]
    print(json.dumps(result) if arguments.json else text.format(**result))


def write(path: pathlib.Path, rows: float) -> int:
    """Writes at least so many rows; how many."""
    import polars as pl

    rng = np.random.default_rng(0)
    stages = np.arange(_PP)
    of_op = dict.fromkeys(("forward-compute", "backward-compute"), stages)
    of_op |= dict.fromkeys(("forward-send", "backward-recv"), stages[:-1])
    of_op |= dict.fromkeys(("forward-recv", "backward-send"), stages[1:])
    parts = []
    for op, mine in of_op.items():
        axes = (np.arange(_STEPS), np.arange(_DP), mine, np.arange(_MICROBATCHES))
        columns = [x.ravel() for x in np.meshgrid(*axes, indexing="ij")]
        part = pl.DataFrame(dict(zip(("step", "dp_rank", "stage", "seq_id"), columns, strict=True)))
        start = columns[3] + 0.01 * rng.random(len(part))
        duration = 0.5 + 0.1 * rng.random(len(part))
        parts.append(part.with_columns(optype=pl.lit(op), start_ts=start, duration=duration))
    some = pl.concat(parts).sort("step")
    times = int(np.ceil(rows / len(some)))
    later = [some.lazy().with_columns(step=pl.col("step") + _STEPS * i) for i in range(times)]
    pl.concat(later).sink_parquet(path)
    return times * len(some)


def read(path: str) -> dict[str, float]:
    from prism_jax.data import Job, Layout, ScheduleConfig
    from prism_jax.trace import read_trace

    schedule = ScheduleConfig(kind="1f1b", num_microbatches=_MICROBATCHES)
    start = time.perf_counter()
    read_trace(path, Job(Layout(dp=_DP, pp=_PP), schedule, name="large"))
    read_s = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"peak_gib": peak, "read_s": read_s}


def read_kineto(path: str) -> dict[str, float]:
    from prism_jax.data import Job, Layout, ScheduleConfig
    from prism_jax.trace import read_profile_traces

    schedule = ScheduleConfig(kind="1f1b", num_microbatches=8)
    start = time.perf_counter()
    trace = read_profile_traces(path, Job(Layout(), schedule, name="large"))
    read_s = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"peak_gib": peak, "read_s": read_s, "steps": len(trace.steps)}


if __name__ == "__main__":
    main()
