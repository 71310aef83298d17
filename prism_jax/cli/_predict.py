"""`prism-jax predict`: a job's step without variability, and its parts."""

import argparse
from typing import Any

import msgspec

from ._arguments import add_oom_argument, add_set_argument
from ._catalogue import table
from ._json import plain


HELP = "print the step time without variability, and its parts, within seconds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", metavar="JOB", help="a shipped job (`prism-jax jobs`), or a .toml file"
    )
    add_set_argument(parser)
    add_oom_argument(parser)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..data import load_job
    from ._load import tell_notes

    job = load_job(arguments.job, arguments.overrides)

    from ..prediction import check_memory, predict, throughput

    if not arguments.allow_oom:
        check_memory(job)
    found = predict(job)
    tell_notes([job])
    result = {"job": job.name, "world_size": job.layout.world_size}
    result["step_time_s"] = {"mean": found.mean}
    result |= {k: plain(v) for k, v in msgspec.structs.asdict(found).items() if k != "mean"}
    ordered = sorted(found.breakdown.items(), key=lambda item: -item[1])
    rows = [(name, f"{s:.4g} s", f"{100 * s / found.mean:.1f} %") for name, s in ordered]
    per_gpu = throughput(job)
    assert per_gpu is not None  # `predict` raises where a job has no model.
    result["throughput"] = plain(msgspec.structs.asdict(per_gpu))
    text = [
        f"{job.name}: {found.mean:.5g} s a step on {job.layout.world_size:,} GPUs, without "
        "variability",
        *per_gpu.lines(),
        "",
        table(("part", "time", "share"), rows),
    ]
    if job.layout.pp > 1:
        text += [
            "",
            f"pipeline: waiting for other stages, of which {found.exposed_send_recv:.3g} s for "
            "send_recvs",
        ]
    return result, "\n".join(text)


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each part of the step."""
    return [{"part": name, "seconds": s} for name, s in result["breakdown"].items()]
