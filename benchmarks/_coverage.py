"""How often 95 % intervals contain the truth, which is estimated from a long run."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gradients import NAMES


_STEPS = 2**14
_LONG = 2**20


def measure(repetitions: int, of: str | None = None) -> list[dict[str, Any]]:
    """Of estimates and their derivatives, and of `what_if` and `sensitivity`; `of` one of these."""
    rows = [] if of == "analyses" else _of_estimators(repetitions)
    return rows if of == "estimators" else [*rows, *_of_analyses(repetitions)]


def table(rows: list[dict[str, Any]]) -> str:
    """Tables in Markdown: the estimators with their derivatives, and the analyses."""
    coverage = {row["what"]: row["coverage"] for row in rows}
    lines = []
    estimators = [what.removesuffix(": value") for what in coverage if what.endswith(": value")]
    if estimators:
        lines += ["| estimator | coverage of values | coverage of derivatives |", "|---|---|---|"]
    for name in estimators:
        value, derivative = coverage.pop(f"{name}: value"), coverage.pop(f"{name}: derivative")
        lines.append(f"| {name} | {value:.3f} | {derivative:.3f} |")
    if estimators and coverage:
        lines.append("")
    if coverage:
        lines += ["| figure of an analysis | coverage |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value:.3f} |" for name, value in coverage.items())])


def _of_estimators(repetitions: int) -> list[dict[str, Any]]:
    """Of value and derivative, by objective."""
    import jax

    from benchmarks._programs import programs
    from prism_jax.analysis import CVaR, Exceedance, Mean, Quantile, Std
    from prism_jax.analysis._batches import NUM_BATCHES, Batched, beside
    from prism_jax.analysis._estimate import figure, figure_batches, gradient_batches
    from prism_jax.engine import composed_steps

    cases = [("chain, log-normal", o) for o in (Mean(), Std(), Quantile(0.9), CVaR(0.9), None)]
    cases.append(("1f1b, random tail", None))
    rows = []
    for name, objective in cases:
        program = programs()[name]
        if objective is None:
            steps = composed_steps(program, num_samples=2**16, key=jax.random.key(0)).steps
            objective = Exceedance(float(np.quantile(steps, 0.9)))

        def both(number, seed, program=program, objective=objective):
            options = {"num_samples": number, "key": jax.random.key(seed)}
            found = figure(program, objective, batches=NUM_BATCHES, **options)
            slopes: Any = [one.variability.residual["gemm"] for one in gradient_batches(found)]
            sigmas = np.array([[float(law.sigma)] for law in slopes])
            derivative = Batched(sigmas, sigmas.mean(axis=0))
            return beside(figure_batches(found), derivative), found.composed.over

        long, over = both(2**24, 0)
        truth, inside = long.of_all, []
        for seed in range(repetitions):
            low, high = both(2**15, 1 + seed)[0].interval()
            inside.append((low <= truth) & (truth <= high))
        value, derivative = np.mean(inside, axis=0).tolist()
        label = NAMES[type(objective).__name__ + (over.last if over else "")]
        rows.append({"what": f"{label}: value", "coverage": value})
        rows.append({"what": f"{label}: derivative", "coverage": derivative})
    return rows


def _of_analyses(repetitions: int) -> list[dict[str, Any]]:
    """Of what `what_if` and `sensitivity` find of a small pipeline."""
    import jax

    import prism_jax as prism
    from prism_jax.program import Variability
    from prism_jax.schedule import OneFOneB
    from tests.helpers import lognormal, pipeline_program

    def program(num_replicas):
        laws = {"residual": {"gemm": lognormal(0.05)}, "rank": lognormal(0.02)}
        laws["step"] = lognormal(0.01)
        return pipeline_program(
            OneFOneB(2, 4), variability=Variability(**laws), num_replicas=num_replicas
        )

    few, many = program(4), program(256)
    scenarios = {
        "256 replicas in place of 4": prism.Scenario(many),
        "gemm scaled to 0.9": prism.scale_kernel(few, "gemm", 0.9),
        "one slow rank in one replica": prism.slow_rank(few, rank=1, factor=1.1, replicas=1),
    }

    def what_if(num_samples, key):
        found = prism.what_if(few, scenarios, num_samples=num_samples, key=key)
        return {
            f"what_if, {name}: {figure}": change
            for name, changes in found.changes.items()
            for figure, change in changes.items()
            if figure in ("mean", "std", "p50", "p95")
        }

    def sensitivity(num_samples, key):
        options = {"num_samples": num_samples, "key": key, "parts": ["gemm", "rank"]}
        found = prism.sensitivity(few, prism.Quantile(0.9), **options)
        return {
            f"sensitivity of p90, {part.name}: {field}": getattr(part, field)
            for part in found.parts
            for field in ("mean", "spread", "gain")
            if part.name in options["parts"] and getattr(part, field) is not None
        }

    rows = []
    for analysis in (what_if, sensitivity):
        rows += _covered(analysis, jax.random.key(0), repetitions)
    return rows


def _covered(
    analysis: Callable[..., dict[str, Any]], key: Any, repetitions: int
) -> list[dict[str, Any]]:
    """How often the intervals of an analysis hold what a long one finds."""
    import jax

    truth = analysis(_LONG, key)
    held: dict[str, list[bool]] = {name: [] for name in truth}
    for seed in range(repetitions):
        for name, estimate in analysis(_STEPS, jax.random.key(1 + seed)).items():
            low, high = estimate.interval()
            held[name].append(low <= truth[name].value <= high)
    return [{"what": name, "coverage": float(np.mean(mine))} for name, mine in held.items()]
