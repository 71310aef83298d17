import dataclasses
import math
from typing import ClassVar, Literal

from msgspec.structs import replace

from ...cluster import Routing
from ...data import (
    AtLeastOne,
    Count,
    Layout,
    Model,
    NonNegative,
    PositiveOrInfinite,
    Seed,
    Training,
)
from .._block import Kernel, Linear, Load, Result, Segment, Segments, weights_of
from .._costs import Costs
from .._parts import fullest_mean, segment
from ._base import AbstractModule, Parameters
from ._gather import cast, cast_gradient, gradients
from ._mlp import MLP, Activation, gate_factor
from ._operators import Operator, matrices
from ._routing import (
    draw_popularity,
    dropless_concentration,
    with_load,
)


# DeepEP's host waits in each forward for how many tokens arrive (its README, "Normal kernels"),
# which tables of its kernels do not have. By so much a layer of Mixtral's shapes on 8 H100 takes
# longer than with all_to_all, in bf16 as in fp8 (`../shared/data/steps/moe_layers.csv`).
_COUNTED_S = 0.31e-3


@dataclasses.dataclass(frozen=True)
class MoE(AbstractModule):
    """A mixture of experts: each token goes to its best few of many MLPs, which are distributed
    over the expert-parallel group, and to the shared experts.

    A rank routes its own tokens and sends them to the ranks of their experts (all_to_all), which
    run grouped GEMMs and send the results back. If experts are split (`layout.etp`), each group
    first gathers its tokens, and scatters the sums. The latency of experts grows with the tokens of
    their rank, that of the exchanges with the tokens of the fullest rank.

    **Attributes:**

    - `num_experts`: the number of experts in a layer.
    - `top_k`: how many experts a token goes to.
    - `expert_ffn_size`: the width between the matrices of an expert.
    - `num_shared_experts`: the number of experts that every token goes to.
    - `shared_ffn_size`: the width of all shared experts together; by default that of so many
        experts.
    - `shared_gate`: whether a gate scales the output of the shared experts.
    - `num_groups`, `top_k_groups`: the number of groups of neighbouring experts, and of how many
        groups a token may use experts; by default of all. It then goes to few nodes (DeepSeek-V3),
        which matters if it is sent once to each node (`training.token_dispatcher`).
    - `activation`, `bias`: as in `MLP`.
    - `router_bias`: whether the router has a value for each expert besides its matrix.
    - `latent_size`: the width of a latent that the experts read and write instead of hidden states,
        and that is sent to them; two further matrices make it, and hidden states of it.
    - `load_concentration`: the sum of the equal parameters of a Dirichlet law of the experts'
        popularities: the standard deviation of one is `sqrt((num_experts - 1) / (1 + this))` of its
        mean. If infinite, only counts of tokens vary; if `None`, all experts get equally many.
    - `balance`: the router's balance, where the load is not given: `forced` sends all experts
        equally many tokens; `dropless` is a router as it is, whose fullest rank of 8 has 1.46 times
        the mean, and of 32 ranks 1.8 times.
    - `load_seed`: draws the popularities of each layer once, for all microbatches, steps and
        replicas of a run; by default they are drawn anew for each microbatch.
    - `load_popularity`: the popularity of each expert instead, such as its tokens in a run.
    - `capacity_factor`: if the load varies, the most tokens of a microbatch that an expert takes,
        over its mean, at least 1; others are dropped.
    """

    kind: ClassVar[str] = "moe"

    num_experts: Count
    top_k: Count
    expert_ffn_size: Count
    num_shared_experts: int = 0
    shared_ffn_size: Count | None = None
    shared_gate: bool = False
    num_groups: Count = 1
    top_k_groups: Count | None = None
    activation: Activation = "swiglu"
    bias: bool = False
    router_bias: bool = False
    latent_size: Count | None = None
    load_concentration: PositiveOrInfinite | None = None
    balance: Literal["forced", "dropless"] = "forced"
    load_seed: Seed | None = None
    load_popularity: tuple[NonNegative, ...] | None = None
    capacity_factor: AtLeastOne | None = None

    @property
    def shared(self) -> tuple[MLP, ...]:
        """The shared experts as one MLP, if there are any."""
        size = self.shared_ffn_size or self.num_shared_experts * self.expert_ffn_size
        return (MLP(size, self.activation, self.bias),) if size else ()

    @property
    def used_groups(self) -> int:
        """The number of groups a token goes to."""
        return self.top_k_groups or self.num_groups

    @property
    def used_experts(self) -> float:
        return self.top_k / self.num_experts

    def concentration(self, ranks: int) -> float | None:
        """The concentration of the popularity of experts on so many ranks, if it varies."""
        if self.balance == "forced" or self.load_concentration or self.load_popularity:
            return self.load_concentration
        return dropless_concentration(ranks)

    def of_layer(self, number: int) -> "MoE":
        if self.load_seed is None or self.load_concentration is None:
            return self
        seed = (self.load_seed, number)
        drawn = draw_popularity(self.num_experts, self.load_concentration, seed)
        return dataclasses.replace(
            self, load_concentration=None, load_seed=None, load_popularity=drawn
        )

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        _check_routing(self)
        _check_degrees(self, layout, training)
        _check_load(self)
        for mlp in self.shared:
            mlp.check(model, layout, training)

    def parameters(self, model: Model) -> Parameters:
        hidden, read = model.hidden_size, self.latent_size or model.hidden_size
        up = gate_factor(self.activation) * self.expert_ffn_size
        expert = read * (up + self.expert_ffn_size) + (up + read if self.bias else 0)
        copied = hidden * (self.num_experts + self.shared_gate)
        copied += self.num_experts * self.router_bias + 2 * hidden * (self.latent_size or 0)
        total = Parameters(copied=copied, experts=self.num_experts * expert)
        for mlp in self.shared:
            total = total.plus(mlp.parameters(model))
        return total

    def adapted(self, model: Model) -> dict[str, Parameters]:
        read = replace(model, hidden_size=self.latent_size or model.hidden_size)
        of_one = MLP(self.expert_ffn_size, self.activation).adapted(read)
        total = {key: Parameters(experts=self.num_experts * n.split) for key, n in of_one.items()}
        for mlp in self.shared:
            total = {key: total[key].plus(number) for key, number in mlp.adapted(model).items()}
        return total

    def forward(self, costs: Costs, before: list[Kernel]) -> Segments:
        router, up, down = self._linears(costs)
        to_latents, of_latents = self._latents(costs)
        routed, ffn, width = self._shape(costs)
        hidden = self.latent_size or costs.model.hidden_size
        arriving, between = cast(costs, routed * hidden), cast(costs, routed * ffn)
        between.append(costs.move_values("elementwise", routed * (width + ffn)))
        if costs.training.fused_experts:
            arriving = between = []
        biases = self._biases(costs, routed)
        experts = [*arriving, up.forward, *between, down.forward, *biases]
        permute = self._permute_to_send(costs)
        route = [*before, router.forward, self._choose(costs)]
        route += [*(linear.forward for linear in to_latents), *permute, *self._counted(costs)]
        shared = [segment for mlp in self.shared for segment in mlp.forward(costs, [])]
        segments = self._exchange(costs, route, experts, shared)
        return [*segments, segment([*permute, *(linear.forward for linear in of_latents)])]

    def backward(self, costs: Costs, before: list[Kernel], *, weights: bool = True) -> Segments:
        router, up, down = self._linears(costs)
        to_latents, of_latents = self._latents(costs)
        routed, ffn, width = self._shape(costs)
        act = costs.move_values("elementwise", routed * (width + ffn))
        again = [act] if costs.recomputes("moe_act") else []
        hidden = self.latent_size or costs.model.hidden_size
        arriving = cast_gradient(costs, routed * hidden)
        between = cast_gradient(costs, routed * width)
        between.append(costs.move_values("elementwise", routed * (ffn + 2 * width)))
        if costs.training.fused_experts:
            arriving = between = []
        experts = [
            *again,
            *self._biases(costs, routed),
            *arriving,
            *gradients(down, weights),
            *between,
            *gradients(up, weights),
        ]
        permute = self._permute_to_send(costs)
        last = [*permute, self._choose(costs)]
        for linear in (*to_latents, router):
            last += gradients(linear, weights)
        shared = [
            segment for mlp in self.shared for segment in mlp.backward(costs, [], weights=weights)
        ]
        forward: Segments = []
        if costs.recomputes("moe"):
            forward = self.forward(costs, [])
        elif costs.recomputes("shared_experts"):
            forward = [segment for mlp in self.shared for segment in mlp.forward(costs, [])]
        for linear in of_latents:
            before = [*before, *gradients(linear, weights)]
        segments = self._exchange(costs, [*before, *permute], experts, shared)
        return [*forward, *segments, segment(last)]

    def backward_weight(self, costs: Costs) -> Segments:
        shared = [segment for mlp in self.shared for segment in mlp.backward_weight(costs)]
        router, *experts = self._linears(costs)
        to_latents, of_latents = self._latents(costs)
        loaded = with_load(weights_of(*experts), self._load(costs))
        of_experts = segment(loaded, members=costs.expert_ranks)
        return [segment(weights_of(router, *to_latents, *of_latents)), of_experts, *shared]

    def normed_bytes(self, costs: Costs) -> float:
        """A router reads the norm as it is."""
        return costs.activation_bytes if costs.input_bytes() else 0

    def activations(self, costs: Costs) -> dict[str, float]:
        routed, ffn, width = self._shape(costs)
        if self.capacity_factor is not None and (load := self._load(costs)) is not None:
            routed *= fullest_mean(load)  # Further tokens are dropped.
        hidden = self.latent_size or costs.model.hidden_size
        parts: dict[str, float] = {
            # In float32: the probabilities of all experts, and what the chosen ones scored.
            "router": 8 * costs.norm_tokens * self.num_experts,
            "experts": routed * costs.input_bytes("linear_fc1") * hidden,
        }
        if self.latent_size:  # What the matrix reads that makes hidden states again.
            parts["experts"] += costs.input_bytes() * costs.norm_tokens * hidden
        parts["experts"] += routed * costs.activation_bytes * width
        if costs.recomputes("moe"):
            return {"experts": 0.0}
        if not costs.recomputes("moe_act"):
            # One kernel applies an activation and the weight of a token if the activation has a
            # gate (Megatron-Core, transformer/moe/experts.py); otherwise both results are kept.
            in_one = width > ffn or costs.training.fused_experts
            size = costs.input_bytes("linear_fc2") + (0 if in_one else costs.activation_bytes)
            parts["experts"] += routed * ffn * size
        if not costs.recomputes("shared_experts"):
            for mlp in self.shared:
                parts["shared_experts"] = sum(mlp.activations(costs).values())
        return parts

    def operators(self, costs: Costs) -> list[Operator] | None:
        """On one GPU. Transformers' grouped products are not among those that autocast casts, so
        that experts of weights in float32 are multiplied in it (transformers/integrations/moe.py).
        """
        gated = gate_factor(self.activation) > 1
        if costs.layout.ep > 1 or self.latent_size or self.bias or not gated:
            return None
        hidden, ffn = costs.model.hidden_size, self.expert_ffn_size
        dtype = "fp32" if costs.operands == "fp32" else None
        copied = {"m": self.top_k * costs.states, "h": costs.states}
        routes = {"e": costs.tokens * self.num_experts, "s": costs.tokens * self.top_k}
        between, groups = {"f": self.top_k * costs.tokens * ffn}, self.num_experts

        def of_experts(inputs: int, outputs: int) -> Operator:
            values, shape = {"w": groups * inputs * outputs}, (inputs, outputs)
            return Operator("experts", values, shape, groups, self.top_k, dtype)

        shared = (operator for mlp in self.shared for operator in mlp.operators(costs))
        return [
            *matrices(costs, (groups + self.shared_gate,), hidden, biased=self.router_bias),
            *(Operator("routing", {**routes, "t": costs.tokens}), Operator("dispatch", copied)),
            *(of_experts(hidden, 2 * ffn), Operator("experts-swiglu", between)),
            *(of_experts(ffn, hidden), Operator("combine", copied)),
            *shared,
            *[Operator("residual", copied)] * len(self.shared),
        ]

    def results(self, costs: Costs) -> list[Result]:
        """Of the router and the experts' grouped products, which are no plain ones, nothing."""
        values = self.top_k * self._sending(costs).states
        sent = [Result(costs.activation_bytes * values)] * (2 if costs.group("ep").size > 1 else 0)
        return [*(result for mlp in self.shared for result in mlp.results(costs)), *sent]

    def _shape(self, costs: Costs) -> tuple[int, int, int]:
        """The tokens of the experts of a rank, and their widths after and before the gate."""
        etp = costs.layout.expert_tp
        ffn = self.expert_ffn_size // etp
        return self.top_k * costs.norm_tokens * etp, ffn, gate_factor(self.activation) * ffn

    def _linears(self, costs: Costs) -> tuple[Linear, Linear, Linear]:
        """The matrices of the router, and of the experts of one rank."""
        routed, ffn, width = self._shape(costs)
        hidden, local = costs.model.hidden_size, self.num_experts // costs.layout.ep
        read, scores = self.latent_size or hidden, self.num_experts + self.shared_gate
        tokens = routed / local  # On average, of which there may be a part.
        return (
            costs.linear(costs.norm_tokens, scores, hidden, costs.base_dtype),
            costs.linear(tokens, width, read, groups=local, name="linear_fc1"),
            costs.linear(tokens, read, ffn, groups=local, name="linear_fc2"),
        )

    def _latents(self, costs: Costs) -> tuple[list[Linear], list[Linear]]:
        """The matrix that makes latents, and the one that makes hidden states of them, if any."""
        if self.latent_size is None:
            return [], []
        hidden, size, tokens = costs.model.hidden_size, self.latent_size, costs.norm_tokens
        return [costs.linear(tokens, size, hidden)], [costs.linear(tokens, hidden, size)]

    def _exchange(
        self, costs: Costs, first: list[Kernel], experts: list[Kernel], shared: Segments
    ) -> Segments:
        """Sends tokens to the experts, through them and back; all their ranks wait for the slowest.
        The shared experts run before the first exchange, or overlap with it.
        """
        costs = self._sending(costs)
        ranks, load = costs.expert_ranks, self._load(costs)
        send = costs.exchange(
            Routing(self.top_k, self.num_experts, self.num_groups, self.used_groups)
        )
        training = costs.training
        # HybridEP permutes as it sends, for grouped products that take what it writes.
        fused = training.fused_experts and training.token_dispatcher == "hybridep"
        several = self.num_experts > costs.layout.ep > 1
        sort = [self._permute(costs)] if several and not fused else []

        def closed(kernels: list[Kernel], by: Kernel | None) -> Segment:
            return segment(with_load(kernels, load), with_load([by], load)[0], members=ranks)

        (sent,) = with_load([send], load)
        out = [*shared, segment(first, sent, members=ranks)]
        if sent and shared and costs.training.overlap_shared_experts:
            alone = [
                kernel for segment in shared for kernel, n in segment.kernels for _ in range(n)
            ]
            out = [segment(first, None, costs.beside(alone, sent), members=ranks)]
        etp = costs.group("etp")
        if etp.size == 1:
            return [*out, closed([*sort, *experts, *sort], send)]
        gathered = costs.activation_bytes * self.top_k * costs.states * etp.size
        gather = costs.collective("all_gather", gathered, etp)
        scatter = costs.collective("reduce_scatter", gathered, etp)
        if send is None:
            return [*shared, segment(first, with_load([gather], load)[0]), closed(experts, scatter)]
        return [*out, closed(sort, gather), closed(experts, scatter), closed(sort, send)]

    def _biases(self, costs: Costs, routed: int) -> list[Kernel]:
        """Adds the biases, times the probability of each token, expert by expert: as products and
        sums in float32, which are then joined and cast (`_apply_bias` in
        megatron/core/transformer/moe/experts.py); the backward moves about as much.
        """
        if not self.bias or costs.training.fused_experts:
            return []
        *_, width = self._shape(costs)
        hidden = self.latent_size or costs.model.hidden_size
        return [costs.move("elementwise", 24 * routed * (width + hidden))]

    def _sending(self, costs: Costs) -> Costs:
        """The costs of what is sent to experts, in its width."""
        width = self.latent_size or costs.model.hidden_size
        return replace(costs, model=replace(costs.model, hidden_size=width))

    def _load(self, costs: Costs) -> Load | None:
        """The law of the load of a rank; `None` if all loads are equal."""
        layout = costs.layout
        concentration = self.concentration(layout.ep)
        if (concentration or self.load_popularity) is None:
            return None
        # A rank that has all experts has all tokens but those that are dropped, of which the ranks
        # beside it drop as many.
        if layout.ep == 1 and (self.capacity_factor is None or self.num_experts == 1):
            return None
        routed, *_ = self._shape(costs)
        return Load(
            concentration=concentration or math.inf,
            members=layout.ep,
            counts=routed * layout.ep,
            experts=self.num_experts // layout.ep,
            split=layout.expert_tp if layout.ep > 1 else layout.tp * layout.cp,
            capacity=math.inf if self.capacity_factor is None else self.capacity_factor,
            popularity=self.load_popularity or (),
        )

    def _permute_to_send(self, costs: Costs) -> list[Kernel]:
        """A permutation if a rank has all experts, or sends a copy of a token to each of them."""
        once = costs.training.token_dispatcher != "alltoall" and costs.group("ep").size > 1
        return [] if once else [self._permute(costs)]

    def _permute(self, costs: Costs) -> Kernel:
        """Reads the tokens of a rank once and writes them `top_k` times, or the reverse."""
        return costs.move_values("elementwise", (1 + self.top_k) * self._sending(costs).states)

    def _counted(self, costs: Costs) -> list[Kernel]:
        """The wait for the number of tokens, unless CUDA graphs replay the step."""
        replayed = costs.training.cuda_graphs == "iteration"
        if replayed or costs.training.token_dispatcher != "deepep" or costs.group("ep").size == 1:
            return []
        return [Kernel("host", "counts of tokens", _COUNTED_S)]

    def _choose(self, costs: Costs) -> Kernel:
        """The softmax and its top values, in float32: three passes."""
        return costs.move("elementwise", 3 * 4 * costs.norm_tokens * self.num_experts)


def _check_routing(experts: MoE) -> None:
    """Raises a `ValueError` if tokens cannot go to so many experts of so many groups."""
    if experts.top_k > experts.num_experts:
        raise ValueError(
            f"`top_k` = {experts.top_k} is more than `num_experts` = {experts.num_experts}; use at "
            "most as many."
        )
    per_group, odd = divmod(experts.num_experts, experts.num_groups)
    if odd:
        raise ValueError(
            f"`num_experts` = {experts.num_experts} do not divide evenly into `num_groups` = "
            f"{experts.num_groups}; use a number of groups that divides it."
        )
    if experts.used_groups > experts.num_groups:
        raise ValueError(
            f"`top_k_groups` = {experts.top_k_groups} is more than `num_groups` = "
            f"{experts.num_groups}; use at most as many."
        )
    if experts.top_k > experts.used_groups * per_group:
        raise ValueError(
            f"`top_k_groups` = {experts.used_groups} groups have {experts.used_groups * per_group} "
            f"experts, fewer than `top_k` = {experts.top_k}; use more groups."
        )


def _check_degrees(experts: MoE, layout: Layout, training: Training) -> None:
    """Raises a `ValueError` if a layout cannot distribute the experts."""
    if layout.tp > 1 and not training.sequence_parallel:
        raise ValueError(
            f"`layout.tp` = {layout.tp} without sequence parallelism gives each rank all "
            "tokens to route to its experts; use `training.sequence_parallel` = true."
        )
    if experts.shared and training.overlap_shared_experts and layout.tp > 1:
        raise ValueError(
            f"`layout.tp` = {layout.tp} gives shared experts collectives of their own, which "
            "are not known beside those of the others; use "
            "`training.overlap_shared_experts` = false."
        )
    if experts.num_experts % layout.ep != 0:
        raise ValueError(
            f"`layout.ep` = {layout.ep} does not divide `num_experts` = {experts.num_experts}; "
            "use a divisor."
        )
    if experts.expert_ffn_size % layout.expert_tp != 0:
        raise ValueError(
            f"`layout.etp` = {layout.expert_tp} does not divide `expert_ffn_size` = "
            f"{experts.expert_ffn_size}; use a divisor."
        )


def _check_load(experts: MoE) -> None:
    """Raises a `ValueError` of one sentence if the keys of the load do not fit one another."""
    num_experts, popularity = experts.num_experts, experts.load_popularity
    concentration, seed = experts.load_concentration, experts.load_seed
    for name, value in (("load_concentration", concentration), ("load_seed", seed)):
        if popularity is not None and value is not None:
            raise ValueError(f"`load_popularity` gives what `{name}` draws; leave one of them out.")
    if popularity is not None and len(popularity) != num_experts:
        raise ValueError(
            f"`load_popularity` has {len(popularity)} entries for `num_experts` = {num_experts}; "
            "give one for each expert."
        )
    if popularity is not None and not sum(popularity) > 0:
        raise ValueError("`load_popularity` is zero for all experts; give some of them more.")
    if seed is not None and concentration is None:
        raise ValueError(
            f"`load_seed` = {seed} draws popularities of experts, but not by which law; give "
            "`load_concentration`, too."
        )
    varies = experts.balance == "dropless" or concentration is not None or popularity is not None
    if experts.capacity_factor is not None and not varies:
        raise ValueError(
            f"`capacity_factor` = {experts.capacity_factor} cuts loads that vary, but all experts "
            'get equally many tokens; give `load_concentration`, or `balance = "dropless"`, too.'
        )
