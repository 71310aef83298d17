from typing import Any

from .._files import shown
from .._misc import quoted, unknown_name
from .._summary import Column, Table, picked, plain
from . import _load, _prism as prism
from ._options import SIMULATED, Given, Output, command
from ._values import named_factor


@command(SIMULATED, csv=True)
def whatif(given: Given) -> Output:
    """Show the effect of a slow rank, hot node, congested link, scaled kernel or any change.

    --slow-rank stage=S:F...  the rank of one replica that runs stage S (or rank=R) is F times
        slower
    --hot-node stage=S:F...  a node whose GPUs run stage S (or rank=R) is F times slower
    --link NAME:F...  a link of the cluster has F times less bandwidth
    --kernel KIND:F...  a kind of kernel takes F times as long, such as all_gather:0.8
    --change KEY=VALUE...  a key of the job, such as schedule.virtual_stages=6

    example: prism-jax whatif gpt3-175b-h100-4096 --slow-rank stage=7:1.2 --kernel all_gather:0.8
    """
    job = _load.load(given)
    changed = {text: _load.load(given, text) for text in given.change}
    for text in given.link:
        changed[f"link {text}"] = _load.load(given, _slower_link(given, job, text))
    slow = {f"slow rank {text}": _place(text, "--slow-rank") for text in given.slow_rank}
    hot = {f"hot node {text}": _place(text, "--hot-node") for text in given.hot_node}
    places = slow | hot
    kernels = {text: named_factor(text, "--kernel", "all_gather:0.8") for text in given.kernel}
    if not (changed or places or kernels):
        raise ValueError(
            "Nothing to compare with was given; use --slow-rank, --hot-node, --link, --kernel or "
            "--change."
        )
    program, options = _load.compiled(given, job)
    scenarios = {}
    of_node = max(job.devices_per_node // program.group_size, 1) if hot else 1
    for name, (of, number, factor) in places.items():
        rank = number if of == "rank" else _rank_of_stage(program, number)
        replicas = min(of_node, program.num_replicas) if name in hot else 1
        scenarios[name] = prism.analysis.slow_rank(program, rank, factor, replicas=replicas)
    for text, (kind, factor) in kernels.items():
        scenarios[f"kernel {text}"] = prism.analysis.scale_kernel(program, kind, factor)
    for text, other in changed.items():
        scenarios[text] = prism.analysis.Scenario(other.compile())
        if other.job and job.job and other.job.cluster != job.job.cluster:
            _load.tell_notes([other.job])
    found = prism.analysis.what_if(program, scenarios, **options)
    mean, throughput = found.before["mean"].value, prism.prediction.throughput
    each = {"as it is": throughput(job.job, mean)}
    for name, changes in found.changes.items():
        other = changed.get(name, job).job or job.job
        each[name] = throughput(other, mean + changes["mean"].value)
    figures = ("world_size", "tokens_per_s_per_gpu", "mfu")  # A profile has none.
    speed = {name: picked(one, *figures) for name, one in each.items() if one is not None}
    columns = [
        Column("scenario"),
        Column("GPUs", "world_size"),
        Column("tokens/s per GPU", "tokens_per_s_per_gpu", ",.0f"),
        Column("MFU", "mfu", ".1f", "%", scale=100),
    ]
    speeds = Table(columns, [{"scenario": name, **one} for name, one in speed.items()], most=None)
    sizes = {name: one["world_size"] for name, one in speed.items()}
    notes = _load.other_sizes(sizes, sizes["as it is"]) if speed else []
    table = found.summary().named(job.name, most=None)
    result = {"job": job.name, **plain(found), "throughput": speed}
    return Output(result, [table, *[speeds] * bool(speed), *notes])


def _slower_link(given: Given, job: _load.Loaded, text: str) -> str:
    """The change of a job's key for `--link`."""
    name, factor = named_factor(text, "--link", "infiniband:1.5")
    if job.job is None:
        raise ValueError(f"{shown(given.job)}: this is a profile, without links; give a job.")
    if job.job.cluster is None:
        raise ValueError(
            f"{shown(given.job)}: this job names no cluster, so it has no links; give a job "
            "with a `cluster`."
        )
    links = {link.name: link for link in job.job.cluster.links}
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
