"""The costs of the kernels of a job."""

import math
from collections.abc import Iterable, Sequence

import msgspec

from ..cluster import (
    Group,
    Routing,
    collective_latency,
    compute_latency,
    dispatch_latency,
    find_link,
    find_send_link,
    group_of,
    send_recv_latency,
)
from ..data import Cluster, Kernels, Layout, Link, Model, ScheduleConfig, Training
from ._block import Block, Branches, Kernel, Linear, Result, Segment, weights_of
from ._parts import row, segment


# HybridEP takes 16 of 152 multiprocessors of a GB200 (its page in DeepEP's repository).
_HYBRIDEP = 0.105
_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
# With the factors of blocks.
_DTYPE_BYTES = {**_BYTES, "mxfp8": 1 + 1 / 32, "fp4": 0.5 + 1 / 16}
# What cross entropies hold for each logit, in bytes: the most in the forward, what they keep, and
# the most in the backward. A 16-bit logit or gradient takes 2, one in float32 takes 4.
_LOGIT_BYTES = {
    # `F.cross_entropy(logits.float(), labels)` (PyTorch, ATen/native/SoftMax.cpp): both logits and
    # the log-softmax; the latter, its gradient, and that of the logits. Where a name keeps logits,
    # these besides, as in a loop that names them, on one H200: 38.2 and 47.3 GB for Llama 3.2 1B
    # with recomputation and 16,384 tokens, of which other tensors have 8.5 and 17.6.
    "eager": (10, 4, 12),
    "eager-named": (10, 6, 14),
    "eager-float32": (14, 10, 18),
    # The same on shards of the vocabulary, with logits less their maximum, and their exponentials
    # (PyTorch, torch/distributed/tensor/parallel/loss.py).
    "loss-parallel": (14, 4, 16),
    # The softmax in the place of the float32 logits, and its gradient in its place (Megatron-LM,
    # megatron/core/tensor_parallel/cross_entropy.py). What torch.compile makes of its steps
    # (megatron/core/fusions/fused_cross_entropy.py) does not write in place: Megatron-LM's
    # functional tests have 10 on H100 and GB200, and 14 on A100.
    "vocab-parallel": (6, 4, 6),
    "vocab-parallel-compiled": (12, 4, 12),
    # 16-bit gradients besides the 16-bit logits, or in their place (Transformer Engine,
    # common/triton/cross_entropy.py; Liger-Kernel, ops/cross_entropy.py).
    "compiled": (2, 2, 4),
    "fused": (2, 2, 2),
}
# The same of logits in float32, which are not cast: "eager" frees no other copy, and
# "vocab-parallel" writes in the place of the logits themselves.
_FLOAT32_LOGIT_BYTES = {
    "eager": (8, 4, 12),
    "eager-named": (8, 8, 16),
    "eager-float32": (8, 8, 16),
    "loss-parallel": (12, 4, 16),
    "vocab-parallel": (4, 4, 4),
    "vocab-parallel-compiled": (12, 4, 12),
    "compiled": (4, 4, 8),
    "fused": (4, 4, 4),
}


class Costs(msgspec.Struct, frozen=True):
    """What the kernels of a step follow from, and their costs. Sizes are those of one GPU and one
    microbatch.

    **Attributes:**

    - `model`, `layout`, `schedule`, `training`: the model, and how it is trained.
    - `cluster`: the machine.
    - `kernels`: the profile of its kernels.
    """

    model: Model
    layout: Layout
    schedule: ScheduleConfig
    training: Training
    cluster: Cluster
    kernels: Kernels

    @property
    def tokens(self) -> int:
        """The tokens of a microbatch on one context-parallel rank."""
        return self.training.microbatch_size * self.training.sequence_length // self.layout.cp

    @property
    def norm_tokens(self) -> int:
        """The tokens on one rank where sequence parallelism has split them."""
        return self.tokens // self.layout.tp if self.splits_sequence else self.tokens

    @property
    def splits_sequence(self) -> bool:
        return self.training.sequence_parallel and self.layout.tp > 1

    @property
    def scatters_send_recv(self) -> bool:
        """Whether ranks of a tensor-parallel group hold the same tensor and each send a part."""
        return self.training.scatter_send_recv and self.layout.tp > 1 and not self.splits_sequence

    @property
    def base_dtype(self) -> str:
        """The dtype of activations, and of whatever is not multiplied in a narrower dtype."""
        return self.training.base_dtype

    @property
    def activation_bytes(self) -> int:
        """The bytes of an activation, of its gradient, and of a parameter that is multiplied, also
        where these are moved or sent.
        """
        return 4 if self.training.in_float32 else 2

    def input_bytes(self, name: str = "") -> float:
        """The bytes of a value that is kept for the backward as the input of the matrix of a layer
        with this name: none if nothing is trained that reads it.
        """
        if (adapters := self.training.adapters) is not None:
            # With dropout also a mask.
            return self.activation_bytes + adapters.dropout if name in adapters.modules else 0
        kept = self.training.narrow_inputs and self.training.dtype != self.base_dtype
        return _DTYPE_BYTES[self.training.dtype] if kept else self.activation_bytes

    @property
    def logit_bytes(self) -> tuple[int, int, int]:
        """The bytes of the loss for each logit: the most in the forward, what is kept, and the most
        in the backward.
        """
        loss = self.training.loss or ("eager" if self.training.zero == 3 else "vocab-parallel")
        split = loss == "eager" and self.layout.tp > 1
        sizes = _FLOAT32_LOGIT_BYTES if self.training.in_float32 else _LOGIT_BYTES
        return sizes["loss-parallel" if split else loss]

    @property
    def operands(self) -> str:
        """The dtype of the weights that operators see: float32 with autocast, or 16 bits, also if
        these are gathered from shards in float32.
        """
        training = self.training
        narrow = (
            training.zero == 3 and training.gather_dtype != "fp32" and self.group("dp").size > 1
        )
        return "fp32" if training.weights == "fp32" and not narrow else "bf16"

    @property
    def residual_bytes(self) -> int:
        """The bytes of a value of the residual stream: autocast leaves it in float32."""
        listed = self.kernels.operators is not None
        return 4 if listed and self.operands == "fp32" else self.activation_bytes

    @property
    def weight_bytes(self) -> int:
        """The bytes of a parameter that is trained, of its gradient and of each moment, as PyTorch
        alone has it. PEFT has adapters in float32 beside any weights.
        """
        return 2 if self.training.weights == "bf16" and self.training.adapters is None else 4

    @property
    def gradient_bytes(self) -> int:
        """The bytes of a gradient that is accumulated; of weights in bf16 it is in bf16, too."""
        narrow = self.training.weights == "bf16" or self.training.gradient_dtype != "fp32"
        return self.activation_bytes if narrow else 4

    @property
    def copy_bytes(self) -> int:
        """The bytes of the float32 copy of a parameter that the optimizer updates, if that which is
        multiplied is no float32 itself.
        """
        return 0 if self.training.in_float32 else 4

    @property
    def sent_gradient_bytes(self) -> int:
        """The bytes of a gradient that is reduced."""
        sent = self.training.gradient_comm_dtype
        return self.gradient_bytes if sent is None else _BYTES[sent]

    @property
    def moment_bytes(self) -> int:
        """The bytes of all moments of a parameter."""
        number = {"adam": 2, "adagrad": 1}[self.training.optimizer]
        return number * _BYTES[self.training.optimizer_dtype]

    def recomputes(self, name: str | None) -> bool:
        """Whether selective recomputation includes the module with this name."""
        return self.training.recompute == "selective" and name in self.training.recompute_modules

    def group(self, name: str) -> Group:
        """A group of ranks, named as in `group_of`."""
        return group_of(name, self.layout)

    @property
    def replicas(self) -> tuple[Group, Group]:
        """The groups that reduce the gradients of dense parameters, and of those of experts."""
        return self.group("dp"), self.group("edp")

    @property
    def expert_ranks(self) -> int | None:
        """The ranks that share the experts of a layer, and so meet in every microbatch; `None` if
        each rank has all experts.
        """
        return self.layout.ep * self.layout.expert_tp if self.layout.ep > 1 else None

    @property
    def states(self) -> int:
        """The values of the hidden states on one rank where sequence parallelism has split them."""
        return self.norm_tokens * self.model.hidden_size

    @property
    def stream_states(self) -> int:
        """The same of all residual streams."""
        return self.states * self.model.hyper_connections

    def norm(self, passes: int = 2) -> Kernel:
        """A norm of the hidden states: one read and one write; its backward has one more read."""
        return self.move_values("norm", passes * self.states)

    def residual(self, *, backward: bool = False) -> Kernel:
        # Reads two and writes one; a backward sums two gradients. Dropout has a mask of one byte
        # and, in a backward, writes and reads a gradient of its own.
        size = self.activation_bytes
        dropout = (2 * size + 1 if backward else 1) if self.model.dropout else 0
        return self.move("elementwise", (3 * size + dropout) * self.states)

    def gemm(
        self,
        m: float,
        n: int,
        k: float,
        dtype: str | None = None,
        batch: int = 1,
        parts: int = 1,
        *,
        added: bool = False,
    ) -> Kernel:
        """`batch` products of an `(m, k)` with a `(k, n)` matrix. They run at once, or in `parts`
        parts. The result is an activation, or is `added` to a gradient in float32.
        """
        dtype = self.training.dtype if dtype is None else dtype
        flop = 2 * batch * m * n * k
        result_bytes = 8 if added else self.activation_bytes
        num_bytes = batch * (_DTYPE_BYTES[dtype] * (m * k + k * n) + result_bytes * m * n)
        on = self.cluster.device, self.kernels, parts
        mean = compute_latency("gemm", dtype, flop, num_bytes, *on)
        sizes = map(math.ceil, (m, n, k) if batch == 1 else (batch, m, n, k))
        shape = "x".join(map(str, sizes))
        return Kernel("gemm", f"{dtype} {shape}{' added' if added else ''}", mean, flop=flop)

    def linears(
        self,
        tokens: float,
        outputs: Sequence[int],
        inputs: int,
        name: str = "",
        *,
        joined: bool = False,
    ) -> Linear:
        """Matrices that read the same: as one, or one by one (`training.separate_products`, unless
        they are `joined`), which count as one kernel, and the gradients of whose input are summed.
        Those with an adapter for all are one.
        """
        adapters = self.training.adapters
        shared = adapters is not None and name in adapters.modules
        if shared or joined or not self.training.separate_products:
            return self.linear(tokens, sum(outputs), inputs, name=name)
        matrices = [self.linear(tokens, width, inputs, name=name) for width in outputs if width]
        summed = self.move_values("elementwise", (len(matrices) + 1) * tokens * inputs)
        whole = _joined(matrices, 0.0, summed.mean if len(matrices) > 1 else 0.0)
        results = [result for matrix in matrices for result in matrix.results]
        results = tuple(msgspec.structs.replace(result, of=whole.forward) for result in results)
        return msgspec.structs.replace(whole, results=results)

    def linear(
        self,
        tokens: float,
        outputs: int,
        inputs: int,
        dtype: str | None = None,
        groups: int = 1,
        name: str = "",
    ) -> Linear:
        """A matrix of the model, which takes `inputs` values of each token to `outputs` values; or
        `groups` matrices with `tokens` tokens each, on average. Adapters read and add to those that
        have their `name`.
        """

        def plain(outputs: int, inputs: int, dtype: str | None) -> Linear:
            forward = self.gemm(tokens, outputs, inputs, dtype, groups, groups)
            return Linear(
                forward,
                self.gemm(tokens, inputs, outputs, dtype, groups, groups),
                self.gemm(inputs, outputs, tokens, dtype, groups, groups, added=True),
                (Result(self.activation_bytes * tokens * groups * outputs, forward, forward),),
            )

        base, adapters = plain(outputs, inputs, dtype), self.training.adapters
        if adapters is None:
            return base
        base = msgspec.structs.replace(base, wgrad=None)
        if name not in adapters.modules:
            return base
        down = plain(adapters.rank, inputs, self.base_dtype)
        up = plain(outputs, adapters.rank, self.base_dtype)
        # Kernels of their own scale what the adapter makes, and add it; so in the backward. A
        # dropout reads and writes its input, or its gradient, and a mask.
        size, values = self.activation_bytes, tokens * groups
        drop = (2 * size + 1) * adapters.dropout * inputs
        added = self.move("elementwise", values * (5 * size * outputs + drop)).mean
        back = self.move("elementwise", values * (size * (2 * outputs + 3 * inputs) + drop)).mean
        joined = _joined([base, down, up], added, back)
        result = Result(size * values * outputs, joined.forward, joined.forward)
        return msgspec.structs.replace(joined, results=(result,))

    def attention(
        self,
        size: str,
        flop: float,
        num_bytes: float,
        head_size: int = 128,
        masked: bool = False,
        *,
        backward: bool,
    ) -> Kernel:
        """The fused core of attention, forward or backward."""
        kind = "attention_backward" if backward else "attention"
        table = self._table_of_attention(kind, head_size, masked)
        phase = "backward" if backward else "forward"
        mean = compute_latency(
            table, self.base_dtype, flop, num_bytes, self.cluster.device, self.kernels
        )
        return Kernel("attention", f"{self.base_dtype} {size} {phase}", mean, flop=flop)

    def _table_of_attention(self, kind: str, head_size: int, masked: bool) -> str:
        """The table of the kernel that the job has, or else that of the device's fastest kernel."""
        narrow = self.training.dtype != self.base_dtype
        variants = ["fp8"] if self.training.fp8_attention and narrow else []
        # On Blackwell, which FlashAttention 2 was not written for, PyTorch takes cuDNN's kernel.
        fallbacks = ["cudnn"] if self.training.attention == "flash-2" else []
        if self.kernels.operators is not None:
            variants.append("masked-" * masked + ("64" if head_size <= 64 else "128"))
        variants += [self.training.attention, *fallbacks]
        tables = (*(f"{kind}-{variant}" for variant in variants), kind)
        measured = (name for name in tables if self.kernels.find_efficiency(name, self.base_dtype))
        return next(measured, "attention")

    def move(self, kind: str, num_bytes: float) -> Kernel:
        """A kernel that only moves bytes."""
        share = self.training.eager_share if kind in ("norm", "elementwise") else 1.0
        moved = round(num_bytes) / share
        mean = compute_latency(kind, "", 0, moved, self.cluster.device, self.kernels)
        return Kernel(kind, f"{round(num_bytes)}B", mean)

    def move_values(self, kind: str, values: float) -> Kernel:
        """A kernel that only reads and writes so many values of activations."""
        return self.move(kind, self.activation_bytes * values)

    def collective(self, kind: str, num_bytes: float, group: Group) -> Kernel:
        """An exposed collective of `num_bytes`, the size of the full tensor."""
        seconds = collective_latency(kind, num_bytes, group, self.cluster, self.kernels)
        link = find_link(self.cluster, group).name
        size = f"{round(num_bytes)}B {group.name}{group.size} {link}"
        return Kernel(kind, size, seconds, link, group=group.name)

    def exchange(self, routing: Routing) -> Kernel | None:
        """The all_to_all of a microbatch's tokens to their experts, or back; `None` if every rank
        has all experts.
        """
        if self.group("ep").size == 1:
            return None
        token_bytes = self.activation_bytes * self.states
        all_to_all = self.collective("all_to_all", routing.copies * token_bytes, self.group("ep"))
        if self.training.token_dispatcher == "alltoall":
            return all_to_all
        kind = self.training.token_dispatcher
        on = self.group("ep"), self.cluster, self.kernels
        seconds = dispatch_latency(kind, token_bytes, routing, *on)
        return msgspec.structs.replace(all_to_all, size=f"{all_to_all.size} {kind}", mean=seconds)

    def beside(self, compute: Iterable[Kernel], *collectives: Kernel) -> Branches:
        """Compute that overlaps with serial collectives. The collectives take a share of the
        compute units, so compute takes `1 / (1 - share)` times as long meanwhile.
        """
        return Branches(row(compute), (row(collectives),), self.contention)

    def beside_block(self, within: Block, *streams: Sequence[Kernel]) -> Segment:
        """The same for a block that overlaps with streams of serial collectives, or of copies to
        the host, which take no compute units.
        """
        copies = all(kernel.kind == "copies" for stream in streams for kernel in stream)
        contention = (0.0, 0.0) if copies else self.contention
        return segment([], None, Branches((), tuple(map(row, streams)), contention, within))

    @property
    def optimizer_on_host(self) -> float:
        """The share of the optimizer's states that the host keeps and updates."""
        offloads = "optimizer" in self.training.offload
        return self.training.offload_fraction if offloads else 0.0

    def to_host(self, num_bytes: float) -> Kernel:
        """A copy to the host, or back."""
        seconds = num_bytes / self.cluster.host.link_bytes_per_s
        return Kernel("copies", f"{round(num_bytes)}B host", seconds, group="host")

    def on_host(self, parameters: float, num_bytes: float) -> list[Kernel]:
        """The update of parameters whose optimizer the host runs, in whose memory it moves
        `num_bytes`: their gradients are copied there in float32, and their weights back as they
        are multiplied, or as FSDP has them, in float32.
        """
        if not parameters:
            return []
        seconds = num_bytes / self.cluster.host.memory_bytes_per_s
        update = Kernel("optimizer", f"{round(num_bytes)}B host", seconds)
        back = 4 if self.training.zero == 3 else self.activation_bytes
        return [self.to_host(4 * parameters), update, self.to_host(back * parameters)]

    @property
    def contention(self) -> tuple[float, float]:
        """The contention of compute and of collectives, as in `Branches`."""
        return _slower(self.kernels.overlap.contention)

    @property
    def exchange_contention(self) -> tuple[float, float]:
        """The same for exchanges with experts."""
        contention = _HYBRIDEP if self.training.token_dispatcher == "hybridep" else 1.0
        return _slower(min(contention, self.kernels.overlap.contention))

    def in_pieces(self, kind: str, num_bytes: int, gemm: Kernel) -> tuple[Kernel, Branches]:
        """A tensor-parallel collective in as many pieces as the group has members. One piece, the
        first to arrive or the last to leave, is exposed; the others overlap with a GEMM.
        """
        collective, pieces = self.collective(kind, num_bytes, self.group("tp")), self.layout.tp

        def of_pieces(count: int) -> Kernel:
            size = collective.size.replace(f"{num_bytes}B", f"{num_bytes * count // pieces}B", 1)
            size += f", {count} of {pieces} pieces"
            return msgspec.structs.replace(
                collective, size=size, mean=collective.mean * count / pieces
            )

        return of_pieces(1), self.beside([gemm], of_pieces(pieces - 1))

    def send_recv(self, sender: int, receiver: int) -> Kernel:
        """The send_recv of the activations, or their gradients, of a microbatch between two
        pipeline ranks. Each GPU sends to its peer over a link of its own.
        """
        num_bytes = self.activation_bytes * self.stream_states
        num_bytes //= self.layout.tp if self.scatters_send_recv else 1
        link = find_send_link(self.cluster, self.layout, sender, receiver)
        return self._sent(num_bytes, "pp", link, link.name)

    def ring(self, num_bytes: int, group: Group) -> Kernel:
        """`num_bytes` from each rank of a group to the next."""
        link = find_link(self.cluster, group)
        return self._sent(num_bytes, group.name, link, f"{group.name}{group.size} {link.name}")

    def _sent(self, num_bytes: int, group: str, link: Link, way: str) -> Kernel:
        mean = send_recv_latency(num_bytes, link, self.cluster, self.kernels)
        return Kernel("send_recv", f"{num_bytes}B {way}", mean, link.name, group=group)


def _joined(linears: Sequence[Linear], forward_s: float, backward_s: float) -> Linear:
    """Matrices as one, whose forward, and the gradient of whose input, take so much longer."""
    weights = weights_of(*linears)
    return Linear(
        _sum([linear.forward for linear in linears], forward_s),
        _sum([linear.dgrad for linear in linears], backward_s),
        _sum(weights) if weights else None,
    )


def _sum(kernels: Sequence[Kernel], seconds: float = 0.0) -> Kernel:
    """Kernels, and `seconds` besides them, as one."""
    return msgspec.structs.replace(
        kernels[0],
        size=" and ".join(kernel.size for kernel in kernels),
        mean=sum(kernel.mean for kernel in kernels) + seconds,
        flop=sum(kernel.flop for kernel in kernels),
    )


def _slower(share: float) -> tuple[float, float]:
    return share / (1 - share), 0.0
