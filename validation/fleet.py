"""How runs on shared networks vary, and GPUs of a fleet, predicted by the shipped laws.

The jobs' step times and shares of communication are in `fleet.toml`. No law is that of a job or a
machine: the network is `kernels/networks/shared.toml`, GPUs have the laws of their device.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl
from scipy.optimize import least_squares, minimize
from scipy.special import gammaln, ndtr, ndtri
from scipy.stats import norm

from prism_jax import data
from prism_jax.latency import AbstractLatency, make_latency

from .rows import note, note_left_out, number, read, words
from .tables import Folder, Row, table


# `memory_gb` tells the two kinds of nodes of Perlmutter.
_DEVICES = {"perlmutter": "a100-40g-sxm", "frontier": "mi250x"}
_DRAWN = (8, 64, 512)
_FURTHER = 4096  # Without a measured figure.
_BEYOND = 1.1
_SPELL = 1.05
_OTHERS = ("compute_s", "memory_ops_s", "other_s")
_FIGURES = ("communication_share", "p95_over_p50", f"share_above_{_BEYOND}")
_LEVELS = (np.arange(20_000) + 0.5) / 20_000
_FACTORS = np.linspace(0.7, 1.6, 9001)
# By how much what is no communication varies between runs: as steps do on a quiet pod.
_QUIET = 0.0015
_PARAMETERS = ("spell_s", "excess", "sigma", "calm_sigma")
Spells = dict[str, float]  # The parameters, `excess` in place of `slowdown`.


def _jobs() -> list[Row]:
    return [{"staged": 0.0, **job} for job in words("fleet")["jobs"]]


def _shipped() -> Spells:
    (law,) = data.load_network("shared")
    return {**law.parameters, "excess": law.parameters["slowdown"] - 1}


def _runs(folder: Folder, job: Row) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of collectives, and of all, of the runs of a job; none if there is no such table.
    Those of collectives are what other parts leave of all, not a number where a part is empty."""
    path = folder / "fleet" / f"breakdown_{job['machine']}_{job['job']}.csv"
    seconds = [[number(row[key], 0.0) for key in ("total_s", *_OTHERS)] for row in read(path)]
    timed = [row for row in seconds if row[0]]
    note_left_out(len(seconds) - len(timed), path, "no `total_s`")
    total, *others = np.array(timed, float).reshape(-1, 4).T
    return total - sum(others), total


def _between(total: np.ndarray) -> list[float]:
    """The p95 of runs over their median, and the share beyond 1.1 times the median."""
    over = total / np.median(total)
    return [float(np.quantile(over, 0.95)), float(np.mean(over > _BEYOND))]


def _predicted(law: Spells, job: Row) -> list[float]:
    """The share of communication in the variance between runs, p95/p50, and the share beyond."""
    share, congested = job["communication"], np.exp(-job["step_s"] / law["spell_s"])
    score = ndtri(_LEVELS)
    adds = law["excess"] * np.exp(law["sigma"] * score), law["calm_sigma"] * score
    seconds, order = np.concatenate(adds), np.argsort(np.concatenate(adds))
    weights = np.repeat([congested, 1 - congested], len(_LEVELS))[order] / len(_LEVELS)
    reached = np.cumsum(weights)
    seconds = 1 + seconds[order]
    median, high = (seconds[np.searchsorted(reached, q)] for q in (0.5, 0.95))
    mean = weights @ seconds
    variance = weights @ (seconds - mean) ** 2 * (share / median) ** 2
    # Copies wait as collectives do; all else varies by itself.
    quiet = ((1 - share) * _QUIET) ** 2
    of_variance = variance * (1 + job["staged"]) / (variance * (1 + job["staged"]) ** 2 + quiet)
    beyond = weights @ (share * (seconds / median - 1) > _BEYOND - 1)
    return [float(x) for x in (of_variance, 1 + share * (high / median - 1), beyond)]


def fitted(runs: Sequence[tuple[np.ndarray, float]]) -> Spells:
    """The law with the largest likelihood for the seconds of collectives of some jobs, each with
    the length of its steps; each job has a level of its own."""

    def loss(theta: np.ndarray) -> float:
        lasts, excess, sigma, calm = np.exp(theta[:4])
        total = 0.0
        for (seconds, step_s), level in zip(runs, theta[4:], strict=True):
            more, congested = seconds / np.exp(level) - 1, np.exp(-step_s / lasts)
            score = np.log(np.maximum(more, 1e-9) / excess) / sigma
            slow = np.where(more > 0, norm.pdf(score) / (sigma * np.maximum(more, 1e-9)), 0)
            density = congested * slow + (1 - congested) * norm.pdf(more, 0, calm)
            total -= np.sum(np.log(density + 1e-12) - level)
        return total

    levels = np.log([np.median(seconds) for seconds, _ in runs])
    options = {"maxiter": 40_000, "maxfev": 40_000, "adaptive": True}
    fits: list[Any] = []
    for *law, low in (
        (5, 0.3, 1.2, 0.03, 0.8),
        (3, 0.5, 1.2, 0.03, 0.9),
        (8, 0.2, 1.2, 0.03, 0.97),
    ):
        start = [*np.log(law), *(levels + np.log(low))]
        fits.append(minimize(loss, start, method="Nelder-Mead", options=options))
    best = min(fits, key=lambda fit: fit.fun)
    return dict(zip(_PARAMETERS, np.exp(best.x[:4]).tolist(), strict=True))


def largest_of(values: np.ndarray, drawn: int) -> float:
    """The mean of the largest of so many values, drawn without replacement, over the mean."""
    rank, number = np.arange(drawn, len(values) + 1), len(values)
    logs = gammaln(rank) - gammaln(rank - drawn + 1) + gammaln(number - drawn + 1)
    weights = drawn * np.exp(logs - gammaln(number + 1))
    return float(weights @ np.sort(values)[drawn - 1 :] / np.mean(values))


def largest_of_law(law: AbstractLatency, drawn: int) -> float:
    """As `largest_of`, of a law."""
    below = ndtr(np.asarray(law.to_normal(_FACTORS), float)) ** drawn
    return float((_FACTORS[-1] - np.trapezoid(below, _FACTORS)) / np.asarray(law.mean()))


def gpus_of(folder: Folder, machine: str) -> pl.DataFrame:
    """The median time of each GPU, with its node; none if there is no such table."""
    rows = _products(folder, machine)
    return rows.group_by("node", "gpu").agg(pl.median("time_s")).sort("node", "gpu")


def _products(folder: Folder, machine: str) -> pl.DataFrame:
    path = folder / "fleet" / f"gemm_{machine}.parquet"
    if not path.is_file():
        note(f"{path} is missing and left out")
        return pl.DataFrame(schema={"node": int, "gpu": int, "job": int, "time_s": float})
    rows = pl.read_parquet(path)
    if "memory_gb" in rows.columns:
        rows = rows.filter(pl.col("memory_gb").cast(pl.Float64).fill_null(40.0) == 40)
    whole = rows.drop_nulls(["node", "gpu", "time_s"])
    note_left_out(len(rows) - len(whole), path, "no node, GPU or time")
    return whole


def _rank(device: str) -> AbstractLatency:
    (law,) = (law for law in data.load_device(device).laws if law.component == "rank")
    return make_latency(law.family, law.parameters)


def fleet_rows(folder: Folder) -> dict[str, list[Row]]:
    """A row for each figure in `fleet/` of a folder like `../shared/data`."""
    rows, law = [], _shipped()
    for job in _jobs():
        collectives, total = _runs(folder, job)
        whole = np.isfinite(collectives)
        if parts := np.count_nonzero(~whole):
            left_out = f"{parts} runs of {job['job']} on {job['machine']}"
            note(f"{left_out} count in the tail alone: a part of `total_s` is empty")
        if np.count_nonzero(whole) < 3:
            continue
        covariance = np.cov(collectives[whole], total[whole])
        measured = [float(covariance[0, 1] / covariance[1, 1]), *_between(total)]
        for figure, *pair in zip(_FIGURES, measured, _predicted(law, job), strict=True):
            rows.append(_row(figure, job["machine"], job["job"], *pair))
    for machine, device in _DEVICES.items():
        times, of_gpus = gpus_of(folder, machine)["time_s"].to_numpy(), _rank(device)
        for drawn in (n for n in _DRAWN if n <= len(times)):
            pair = largest_of(times, drawn), largest_of_law(of_gpus, drawn)
            rows.append(_row(f"slowest_of_{drawn}", machine, "", *pair))
    return {"rows": rows}


def _row(figure: str, machine: str, job: str, measured: float, predicted: float) -> Row:
    row: Row = {"figure": figure, "machine": machine, "job": job}
    return row | {"measured": measured, "predicted": predicted}


def fleet_table(result: dict[str, list[Row]]) -> str:
    """In Markdown: the figures; and what GPUs of a law beyond the data are expected to be."""
    cells = [
        [f"{x:.4f}" if isinstance(x, float) else x for x in row.values()] for row in result["rows"]
    ]
    names = ("figure", "machine", "job", "measured", "predicted")
    furthest = (
        f"{name} {largest_of_law(_rank(of), _FURTHER):.4f}" for name, of in _DEVICES.items()
    )
    further = f"The slowest of {_FURTHER:,}, by the tails of the laws: {', '.join(furthest)}"
    return f"{table(names, cells)}\n\n{further}"


def networks_text(folder: Folder) -> str:
    """In Markdown: the law of networks by all runs, as `kernels/networks/shared.toml` has it, and
    by parts of them: by the earlier 60 % for the later ones, and for a job or a machine without its
    own runs."""
    jobs = [
        job | dict(zip(("seconds", "total"), _runs(folder, job), strict=True)) for job in _jobs()
    ]
    jobs = [job for job in jobs if len(job["total"])]
    splits = [int(0.6 * len(job["total"])) for job in jobs]
    early = [
        job | {"seconds": job["seconds"][:n], "total": job["total"][n:]}
        for job, n in zip(jobs, splits, strict=True)
    ]
    cells = [*_fits("all", jobs, jobs), *_fits("earlier 60 %, for later", early, early)]
    for key in ("machine", "job"):
        for name in dict.fromkeys(job[key] for job in jobs):
            out = [job for job in jobs if job[key] == name]
            cells += _fits(f"without {name}", [job for job in jobs if job[key] != name], out)
    head = ("fitted to", *_PARAMETERS, "of", "p95/p50", "predicted", "beyond 1.1", "predicted")
    return table(head, cells)


def _fits(name: str, of: Iterable[Row], scored: Iterable[Row]) -> list[list[str]]:
    law = fitted([(job["seconds"], job["step_s"]) for job in of])
    rows = []
    for job in scored:
        pairs = zip(_between(job["total"]), _predicted(law, job)[1:], strict=True)
        figures = [f"{x:.3f}" for pair in pairs for x in pair]
        parameters = [f"{law[key]:.3g}" for key in _PARAMETERS]
        rows.append([name, *parameters, f"{job['machine']} {job['job']}", *figures])
    return rows


def gpus_text(folder: Folder) -> str:
    """In Markdown: the law of each device by all nodes, as its file has it, and by half of them for
    the others; and how times differ besides between the jobs that Perlmutter's GPUs had."""
    rows = []
    for machine, device in _DEVICES.items():
        gpus = gpus_of(folder, machine)
        times, is_odd = gpus["time_s"].to_numpy(), gpus["node"].to_numpy() % 2 == 1
        for name, of, scored in (("all", times, times), ("odd", times[is_odd], times[~is_odd])):
            law = _fitted_gpus(of)
            made = make_latency("lognormal-mixture", law)
            pairs = [(largest_of(scored, n), largest_of_law(made, n)) for n in _DRAWN]
            cells = [f"{x:.4g}" for x in law.values()], [f"{y / x - 1:+.2%}" for x, y in pairs]
            rows.append([device, name, *cells[0], *cells[1]])
    laws = table(("device", "nodes", *law, *(f"error, slowest of {n}" for n in _DRAWN)), rows)
    return f"{laws}\n\n{_spells_text(_products(folder, 'perlmutter'))}"


def _spells_text(rows: pl.DataFrame) -> str:
    """How far the times of a GPU lie from their median: as a rule; those of the GPUs of a node in a
    job together; and in spells, which are longer than any GPU differs as a rule."""
    rows = rows.with_columns(over=pl.col("time_s") / pl.median("time_s").over("node", "gpu"))
    spells, usual = rows.filter(pl.col("over") > _SPELL), rows.filter(pl.col("over") <= _SPELL)
    nodes = usual.group_by("node", "job").agg(pl.mean("over"), pl.len()).filter(pl.col("len") > 3)
    of_gpus, of_nodes = (100 * part["over"].to_numpy().std() for part in (usual, nodes))
    met = 1 - (1 - len(spells) / len(rows)) ** _FURTHER
    return (
        f"From job to job a GPU differs by {of_gpus:.2f} %, the GPUs of a node together by "
        f"{of_nodes:.2f} %. Spells of {spells['over'].to_numpy().mean():.3g} times: {len(spells)} "
        f"of {len(rows):,} measurements, of {spells.n_unique(['node', 'gpu'])} GPUs, in "
        f"{spells['job'].n_unique()} jobs; {_FURTHER:,} GPUs meet one with probability {met:.2f}."
    )


def _fitted_gpus(times: np.ndarray) -> dict[str, float]:
    """The mixture whose slowest GPUs are as slow as those of the times."""
    wanted = [largest_of(times, n) for n in _DRAWN]

    def law(theta: np.ndarray) -> dict[str, float]:
        sigma, odds, longer = np.exp(theta).tolist()
        return {"sigma": sigma, "slow_weight": odds / (1 + odds), "slow_factor": 1 + longer}

    def off(theta: np.ndarray) -> list[float]:
        made = make_latency("lognormal-mixture", law(theta))
        pairs = zip(_DRAWN, wanted, strict=True)
        return [1e3 * (largest_of_law(made, n) - x) for n, x in pairs]

    return law(least_squares(off, np.log([0.012, 0.015, 0.04]), diff_step=1e-3).x)
