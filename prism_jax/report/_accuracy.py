"""How accurate predictions were: lines copied from `docs/accuracy.md`."""

from collections.abc import Sequence

from .._summary import Table
from ..data import Job
from ..prediction import expected_error as predicted_error
from ._html import Markup, join, table, tag
from ._report import Report


# Means of published steps from configuration alone: table, rows, mean error, mean absolute, worst.
MEANS = (
    ("InternEvo, A100", "21", "-9.7 %", "11.2 %", "-22.5 %"),
    ("Korthikanti et al. 2022, A100", "8", "-0.4 %", "1.9 %", "-5.4 %"),
    ("MLPerf families", "11", "-0.4 %", "3.3 %", "-6.9 %"),
    ("MLPerf v6.0, experts", "4", "+0.2 %", "3.3 %", "+6.9 %"),
    ("Megatron-Bridge, B200, dense", "3", "+3.3 %", "4.0 %", "+6.5 %"),
    ("Megatron-Bridge, B200, experts", "10", "-4.0 %", "7.8 %", "-31.9 %"),
    ("Megatron-Bridge, B300, experts", "11", "+2.1 %", "11.2 %", "-19.6 %"),
    ("Megatron-Bridge, GB200, dense", "20", "+0.3 %", "4.2 %", "-13.1 %"),
    ("Megatron-Bridge, GB200, experts", "17", "-5.1 %", "13.2 %", "-55.9 %"),
    ("Megatron-Bridge, GB300, dense", "13", "+1.6 %", "4.9 %", "+27.9 %"),
    ("Megatron-Bridge, GB300, experts", "24", "-2.9 %", "10.7 %", "-52.2 %"),
    ("Megatron-Bridge, H100, dense", "7", "+1.4 %", "3.5 %", "-6.1 %"),
    ("Megatron-Bridge, H100, experts", "16", "-8.6 %", "12.3 %", "-53.4 %"),
    (
        "Megatron-Core r0.8, H100, assumed: micro-batch 1, not interleaved",
        "5",
        "+16.5 %",
        "17.1 %",
        "+24.2 %",
    ),
    (
        "Megatron-LM 2021, A100, assumed: micro-batch 1, fewest virtual stages",
        "3",
        "-2.0 %",
        "3.6 %",
        "-8.5 %",
    ),
    ("Megatron-LM Llama examples, H100", "2", "+4.3 %", "4.3 %", "+4.8 %"),
    ("MoE-ModelZoo, H100", "14", "-0.1 %", "5.0 %", "-20.4 %"),
    ("NeMo-Automodel, FSDP, H100", "5", "+7.6 %", "11.8 %", "+19.4 %"),
    ("SimuMax, B200, context parallel", "6", "+2.4 %", "2.5 %", "+3.9 %"),
    ("SimuMax, B200, experts", "7", "+1.9 %", "2.1 %", "+4.6 %"),
    ("SimuMax, B200, others", "9", "+0.4 %", "2.4 %", "-6.9 %"),
    ("dgxc, GB200, dense", "12", "+2.1 %", "2.1 %", "+3.9 %"),
    ("dgxc, H100, dense", "55", "+1.7 %", "2.4 %", "+9.5 %"),
    ("dgxc, H100, experts", "36", "-5.6 %", "5.6 %", "-12.2 %"),
    ("dgxc, MaxText, FSDP, H100", "10", "+1.4 %", "1.5 %", "+3.3 %"),
    ("dgxc, PaxML, FSDP, H100", "8", "-10.1 %", "10.1 %", "-14.9 %"),
    ("llm-foundry, FSDP, a100_40gb", "39", "-1.6 %", "3.8 %", "-26.0 %"),
    ("llm-foundry, FSDP, a100_80gb", "31", "-1.2 %", "3.1 %", "-26.4 %"),
    ("llm-foundry, FSDP, h100_80gb", "39", "-1.8 %", "4.3 %", "-8.2 %"),
    ("torchtitan, FSDP", "9", "-7.5 %", "11.1 %", "-22.5 %"),
    ("vTrain, Megatron-DeepSpeed, A100, multi node", "55", "-2.7 %", "8.3 %", "-38.0 %"),
    ("vTrain, Megatron-DeepSpeed, A100, single node", "720", "+1.4 %", "7.5 %", "-30.7 %"),
)
# Jobs calibrated to the step times of one system, or of several, that predict another system.
CALIBRATED = (
    "from one scale: p50 off by 0.30 % on average; p95/p50 by 0.0020, carried over by 0.0025; 90 % "
    "intervals hold 65 % of steps, with --epistemic 96 %",
    "from several: p50 off by 0.16 % on average; the line by 0.12 %; p95/p50 by 0.0030, carried "
    "over by 0.0042; 90 % intervals hold 73 % of steps, with --epistemic 89 %",
)
# Profiles of traces, fitted to some steps and scored on others: trace, split, mean, p95, std ratio.
TRACES = (
    ("slow_worker", "even to odd", "+0.05 % (0.14)", "+0.52 % (0.09)", "1.16 (0.52)"),
    ("slow_worker", "odd to even", "-0.29 % (0.14)", "-0.06 % (0.16)", "1.22 (0.28)"),
    ("stage_imbalance", "even to odd", "-0.32 % (0.55)", "-1.45 % (2.59)", "1.14 (1.88)"),
    ("stage_imbalance", "odd to even", "-0.02 % (0.59)", "-1.58 % (2.70)", "1.16 (0.90)"),
)


def expected_error(report: Report) -> Markup:
    """How far predictions of this kind were off, and for which runs."""
    parts = [
        tag(
            "p",
            "The intervals on this page cover only the noise of the simulation: more samples make "
            "them narrower, but not the model more accurate. The commands that docs/accuracy.md "
            "names print how accurate predictions of this kind were.",
        ),
        *(_of_trace() if report.job is None else _of_job(report)),
    ]
    return join(parts)


def _of_trace() -> Sequence[Markup]:
    about = (
        "This is a profile of a trace. Two traced jobs (StragglerAnalysis, arXiv:2505.05713; 64 "
        "GPUs with one slow worker, and 8 GPUs with a longer last stage) were fitted to every "
        "other step and scored on the steps in between: predicted over measured, minus one. The "
        "brackets hold the scatter of each figure, as only 11 or 16 steps were measured. The table "
        "does not apply to the steps of another run, or of other GPUs."
    )
    header = ("trace", "from and to", "mean", "p95", "std ratio")
    return tag("p", about), table(Table(header, TRACES, "Steps of a trace from other steps"))


def _of_class(job: Job | None) -> Markup:
    """The expected error of a job, and of which steps it is."""
    if job is None or job.model is None:
        return join([])
    found = predicted_error(job)
    low, high = (f"{100 * (factor - 1):+.0f} %" for factor in found.interval(0.9))
    return tag(
        "p",
        f"Nine of ten measured means of such jobs are expected to differ by {low} to {high} from "
        f"what is predicted. Published steps of the class of this job: {found.num_runs:,}.",
    )


def _of_job(report: Report) -> Sequence[Markup]:
    job = report.job
    if job is not None and job.calibrated is not None:
        about = (
            "This job is calibrated to measured step times. Of families of MLPerf Training logs "
            "(GPT-3 175B and Llama 3.1 405B on H100 and GB200, 512 to 6,144 GPUs), jobs that were "
            "calibrated to some systems predicted another of the same family:"
        )
        return tag("p", about), tag("ul", *(tag("li", line) for line in CALIBRATED))
    about = (
        "This job is predicted from its configuration and from tables of kernels, without "
        "calibration. The table has the errors of such predictions for means of published steps: "
        "predicted over measured, minus one. The tables of kernels were chosen with knowledge of "
        "some of these runs, so a job unlike them may be further off."
    )
    header = ("published runs", "rows", "mean error", "mean absolute error", "worst")
    title = "Means of published steps, from configuration alone"
    return _of_class(job), tag("p", about), table(Table(header, MEANS, title))
