import os
import sys

from .._files import shown
from .._misc import counted
from ._options import ALLOW_OOM, SET, Given, Output, argument, command, flag
from ._values import count


@command(
    "config.json --gpus 64 --batch 512 --set layout.tp=8 --out my_job.toml",
    argument(
        "file FILE",
        "a config.json of Hugging Face; or the arguments of Megatron-LM: a .yaml with MODEL_ARGS, "
        "or a command line in a .sh or .txt file",
    ),
    argument("--gpus N", "how many GPUs the job has", count, required=True),
    argument(
        "--cluster CLUSTER", "a shipped family of clusters (`prism-jax hardware`), or a .toml file"
    ),
    argument("--batch N", "the sequences of a step (those of the file, or published ones)", count),
    flag("--strict", "refuse arguments of Megatron-LM that are not known"),
    argument("--out JOB.toml", "the job to write", required=True),
    flag("--force", "overwrite a job that is there"),
    *SET,
    ALLOW_OOM,
)
def run(given: Given) -> Output:
    """Make a job file from a Hugging Face config.json or the arguments of Megatron-LM."""
    from ..data import check_job_path, save_job
    from ..importers import import_job

    check_job_path(given.out)
    if os.path.lexists(given.out) and not given.force:
        raise ValueError(
            f"--out `{shown(given.out)}` is there already; give another file, or `--force` to "
            "overwrite it."
        )
    options = {name: getattr(given, name) for name in ("cluster", "overrides", "batch", "strict")}
    found = import_job(given.file, given.gpus, **options)
    job = found.job

    from ..prediction import check_memory, memory
    from ..workload import count_parameters

    memory(job)  # Raises where the layout does not fit the model.
    if found.question:
        raise ValueError(found.question)
    save_job(job, given.out)
    for note in found.notes:
        print(f"prism-jax: note: {note}", file=sys.stderr, flush=True)
    if not given.allow_oom:
        try:
            check_memory(job)
        except ValueError as error:
            said = str(error).rstrip(".")
            raise RuntimeError(f"{said}; {shown(given.out)} is written as it is.") from None
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
        "notes": list(found.notes),
    }
    return Output(result, [text])
