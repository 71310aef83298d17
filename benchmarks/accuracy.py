"""How accurate the predictions are, on measured data.

    python benchmarks/accuracy.py                     # all parts, as tables in Markdown
    python benchmarks/accuracy.py --means --growth    # these parts
    python benchmarks/accuracy.py --systems --data DIR --json

Each part reads a folder below `--data`, by default `../shared/data`, and is left out with a note
where that is missing. `--json` prints one JSON object with a key for each part.

- `traces`: `straggler_traces/`; see `_traces.py`.
- `means`: `published/`, `steps/`, and the systems of `mlperf/` and `mlperf_v6/`; see `_means.py`.
- `expected`: the same, by class; see `expected_error.py`.
- `experts`: the rows with experts, with their constants fitted without a family; see
  `_experts.py`.
- `times`: how long `predict` takes for the same rows; see `_times.py`.
- `flagships`: the shipped jobs of well-known runs, with their `[measured]`; see `_shipped_jobs.py`.
- `recommenders`, `images`: the shipped recommender and FLUX.1, by what is assumed of them, and
  shares of convolution and of attention across frames.
- `growth`: `steps/growth.csv`; see `_growth.py`.
- `layers`: `steps/moe_layers.csv`; see `_layers.py`.
- `operators`: `operators/`; see `_operators.py`.
- `power`: `gemm_variability/` and `operators/power.parquet`; see `_power.py`.
- `faults`: `faults/`; see `_faults.py`.
- `systems`: the steps of `mlperf/` and `mlperf_v6/`; see `_tails.py`.
- `own-machine`: no data, but a training step on this machine's CPU; see `_own_machine.py`.
- `memory`: `megatron_golden/memory.csv`; see `_memory.py`.
- `collectives`: `collectives/`; see `_collectives.py`.
"""

import argparse
import importlib
import json
import os
import pathlib
import sys
from typing import Any


ROOT = pathlib.Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

# Of each part: its folder below the data, its module, and the functions of its rows and its table.
_PARTS = {
    "means": ("", "_means", "mean_rows", "mean_table"),
    "expected": ("", "expected_error", "expected_rows", "expected_table"),
    "experts": ("", "_experts", "expert_rows", "expert_table"),
    "times": ("", "_times", "time_rows", "time_table"),
    "flagships": ("", "_shipped_jobs", "flagship_rows", "flagship_table"),
    "recommenders": ("", "_shipped_jobs", "recommender_rows", "recommender_table"),
    "images": ("", "_shipped_jobs", "image_rows", "image_table"),
    "growth": ("", "_growth", "growth_rows", "growth_table"),
    "layers": ("steps", "_layers", "layer_rows", "layer_table"),
    "operators": ("operators", "_operators", "operator_rows", "operator_table"),
    "power": ("", "_power", "power_rows", "power_table"),
    "faults": ("faults", "_faults", "fault_rows", "fault_table"),
    "systems": ("", "_tails", "system_rows", "system_table"),
    "traces": ("straggler_traces", "_traces", "trace_rows", "trace_table"),
    "collectives": ("collectives", "_collectives", "collective_rows", "collective_table"),
    "own-machine": ("", "_own_machine", "own_rows", "own_table"),
    "memory": ("megatron_golden", "_memory", "memory_rows", "memory_table"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of predictions on measured data.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for name in _PARTS:
        keys: Any = {"dest": "only", "const": name, "help": "this part"}
        parser.add_argument(f"--{name}", action="append_const", **keys)
    parser.add_argument("--only", action="append", choices=_PARTS, help="the same by name")
    parser.add_argument("--data", type=pathlib.Path, default=SHARED, help="the measurements")
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        parser.error(f"there is no folder {arguments.data}; name one with --data")

    import jax

    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    result = {}
    for name in arguments.only or _PARTS:
        folder, module, *names = _PARTS[name]
        if not (arguments.data / folder).is_dir():
            print(f"{name}: there is no folder {folder}", file=sys.stderr)
            continue
        found = importlib.import_module(f"benchmarks.{module}")
        rows_of, table = (getattr(found, one) for one in names)
        try:
            rows = rows_of(arguments.data / folder)
            result[name] = rows if isinstance(rows, dict) else list(rows)
        except FileNotFoundError as error:
            print(f"{name}: there is no file {error.filename}", file=sys.stderr)
            continue
        if not arguments.json:
            print(table(result[name]), end="\n\n", flush=True)
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
