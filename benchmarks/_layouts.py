"""How long other layouts of a job take: set-up, compilation and simulation."""

import random
import time
from typing import Any


_JOB, _GPUS, _LAYERS = "gpt3-175b-h100-4096", 4096, 96
_SAMPLES = 65_536


def layouts(number: int, seed: int = 0) -> list[list[str]]:
    """Overrides of the main job: random 1F1B and interleaved layouts of its GPUs."""
    rng = random.Random(seed)
    found: list[list[str]] = []
    while len(found) < number:
        tp, pp = rng.choice([1, 2, 4, 8]), rng.choice([2, 4, 8, 16])
        virtual = rng.choice([v for v in (1, 2, 3, 6, 12) if _LAYERS % (pp * v) == 0])
        microbatches = pp * rng.randint(1, 6)
        found.append(
            [
                f"layout.tp={tp}",
                f"layout.pp={pp}",
                f"layout.dp={_GPUS // (tp * pp)}",
                f"schedule.kind={'1f1b' if virtual == 1 else 'interleaved-1f1b'}",
                f"schedule.virtual_stages={virtual}",
                f"schedule.num_microbatches={microbatches}",
            ]
        )
    return found


def measure(number: int = 100) -> dict[str, Any]:
    """Figures of a process that has compiled nothing yet."""
    import jax

    from prism_jax import compile_job, load_job, simulate

    key = jax.random.key(0)

    def set_up(overrides: list[str]) -> float:
        start = time.perf_counter()
        program = compile_job(load_job(_JOB, overrides))
        graph = time.perf_counter() - start
        return graph + simulate(program, num_samples=_SAMPLES, key=key).compile_s

    first, second = set_up([]), set_up(["schedule.num_microbatches=8", "layout.dp=64"])
    start = time.perf_counter()
    ops = 0
    for overrides in layouts(number):
        program = compile_job(load_job(_JOB, overrides))
        ops += program.num_ops
        simulate(program, num_samples=_SAMPLES, key=key)
    seconds = time.perf_counter() - start
    return {
        "compiled_s": first,
        "recompiled_s": second,
        "layouts_per_minute": 60 * number / seconds,
        "ops_per_layout": ops / number,
    }
