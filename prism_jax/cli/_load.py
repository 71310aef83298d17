"""Loads the job or the profile of a command, and what every analysis of it needs."""

import contextlib
import functools as ft
import itertools as it
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor
from typing import Any

import msgspec
import numpy as np

import prism_jax as prism

from .. import _devices
from .._files import shown
from .._interrupt import told_interrupt
from .._misc import plural, printable, quoted
from .._progress import say_doing
from ..data import Job, is_profile, job_warnings, load_job
from ._device import rather_on_cpu, reckoned_s
from ._options import IMPLAUSIBLE, Args


# Simulated by a command without `--samples`, about.
_STEPS = 8192


def load(args: Args, *changes: str) -> Any:
    """Loads a job or a profile by name: a shipped job, a `.toml` file, or the folder of a profile.

    `changes` are made after those of `--set`.
    """
    name, overrides = args.job, [*args.overrides, *changes]
    if not is_profile(name):
        return load_job(name, overrides)
    if overrides:
        raise ValueError(
            f"{shown(name)}: this is a profile, whose latencies were measured; `--set` changes "
            "jobs."
        )
    return prism.profile.load_profile(name)


def read_measured(args: Args, path: str, job: Job | None) -> "prism.logs.Measured":
    """Measured steps of a file."""
    measured = prism.logs.read_log(path, job, column=args.column, unit=args.unit)
    for note in measured.notes:
        tell_note(note)
    return measured


def measured_runs(args: Args, path: str, job: Job | None) -> list[np.ndarray]:
    """The step times of each measured run, in seconds; what does not count is told."""
    measured = read_measured(args, path, job)
    if measured.left_out:
        tell_note(measured.headline())
    return [*measured.runs]


def job_of(loaded: Any) -> Any:
    """What was loaded; `None` if it is a profile."""
    return loaded if isinstance(loaded, Job) else None


def has_model(loaded: Any) -> bool:
    """Whether steps are predicted from a model, so that the errors of such predictions are known.
    A job without one cannot be compiled.
    """
    return isinstance(loaded, Job) and loaded.model is not None


def of(loaded: Any, program: Any) -> tuple[dict[str, Any], str]:
    """What a result is of: its name as `--json` prints it, and a line."""
    line = loaded.header if isinstance(loaded, Job) else loaded.header(program.num_ops)
    return {"job": loaded.name}, line


def devices_per_node(loaded: Any) -> int:
    """How many devices a node has; eight, if only latencies are known."""
    job = job_of(loaded)
    return 8 if job is None else job.cluster.devices_per_node


def program_of(args: Args, loaded: Any) -> Any:
    """The program of a job or a profile. A job that needs more memory than its devices have is not
    compiled, except with `--allow-oom`. JAX is imported only here.
    """
    if not isinstance(loaded, Job):
        return prism.profile.compile_profile(loaded)
    check_memory(args, loaded)
    return prism.program.compile_job(loaded)


def check_memory(args: Args, *jobs: Job) -> None:
    """Raises a `ValueError` of one sentence for the first job that needs more memory than its
    devices have, except with `--allow-oom`. A search for what fits needs JAX.
    """
    for job in () if args.allow_oom else jobs:
        if prism.prediction.shortage(job):
            prism.layouts.check_memory(job)


def compiled(args: Args, loaded: Any, programs: int = 1) -> tuple[Any, dict[str, Any]]:
    """The program of a job, and the options of all functions that simulate it. `programs`: how many
    like it a command simulates.
    """
    compiled_once = ft.cache(lambda: program_of(args, loaded))
    say(args, f"compiling {loaded.name}")
    use_devices(args, compiled_once, programs)
    program = compiled_once()
    tell_notes([job_of(loaded)])
    steps = "steps" if args.samples is None else plural(args.samples, "step")
    say(args, f"simulating {steps} of {plural(program.num_ops, 'op')}")
    return program, options_of(args)


def options_of(args: Args) -> dict[str, Any]:
    """The options of all functions that simulate: `num_samples`, `key`, `progress`."""
    progress = wants_progress(args)
    return {"num_samples": args.samples, "key": key_of(args), "progress": progress}


def key_of(args: Args) -> Any:
    import jax

    return jax.random.key(args.seed)


def tell_notes(jobs: Iterable[Any]) -> None:
    """Prints warnings on stderr, each once. That keys have no effect is expected of several jobs,
    and told of a single one.
    """
    known = [job for job in jobs if job is not None]
    notes = all_notes(known[0]) if len(known) == 1 else it.chain(*map(job_warnings, known))
    for note in dict.fromkeys(notes):
        tell_note(note)


def tell_note(note: str) -> None:
    print(f"prism-jax: note: {printable(note)}", file=sys.stderr, flush=True)


def all_notes(job: Job) -> tuple[str, ...]:
    """All warnings about one job."""
    return (
        *job_warnings(job),
        *prism.prediction.idle_keys(job),
        *prism.prediction.costly_keys(job),
    )


def tell_idle_sets(overrides: Sequence[str], loaders: Iterable[Callable[[list[str]], Job]]) -> None:
    """Says on stderr which of the values of `--set` change none of some jobs.

    **Arguments:**

    - `overrides`: the values of `--set`.
    - `loaders`: for each job a function that makes it with such values.
    """
    loaders = [*loaders]
    jobs = [make([*overrides]) for make in loaders] if overrides else []
    for text in overrides if loaders else ():
        if text == IMPLAUSIBLE:  # An option of its own.
            continue
        kept = [change for change in overrides if change is not text]
        try:
            pairs = [(make(kept), job) for make, job in zip(loaders, jobs, strict=True)]
        except ValueError:  # Without it there is no such job.
            continue
        if all(without == job for without, job in pairs):
            tell_note(f"`--set {quoted(text)}` changes nothing: the job is the same without it.")
        elif all(_without_stack(without) == _without_stack(job) for without, job in pairs):
            tell_note(
                f"`--set {quoted(text)}` changes no other key, because the job gives all that this "
                "stack sets, or has the same values by itself; `prism-jax show` says which."
            )


def _without_stack(job: Job) -> Job:
    training = job.training and msgspec.structs.replace(job.training, software=None)
    return msgspec.structs.replace(job, training=training)


def tell_interrupted(noun: str, law: Any, number: int) -> None:
    """Says on stderr of how many steps or runs a law is, if it was interrupted."""
    if law.interrupted:
        tell_ended(f"{number:,} of {law.requested:,} {noun}; the law has only these {noun}")


def tell_ended(known: str) -> None:
    """Says on stderr what was done until Ctrl-C."""
    print(f"prism-jax: interrupted after {known}.", file=sys.stderr, flush=True)
    told_interrupt()


def say(args: Args, sentence: str) -> None:
    """Says what a command is about to do: at once, if progress is shown."""
    say_doing(f"{printable(sentence)} ...", wants_progress(args))


def wants_progress(args: Args) -> bool:
    """Whether to show progress: on a terminal without `--json`, and with `--progress`."""
    return args.progress or (not args.json and sys.stderr.isatty())


def use_all_cores() -> None:
    """Makes each core a JAX device, because XLA runs a loop over small arrays on one core only.

    It has no effect in a process that has already used JAX.
    """
    import jax

    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    if os.environ.get("JAX_PLATFORMS"):  # A choice, which JAX may not have.
        devices_of_jax()


def use_devices(args: Args, compiled: Callable[[], Any], programs: int = 1) -> None:
    """Lets JAX use the devices of `--device`, until the command ends. By itself it takes the CPU
    beside an accelerator for what is done there no later, and says so.

    **Arguments:**

    - `compiled`: gives the first program that is simulated; called on the CPU, and only where there
        is an accelerator to choose.
    - `programs`: how many like it are simulated.
    """
    import jax

    use_all_cores()
    first, *_ = devices_of_jax()
    if first.platform == "cpu":
        if args.device == "gpu":
            raise ValueError(
                "`--device gpu` was given, and JAX sees no GPU here, nor another accelerator; "
                "leave it out, or install what JAX needs for yours; see `prism-jax doctor`."
            )
        return

    try:
        jax.devices("cpu")
    except RuntimeError:
        if args.device != "cpu":
            return
        raise ValueError(
            "`--device cpu` was given, and `JAX_PLATFORMS` leaves out the CPU; leave it out, or "
            "add `cpu` to the variable, such as `JAX_PLATFORMS=cuda,cpu`."
        ) from None

    def use(device: Any) -> None:
        args.at_end.callback(jax.config.update, "jax_default_device", _devices.default())
        jax.config.update("jax_default_device", device)

    use(first if args.device == "gpu" else "cpu")
    if args.device == "auto":
        steps = getattr(args, "samples", None) or _STEPS
        cores = os.cpu_count() or 1
        evaluations = steps * programs * compiled().num_ops
        of_command = args.command, evaluations, cores
        args.device = "cpu" if rather_on_cpu(*of_command) else "gpu"  # It is told once.
        if args.device == "gpu":
            use(first)
            return
        accelerator, cpu = reckoned_s(*of_command)
        tell_note(
            f"on the CPU: {evaluations:.2g} op evaluations are reckoned to take {cpu:.2g} s from "
            f"cold with its {cores} cores, and {accelerator:.2g} s on a GPU; `--device gpu` uses "
            "it."
        )


def devices_of_jax() -> list[Any]:
    """The devices that JAX takes. Raises a `ValueError` of one sentence if none works."""
    import jax

    try:
        return jax.devices()
    # A plugin whose driver is missing, or a platform without its plugin, which JAX asserts.
    except (RuntimeError, AssertionError) as error:
        problem = str(error).strip().partition("\n")[0].rstrip(".") or "its plugin is missing"
        chosen = os.environ.get("JAX_PLATFORMS")
        on = f" on JAX_PLATFORMS={quoted(chosen)}" if chosen else ""
        raise ValueError(
            f"JAX finds no device that works{on} ({problem}); install what it needs, such as "
            '`pip install "prism_jax[cuda13]"` for NVIDIA GPUs, or choose JAX_PLATFORMS=cpu.'
        ) from None


def other_sizes(sizes: Mapping[str, int], size: int) -> list[str]:
    """A sentence if the compared jobs do not all have the same number of GPUs."""
    if {*sizes.values()} <= {size}:
        return []
    listed = ", ".join(f"{number:,}" for number in sorted({size, *sizes.values()}))
    return [
        f"note: the jobs have different numbers of GPUs ({listed}), so their steps may have other "
        "numbers of tokens or samples; compare what each GPU does in a second."
    ]


@contextlib.contextmanager
def ray_executor(args: Args) -> Iterator[Executor | None]:
    """The executor of `--ray`; `None` without it, where this process uses all cores. Ctrl-C and
    errors end the work of its workers.
    """
    if args.ray is None:
        if args.worker_gpus is not None:
            raise ValueError("`--worker-gpus` applies to the workers of `--ray`; give both.")
        use_all_cores()
        yield None
        return
    if args.device != "auto":
        raise ValueError(
            "`--device` is of this process, and `--ray` gives work to others, whose GPUs are those "
            "of `--worker-gpus`; leave it out."
        )
    where = None if args.ray is True else args.ray
    gpus, keep = args.worker_gpus or 0, not args.no_cache
    # A thread of Ray prints what becomes of its workers, and stdout is the result.
    with contextlib.redirect_stdout(sys.stderr):
        executor = prism.workers.RayExecutor(where, num_gpus=gpus, keep=keep)
        try:
            yield executor
        except BrokenExecutor as error:
            raise RuntimeError(str(error)) from None
        finally:
            executor.shutdown(cancel_futures=True)
