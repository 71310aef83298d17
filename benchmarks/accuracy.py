"""How accurate the predictions are, on measured data.

    python benchmarks/accuracy.py            # tables in Markdown; --json for one JSON object
    python benchmarks/accuracy.py --only scales
    python benchmarks/accuracy.py --means    # the same as --only means
    python benchmarks/accuracy.py --means --count    # only which rows are jobs; seconds
    python benchmarks/accuracy.py --memory   # the same as --only memory
    python benchmarks/accuracy.py --collectives

- `traces`: `../shared/data/straggler_traces`; see `_traces.py`.
- `means`: `../shared/data/published` and the systems of `../shared/data/mlperf`; see `_means.py`.
- `memory`: `../shared/data/megatron_golden/memory.csv`; see `_memory.py`.
- `collectives`: `../shared/data/collectives`; see `_collectives.py`.
- `scales`: `../shared/data/mlperf`; see `_scales.py`. `(out)` marks figures that are further
  off than 1.5 % of the median, 0.01 of p95/p50, or a factor of 1.5 of the spread of the core. If
  two runs of a system differ by more, that difference is the limit.
"""

import argparse
import json
import os
import pathlib
import sys


ROOT = pathlib.Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
_FOLDERS = {"means": "published", "traces": "straggler_traces", "scales": "mlperf"}
_FOLDERS |= {"memory": "megatron_golden", "collectives": "collectives"}
if __name__ == "__main__":
    sys.path[0] = str(ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of predictions on measured data.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", choices=tuple(_FOLDERS), help="one of them")
    for name in ("means", "memory", "collectives"):
        parser.add_argument(
            f"--{name}", dest="only", action="store_const", const=name, help=f"as --only {name}"
        )
    parser.add_argument("--count", action="store_true", help="of means: only which rows are jobs")
    parser.add_argument("--data", type=pathlib.Path, default=SHARED, help="the measurements")
    arguments = parser.parse_args()
    for name, folder in _FOLDERS.items():
        if arguments.only in (None, name) and not (arguments.data / folder).is_dir():
            parser.error(f"there is no folder {arguments.data / folder}; name its own with --data")

    import jax

    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    from benchmarks._collectives import collective_rows, collective_table
    from benchmarks._means import count_table, job_rows, mean_rows, mean_table
    from benchmarks._memory import memory_rows, memory_table
    from benchmarks._scales import scale_rows, scale_table
    from benchmarks._traces import all_trace_rows, trace_table

    means = (job_rows, count_table) if arguments.count else (mean_rows, mean_table)
    parts = {"means": means, "traces": (all_trace_rows, trace_table)}
    parts["scales"] = (scale_rows, scale_table)
    parts["collectives"] = (collective_rows, collective_table)
    result = {}
    if arguments.only in (None, "memory"):
        rows, refused = memory_rows(arguments.data / _FOLDERS["memory"] / "memory.csv")
        result["memory"] = {"rows": [row._asdict() for row in rows], "refused": refused}
        if not arguments.json:
            print(memory_table(rows, refused), end="\n\n", flush=True)
    for name, (rows_of, table) in parts.items():
        if arguments.only in (None, name):
            result[name] = list(rows_of(arguments.data / _FOLDERS[name]))
            if not arguments.json:
                print(table(result[name]), end="\n\n", flush=True)
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
