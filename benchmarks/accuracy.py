"""How accurate the predictions are, on measured data.

    python benchmarks/accuracy.py                     # all parts, as tables in Markdown
    python benchmarks/accuracy.py --means --growth    # these parts
    python benchmarks/accuracy.py --systems --data DIR --json

Each part reads a folder below `--data`, by default `../shared/data`, and is left out with a note
where that is missing. `--json` prints one JSON object with a key for each part.

- `traces`: `straggler_traces/`; see `own_traces.py`.
- `means`: `published/`, `steps/`, and the systems of `mlperf/` and `mlperf_v6/`; see `_means.py`.
- `expected`: the same, by class; see `expected_error.py`.
- `imported`: the rows of models that have a config.json, imported from it; see `_imported.py`.
- `experts`: the rows with experts, with their constants fitted without a family; see `_means.py`.
- `times`: how long `predict` takes for the same rows; see `_means.py`.
- `flagships`: the shipped jobs of well-known runs, with their `[measured]`; see `_shipped_jobs.py`.
- `machines`: the steps of other machines in `steps/more_machines.csv`; see `_machines.py`.
- `recommenders`, `adapters`, `images`: the shipped recommender, Llama 2 70B with adapters, and
  FLUX.1, by what is assumed of them; published steps with adapters; and shares of convolution and
  of attention across frames.
- `growth`: `steps/growth.csv`; see `_growth.py`.
- `layers`: `steps/moe_layers.csv`; see `_parts.py`.
- `operators`: `operators/`; see `fit_operators.py`.
- `training-operators`: forward, backward and optimizer kernels, and collectives over eight nodes,
  `operators/`; see `_training_operators.py`.
- `power`: `gemm_variability/` and `operators/power.parquet`; see `_power.py`.
- `faults`: `faults/`; see `_faults.py`.
- `fleet`: runs on shared networks, and the slowest of many GPUs, `fleet/`; see `_fleet.py`.
- `sites`: by how much systems with one configuration differ, `fleet/`; see `_sites.py`.
- `systems`: the steps of `mlperf/` and `mlperf_v6/`; see `_tails.py`.
- `own-machine`: no data, but a training step on this machine's CPU; see `_shipped_jobs.py`.
- `memory`: peaks of memory in `megatron_golden/`, `published/`, `steps/` and `../cases`, and which
    runs fitted; see `_memory.py`.
- `plain`: plain PyTorch on one H200, `plain_h200/`, or a folder with its tables; see `_plain.py`.
- `searches`: layouts that searches tried, `steps/layouts_a100.csv`; see `_searches.py`.
- `collectives`: `collectives/`; see `_parts.py`.
"""

import importlib
import json
import re
import sys
from typing import Any


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from benchmarks._rows import MEASUREMENTS
from benchmarks._tables import options, use_all_cores


# The parts of each module, whose functions `..._rows` and `..._table` have their names without `s`.
_MODULES = {
    "_means": "means experts times",
    "expected_error": "expected",
    "_power": "power",
}
_MODULES |= {"_shipped_jobs": "flagships recommenders adapters images own-machine"}
_MODULES |= {"_growth": "growth", "_imported": "imported"}
_MODULES |= {"_parts": "layers collectives", "_memory": "memory", "fit_operators": "operators"}
_MODULES |= {"_training_operators": "training_operators", "_searches": "searches"}
_MODULES |= {"_machines": "machines"}
_MODULES |= {"_plain": "plain", "_faults": "faults", "_tails": "systems", "own_traces": "traces"}
_MODULES |= {"_fleet": "fleet", "_sites": "sites"}
_PARTS = {part: module for module, parts in _MODULES.items() for part in parts.split()}
# The folders below the data of those that do not read several.
_FOLDERS = {"layers": "steps", "operators": "operators", "collectives": "collectives"}
_FOLDERS |= {"training_operators": "operators", "faults": "faults", "traces": "straggler_traces"}


def main() -> None:
    switch: Any = {"dest": "only", "action": "append_const", "help": "this part"}
    known: Any = {name: switch | {"const": name} for name in _PARTS}
    known["only"] = {"action": "append", "choices": _PARTS, "help": "the same by name"}
    known["json"] = (False, "print one JSON object")
    given = options(__doc__, data=MEASUREMENTS, **known)
    use_all_cores()
    result = {}
    for name in given.only or _PARTS:
        folder, start = _FOLDERS.get(name, ""), re.sub("(?<=ch)es$|s$", "", name.replace("-", "_"))
        if not (given.data / folder).is_dir():
            print(f"{name}: there is no folder {folder}", file=sys.stderr)
            continue
        module = importlib.import_module(f"benchmarks.{_PARTS[name]}")
        try:
            rows = getattr(module, f"{start}_rows")(given.data / folder)
            result[name] = rows if isinstance(rows, dict) else list(rows)
        except FileNotFoundError as error:
            print(f"{name}: there is no file {error.filename or error}", file=sys.stderr)
            continue
        if not given.json:
            print(getattr(module, f"{start}_table")(result[name]), end="\n\n", flush=True)
    if given.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
