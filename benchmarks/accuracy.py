"""How accurate the predictions are, on measured data.

    python benchmarks/accuracy.py                     # all parts, as tables in Markdown
    python benchmarks/accuracy.py --means --growth    # these parts
    python benchmarks/accuracy.py --systems --data DIR --json

A part's module is here or in `validation/`. It reads a folder below `--data`, by default
`../shared/data`, and is left out with a note where that is missing. `--json` prints one JSON object
with a key for each part.

- `traces`: `straggler_traces/`; see `own_traces.py`.
- `means`: `published/`, `steps/`, and the systems of `mlperf/` and `mlperf_v6/`; see `means.py`.
- `expected`: the same, by class; see `expected_error.py`.
- `imported`: the rows of models that have a config.json, imported from it; see `imported.py`.
- `experts`: the rows with experts, with their constants fitted without a family; see `means.py`.
- `times`: how long `predict` takes for the same rows; see `means.py`.
- `flagships`: the shipped jobs of well-known runs, with their `[measured]`; see `shipped_jobs.py`.
- `machines`: the steps of other machines in `steps/more_machines.csv`; see `machines.py`.
- `recommenders`, `adapters`, `images`: the shipped recommender, Llama 2 70B with adapters, and
  FLUX.1, by what is assumed of them; published steps with adapters; and shares of convolution and
  of attention across frames.
- `growth`: `steps/growth.csv`; see `growth.py`.
- `layers`: `steps/moe_layers.csv`; see `parts.py`.
- `operators`: `operators/`; see `fit_operators.py`.
- `training-operators`: forward, backward and optimizer kernels, and collectives over eight nodes,
  `operators/`; see `training_operators.py`.
- `power`: `gemm_variability/` and `operators/power.parquet`; see `power.py`.
- `faults`: `faults/`; see `faults.py`.
- `fleet`: runs on shared networks, and the slowest of many GPUs, `fleet/`; see `fleet.py`.
- `sites`: by how much systems with one configuration differ, `fleet/`; see `sites.py`.
- `systems`: the steps of `mlperf/` and `mlperf_v6/`; see `tails.py`.
- `own-machine`: no data, but a training step on this machine's CPU; see `shipped_jobs.py`.
- `memory`: peaks of memory in `megatron_golden/`, `published/`, `steps/` and `../cases`, and which
    runs fitted; see `memory.py`.
- `plain`: plain PyTorch on one H200, `plain_h200/`, or a folder with its tables; see `plain.py`.
- `searches`: layouts that searches tried, `steps/layouts_a100.csv`; see `searches.py`.
- `collectives`: `collectives/`; see `parts.py`.
"""

import importlib
import json
import re
import sys
from typing import Any


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from validation.rows import MEASUREMENTS
from validation.tables import options, use_all_cores


# The parts of each module, whose functions `..._rows` and `..._table` have their names without `s`.
_MODULES = {
    "benchmarks.expected_error": "expected",
    "benchmarks.fit_operators": "operators",
    "benchmarks.own_traces": "traces",
    "validation.faults": "faults",
    "validation.fleet": "fleet",
    "validation.growth": "growth",
    "validation.imported": "imported",
    "validation.machines": "machines",
    "validation.means": "means experts times",
    "validation.memory": "memory",
    "validation.parts": "layers collectives",
    "validation.plain": "plain",
    "validation.power": "power",
    "validation.searches": "searches",
    "validation.shipped_jobs": "flagships recommenders adapters images own-machine",
    "validation.sites": "sites",
    "validation.tails": "systems",
    "validation.training_operators": "training_operators",
}
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
        module = importlib.import_module(_PARTS[name])
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
