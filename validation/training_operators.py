"""Calls of training by shape, forward, backward and the optimizer's step; and collectives over
eight nodes, which the shipped tables have from those over two and four.

`fit_operators.py` fits the tables and prints the errors of shapes that it leaves out. The paper of
these calls (arXiv:2509.22832) prints errors of whole batches, 4.98 and 9.38 %; their measurements
are not public, so nothing here can be set beside them.
"""

from typing import Any

import numpy as np

from benchmarks.fit_operators import DEVICES, TRAINING, error_table, names_of, read_operators
from prism_jax.cluster import shape_latencies
from prism_jax.data._load_kernels import load_shapes
from prism_jax.data._shapes import shape_key

from .rows import note
from .tables import Folder, Row, by, error_of


_PHASES = ("backward", "step")
_MOST_NODES = 8


def training_operator_rows(folder: Folder) -> dict[str, list[Row]]:
    """`rows`: of each call its `table`, which is the phase or `collectives_8_nodes`; its device and
    shape as `name`; and `measured` and `predicted` seconds."""
    rows = []
    for device, measured in read_operators(folder, TRAINING):
        phase = measured.kernel.rpartition(":")[2]
        table = phase if phase in _PHASES else "forward"
        if "sent" in measured.columns:
            measured = measured.only(measured.columns["nodes"] == _MOST_NODES)
            table = f"collectives_{_MOST_NODES}_nodes"
        shapes = load_shapes(DEVICES[device][0])
        (fitted,) = shapes.get(shape_key(measured.kernel, measured.dtype)) or (None,)
        if fitted is None:
            left_out = f"{len(measured.seconds)} rows are left out"
            note(f"{left_out}: no table of {device} {measured.kernel}")
            continue
        predicted = shape_latencies(fitted, measured.columns).tolist()
        for name, seconds, latency in zip(
            names_of(measured), measured.seconds.tolist(), predicted, strict=True
        ):
            row = {"table": table, "name": f"{device} {name}"}
            rows.append(row | {"measured": seconds, "predicted": latency})
    return {"rows": rows}


def training_operator_table(result: dict[str, list[Row]]) -> str:
    """The errors of each table, and of each kernel in it, in Markdown."""
    errors: dict[str, Any] = {}
    for name, rows in by("table", result["rows"]).items():
        errors[name] = [np.log1p(error_of(row)) for row in rows]
        for row in rows:
            kernel = " ".join(row["name"].split()[:2])
            errors.setdefault(f"{name}: {kernel}", []).append(np.log1p(error_of(row)))
    return error_table(errors)
