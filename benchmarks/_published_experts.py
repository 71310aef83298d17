"""Systems of MLPerf Training v6.0 that train DeepSeek-V3, as rows like those of published steps."""

import csv
import pathlib
from collections import defaultdict
from collections.abc import Iterator

import numpy as np


_COLUMNS = ("measured_steps_row", "layers", "hidden", "zero", "seq_parallel", "balance")
# What their files set for all of them (`configs.csv`): the kernels of the newest Megatron-Bridge.
_SET = {
    "model": "DeepSeekV3",
    "source": "MLPerf v6.0",
    "release": "26.06",
    "micro_batch": "1",
    "etp": "1",  # As in the recipes of that software; the files do not set it.
    "dtype": "mxfp8",
    "dispatcher": "hybridep",
    "ep_overlap": "1",
    "cuda_graph": "full_iteration",
    "fused_grouped_gemm": "1",
    "fp8_attention": "1",
    "note": "",
}


def systems_with_experts(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """A row of each system, with the median of the medians of its runs. The first step of a run
    does not count."""
    if not all((folder / name).is_file() for name in ("configs.csv", "step_times.csv")):
        return
    runs = defaultdict(lambda: defaultdict(list))
    devices = {}
    for row in _read(folder / "step_times.csv"):
        devices[row["system"]] = row["device"]
        if "first" not in row["note"]:
            runs[row["system"]][row["run"]].append(float(row["step_time_s"]))
    for row in _read(folder / "configs.csv"):
        system = row["system"]
        if row["bench"] != "deepseekv3_671b" or not row["tp"] or system not in runs:
            continue
        p50 = np.median([np.median(steps) for steps in runs[system].values()])
        modules = "" if row["recompute"].startswith("none") else row["recompute"].split(" ")[0]
        yield (
            dict.fromkeys(_COLUMNS, "")
            | _SET
            | {
                **{key: row[key] for key in ("gpus", "tp", "pp", "cp", "ep", "pipeline_layout")},
                "system": system,
                "vpp": row["vp"],
                "dp": str(int(row["gpus"]) // (int(row["tp"]) * int(row["pp"]) * int(row["cp"]))),
                "global_batch": row["global_batch"],
                "seq": row["sequence"],
                "gpu_type": f"DGX-{devices[system]}",
                "recompute": "selective" if modules else "none",
                "recompute_modules": modules,
                "fp8_head": "1" if "FP8_OUTPUT_PROJ=True" in row["dtype"] else "",
                "step_time_s": str(p50),
                "family": "MLPerf v6.0 DeepSeekV3",
            }
        )


def _read(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
