"""Systems of MLPerf Training v6.0 that train models with experts, as rows like those of published
steps."""

import pathlib
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from ._published_models import has_experts
from ._rows import WORDS, number, read


# What the software that all of them use does; the files do not set it.
_SET = {"source": "MLPerf v6.0", "release": "26.06"}
# Columns that have the same name here and there, or another one.
_COLUMNS = {name: name for name in ("gpus", "tp", "pp", "cp", "ep", "pipeline_layout")}
_COLUMNS |= {"vpp": "vp", "global_batch": "global_batch", "seq": "sequence", "model": "bench"}


def systems_with_experts(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """A row of each system, with the median of the medians of its runs. The first step of a run
    does not count."""
    runs = defaultdict(lambda: defaultdict(list))
    devices = {}
    for row in read(folder / "step_times.csv"):
        key = row["system"], row["bench"]
        devices[key] = row["device"]
        time = number(row["step_time_s"])
        if time is not None and "first" not in row["note"]:
            runs[key][row["run"]].append(time)
    for row in read(folder / "configs.csv"):
        key = row["system"], row["bench"]
        if not has_experts({"model": row["bench"]}) or not row["tp"] or key not in runs:
            continue
        p50 = np.median([np.median(steps) for steps in runs[key].values()])
        modules = "" if row["recompute"].startswith("none") else row["recompute"].split(" ")[0]
        found = defaultdict(str, _SET | {name: row[key] for name, key in _COLUMNS.items()})
        for said in WORDS["said"]:
            if said["part"] in row[said["column"]]:
                found |= said["is"]
        found |= {
            "system": row["system"],
            "gpu_type": f"DGX-{devices[key]}",
            "micro_batch": row["microbatch"].split(" ")[0],
            "etp": row["etp"] or "1",
            "dtype": re.split("[ ;]", row["dtype"])[0],
            "dispatcher": re.split("[ /]", row["dispatcher"].removeprefix("flex/"))[0],
            "recompute": "selective" if modules else "none",
            "recompute_modules": modules,
            "step_time_s": str(p50),
            "family": f"MLPerf v6.0 {row['bench']}",
        }
        yield found
