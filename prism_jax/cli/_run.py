import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

import prism_jax as prism

from .._estimate import Estimate
from .._misc import plural
from .._summary import Column, Table, plain
from ..data import at_age, load_failures
from . import _load
from ._compare import cost
from ._options import Args, Output, command
from ._values import number, tokens, whole


_COSTS = ("interval", "blocking", "background", "restart", "repair", "evaluation")
# Equally likely quantiles of the expected error.
_LEVELS = (np.arange(51) + 0.5) / 51


@command(
    "job RANDOM --allow-oom --price",
    how={
        "--tokens": tokens,
        "--deadline": number(1e-9, "a number of days above 0, up to 1e9"),
        "--age": number(0, "a number of years from 0 to 1e9"),
        "--spares": whole(0),
        "--autocorrelation": number(1, "a number of steps from 1 to 1e9"),
        "--level": number(0, "a share from 0 to 1"),
    },
)
def run(args: Args) -> Output:
    """Print how long a whole training run takes, including interruptions.

    --samples N (8192)  steps to simulate
    --steps N  training steps of a run
    --tokens N  tokens of a run, in place of --steps
    --deadline DAYS  print the probability that a run ends within this many days
    --failures FAILURES (llama-3)  counts of interruptions: the name of shipped ones, or a .toml
        file
    --age YEARS  age of the GPUs, where --failures has rates by age (as counted)
    --interval S  seconds: work between two checkpoints (the best)
    --blocking S  seconds: for how long a checkpoint blocks the job (that of --failures)
    --background S  seconds: for how long a checkpoint is then written in the background (0)
    --restart S  seconds: from noticing an interruption to the first step (that of --failures)
    --repair S  seconds: until a replaced node can be used as a spare, on average (that of
        --failures)
    --evaluation S  seconds: for evaluations in each interval (0)
    --spares K  spare nodes (unlimited)
    --find-slow S  seconds until a slow node is found and replaced (never)
    --autocorrelation STEPS  autocorrelation time of the steps on the same GPUs, in steps (twice a
        spell of congestion on a shared network, else 1: independent)
    --level SD  standard deviation of the logarithm of a run's level (that of runs of other systems)
    --runs N (100000)  runs to simulate
    --derivatives  print the derivatives of the days with respect to rates and costs

    example: prism-jax run gpt3-175b-h100-4096 --steps 100000 --deadline 7
    """
    job = _load.load(args)
    failures, world_size = load_failures(args.failures), job.layout.world_size
    failures = failures if args.age is None else at_age(failures, args.age)
    loaded = _load.job_of(job)
    steps, costs = _steps(args, loaded), _costs(args, failures, world_size)
    program, options = _load.compiled(args, job)
    level, drift = (0.0, 0.0) if loaded is None else prism.calibration.level_of_runs(loaded)
    level = level if args.level is None else args.level
    law = prism.runs.training_run(
        program,
        num_steps=steps,
        failures=failures,
        costs=costs,
        num_spares=args.spares,
        autocorrelation_time=args.autocorrelation or _spell_steps(loaded),
        level=level,
        drift=drift,
        find_slow_s=args.find_slow,
        num_runs=args.runs,
        derivatives=args.derivatives,
        **options,
    )
    error = None if loaded is None else prism.prediction.expected_error(loaded)
    future = law if error is None else law.at_levels(prism.prediction.levels_of_law(error, _LEVELS))
    _load.tell_interrupted("runs", law, law.num_runs)
    dear = cost(args, world_size, 86_400 * law.mean.value)
    of_runs = {"steps": steps, "level_std": level, "drift": drift, "failures": failures.source}
    parts = [*_load.of(job, program), {"world_size": world_size, **of_runs}, law.to_json(), dear]
    table = law.summary()
    if error is not None:
        intervals = _intervals(law.figures, law.parts, error)
        parts.append({"prediction_interval_90": intervals, "expected_error": error})
        low, high = future.quantile(0.05), future.quantile(0.95)
        interval = f"90 % of such runs take {low:.4g} .. {high:.4g} days, {error}"
        parts.append(f"{plural(steps, 'step')}: {interval}")
        table = dataclasses.replace(table, title="If steps take as long as predicted:")
    priced = f", cost {dear['cost']:,.0f}" if "cost" in dear else ""
    parts += [table, f"{plural(round(dear['gpu_hours']), 'GPU hour')} on average{priced}"]
    if args.deadline is not None:
        parts += _in_time(future, args.deadline)
    if law.derivatives:
        parts += [{"derivatives_days": law.derivatives}, _derivatives(law.derivatives)]
    return Output(*parts, f"failures: {failures.source}")


def _spell_steps(job: Any) -> float:
    """The autocorrelation time of steps in spells of congestion whose length is exponential, in
    steps; at least one.
    """
    if job is None or (network := job.kernels.find_variation("network")) is None:
        return 1.0
    spell_s = network.parameters.get("spell_s", 0.0)
    return max(1.0, 2 * spell_s / prism.predict(job).mean) if spell_s else 1.0


def _in_time(law: Any, days: float) -> tuple[dict[str, Any], str]:
    """How likely a run ends within some days: as `--json` prints it, and as a sentence."""
    chance = law.probability(days)
    in_time = {"deadline_days": days, "probability": chance.value}
    in_time["probability_interval_95"] = plain(np.clip(chance.interval(), 0, 1).tolist())
    percent = Estimate(100 * chance.value, 100 * chance.standard_error)
    return in_time, f"{percent} % of such runs end within {days:g} days"


def _steps(args: Args, job: Any) -> int:
    """The steps of a run: those given, or as many as have the given tokens."""
    if (args.steps is None) == (args.tokens is None):
        raise ValueError("A run has `--steps` or `--tokens`; give one of them.")
    if args.steps is not None:
        return args.steps
    if job is None:
        raise ValueError("A profile does not say how many tokens a step has; give `--steps`.")
    if job.unit != "token":
        raise ValueError("A model without words has no tokens; give `--steps`.")
    return max(1, -(-args.tokens // job.tokens_per_step))


def _intervals(
    days: dict[str, float], parts: Mapping[str, float], error: Any
) -> dict[str, list[float]]:
    """In which interval each figure lies, in days: steps that count take longer or shorter."""
    work = parts["work"] + parts["slow"]
    longer = [work * float(prism.prediction.levels_of_law(error, q) - 1) for q in (0.05, 0.95)]
    return {name: [value + more for more in longer] for name, value in days.items()}


def _costs(args: Args, failures: Any, world_size: int) -> Any:
    """The given costs, completed by those of the failures; `None` if none were given."""
    costs = {f"{n}_s": v for n in _COSTS if (v := getattr(args, n)) is not None}
    if not costs:
        return None
    fields = ("blocking_s", "restart_s", "repair_s", "repair_power")
    costs = {name: getattr(failures, name) for name in fields} | costs
    if "interval_s" not in costs:
        counted = sum(cause.count for cause in failures.causes if not cause.announced)
        rate = counted * world_size / (failures.device_hours * 3600)
        if not (rate and costs["blocking_s"]):
            raise ValueError(
                "There is no best interval between checkpoints if they cost nothing or if no "
                "interruption loses work; give `--interval`."
            )
        costs["interval_s"] = prism.runs.best_interval(rate, costs["blocking_s"])
    run_costs = prism.runs.RunCosts(**costs)
    prism.runs.check_costs(run_costs)
    return run_costs


def _derivatives(derivatives: dict[str, Any]) -> Table:
    ordered = sorted(derivatives.items(), key=lambda item: -abs(item[1].value))
    rows = [{"of": name, "days": derivative.value} for name, derivative in ordered]
    columns = (Column("1 % more of", "of"), Column("days", form="+.2g", scale=0.01))
    return Table(columns, rows)
