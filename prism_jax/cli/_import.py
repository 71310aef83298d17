"""`prism-jax import`: makes a job from a configuration of another framework."""

import argparse
import os
import sys
from typing import Any

from ._arguments import add_oom_argument, add_set_argument, count


HELP = "make a job file from a Hugging Face config.json or the arguments of Megatron-LM"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a config.json of Hugging Face; or the arguments of Megatron-LM: a .yaml with "
        "MODEL_ARGS, or a command line in a .sh or .txt file",
    )
    parser.add_argument(
        "--gpus", type=count, required=True, metavar="N", help="how many GPUs the job has"
    )
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="a shipped family of clusters (`prism-jax hardware`), or a .toml file",
    )
    parser.add_argument(
        "--batch",
        type=count,
        metavar="N",
        help="the sequences of a step (those of the file, or published ones)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="refuse arguments of Megatron-LM that are not known"
    )
    parser.add_argument("--out", required=True, metavar="JOB.toml", help="the job to write")
    parser.add_argument("--force", action="store_true", help="overwrite a job that is there")
    add_set_argument(parser)
    add_oom_argument(parser)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from .._files import shown
    from .._misc import counted
    from ..data import check_job_path, save_job
    from ..importers import import_with_notes

    check_job_path(arguments.out)
    if os.path.lexists(arguments.out) and not arguments.force:
        raise ValueError(
            f"--out `{shown(arguments.out)}` is there already; give another file, or `--force` to "
            "overwrite it."
        )
    found = import_with_notes(
        arguments.file,
        arguments.gpus,
        cluster=arguments.cluster,
        overrides=arguments.overrides,
        batch=arguments.batch,
        strict=arguments.strict,
    )
    job = found.job

    from ..prediction import check_memory, memory
    from ..workload import count_parameters

    memory(job)  # Raises where the layout does not fit the model.
    if found.question:
        raise ValueError(found.question)
    save_job(job, arguments.out)
    for note in found.notes:
        print(f"prism-jax: note: {note}", file=sys.stderr, flush=True)
    if not arguments.allow_oom:
        try:
            check_memory(job)
        except ValueError as error:
            said = str(error).rstrip(".")
            raise RuntimeError(f"{said}; {shown(arguments.out)} is written as it is.") from None
    assert job.model is not None
    parameters = count_parameters(job.model)
    assert job.training is not None
    layout, number, training = job.layout, job.schedule.num_microbatches, job.training
    sequences = layout.dp * number * training.microbatch_size
    text = (
        f"{shown(arguments.out)}: {parameters / 1e9:.1f} billion parameters on "
        f"{layout.world_size} GPUs (tp{layout.tp} pp{layout.pp} dp{layout.dp} cp{layout.cp} "
        f"ep{layout.ep}); a step has {counted(sequences, 'sequence')} of "
        f"{training.sequence_length:,} tokens, in {counted(number, 'microbatch', 'es')} a replica "
        f"({training.dtype})"
    )
    result = {
        "out": arguments.out,
        "parameters": parameters,
        "world_size": layout.world_size,
        "global_batch_size": sequences,
        "sequence_length": training.sequence_length,
        "notes": list(found.notes),
    }
    return result, text
