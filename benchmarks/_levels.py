"""Published steps with other levels of jobs that are not calibrated (`kernels/priors.toml`)."""

import pathlib
from collections import defaultdict
from typing import Any

import msgspec
import numpy as np

import prism_jax as prism
from prism_jax.workload import has_experts

from ._means import VARIABILITY
from ._published import published
from ._tables import table


# Tables of dense models whose errors grew when the level was added.
_DENSE = ("MLPerf families", "Megatron-Core r0.8", "Megatron-LM 2021")
_DENSE += ("Megatron-LM Llama", "SimuMax")
_REPLICAS, _FASTER = 8, 0.97


def variants_text(folder: pathlib.Path) -> str:
    """Mean absolute errors by kind of job, each table of steps once, and of `_DENSE`."""
    errors: Any = defaultdict(lambda: defaultdict(list))
    for one in published(folder):
        job: Any = one.job
        if job is None:
            continue
        experts, fsdp = has_experts(job.model), job.training.zero == 3
        kind = "FSDP" if fsdp else "experts" if experts else "dense"
        for name, kernels in _variants(job).items():
            changed = msgspec.structs.replace(job, kernels=kernels)
            ratio = VARIABILITY * prism.predict(changed).mean / one.seconds
            errors[kind, one.table][name].append(abs(ratio - 1))
    names = list(next(iter(errors.values())))
    cells = []
    chosen = [(kind, kind, "") for kind in ("dense", "FSDP", "experts")]
    chosen += [(part, "dense", part) for part in _DENSE]
    for label, kind, part in chosen:
        mine = [e for (k, table), e in errors.items() if k == kind and table.startswith(part)]
        means = [np.mean([np.mean(one[name]) for one in mine]) for name in names]
        cells.append([label, *(f"{100 * mean:.2f} %" for mean in means)])
    return table(["", *names], cells)


def _variants(job: Any) -> dict[str, Any]:
    """The kernels of a job with each level."""
    kernels, new = job.kernels, msgspec.structs.replace
    beyond = {"num_replicas": _REPLICAS} if job.layout.dp >= _REPLICAS else {"growth": 0.0}
    products = tuple(
        new(one, values=tuple(v / _FASTER for v in one.values)) if one.kernel == "gemm" else one
        for one in kernels.efficiency
    )
    return {
        "shipped": kernels,
        "no constant": new(kernels, constant_s=0.0),
        "half the constant": new(kernels, constant_s=kernels.constant_s / 2),
        f"growth beyond {_REPLICAS} replicas": new(kernels, **beyond),
        f"products x {_FASTER}": new(kernels, efficiency=products),
    }
