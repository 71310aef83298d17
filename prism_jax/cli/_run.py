"""`prism-jax run`: how long a whole training run takes, including interruptions."""

import argparse
import sys
from typing import Any

from .._misc import quoted
from ._arguments import add_job_arguments, count
from ._catalogue import table
from ._json import plain


HELP = "print how long a whole training run takes, including interruptions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    # Enough for the mean to be known to a hundredth of the spread.
    parser.set_defaults(samples=8_192)
    parser.add_argument(
        "--steps", type=count, required=True, metavar="N", help="training steps of a run"
    )
    parser.add_argument(
        "--deadline",
        type=_days,
        metavar="DAYS",
        help="print the probability that a run ends within this many days",
    )
    parser.add_argument(
        "--failures",
        default="llama-3",
        metavar="FAILURES",
        help="counts of interruptions: the name of shipped ones, or a .toml file (llama-3)",
    )
    for name, what in (
        ("interval", "work between two checkpoints (the best)"),
        ("blocking", "for how long a checkpoint blocks the job (that of --failures)"),
        ("background", "for how long a checkpoint is then written in the background (0)"),
        ("restart", "from noticing an interruption to the first step (that of --failures)"),
        ("repair", "until a replaced node can be used as a spare (0)"),
        ("evaluation", "for evaluations in each interval (0)"),
    ):
        parser.add_argument(f"--{name}", type=_seconds, metavar="S", help=f"seconds: {what}")
    parser.add_argument("--spares", type=_spares, metavar="K", help="spare nodes (unlimited)")
    parser.add_argument(
        "--autocorrelation",
        type=_correlated,
        default=1.0,
        metavar="STEPS",
        help="autocorrelation time of the steps on the same GPUs, in steps (1: independent)",
    )
    parser.add_argument(
        "--runs", type=count, default=100_000, metavar="M", help="runs to simulate (100000)"
    )
    parser.add_argument(
        "--derivatives",
        action="store_true",
        help="print the derivatives of the days with respect to rates and costs",
    )


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ._load import compiled, load

    # Bad input fails before JAX starts.
    job = load(arguments)

    from ..data import load_failures

    failures = load_failures(arguments.failures)

    from ..runs import training_run

    costs = _costs(arguments, failures, job.layout.world_size)
    program, options = compiled(arguments, job)
    law = training_run(
        program,
        num_steps=arguments.steps,
        failures=failures,
        costs=costs,
        num_spares=arguments.spares,
        autocorrelation_time=arguments.autocorrelation,
        num_runs=arguments.runs,
        derivatives=arguments.derivatives,
        **options,
    )
    days: dict[str, Any] = {"mean": law.mean.value}
    days |= {f"p{round(100 * q)}": law.quantile(q) for q in (0.05, 0.5, 0.95)}
    result: dict[str, Any] = {
        "job": job.name,
        "world_size": job.layout.world_size,
        "steps": arguments.steps,
        "days": days,
        "goodput": law.goodput,
        "parts_days": law.parts,
        "interruptions": law.interruptions,
        "interval_s": law.interval_s,
        "best_interval_s": plain(law.best_interval_s),
        "failures": failures.source,
        "num_runs": len(law.days),
        "requested_runs": law.requested,
    }
    if law.interrupted:
        print(
            f"prism-jax: interrupted after {len(law.days):,} of {law.requested:,} runs; the law "
            "has only these runs.",
            file=sys.stderr,
        )
    if arguments.deadline is not None:
        result["deadline_days"] = arguments.deadline
        result["probability"] = law.probability(arguments.deadline).value
    if law.derivatives:
        result["derivatives_days"] = plain(law.derivatives)
    return result, _text(result, law)


def _text(result: dict[str, Any], law) -> str:
    days = result["days"]
    lines = [
        f"{result['job']}: {result['steps']:,} steps on {result['world_size']:,} GPUs",
        "",
        f"days          mean {days['mean']:.4g}, p5 {days['p5']:.4g}, p50 {days['p50']:.4g}, "
        f"p95 {days['p95']:.4g}",
    ]
    if "probability" in result:
        chance = 100 * result["probability"]
        lines.append(f"probability   {chance:.4g} % to end within {result['deadline_days']:g} days")
    rest = ", ".join(f"{name} {d:.3g}" for name, d in result["parts_days"].items() if d > 1e-8)
    number = sum(law.interruptions.values())
    best = f"the best interval is {law.best_interval_s:.4g} s"
    if not number:
        best = "no run was interrupted"
    lines += [
        f"goodput       {100 * law.goodput:.4g} % of the time is spent in steps that count",
        f"days by part  {rest}",
        f"interrupted   {number:.4g} times{': ' if number else ''}"
        + ", ".join(f"{name} {n:.3g}" for name, n in law.interruptions.items() if n),
        f"checkpoints   after each {law.interval_s:.4g} s of work; {best}",
    ]
    if law.derivatives:
        ordered = sorted(law.derivatives.items(), key=lambda item: -abs(item[1].value))
        rows = [(name, f"{d.value / 100:+.2g}") for name, d in ordered]
        lines += ["", table(("1 % more of", "days"), rows)]
    return "\n".join([*lines, "", f"failures: {result['failures']}"])


def _costs(arguments: argparse.Namespace, failures, world_size: int):
    """The given costs, completed by those of the failures; `None` if none were given."""
    from ..runs import RunCosts, best_interval, check_costs

    names = ("interval", "blocking", "background", "restart", "repair", "evaluation")
    given = {f"{n}_s": v for n in names if (v := getattr(arguments, n)) is not None}
    if not given:
        return None
    costs = {"blocking_s": failures.blocking_s, "restart_s": failures.restart_s, **given}
    if "interval_s" not in costs:
        counted = sum(cause.count for cause in failures.causes if not cause.announced)
        rate = counted * world_size / (failures.device_hours * 3600)
        if not (rate and costs["blocking_s"]):
            raise ValueError(
                "There is no best interval between checkpoints if they cost nothing or if no "
                "interruption loses work; give `--interval`."
            )
        costs["interval_s"] = best_interval(rate, costs["blocking_s"])
    found = RunCosts(**costs)
    check_costs(found)
    return found


def _number(text: str, least: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"`{quoted(text)}` must be a number of {what}")
    return value


def _days(text: str) -> float:
    return _number(text, 1e-9, "days above 0, up to 1e9")


def _seconds(text: str) -> float:
    return _number(text, 0, "seconds from 0 to 1e9")


def _correlated(text: str) -> float:
    return _number(text, 1, "steps from 1 to 1e9")


def _spares(text: str) -> int:
    return count(text, 0)
