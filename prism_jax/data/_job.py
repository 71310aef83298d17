"""Jobs: what is trained, in which layout, on which machine, and what was measured."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from .._misc import plural, quoted
from .._summary import Shown, Table, picked_attributes
from ._given import Given
from ._hardware import Cluster
from ._kernels import Calibrated, Kernels
from ._model import Model
from ._training import Training
from ._types import Count, Label, Name, Positive, Text


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The degrees of parallelism: tensor, pipeline, data, context and expert.

    For experts, the `tp * cp * dp` GPUs of a stage are grouped differently: into expert-parallel
    groups of `ep * etp` GPUs, and replicas of these groups.

    **Attributes:**

    - `tp`: the number of tensor-parallel GPUs, which share each matrix.
    - `pp`: the number of pipeline ranks.
    - `dp`: the number of data-parallel replicas; of a job whose `world_size` is given, by default
        as many as there are GPUs for.
    - `cp`: the number of context-parallel GPUs, which share each sequence.
    - `ep`: the number of expert-parallel GPUs, which share the experts of a layer, or the embedding
        tables of a recommender.
    - `etp`: the number of tensor-parallel GPUs of an expert; by default `tp`.
    """

    tp: Count = 1
    pp: Count = 1
    dp: Count = 1
    cp: Count = 1
    ep: Count = 1
    etp: Count | None = None

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp


class ScheduleConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pipeline schedule, and how layers are distributed over its stages.

    **Attributes:**

    - `kind`: the name of the schedule; `traced` for the order of ops in a trace. A file may leave
        it out for `1f1b`, or `interleaved-1f1b` if there are virtual stages.
    - `num_microbatches`: the number of microbatches of one replica in one step. A file may leave it
        out if it gives `training.global_batch_size`, from which it follows.
    - `virtual_stages`: the number of stages on each pipeline rank.
    - `microbatch_group_size`: for interleaved schedules: how many microbatches run through a stage
        before its rank turns to its next stage; by default the number of pipeline ranks.
    - `memory_limit`: for schedules with a memory limit: the most pairs of a stage and a microbatch
        whose activations a rank may hold.
    - `orders`: for `traced`: the ops of each rank in the order in which it runs them, as tokens of
        [`prism_jax.CustomSchedule`][] separated by blanks.
    - `blocking`: whether sends and receives block compute; by default the schedule decides.
    - `layers_per_stage`: the number of layers in each global virtual stage, or `auto` to balance
        their cost; by default the layers are distributed evenly, or by cost where no even
        distribution is possible.
    - `embedding_counts_as_layer`: whether the embedding counts as a layer when layers are
        distributed, as in Megatron-LM.
    - `head_counts_as_layer`: whether the head counts as a layer when layers are distributed, as in
        Megatron-LM.
    """

    kind: Name
    num_microbatches: Count
    virtual_stages: Count = 1
    microbatch_group_size: Count | None = None
    memory_limit: Count | None = None
    orders: tuple[Text, ...] | None = None
    blocking: bool | None = None
    layers_per_stage: (
        tuple[Annotated[int, msgspec.Meta(ge=0, le=10**5)], ...] | Literal["auto"] | None
    ) = None
    embedding_counts_as_layer: bool = False
    head_counts_as_layer: bool = False


def balances(layers: int, stages: int) -> bool:
    """Whether layers are distributed over stages by cost: where there are enough of them, but
    neither they, nor they with the embedding or the head, divide evenly.
    """
    return layers >= stages and -layers % stages > 2


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An op that workers run once in a step.

    **Attributes:**

    - `op`: the name of the op, as in traces.
    - `scope`: which workers run it together: `self` (the worker alone), or all workers with the op
        in the same `dp` group (the replicas of a stage), `pp` group (the stages of a replica) or
        `world`.
    - `waits_for`: for each `[dp_rank][stage]`, the workers whose earlier ops must have ended before
        the worker launches the op: a scope, or `last` (the worker and the last stages of all
        replicas, which share the loss), or empty for a worker without the op.
    """

    op: Name
    scope: Label
    waits_for: tuple[tuple[Label, ...], ...]


class Outline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trace shows of the graph of a step: the ops that workers run once in a step, before
    and after the pipeline, in their order; if there are two classes of links, the pairs of workers
    (`dp_rank * pp + stage`) with slow links, such as those between nodes; and the kinds of compute
    that start only when all replicas have reached them, such as those that gather parameters.
    """

    before: tuple[Call, ...] = ()
    after: tuple[Call, ...] = ()
    slow_links: tuple[tuple[int, int], ...] = ()
    gathered: tuple[Name, ...] = ()


class Measured(Shown, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured figures of the step time.

    **Attributes:**

    - `source`: who measured the step time, and how.
    - `mean_s`: the mean step time.
    - `std_s`: the standard deviation of the step time.
    - `p5_s`, `p50_s`, `p95_s`, `p99_s`: quantiles of the step time.
    - `num_samples`: how many steps were measured.
    """

    source: Text
    mean_s: Positive | None = None
    std_s: Positive | None = None
    p5_s: Positive | None = None
    p50_s: Positive | None = None
    p95_s: Positive | None = None
    p99_s: Positive | None = None
    num_samples: Count | None = None

    def headline(self) -> str:
        return f"measured: {self.source}"

    def to_json(self) -> dict[str, Any]:
        """What is known of these."""
        values = picked_attributes(self, *self.__struct_fields__)
        return {name: value for name, value in values.items() if value is not None}

    @property
    def figures(self) -> dict[str, float]:
        """Those that were measured, by name: `mean`, `std`, `p5` and so on."""
        names = ("mean", "std", "p5", "p50", "p95", "p99")
        values = {name: getattr(self, f"{name}_s") for name in names}
        return {name: value for name, value in values.items() if value is not None}


class Job(Shown, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training job. A job that only describes how a trace was recorded has no model and no
    cluster.

    **Attributes:**

    - `layout`: the degrees of parallelism.
    - `schedule`: the order in which ops run.
    - `world_size`: the number of GPUs, which must be the product of the degrees. In a file,
        `layout.dp` follows from it where it is left out.
    - `model`: the model that is trained; give `model`, `cluster` and `training`, or none of them.
    - `cluster`: the machine that the job runs on.
    - `training`: how a step is computed.
    - `kernels`: the profile of the cluster's kernels, with the changes of `calibrated`.
    - `calibrated`: changes to the kernels' profile that were learned from measured step times.
    - `measured`: measured figures of the step time.
    - `name`: the name of the job.
    - `source`: where the configuration is from.
    - `allow_implausible`: whether hardware may be ten thousand times slower or faster than all that
        is shipped.
    - `allow_oom`: why a job ran although it needs more memory here than is usable, in one sentence:
        it goes on, as with `--allow-oom`. Overrides of other keys than `kernels` drop it.
    - `given`: which of these keys were given, by a file or overrides. Jobs that differ only in it
        are equal.
    """

    layout: Layout
    schedule: ScheduleConfig
    world_size: Count | None = None
    model: Model | None = None
    cluster: Cluster | None = None
    training: Training | None = None
    kernels: Kernels | None = None
    calibrated: Calibrated | None = None
    measured: Measured | None = None
    name: Label = ""
    source: str = ""
    allow_implausible: bool = False
    allow_oom: str = ""
    given: Given = Given()

    def replace(self, **values: Any) -> "Job":
        """The job with other values of some keys, as by the `overrides` of `load_job`: what was not
        given follows from the new values.

        ```python
        job.replace(**{"training.zero": 3, "layout.dp": 8})
        ```

        **Arguments:**

        - `values`: the value of each dotted key; `None` takes the key out.

        **Raises:**

        `ValueError` of one sentence for a key that jobs do not have, or a job that cannot be.
        """
        from ._load import replaced

        return replaced(self, values)

    def summary(self) -> Table:
        title, _, layout = self.header.partition(": ")
        rows = [("job", self.name), ("layout", layout)]
        if self.model is not None:
            rows.append(("model", f"{self.model.name}, {plural(self.model.num_layers, 'layer')}"))
        if self.cluster is not None and self.training is not None:
            words = f"{self.training.dtype}, recompute {self.training.recompute}"
            rows += [("cluster", self.cluster.name), ("training", words)]
        if self.measured is not None and self.measured.p50_s is not None:
            rows.append(("measured p50", f"{self.measured.p50_s:g} s"))
        return Table((), rows, title)

    @property
    def header(self) -> str:
        """What is trained, on which machine, in which layout and of which batch, as
        `Llama 3.1 8B, 64 x H100 SXM (8 nodes): FSDP over 64, 512 sequences of 8,192 tokens, 1
        microbatch of 8`.
        """
        microbatches = plural(self.schedule.num_microbatches, "microbatch", "es")
        terms = [*self._parallelism(), microbatches]
        if self.training is not None:
            size = f"{microbatches} of {self.training.microbatch_size:,}"
            terms[-1:] = [self.batch_text(self.batch_size), size]
        return f"{self.machine_text(self.layout.world_size)}: {', '.join(terms)}"

    def machine_text(self, gpus: int) -> str:
        """The model, and the machine with so many GPUs."""
        if self.model is None or self.cluster is None:
            return f"{self.name}, {plural(gpus, 'GPU')}"
        device, adapters = self.cluster.device, self.training and self.training.adapters
        model = self.model.title or self.model.name or self.name
        lora = f" (LoRA of rank {adapters.rank})" if adapters else ""
        nodes = plural(-(-gpus // self.cluster.devices_per_node), "node")
        return f"{model}{lora}, {gpus:,} x {device.title or device.name or 'GPU'} ({nodes})"

    def batch_text(self, sequences: int) -> str:
        """The batch of a step; without the length of samples that are no tokens."""
        if self.unit == "sample" or self.training is None:
            return plural(sequences, "sample")
        length = plural(self.training.sequence_length, "token")
        return f"{plural(sequences, 'sequence')} of {length}"

    def _parallelism(self) -> Iterator[str]:
        """The degrees above one, and what replicas share."""
        layout, order, training = self.layout, self.schedule, self.training
        virtual = f" x {order.virtual_stages}" if order.virtual_stages > 1 else ""
        degrees = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep}
        for name, degree in degrees.items():
            if degree > 1:
                yield f"{name} {degree}" + (f"{virtual} ({order.kind})" if name == "pp" else "")
        if layout.expert_tp != layout.tp:
            yield f"etp {layout.expert_tp}"
        zero, dp = training and training.zero, layout.dp
        if training is not None and zero == 3 and dp * layout.cp > 1:
            # Ranks that share a sequence share the states, too.
            copies = training.optimizer_instances
            hybrid = f" in {copies} copies" if copies > 1 else ""
            yield f"FSDP over {dp * layout.cp // copies}{hybrid}"
        elif dp > 1:
            yield f"DDP over {dp}" if zero == 0 else f"dp {dp}{f' (ZeRO-{zero})' if zero else ''}"

    @property
    def batch_size(self) -> int:
        """The number of sequences in a step."""
        size = 1 if self.training is None else self.training.microbatch_size
        return self.layout.dp * self.schedule.num_microbatches * size

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens in a step; zero for a job without `training`."""
        return 0 if self.training is None else self.batch_size * self.training.sequence_length

    @property
    def unit(self) -> str:
        """What steps are counted in: `token`, or `sample` for a model without words, of whose
        samples the sequence length counts patches, pixels or rows.
        """
        return "token" if self.model is None or self.model.vocab_size else "sample"

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each table of kernels that is used in place of a missing one."""
        if self.kernels is None:
            return ()
        notes = self.kernels.notes
        training = self.training
        dtype = "" if training is None else training.dtype
        if training is not None and training.operators and not training.listed:
            notes += (
                f"lists of operators have no products in {dtype}, so the kernels of this job are "
                "fused, and true steps may take longer.",
            )
        elif training is not None and training.operators and self.model is not None:
            listed = {"attention", "embedding", "head", "mlp", "moe"}
            fused = sorted(self.model.kinds - listed)
            fused += ["residual streams"] * (self.model.hyper_connections > 1)
            fused += ["unfused attention"] * (training.attention == "unfused")
            fused += ["dense layers of a head"] * (self.model.head_transforms > 0)
            if fused:
                notes += (
                    f"lists of operators have none of {', '.join(map(quoted, fused))}, whose "
                    "kernels are fused here, so true steps may take longer.",
                )
        table = self.kernels.find_efficiency("gemm", dtype)
        if table is not None and table.variant not in (dtype, ""):
            notes += (
                f"no efficiency of matrix multiplications in {dtype} is known here, so that of "
                f"{table.variant}, as a share of the peak, is used.",
            )
        return notes
