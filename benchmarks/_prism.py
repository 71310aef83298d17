"""The headlines of PRISM (arXiv:2510.15596) and of its neighbours, beside the same figures here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
import polars as pl

import prism_jax as prism
from examples.tiled_attention import distances
from prism_jax.data import list_names
from prism_jax.workload import widen
from tests import test_trends as toy

from ._rows import DATA
from ._shipped_jobs import image_rows
from ._tables import table
from ._tails import system_rows
from .own_traces import trace_rows
from .placement import program_of


class Headline(NamedTuple):
    """A figure: what it is called in `--only`, what it is of, theirs, how ours is found, on what
    data, and the command that has more of it."""

    name: str
    title: str
    theirs: str
    ours: Callable[[], str]
    data: str
    command: str


def _sampled(number: int | None = None) -> Any:
    return {"key": jax.random.key(0)} | ({"num_samples": number} if number else {})


_FLEET = DATA / "fleet"


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
        found = prism.place(program, factors, devices_per_node=8, **_sampled())
        gains.append(f"{found.worst.value / found.after.value:.2f} ({last} and {factor})")
    return f"by how long the last stage and one node take: {', '.join(gains)}"


def _collectives() -> str:
    job = prism.load_job("gpt3-175b-h100-768")
    program = prism.compile_job(job)
    parts = prism.sensitivity(program, prism.Quantile(0.95), parts=[], **_sampled(8192))
    costs = {one.name: one.spread.value for one in parts.parts if one.spread}
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "send_recv")
    first = max((kind for kind in kinds if kind in costs), key=lambda kind: costs[kind])
    shares = []
    for name in ("frontier_nanogpt", "frontier_deepcam", "perlmutter_nanogpt"):
        runs = pl.read_csv(_FLEET / f"breakdown_{name}.csv")
        names = [one for one in runs.columns if one.startswith("all")]
        sizes = {one: np.cov(runs[one], runs["total_s"])[0, 1] for one in names}
        most = max(sizes, key=lambda one: sizes[one])
        share = sizes[most] / np.var(runs["total_s"].to_numpy(), ddof=1)
        shares.append(f"{most[:-2]} {100 * share:.0f} % ({name.replace('_', ', ')})")
    return f"dedicated: {first}; shared, of the variance between runs: {', '.join(shares)}"


def _at_scale() -> str:
    program = prism.compile_job(prism.load_job("llama-3.1-405b-h100-65536"))
    law = prism.simulate(program, **_sampled(4096))
    p5, p50, p95 = (float(law.quantile(q)) for q in (0.05, 0.5, 0.95))
    return f"{100 * (p95 - p5) / p50:.1f} % from p5 to p95 ({p5:.1f}, {p50:.1f}, {p95:.1f} s)"


def _gpus(name: str) -> pl.DataFrame:
    """The mean time of each GPU over that of all with as much memory."""
    rows = pl.read_parquet(_FLEET / f"gemm_{name}.parquet")
    keys = [one for one in ("node", "gpu", "memory_gb") if one in rows.columns]
    gpus = rows.group_by(keys).agg(pl.median("time_s"))
    kinds = gpus.columns[2:3] if "memory_gb" in keys else []
    mean = pl.mean("time_s").over(kinds) if kinds else pl.mean("time_s")
    return gpus.with_columns(factor=pl.col("time_s") / mean)


def _gemm() -> str:
    parts = []
    for name, device in (("perlmutter", "A100"), ("frontier", "MI250X")):
        factors = _gpus(name)["factor"].to_numpy()
        spread, reach = factors.std(), factors.max() / factors.min() - 1
        parts.append(f"{device}: {100 * spread:.1f} % (CV), {100 * reach:.0f} % from end to end")
    return "; ".join(parts)


def _probability() -> str:
    factors = _gpus("perlmutter")["factor"].to_numpy()
    slow = (factors > 1.05).mean()
    sizes = (8, 64, 512, 4096)
    chances = (f"{100 * (1 - (1 - slow) ** n):.0f} % of {n:,}" for n in sizes)
    return f"that a GPU is 5 % slower than the mean: {', '.join(chances)}"


def _slow_rank() -> str:
    law = prism.latency.Normal(1.0, 0.02)
    at = toy._program_of_costs(16, prism.Variability(residual={"gemm": law}))
    stages = [at(toy._slow(one, 1.2, 1.0)) for one in (None, 0, 7)]
    laws = (prism.simulate(one, **_sampled(65_536)) for one in stages)
    base, first, last = (float(one.quantile(0.95)) for one in laws)
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
    found: Any = prism.enumerate_layouts(*sizes, space=space, **keys)
    seconds = [(one, prism.predict(one).mean) for one in found]
    alone = [s for one, s in seconds if one.training.zero == 3 and one.layout.dp == sizes[-1]]
    return f"{min(alone) / min(s for _, s in seconds):.2f} times"


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
    found = distances()
    whole = found["whole"][1]
    errors = (f"{name} {off / whole:.1f}" for name, (_, off) in found.items() if name != "whole")
    return f"mean error over that of whole attention: {', '.join(errors)}"


_OF = "python benchmarks/"
_MLPERF = "MLPerf Training v3.0 to v6.0, systems written as jobs, each without its machine"
_PLACED = "1F1B of 8 stages and 4 replicas on 32 nodes, simulated"
_HEADLINES = (
    Headline(
        "ks",
        "KS distance of the step time",
        "20.8 % (v1)",
        _ks,
        "traces of two jobs (ByteDance), other steps than those fitted",
        _OF + "accuracy.py --traces",
    ),
    Headline(
        "p95",
        "p95 of the step time",
        "within 4.3 % over 748 runs (v2), 5.4 % over 14 configurations (v3)",
        _p95,
        _MLPERF,
        _OF + "accuracy.py --systems",
    ),
    Headline(
        "placement",
        "gain of placement",
        "up to 1.26 times (v1)",
        _placement,
        _PLACED,
        _OF + "findings.py --only placements",
    ),
    Headline(
        "collectives",
        "collectives that matter most",
        "AllGather and ReduceScatter",
        _collectives,
        "GPT-3 175B on 768 H100, simulated; runs on Frontier and Perlmutter, measured",
        _OF + "findings.py --only communication",
    ),
    Headline(
        "scale",
        "spread of the step time at 64K GPUs",
        "9 % (v1, v2), 12 % (v3); 18.6, 18.8, 19.3 s",
        _at_scale,
        "Llama 3.1 405B on 65,536 H100, simulated, without a level of its own",
        "prism-jax simulate llama-3.1-405b-h100-65536",
    ),
    Headline(
        "gemm",
        "variation of a GEMM between GPUs",
        "1.6 to 14 %",
        _gemm,
        "A100 of Perlmutter, MI250X of Frontier, measured",
        _OF + "accuracy.py --fleet",
    ),
    Headline(
        "probability",
        "probability of a slow-down by scale",
        "grows with the number of GPUs; no figure known here",
        _probability,
        "GEMMs of the A100 of Perlmutter, drawn independently",
        _OF + "accuracy.py --fleet",
    ),
    Headline(
        "slow_rank",
        "p95 with one slow rank",
        "8.0 to 15.6 %, by its stage (v2)",
        _slow_rank,
        "1F1B of 8 stages and 16 microbatches, one stage 20 % slower, simulated",
        _OF + "findings.py --only slow_stages",
    ),
    Headline(
        "exposed",
        "exposed communication (MAD-Max, 2310.02784)",
        "14 to 32 % of GPU hours",
        _exposed,
        "all shipped jobs, predicted",
        "prism-jax predict JOB",
    ),
    Headline(
        "fsdp",
        "best layout over FSDP (MAD-Max)",
        "up to 2.24 times",
        _over_fsdp,
        "layouts of GPT-3 175B on 64 A100 that fit, 1F1B in microbatches of one, predicted",
        "prism-jax layouts JOB",
    ),
    Headline(
        "shares",
        "shares of time in images and video (2312.14385)",
        "convolution up to 44 %, temporal attention over 60 %",
        _shares,
        "Stable Diffusion 2 and Latte-XL/2 on 8 A100, predicted",
        _OF + "accuracy.py --images",
    ),
    Headline(
        "hybrids",
        "speed of hybrids at equal parameters (Composer, 2510.00379)",
        "faster in training; no figure known here",
        _hybrids,
        "8 billion parameters on 32 GPUs, Mamba-2 in three layers of four, predicted",
        "prism-jax compare examples/job.toml --over layers=...",
    ),
    Headline(
        "tiles",
        "deviation of tiled attention in bf16 (2405.02803)",
        "about ten times that of whole attention",
        _tiles,
        "random inputs, 1,024 tokens, sums in bf16, too; JAX on a CPU",
        "python examples/tiled_attention.py",
    ),
)
NAMES = [one.name for one in _HEADLINES]


def headlines_text(only: str | None = None) -> str:
    """In Markdown."""
    shown = [one for one in _HEADLINES if only in (None, one.name)]
    rows = [(x.title, x.theirs, x.ours(), x.data, f"`{x.command}`") for x in shown]
    return table(("what", "theirs", "ours", "on what data", "command"), rows)
