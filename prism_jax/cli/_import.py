from .._files import shown
from .._misc import counted
from ._options import ALLOW_OOM, SET, Given, Output, argument, command
from ._values import count


@command(
    "config.json --gpus 64 --set layout.tp=8 --out my_job.toml",
    argument(
        "file FILE",
        "a config.json of Hugging Face; or the arguments of Megatron-LM: a .yaml with MODEL_ARGS, "
        "or a command line in a .sh or .txt file",
    ),
    argument("--gpus N", "how many GPUs the job has", count, required=True),
    argument(
        "--cluster CLUSTER", "a shipped family of clusters (`prism-jax hardware`), or a .toml file"
    ),
    argument("--out JOB.toml", "the job to write", required=True),
    SET,
    ALLOW_OOM,
)
def run(given: Given) -> Output:
    """Make a job file from a Hugging Face config.json or the arguments of Megatron-LM."""
    from ..data import check_job_path, save_job
    from ..importers import import_job

    check_job_path(given.out)
    job = import_job(given.file, given.gpus, cluster=given.cluster, overrides=given.overrides)

    from ..prediction import check_memory, memory
    from ..workload import count_parameters

    if given.allow_oom:
        memory(job)  # Raises where the layout does not fit the model.
    else:
        check_memory(job)
    save_job(job, given.out)
    assert job.model is not None
    assert job.training is not None
    parameters = count_parameters(job.model)
    layout, number, training = job.layout, job.schedule.num_microbatches, job.training
    sequences = layout.dp * number * training.microbatch_size
    text = (
        f"{shown(given.out)}: {parameters / 1e9:.1f} billion parameters on "
        f"{layout.world_size} GPUs (tp{layout.tp} pp{layout.pp} dp{layout.dp} cp{layout.cp} "
        f"ep{layout.ep}); a step has {counted(sequences, 'sequence')} of "
        f"{training.sequence_length:,} tokens, in {counted(number, 'microbatch', 'es')} a replica "
        f"({training.dtype})"
    )
    result = {
        "out": given.out,
        "parameters": parameters,
        "world_size": layout.world_size,
        "global_batch_size": sequences,
        "sequence_length": training.sequence_length,
    }
    return Output(result, [text])
