"""How much slower some ranks are: tables of factors, tests of nodes, and what detectors of
stragglers write.
"""

import dataclasses
import re
from typing import Any

import numpy as np
from jaxtyping import Float

from .._files import Path, shown
from .._misc import plural
from ..data import located
from ..trace import names_of_columns, read_factors
from ._read import content_of, text_of
from ._series import known


@dataclasses.dataclass(frozen=True)
class RankFactors:
    """How long ranks take for the same work, over any common time.

    **Attributes:**

    - `compute`, `collectives`: of each rank, `(ranks,)`; `None` where it was not measured.
    - `each`: how many ranks were measured together: one, or those of a node.
    - `source`: what has measured it.
    """

    compute: Float[np.ndarray, " ranks"] | None
    collectives: Float[np.ndarray, " ranks"] | None
    each: int
    source: str


def read_ranks(path: Path, num_ranks: int, devices_per_node: int) -> RankFactors:
    """Reads how slow ranks are, of a file of any kind that is known (`known.toml`).

    - A table, CSV or Parquet: by `rank`, `gpu` or `node`, a column `factor`, or what a test of each
      has measured of products and of collectives, such as `gemm_tflops` and `busbw`.
    - Reports of Megatron-LM's detector of stragglers, of FlagScale's, and of NVRx, in a log or as
      JSON: the median over all reports. Some name only the slowest and the fastest ranks. Then
      those that are not named count as the slowest of the faster half that is.

    **Arguments:**

    - `path`: the file.
    - `num_ranks`, `devices_per_node`: of the job.

    **Raises:**

    `ValueError` of one sentence if the file has none, or of other ranks than those of the job.
    """
    if not str(path).endswith((".csv", ".parquet")):
        text = text_of(content_of(path))
        with located(shown(path)):
            return _of_reports(text, num_ranks)
    columns = {
        test: _column(names_of_columns(path), patterns)
        for test, patterns in known()["tests"].items()
    }
    if not any(columns.values()):  # The error says which columns there are.
        columns["compute"] = ("factor", 1)
    nodes = -(-num_ranks // devices_per_node)
    factors: dict[str, Any] = {"compute": None, "collectives": None}
    per_row = 1
    for test, (name, power) in ((test, column) for test, column in columns.items() if column):
        values, by = read_factors(path, name)
        by = by or ("node" if len(values) == nodes else "gpu")
        if len(values) != {"gpu": num_ranks, "node": nodes}[by]:
            raise ValueError(
                f"{shown(path)}: it has {plural(len(values), 'row')} by `{by}`, and the job has "
                f"{plural(num_ranks, 'GPU')} in {plural(nodes, 'node')}; give one for each."
            )
        per_row = devices_per_node if by == "node" else 1
        factors[test] = np.repeat(values**power, per_row)[:num_ranks]
    return RankFactors(**factors, each=per_row, source=shown(path))


def _column(names: list[str], patterns: dict[str, str]) -> tuple[str, int] | None:
    """The first column that has times, or else rates, and the power that makes it a time."""
    for kind, power in (("times", 1), ("rates", -1)):
        for name in names:
            if re.search(patterns[kind], name, re.IGNORECASE):
                return name, power
    return None


def _of_reports(text: str, num_ranks: int) -> RankFactors:
    for form in known()["ranks"]:
        factors = []
        for report in re.findall(form["report"], text):
            matches = re.finditer(form["value"], report)
            rates = {int(match["rank"]): float(match["value"]) for match in matches}
            wrong = [rank for rank, rate in rates.items() if rank >= num_ranks or rate <= 0]
            if wrong:
                raise ValueError(
                    f"it has rank {wrong[0]} with a rate of {rates[wrong[0]]:g}, and the job has "
                    f"{plural(num_ranks, 'rank')}, with rates above zero; give the report of "
                    "this job."
                )
            usual = sorted(rates.values())[len(rates) // 2]
            of_report = np.ones(num_ranks)
            of_report[[*rates]] = usual / np.array([*rates.values()])
            factors.append(of_report)
        if factors:
            source = f"{form['framework']}, {plural(len(factors), 'report')}"
            return RankFactors(np.median(factors, axis=0), None, 1, source)
    raise ValueError(
        "it has no report of a detector of stragglers that is known (Megatron-LM's, FlagScale's, "
        "NVRx's); give one, or a .csv or .parquet table with `rank` and `factor`."
    )
