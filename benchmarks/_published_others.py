"""Jobs of published steps that are not rows like those of `_published_jobs.py`."""

import functools as ft
from typing import Any

from prism_jax import data

from ._published_machines import job_on, switches_of
from ._published_models import GPT
from ._rows import count


# vTrain does not say which Megatron-DeepSpeed it measured; it is taken to be a fork of 2021.
def of_vtrain(row: dict[str, str]) -> data.Job:
    number = ft.partial(count, row)
    tp, pp = number("tensor parallelism"), number("pipeline parallelism")
    dp, size = number("data parallelism"), number("micro batch")
    hidden = number("hidden size")
    model = data.Model(
        num_layers=number("# layers"),
        hidden_size=hidden,
        num_heads=number("attention heads"),
        ffn_size=4 * hidden,
        vocab_size=51200,
        max_positions=number("sequence length"),
        **GPT,
    )
    training = data.Training(
        microbatch_size=size,
        sequence_length=number("sequence length"),
        dtype="fp16",
        recompute="full",
        software="megatron-2021",
        **switches_of("megatron-2021"),
    )
    microbatches, left = divmod(number("global batch"), dp * size)
    if left:
        raise ValueError("its numbers do not divide")
    schedule = data.ScheduleConfig("1f1b", microbatches)
    return job_on(model, data.Layout(tp=tp, pp=pp, dp=dp), schedule, training, "dgx-a100")


def of_family(row: dict[str, str]) -> data.Job:
    from ._scales import overrides

    sizes: dict[str, Any] = {key: count(row, key) for key in ("microbatches", "dp", "gbs")}
    return data.load_job("gpt3-175b-h100-4096", overrides(sizes | {"family": row["family"]}))
