"""By how much sites differ that run one configuration on one machine."""

import numpy as np
import polars as pl
from scipy.stats import chi2, t

from prism_jax import data

from .rows import note_left_out
from .tables import Folder, Row, by, table_of


# What makes a configuration of `fleet/sites_llama31_8b.csv`.
_SAME = ("gpu", "gpus", "precision", "global_batch", "micro_batch")
# GPT-3 of v3.0 on 768 H100: both submitters have `config_DGXH100_96x8x128x4x8_mbs1.sh`.
_GPT3 = ("dgxh100_n96_nemo", "coreweave_hgxh100_n96_ngc23.04_pytorch")
_LEVEL = 0.9


def configurations(folder: Folder) -> list[Row]:
    """The medians of the systems that share a configuration of Llama 3.1 8B, and their
    logarithms."""
    path = folder / "fleet" / "sites_llama31_8b.csv"
    every = pl.read_csv(path, infer_schema=False)
    numbers = pl.col("gpus", "global_batch", "micro_batch", "step_p50_s")
    every = every.with_columns(numbers.cast(pl.Float64, strict=False))
    sites = every.drop_nulls(["gpu", "system", "step_p50_s"])
    note_left_out(len(every) - len(sites), path, "no GPU, system or step time")
    rows = []
    for (gpu, gpus, precision, *_), group in sites.group_by(*_SAME, maintain_order=True):
        name = f"Llama 3.1 8B, {gpus:g} {gpu}, {precision}" if gpus else f"Llama 3.1 8B, {gpu}"
        rows.append({"gpu": gpu, "name": name} | _medians(group, "system", "step_p50_s"))
    return [row for row in rows if len(row["logs"]) > 1]


def of_gpt3(folder: Folder) -> Row:
    """As `configurations`, of two systems of MLPerf Training v3.0."""
    steps = pl.read_parquet(folder / "mlperf" / "step_times.parquet")
    steps = steps.filter((pl.col("phase") == "steady") & pl.col("system").is_in(_GPT3))
    return {"name": "GPT-3 175B, 768 H100"} | _medians(steps, "submitter", "step_time_s")


def _medians(runs: pl.DataFrame, site: str, seconds: str) -> Row:
    medians = dict(runs.group_by(site, maintain_order=True).agg(pl.median(seconds)).iter_rows())
    return {"sites": medians, "logs": np.log([*medians.values()])}


def spread_of_sites(rows: list[Row]) -> tuple[float, int]:
    """The standard deviation of the logarithm between sites, pooled over configurations, and its
    degrees of freedom."""
    degrees = sum(len(row["logs"]) - 1 for row in rows)
    squares = sum(np.sum((row["logs"] - row["logs"].mean()) ** 2) for row in rows)
    return float(np.sqrt(squares / degrees)), degrees


def sites_text(folder: Folder) -> str:
    """In Markdown: the configurations, and whether the sites of each lie as far apart as those of
    the others let expect; and the pooled spread."""
    rows = [*configurations(folder), of_gpt3(folder)]
    for row in rows:
        others, degrees = spread_of_sites([other for other in rows if other is not row])
        row["apart"] = float(np.ptp(row["logs"]))
        row["limit"] = float(np.sqrt(2) * others * t.ppf((1 + _LEVEL) / 2, degrees))
        row["p50"] = ", ".join(f"{name} {p50:.4g} s" for name, p50 in row["sites"].items())
        row["held"] = "yes" if row["apart"] <= row["limit"] else "no"
    columns = {"configuration": "{name}", "p50": "{p50}", "apart": "{apart:.1%}"}
    columns |= {"90 % by the others": "{limit:.1%}", "held": "{held}"}
    spread, degrees = spread_of_sites(rows)
    low, high = (spread * np.sqrt(degrees / chi2.ppf(q, degrees)) for q in (0.95, 0.05))
    pooled = f"Between sites: {100 * spread:.2f} % (90 %: {100 * low:.2f} to {100 * high:.2f} %)"
    return f"{table_of(rows, columns)}\n\n{pooled}, of {degrees} degrees of freedom."


def site_rows(folder: Folder) -> dict[str, list[Row]]:
    """The spread between systems of one configuration, for each GPU that several have, and pooled
    over all; predicted by the shipped prior of sites. None if no two systems share one."""
    of_gpus = by("gpu", configurations(folder))
    if of_gpus:
        of_gpus["all"] = [row for rows in of_gpus.values() for row in rows]
    figure = {"figure": "site_sigma"}
    predicted = {"predicted": data.load_priors().sites.deviation}
    measured = {gpu: spread_of_sites(rows)[0] for gpu, rows in of_gpus.items()}
    rows = ({"machine": gpu, "measured": spread} for gpu, spread in measured.items())
    return {"rows": [figure | row | predicted for row in rows]}


def site_table(result: dict[str, list[Row]]) -> str:
    """In Markdown."""
    columns = {"between systems of": "{machine}", "measured": "{measured:.2%}"}
    return table_of(result["rows"], columns | {"predicted": "{predicted:.2%}"})
