"""Jobs of published steps that are not rows like those of `_published_jobs.py`."""

from prism_jax import data

from ._published_machines import job_on, switches_of
from ._published_models import GPT


# vTrain does not say which Megatron-DeepSpeed it measured; it is taken to be a fork of 2021.
def of_vtrain(row: dict[str, str]) -> data.Job:
    def number(key: str) -> int:
        return int(row[key])

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
    schedule = data.ScheduleConfig("1f1b", number("global batch") // (dp * size))
    return job_on(model, data.Layout(tp=tp, pp=pp, dp=dp), schedule, training, "dgx-a100")


def of_family(row: dict[str, str]) -> data.Job:
    from ._scales import overrides

    system = {k: int(row[k]) for k in ("microbatches", "dp", "gbs")} | {"family": row["family"]}
    return data.load_job("gpt3-175b-h100-4096", overrides(system))
