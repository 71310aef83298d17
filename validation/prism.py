"""The headlines of PRISM (arXiv:2510.15596) and of its neighbours, beside the same figures here."""

from typing import Any

import jax
import msgspec
import numpy as np
import polars as pl

import prism_jax as prism
from benchmarks.own_traces import trace_rows
from benchmarks.placement import program_of
from examples.tiled_attention import distances
from prism_jax.data import list_names
from prism_jax.workload import widen
from tests import test_trends as toy

from .fleet import gpus_of
from .rows import DATA, words
from .shipped_jobs import image_rows
from .tables import table
from .tails import system_rows


def _sampled(number: int | None = None) -> Any:
    return {"key": jax.random.key(0)} | ({"num_samples": number} if number else {})


def _ks() -> str:
    rows = [row for row in trace_rows(DATA / "straggler_traces") if row["split"] != "whole"]
    scores = [row["ks_aligned"][0] for row in rows]
    return f"{100 * min(scores):.0f} to {100 * max(scores):.0f} %, medians made equal"


def _p95() -> str:
    rows = [row for row in system_rows(DATA) if "predicted" in row]
    tails = [row["predicted_p95_over_p50"] / row["measured_p95_over_p50"] - 1 for row in rows]
    levels = [row["predicted"] / row["measured"] - 1 for row in rows]
    errors = np.abs([(1 + a) * (1 + b) - 1 for a, b in zip(tails, levels, strict=True)])
    of_tails = 100 * np.mean(np.abs(tails))
    text = f"{100 * errors.mean():.1f} % on average, {100 * errors.max():.0f} % at most"
    return f"{text}, over {len(rows)} systems; of p95 over p50 {of_tails:.1f} %"


def _placement() -> str:
    gains = []
    for last, factor in ((1.0, 1.26), (1.26, 1.26), (1.26, 1.5)):
        forward = np.array([1.0] * 7 + [last])
        schedule = prism.schedules.OneFOneB(8, 64)
        program = program_of(schedule, 4, 8, backward=2 * forward, forward=forward)
        factors = np.array([factor, *[1.0] * 31])
        placed = prism.place(program, factors, devices_per_node=8, **_sampled())
        gains.append(f"{placed.worst.value / placed.after.value:.2f} ({last} and {factor})")
    return f"by how long the last stage and one node take: {', '.join(gains)}"


def _collectives() -> str:
    job = prism.load_job("gpt3-175b-h100-768")
    program = prism.compile_job(job)
    parts = prism.sensitivity(program, prism.Quantile(0.95), parts=[], **_sampled(8192))
    costs = {part.name: part.spread.value for part in parts.parts if part.spread}
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "send_recv")
    first = max((kind for kind in kinds if kind in costs), key=lambda kind: costs[kind])
    shares = []
    for name in ("frontier_nanogpt", "frontier_deepcam", "perlmutter_nanogpt"):
        runs = pl.read_csv(DATA / "fleet" / f"breakdown_{name}.csv")
        kinds = [kind for kind in runs.columns if kind.startswith("all")]
        covariances = {kind: np.cov(runs[kind], runs["total_s"])[0, 1] for kind in kinds}
        most = max(kinds, key=lambda kind: covariances[kind])
        share = covariances[most] / np.var(runs["total_s"].to_numpy(), ddof=1)
        shares.append(f"{most[:-2]} {100 * share:.0f} % ({name.replace('_', ', ')})")
    return f"dedicated: {first}; shared, of the variance between runs: {', '.join(shares)}"


def _at_scale() -> str:
    program = prism.compile_job(prism.load_job("llama-3.1-405b-h100-65536"))
    law = prism.simulate(program, **_sampled(4096))
    p5, p50, p95 = (float(law.quantile(q)) for q in (0.05, 0.5, 0.95))
    return f"{100 * (p95 - p5) / p50:.1f} % from p5 to p95 ({p5:.1f}, {p50:.1f}, {p95:.1f} s)"


def _gpus(machine: str) -> np.ndarray:
    """The median time of each GPU over the mean of all."""
    times = gpus_of(DATA, machine)["time_s"].to_numpy()
    return times / times.mean()


def _gemm() -> str:
    parts = []
    for name, device in (("perlmutter", "A100"), ("frontier", "MI250X")):
        factors = _gpus(name)
        spread, reach = factors.std(), factors.max() / factors.min() - 1
        parts.append(f"{device}: {100 * spread:.1f} % (CV), {100 * reach:.0f} % from end to end")
    return "; ".join(parts)


def _probability() -> str:
    slow = (_gpus("perlmutter") > 1.05).mean()
    sizes = (8, 64, 512, 4096)
    chances = (f"{100 * (1 - (1 - slow) ** n):.0f} % of {n:,}" for n in sizes)
    return f"that a GPU is 5 % slower than the mean: {', '.join(chances)}"


def _slow_rank() -> str:
    law = prism.latency.Normal(1.0, 0.02)
    at = toy._program_of_costs(16, prism.Variability(residual={"gemm": law}))
    programs = [at(toy._slow(stage, 1.2, 1.0)) for stage in (None, 0, 7)]
    laws = (prism.simulate(program, **_sampled(65_536)) for program in programs)
    base, first, last = (float(law.quantile(0.95)) for law in laws)
    return f"{100 * (first / base - 1):.1f} to {100 * (last / base - 1):.1f} %, by its stage"


def _exposed() -> str:
    shares = []
    for name in list_names("job"):
        seconds = prism.predict(prism.load_job(name)).breakdown
        exposed = sum(part for key, part in seconds.items() if key.startswith("exposed"))
        shares.append(exposed / sum(seconds.values()))
    middle = 100 * np.median(shares)
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %, median {middle:.0f} %"


def _over_fsdp() -> str:
    job: Any = prism.load_job("megatron-175b-a100-64")
    space = prism.LayoutSpace(zero=(1, 3), schedule=("1f1b",), microbatch_size=(1,), cp=(1,))
    keys = {key: getattr(job, key) for key in ("training", "batch_size", "kernels")}
    sizes = job.model, job.cluster, job.layout.world_size
    jobs: Any = prism.enumerate_layouts(*sizes, space=space, **keys)
    seconds = [(job, prism.predict(job).mean) for job in jobs]
    fsdp = [s for job, s in seconds if job.training.zero == 3 and job.layout.dp == sizes[-1]]
    return f"{min(fsdp) / min(s for _, s in seconds):.2f} times"


def _shares() -> str:
    rows = [row for row in image_rows(DATA) if "share" in row]
    return ", ".join(f"{row['of']} {100 * row['share']:.0f} % ({row['job']})" for row in rows)


def _hybrids() -> str:
    seconds = {}
    for kind in ("attention", "hybrid"):
        job: Any = prism.load_job("examples/job.toml", [f"layers=examples/{kind}_layers.toml"])
        job = msgspec.structs.replace(job, model=widen(job.model, 8_000_000_000))
        for length in (8192, 32768):
            training = msgspec.structs.replace(job.training, sequence_length=length)
            long = msgspec.structs.replace(job, training=training)
            seconds[kind, length] = prism.predict(long).mean
    gains = (
        f"{seconds['attention', n] / seconds['hybrid', n]:.2f} times at {n:,} tokens"
        for n in (8192, 32768)
    )
    return f"with attention in one layer of four: {', '.join(gains)}"


def _tiles() -> str:
    errors = {name: error for name, (_, error) in distances().items()}
    whole = errors.pop("whole")
    texts = (f"{name} {error / whole:.1f}" for name, error in errors.items())
    return f"mean error over that of whole attention: {', '.join(texts)}"


_OURS = {
    "ks": _ks,
    "p95": _p95,
    "placement": _placement,
    "collectives": _collectives,
    "scale": _at_scale,
    "gemm": _gemm,
    "probability": _probability,
    "slow_rank": _slow_rank,
    "exposed": _exposed,
    "fsdp": _over_fsdp,
    "shares": _shares,
    "hybrids": _hybrids,
    "tiles": _tiles,
}
NAMES = [*_OURS]


def headlines_text(only: str | None = None) -> str:
    """In Markdown: `prism.toml` beside our figures; all, or one by name."""
    theirs = words("prism")
    shown = [(theirs[name], ours) for name, ours in _OURS.items() if only in (None, name)]
    rows = [(x["title"], x["theirs"], ours(), x["data"], f"`{x['command']}`") for x, ours in shown]
    return table(("what", "theirs", "ours", "on what data", "command"), rows)
