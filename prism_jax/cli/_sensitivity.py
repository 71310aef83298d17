"""What variability costs, of each part and within a budget; what is critical; and what-ifs."""

from typing import Any

import prism_jax as prism

from .._files import shown
from .._misc import quoted, unknown_name
from .._summary import Column, Table, picked_attributes, plain
from . import _load
from ._options import Args, Output, command
from ._trace import read_names
from ._values import named_factor, objective, quantile_of, whole


# Programs without the variability of a part, or with less, that are simulated, about.
_GAINS = 20


@command(
    "job RANDOM --allow-oom --objective --top",
    how={"--samples": whole(32)},
    csv=True,
)
def sensitivity(args: Args) -> Output:
    """Print on which kernels, stages, ranks and factors a figure of the step time depends.

    --samples N (8192)  steps to simulate of each program
    --shapley NAME,NAME  divide the joint gain of up to ten parts among them, such as gemm,rank,step

    example: prism-jax sensitivity gpt3-175b-h100-4096 --objective p95
    """
    job, wanted = _load.load(args), objective(args.objective)
    program, options = _load.compiled(args, job, _GAINS)
    shapley = [name.strip() for name in args.shapley.split(",")] if args.shapley else []
    result = prism.analysis.sensitivity(program, wanted, shapley=shapley, **options)
    table = result.summary(args.top)
    return Output(*_load.of(job, program), plain(result), table, [result.headline()])


@command("SIMULATED --objective", how={"--at": float})
def target(args: Args) -> Output:
    """Print how much a part may vary for a figure of the step time to meet a target.

    --part PART (required)  the part, such as all_gather
    --at X (required)  the target, in the figure's unit

    example: prism-jax target gpt3-175b-h100-4096 --part rank --at 1.605
    """
    job, wanted = _load.load(args), objective(args.objective)
    program, options = _load.compiled(args, job, _GAINS)
    allowed = prism.analysis.target(program, wanted, args.part, args.at, **options)
    return Output(*_load.of(job, program), allowed)


@command("SIMULATED --objective", how={"--budget": float}, csv=True)
def improve(args: Args) -> Output:
    """Find where to reduce variability within a budget, to lower a figure of the step time.

    --cost PART=COST... (required)  the cost of removing all of a part's spread, such as
        all_gather=3 or rank=2
    --budget B (required)  the budget, in the unit of the costs
    --iterations K (20)  iterations of the descent

    example: prism-jax improve gpt3-175b-h100-4096 --cost all_gather=3 --cost rank=2 --budget 2
    """
    job = _load.load(args)
    costs = dict(named_factor(text, "--cost", "all_gather=3", most=1e15) for text in args.cost)
    if len(costs) < len(args.cost):
        raise ValueError("--cost names a part twice; give one cost for each.")
    wanted = objective(args.objective)
    program, options = _load.compiled(args, job, 2 + args.iterations // 2)
    options["num_iterations"] = args.iterations
    result = prism.analysis.improve(program, wanted, costs, args.budget, **options)
    return Output(*_load.of(job, program), result)


@command("SIMULATED --top", csv=True)
def criticality(args: Args) -> Output:
    """Print how often ranks, stages and ops are critical, and how much communication is exposed.

    --of {ranks,stages,ops} (ranks)  print a table of ranks, stages or ops
    --band A:B (0:1)  use only steps between two quantiles, such as 0.94:0.96 for p95

    example: prism-jax criticality gpt3-175b-h100-4096 --of stages --band 0.94:0.96
    """
    job, band = _load.load(args), _band(args.band)
    program, options = _load.compiled(args, job)
    paths = prism.analysis.criticality(program, band=band, **options)
    frame = paths.table(args.of)
    rows = frame.to_dicts()
    title = f"{args.of} on the critical path"
    columns = [
        Column(name, error="standard_error") if name == "probability" else Column(name, form=".3g")
        for name in frame.columns
        if name != "standard_error"  # The digits say it.
        # Each step passes through all stages.
        and not (args.of == "stages" and name == "probability")
    ]
    table = Table(columns, rows, title, most=args.top)
    result = {"band": band, args.of: rows, **paths.to_json()}
    return Output(*_load.of(job, program), result, table, [paths.headline()])


def _band(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        return quantile_of(low), quantile_of(high)
    except ValueError:
        raise ValueError(
            f"--band `{quoted(text)}` must be two quantiles, such as 0.94:0.96 or p94:p96."
        ) from None


@command("SIMULATED")
def timeline(args: Args) -> Output:
    """Write simulated steps, with their kernels, as a trace for Perfetto (ui.perfetto.dev).

    --quantile Q...  write the step at this quantile of the step time, such as 0.99 for p99; can be
        repeated, for a typical step beside a slow one (0.5)
    --trace TRACE  a profile as of `prism-jax trace`, whose median step stands beside
    --names NAMES  a .toml file with the meaning of ranges in the trace
    --out STEP.json (required)  the file to write

    example: prism-jax timeline gpt3-175b-h100-4096 --quantile 0.5 --quantile 0.99 --out steps.json
    """
    job = _load.load(args)
    names, measured = read_names(args), None
    if args.trace:
        measured = prism.trace.median_steps(prism.trace.read_rank_traces(args.trace), names)
    program, options = _load.compiled(args, job, len(args.quantile) or 1)
    step, *others = (
        prism.analysis.sample_step(program, quantile=level, **options)
        for level in dict.fromkeys(args.quantile) or (0.5,)
    )
    kernels = prism.prediction.kernels_of_ops(job) if _load.has_model(job) else None
    prism.plot.save_chrome_trace([step, *others], args.out, measured, kernels)
    result = {
        "out": args.out,
        "num_samples": args.samples,
        "measured_ranks": sorted(measured or ()),
    }
    written = f"written to {shown(args.out)}; open it in ui.perfetto.dev"
    beside = [other.headline() for other in others]
    return Output(*_load.of(job, program), step, {**result, "others": others}, [*beside, written])


@command("SIMULATED", how={"--samples": whole(32)}, csv=True)
def whatif(args: Args) -> Output:
    """Show the effect of a slow rank, hot node, congested link, scaled kernel or any change.

    --slow-rank stage=S:F...  the rank of one replica that runs stage S (or rank=R) is F times
        slower
    --hot-node stage=S:F...  a node whose GPUs run stage S (or rank=R) is F times slower
    --link NAME:F...  a link of the cluster has F times less bandwidth
    --kernel KIND:F...  a kind of kernel takes F times as long, such as all_gather:0.8
    --change KEY=VALUE...  a key of the job, such as schedule.virtual_stages=6
    --samples N (65536)  steps to simulate of each

    example: prism-jax whatif gpt3-175b-h100-4096 --slow-rank stage=7:1.2 --kernel all_gather:0.8
    """
    job = _load.load(args)
    changed = {text: _load.load(args, text) for text in args.change}
    for text in args.link:
        changed[f"link {text}"] = _load.load(args, _slower_link(args, job, text))
    slow = {f"slow rank {text}": _place(text, "--slow-rank") for text in args.slow_rank}
    hot = {f"hot node {text}": _place(text, "--hot-node") for text in args.hot_node}
    places = slow | hot
    kernels = {text: named_factor(text, "--kernel", "all_gather:0.8") for text in args.kernel}
    if not (changed or places or kernels):
        raise ValueError(
            "Nothing to compare with was given; use --slow-rank, --hot-node, --link, --kernel or "
            "--change."
        )
    program, options = _load.compiled(args, job, 1 + len(changed) + len(places) + len(kernels))
    scenarios = {}
    of_node = max(_load.devices_per_node(job) // program.group_size, 1) if hot else 1
    for name, (of, number, factor) in places.items():
        rank = number if of == "rank" else _rank_of_stage(program, number)
        replicas = min(of_node, program.num_replicas) if name in hot else 1
        scenarios[name] = prism.analysis.slow_rank(program, rank, factor, replicas=replicas)
    for text, (kind, factor) in kernels.items():
        scenarios[f"kernel {text}"] = prism.analysis.scale_kernel(program, kind, factor)
    for text, loaded in changed.items():
        scenarios[text] = prism.analysis.Scenario(_load.program_of(args, loaded))
        if loaded.cluster != job.cluster:
            _load.tell_notes([loaded])
    compared = prism.analysis.what_if(program, scenarios, **options)
    jobs = {name: _load.job_of(changed.get(name, job)) for name in ("as it is", *scenarios)}
    means = {"as it is": compared.before["mean"].value}
    for name, changes in compared.changes.items():
        means[name] = means["as it is"] + changes["mean"].value
    speeds, tables = _speeds(jobs, means)
    return Output(*_load.of(job, program), compared, {"throughput": speeds}, *tables)


def _speeds(
    jobs: dict[str, Any], means: dict[str, float]
) -> tuple[dict[str, Any], list[Table | str]]:
    """The throughput of each scenario at its mean step time, and a table of it, with a note if the
    scenarios have different numbers of GPUs. Nothing for a profile, which has no throughput.
    """
    unit = getattr(jobs["as it is"], "unit", "token")
    rate = f"{unit}s_per_s_per_gpu"
    throughputs = {n: prism.prediction.throughput(job, means[n]) for n, job in jobs.items()}
    speeds = {
        name: picked_attributes(throughput, "world_size", rate, "mfu")
        for name, throughput in throughputs.items()
        if throughput is not None
    }
    if not speeds:
        return {}, []
    form = prism.prediction.rate_form(min(speed[rate] or 0.0 for speed in speeds.values()))
    columns = [
        Column("scenario"),
        Column("GPUs", "world_size"),
        Column(f"{unit}s/s per GPU", rate, form),
        Column("MFU", "mfu", ".1f", "%", scale=100),
    ]
    rows = [{"scenario": name, **speed} for name, speed in speeds.items()]
    sizes = {name: speed["world_size"] for name, speed in speeds.items()}
    notes = _load.other_sizes(sizes, sizes["as it is"])
    return speeds, [Table(columns, rows), *notes]


def _slower_link(args: Args, job: Any, text: str) -> str:
    """The change of a job's key for `--link`."""
    name, factor = named_factor(text, "--link", "infiniband:1.5")
    if _load.job_of(job) is None:
        raise ValueError(f"{shown(args.job)}: this is a profile, without links; give a job.")
    if job.cluster is None:
        raise ValueError(
            f"{shown(args.job)}: this job names no cluster, so it has no links; give a job "
            "with a `cluster`."
        )
    links = {link.name: link for link in job.cluster.links}
    if name not in links:
        raise ValueError(unknown_name("link", name, links))
    bandwidth = links[name].bandwidth_bytes_per_s / factor
    return f"cluster.links.{name}.bandwidth_bytes_per_s={bandwidth!r}"


def _place(text: str, option: str) -> tuple[str, int, float]:
    place, factor = named_factor(text, option, "stage=7:1.2")
    of, _, number = place.partition("=")
    if of not in ("stage", "rank") or not (number.isdecimal() and len(number) <= 9):
        raise ValueError(
            f"{option} `{quoted(text)}` must be a stage or rank and a factor, such as "
            "`stage=7:1.2` or `rank=0:1.2`."
        )
    return of, int(number), factor


def _rank_of_stage(program: Any, stage: int) -> int:
    ranks = prism.analysis.ranks_of_stages(program)
    if stage >= len(ranks):
        raise ValueError(f"There is no stage {stage}; the program has 0 to {len(ranks) - 1}.")
    return int(ranks[stage])
