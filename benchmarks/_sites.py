"""By how much sites differ that run one configuration on one machine."""

import numpy as np
import polars as pl
from scipy.stats import chi2, t

from prism_jax import data

from ._tables import Folder, Row, table_of


# What makes a configuration of `fleet/sites_llama31_8b.csv`.
_SAME = ("gpu", "gpus", "precision", "global_batch", "micro_batch", "tp", "cp", "timer")
# GPT-3 of v3.0 on 768 H100: both submitters have `config_DGXH100_96x8x128x4x8_mbs1.sh`.
_GPT3 = ("dgxh100_n96_nemo", "coreweave_hgxh100_n96_ngc23.04_pytorch")
_LEVEL = 0.9


def configurations(folder: Folder) -> list[Row]:
    """The logarithms of the medians of the sites that share a configuration."""
    sites = pl.read_csv(folder / "fleet" / "sites_llama31_8b.csv")
    found = []
    for key, group in sites.group_by(*_SAME, maintain_order=True):
        medians = group.group_by("vendor", maintain_order=True).agg(pl.median("step_p50_s"))
        gpu, gpus, precision, *_ = key
        name = f"Llama 3.1 8B, {gpus} {gpu}, {precision}"
        found.append({"name": name, "sites": dict(medians.iter_rows())})
    steps = pl.read_parquet(folder / "mlperf" / "step_times.parquet")
    steps = steps.filter((pl.col("phase") == "steady") & pl.col("system").is_in(_GPT3))
    medians = steps.group_by("submitter", maintain_order=True).agg(pl.median("step_time_s"))
    found.append({"name": "GPT-3 175B, 768 H100", "sites": dict(medians.iter_rows())})
    several = [row for row in found if len(row["sites"]) > 1]
    return [row | {"logs": np.log([*row["sites"].values()])} for row in several]


def spread_of_sites(rows: list[Row]) -> tuple[float, int]:
    """The standard deviation of the logarithm between sites, pooled over configurations, and its
    degrees of freedom."""
    degrees = sum(len(row["logs"]) - 1 for row in rows)
    squares = sum(np.sum((row["logs"] - row["logs"].mean()) ** 2) for row in rows)
    return float(np.sqrt(squares / degrees)), degrees


def sites_text(folder: Folder) -> str:
    """In Markdown: the configurations, and whether the sites of each lie as far apart as those of
    the others let expect; and the pooled spread."""
    rows = configurations(folder)
    for row in rows:
        others, degrees = spread_of_sites([one for one in rows if one is not row])
        row["apart"] = float(np.ptp(row["logs"]))
        row["limit"] = float(np.sqrt(2) * others * t.ppf((1 + _LEVEL) / 2, degrees))
        row["p50"] = ", ".join(f"{name} {p50:.4g} s" for name, p50 in row["sites"].items())
        row["held"] = "yes" if row["apart"] <= row["limit"] else "no"
    columns = {"configuration": "{name}", "p50": "{p50}", "apart": "{apart:.1%}"}
    columns |= {"90 % by the others": "{limit:.1%}", "held": "{held}"}
    spread, degrees = spread_of_sites(rows)
    low, high = (spread * np.sqrt(degrees / chi2.ppf(q, degrees)) for q in (0.95, 0.05))
    about = f"Between sites: {100 * spread:.2f} % (90 %: {100 * low:.2f} to {100 * high:.2f} %)"
    return f"{table_of(rows, columns)}\n\n{about}, of {degrees} degrees of freedom."


def site_rows(folder: Folder) -> dict[str, list[Row]]:
    """The spread between systems of one configuration, for each GPU that several have, and pooled
    over all; predicted by the shipped prior of sites."""
    sites = pl.read_csv(folder / "fleet" / "sites_llama31_8b.csv", infer_schema_length=None)
    sites = sites.drop_nulls(["gpu", "system", "step_p50_s"])
    same = ("gpu", "gpus", "precision", "global_batch", "micro_batch")
    systems = sites.group_by(*same, "system", maintain_order=True).agg(pl.median("step_p50_s"))
    found = []
    for (gpu, *_), group in systems.group_by(*same, maintain_order=True):
        if len(group) > 1:
            found.append({"gpu": gpu, "logs": np.log(group["step_p50_s"].to_numpy())})
    predicted, rows = data.load_priors().sites.deviation, []
    for gpu in [*dict.fromkeys(row["gpu"] for row in found), "all"]:
        measured, _ = spread_of_sites([row for row in found if gpu in (row["gpu"], "all")])
        row = {"figure": "site_sigma", "machine": gpu, "measured": measured}
        rows.append(row | {"predicted": predicted})
    return {"rows": rows}


def site_table(result: dict[str, list[Row]]) -> str:
    """In Markdown."""
    columns = {"between systems of": "{machine}", "measured": "{measured:.2%}"}
    return table_of(result["rows"], columns | {"predicted": "{predicted:.2%}"})
