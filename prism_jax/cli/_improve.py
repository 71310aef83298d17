"""`prism-jax improve` and `prism-jax target`: what to spend on, and how little spread is needed."""

import argparse
import dataclasses
from typing import Any

from ._arguments import add_job_arguments, count, named_factor
from ._devices import use_all_cores
from ._objective import add_objective_argument, objective


class Improve:
    """`prism-jax improve`."""

    HELP = "spend a budget on taking away variability, to lower a figure"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_job_arguments(parser)
        add_objective_argument(parser)
        parser.add_argument(
            "--cost",
            action="append",
            required=True,
            metavar="PART=COST",
            help="what taking away all of a part's spread costs, such as all_gather=3 or rank=2",
        )
        parser.add_argument(
            "--budget", type=float, required=True, metavar="B", help="in the unit of the costs"
        )
        parser.add_argument(
            "--iterations", type=count, default=20, metavar="K", help="of the descent (20)"
        )

    @staticmethod
    def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
        from ._load import load

        job = load(arguments.job, arguments.overrides)  # Bad input fails before JAX starts.
        costs = dict(named_factor(text, "--cost", "all_gather=3") for text in arguments.cost)
        if len(costs) < len(arguments.cost):
            raise ValueError("--cost names a part twice; give one cost for each.")

        import jax

        from ..analysis import improve

        wanted = objective(arguments.objective)
        use_all_cores()
        found = improve(
            job.compile(),
            wanted,
            costs,
            arguments.budget,
            num_samples=arguments.samples,
            key=jax.random.key(arguments.seed),
            num_iterations=arguments.iterations,
        )
        unit = found.unit if found.unit != "1" else ""
        lines = [f"{job.name}: {found.objective}, with {found.spent:.4g} spent", ""]
        for label, (value, error) in (
            ("as it is", found.before),
            ("improved", found.after),
            ("gain", found.gain),
        ):
            lines.append(f"{label:<24}{value:>12.6g} +- {error:.2g} {unit}".rstrip())
        lines += ["", "share of its spread to take away"]
        for name, share in sorted(found.removed.items(), key=lambda row: -row[1]):
            lines.append(f"{name:<24}{share:>12.3f}")
        lines += ["", f"{found.num_samples:,} steps for each figure, {len(found.path)} iterations"]
        return {"job": job.name, **dataclasses.asdict(found)}, "\n".join(lines)


class Target:
    """`prism-jax target`."""

    HELP = "say how widely a part may vary for a figure to meet a target"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_job_arguments(parser)
        add_objective_argument(parser)
        parser.add_argument("--part", required=True, metavar="PART", help="such as all_gather")
        parser.add_argument(
            "--at", type=float, required=True, metavar="X", help="the target, in the figure's unit"
        )

    @staticmethod
    def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
        from ._load import load

        job = load(arguments.job, arguments.overrides)  # Bad input fails before JAX starts.

        import jax

        from ..analysis import spread_for

        wanted = objective(arguments.objective)
        use_all_cores()
        found = spread_for(
            job.compile(),
            wanted,
            arguments.part,
            arguments.at,
            num_samples=arguments.samples,
            key=jax.random.key(arguments.seed),
        )
        factor, error = found.factor
        text = (
            f"{job.name}: with {factor:.4g}{'' if error is None else f' +- {error:.2g}'} times its "
            f"spread, `{arguments.part}` "
            f"gives {wanted!r} = {found.reached:.6g}; it is {found.as_it_is:.6g} as it is and "
            f"{found.without:.6g} without ({found.num_samples:,} steps)"
        )
        result = {"job": job.name, "objective": repr(wanted), "unit": wanted.unit}
        return {**result, "part": arguments.part, **dataclasses.asdict(found)}, text
