"""`prism-jax whatif`: how the step time would change."""

import argparse
from typing import Any

from .._files import shown
from .._misc import quoted, unknown_name
from ._arguments import add_job_arguments, named_factor
from ._catalogue import table
from ._json import plain
from ._other_sizes import other_sizes


HELP = "show the effect of a slow rank, a hot node, a congested link, a scaled kernel or any change"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    for option, metavar, text in (
        ("--slow-rank", "stage=S:F", "the rank of one replica that runs stage S (or rank=R) is F "
         "times slower"),
        ("--hot-node", "stage=S:F", "a node whose GPUs run stage S (or rank=R) is F times slower"),
        ("--link", "NAME:F", "a link of the cluster has F times less bandwidth"),
        ("--kernel", "KIND:F", "a kind of kernel takes F times as long, such as all_gather:0.8"),
        ("--change", "KEY=VALUE", "a key of the job, such as schedule.virtual_stages=6"),
    ):  # fmt: skip
        parser.add_argument(option, action="append", default=[], metavar=metavar, help=text)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ._load import compiled, load, tell_notes

    job = load(arguments)  # Bad input fails before JAX starts.
    changed = {text: load(arguments, text) for text in arguments.change}
    for text in arguments.link:
        name, factor = named_factor(text, "--link", "infiniband:1.5")
        if job.job is None:
            raise ValueError(
                f"{shown(arguments.job)}: this is a profile, without links; give a job."
            )
        if job.job.cluster is None:
            raise ValueError(
                f"{shown(arguments.job)}: this job names no cluster, so it has no links; give a "
                "job with a `cluster`."
            )
        links = {link.name: link for link in job.job.cluster.links}
        if name not in links:
            raise ValueError(unknown_name("link", name, links))
        bandwidth = links[name].bandwidth_bytes_per_s / factor
        key = f"cluster.links.{name}.bandwidth_bytes_per_s={bandwidth!r}"
        changed[f"link {text}"] = load(arguments, key)
    places = [
        (option, text, *_place(text, option))
        for option, texts in (("slow rank", arguments.slow_rank), ("hot node", arguments.hot_node))
        for text in texts
    ]
    kernels = [
        (text, *named_factor(text, "--kernel", "all_gather:0.8")) for text in arguments.kernel
    ]
    if not (changed or places or kernels):
        raise ValueError(
            "Nothing to compare with was given; use --slow-rank, --hot-node, --link, --kernel or "
            "--change."
        )

    from ..analysis import Scenario, scale_kernel, slow_rank, what_if

    program, options = compiled(arguments, job)
    scenarios = {}
    for option, text, of, number, factor in places:
        rank = number if of == "rank" else _rank_of_stage(program, number)
        replicas = 1
        if option == "hot node":
            devices = 8 if job.job is None else job.job.cluster.devices_per_node
            replicas = min(max(devices // program.group_size, 1), program.num_replicas)
        scenarios[f"{option} {text}"] = slow_rank(program, rank, factor, replicas=replicas)
    for text, kind, factor in kernels:
        scenarios[f"kernel {text}"] = scale_kernel(program, kind, factor)
    for text, other in changed.items():
        scenarios[text] = Scenario(other.compile())
        if other.job and job.job and other.job.cluster != job.job.cluster:
            tell_notes([other.job])
    found = what_if(program, scenarios, **options)
    others = {name: other.job for name, other in changed.items() if other.job is not None}
    speed = _throughputs(job.job, others, found)
    result = {"job": job.name, **plain(found), "throughput": speed}
    return result, "\n".join([_text(job.name, found), *_speed_lines(speed)])


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each scenario and figure."""
    return [
        {"scenario": name, "figure": figure, "before": result["before"][figure], "change": change}
        for name, changes in result["changes"].items()
        for figure, change in changes.items()
    ]


def _throughputs(job: Any, others: dict[str, Any], found) -> dict[str, dict[str, Any]]:
    """GPUs, tokens/s per GPU and MFU of the job as it is and of each scenario."""
    from ..prediction import throughput

    mean = found.before["mean"].value
    means = {name: mean + changes["mean"].value for name, changes in found.changes.items()}
    each = {"as it is": throughput(job, mean)}
    each |= {name: throughput(others.get(name, job), means[name]) for name in means}
    names = ("world_size", "tokens_per_s_per_gpu", "mfu")
    return {
        name: {field: getattr(one, field) for field in names}
        for name, one in each.items()
        if one is not None
    }


def _speed_lines(speed: dict[str, dict[str, Any]]) -> list[str]:
    if not speed:  # A profile has only latencies.
        return []
    sizes = {name: one["world_size"] for name, one in speed.items()}
    cells = [
        (
            name,
            f"{one['world_size']:,}",
            f"{one['tokens_per_s_per_gpu']:,.0f}",
            "" if one["mfu"] is None else f"{100 * one['mfu']:.1f} %",
        )
        for name, one in speed.items()
    ]
    lines = ["", table(("", "GPUs", "tokens/s per GPU", "MFU"), cells)]
    return lines + other_sizes(sizes, sizes["as it is"])


def _place(text: str, option: str) -> tuple[str, int, float]:
    option = f"--{option.replace(' ', '-')}"
    place, factor = named_factor(text, option, "stage=7:1.2")
    of, _, number = place.partition("=")
    if of not in ("stage", "rank") or not (number.isdecimal() and len(number) <= 9):
        raise ValueError(
            f"{option} `{quoted(text)}` must be a stage or rank and a factor, such as "
            "`stage=7:1.2` or `rank=0:1.2`."
        )
    return of, int(number), factor


def _rank_of_stage(program, stage: int) -> int:
    from ..analysis import ranks_of_stages

    ranks = ranks_of_stages(program)
    if stage >= len(ranks):
        raise ValueError(f"There is no stage {stage}; the program has 0 to {len(ranks) - 1}.")
    return int(ranks[stage])


def _text(name: str, found) -> str:
    figures = list(found.before)
    lines = [f"{name}: change of the step time, with its 95 % interval", ""]
    lines.append("".join([f"{'':<28}", *(f"{figure:>14}" for figure in figures)]))
    lines.append(
        "".join([f"{'as it is':<28}", *(f"{found.before[f].value:>12.5g} s" for f in figures)])
    )
    for scenario, changes in found.changes.items():
        rows = zip(*((changes[f].value, *changes[f].interval()) for f in figures), strict=True)
        for label, row in zip((scenario, "  from", "  to"), rows, strict=True):
            cells = (f"{x:>+12.4g} s" if x == x else f"{'unknown':>14}" for x in row)
            lines.append("".join([f"{label:<28}", *cells]))
    lines += ["", f"{found.num_samples:,} steps of each, with common random numbers"]
    return "\n".join([*lines, *found.notes])
