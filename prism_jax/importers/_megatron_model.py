"""The model in arguments of Megatron-LM: of a decoder, of BERT, or of T5, which has both."""

import re
from collections.abc import Callable

from ._frameworks import framework
from ._problems import MOST_LAYERS, Reader, Table, merged


_SYMBOLS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_SYMBOLS |= {"G": "gated-delta", "+": "mla", "D": "mla"}
_VARIANTS = ("", "gdn", "gated_delta_net", "dsa")
_WORD_PIECE = ("bert", "vocab.txt")


def model_of(read: Reader) -> Table:
    """The table of the model of a job."""
    hidden = read.count("hidden-size")
    swiglu, heads = read.flag("swiglu"), read.count("num-attention-heads")
    ffn = (
        max(1, int(4 * hidden * 2 / 3 / 64)) * 64 if swiglu else hidden * read.count("expansion", 4)
    )
    activation = "squared_relu" if read.flag("squared-relu") else "swiglu" if swiglu else "gelu"
    activation = "geglu" if read.flag("quick-geglu") else activation
    if "kv-channels" not in read:
        read.check_divisor("num-attention-heads", heads, "hidden-size", hidden)
    groups = read.count("num-query-groups", 1) if read.flag("group-query-attention") else heads
    dropout = [read.rate(f"{name}-dropout", 0.1) for name in ("hidden", "attention")]
    norm = read.choice("normalization", "LayerNorm", "RMSNorm")
    model = {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": read.count("num-kv-heads", groups),
        "head_size": read.count("kv-channels", max(1, hidden // heads)),
        "ffn_size": read.count("ffn-hidden-size", ffn),
        "vocab_size": _vocabulary(read),
        "activation": activation,
        "position": _position(read),
        "max_positions": read.count("max-position-embeddings", _longest(read)),
        "norm": norm.lower(),
        "bias": not read.flag("disable-bias-linear"),
        "tied_embeddings": not read.flag("untie-embeddings-and-output-weights"),
        "dropout": any(dropout),
    }
    attention: Table = {"kind": "attention"}
    if _is_encoder(read):
        attention["causal"] = False
        model["head_transforms"] = 1 if read.flag("bert-no-binary-head") else 2
    attention["qk_norm"] = read.flag("qk-layernorm")
    attention |= {"qkv_bias": True} if read.flag("add-qkv-bias") else {}
    attention |= {"output_gate": True} if read.flag("attention-output-gate") else {}
    sinks = read.choice("softmax-type", "vanilla", "off-by-one", "learnable") == "learnable"
    attention |= {"sinks": True} if sinks else {}
    variant = read.choice("experimental-attention-variant", *_VARIANTS)
    variant = variant or read.choice("linear-attention-type", *_VARIANTS[:3])
    modules: Table = {"attention": attention}
    if window := _window(read):
        modules["local"] = attention | {"window": window}
    if read.flag("multi-latent-attention"):
        modules["mla"] = _mla(read, variant == "dsa")
        kept = {k: v for k, v in modules["mla"].items() if k != "index_num_heads"}
        modules["shared"] = {"kind": "mla"} | kept
    if "num-experts" in read:
        modules["moe"] = _moe(read, model)
    mtp = read.count("mtp-num-layers", 0, least=0)
    scans = variant in _VARIANTS[1:3]
    usual = "mla" if "mla" in modules else "attention"
    layers = _layers(read, usual, windowed="local" in modules, scans=scans)
    if has_encoder(read):
        layers, added = _encoder_and_decoder(read)
        modules |= added
    names = {name for layer in layers for name in layer["modules"]}
    if "mamba" in names:
        modules["mamba"] = _mamba(read, hidden)
    if "gated-delta" in names:
        modules["gated-delta"] = _sizes(read, "gated-delta")
    elif variant in ("gdn", "gated_delta_net"):
        read.problems.append(f"`experimental-attention-variant` {variant} without a layer of it")
    if read.flag("enable-hyper-connections") or read.flag("enable-mhc-connections"):
        streams = read.count("num-residual-streams", 4)
        model["hyper_connections"] = read.count("mhc-num-residual-streams", streams)
    if "moe" in names and "moe" not in modules:
        read.problems.append("layers of experts without `num-experts`")
    if mtp:
        model["num_mtp_layers"] = mtp
    kept = {name: modules[name] for name in sorted(names) if name in modules}
    return {**model, "layers": layers, "modules": kept}


def _longest(read: Reader) -> int | None:
    """The longest sequence that the arguments say, which other software takes for the positions."""
    names = ("seq-length", "decoder-seq-length", "encoder-seq-length")
    usual = None if _position(read) == "learned" else 8192
    return max((read.count(name) for name in names if name in read), default=usual)


def _position(read: Reader) -> str:
    kinds = {"learned_absolute": "learned", "rope": "rotary", "none": "none"}
    kinds |= {"yarn": "rotary", "mrope": "rotary"}
    named = kinds[read.choice("position-embedding-type", *kinds)]
    if read.flag("no-position-embedding") and named == "learned":
        named = "none"
    return "rotary" if read.flag("use-rotary-position-embeddings") else named


def _vocabulary(read: Reader) -> int:
    """The vocabulary size, padded as in Megatron-LM to a multiple for each tensor-parallel rank."""
    multiple = of_words = read.count("make-vocab-size-divisible-by", 128)
    multiple *= read.count("tensor-model-parallel-size", 1)
    names = f"{read.text('tokenizer-model')} {read.text('vocab-file')}"
    # Older scripts say no type; of those that are left, only GPT-2's has its words in a file alone.
    alone = "vocab-file" in read and "tokenizer-model" not in read
    kind = read.text("tokenizer-type", "GPT2BPETokenizer" if alone else "")
    extra = read.count("vocab-extra-ids", 0, least=0)
    known = _size_of_words("by_file", names)[1]
    padded, size = (read.count(f"{p}vocab-size", 0, least=0) for p in ("padded-", ""))
    if padded:
        return padded
    if not size and not known:
        usual = framework("megatron").table["vocabularies"]["usual"].items()
        # A size that is padded to an odd multiple is one that needs no padding.
        odd = [(name, size) for name, size in usual if of_words % 128 and size % of_words == 0]
        by_kind = _size_of_words("usual", f"{names.lower()} {kind} HuggingFaceTokenizer")
        of, known = odd[0] if odd and of_words > 128 else by_kind
        read.notes.append(
            f"The size of the vocabulary is not said, so {known:,} words are taken, as is usual "
            f"for `{of}`: give {read.name('vocab-size')} for others."
        )
    return -(-(size or known + extra) // multiple) * multiple


def _size_of_words(table: str, text: str) -> tuple[str, int]:
    """The first name of a table of vocabularies that is in a text, and its size; or nothing."""
    sizes = framework("megatron").table["vocabularies"][table].items()
    return next(((name, size) for name, size in sizes if name in text), ("", 0))


def _sizes(read: Reader, module: str) -> Table:
    """The sizes of a module, each of a flag and with a default."""
    rows = framework("megatron").table["modules"][module]
    return {key: read.count(*row) for key, row in rows.items()}


def _mla(read: Reader, sparse: bool) -> Table:
    table = _sizes(read, "mla") | read.given(q_lora_rank="q-lora-rank")
    return table | (_sizes(read, "dsa") if sparse else {})


def _moe(read: Reader, model: Table) -> Table:
    table = {
        "num_experts": read.count("num-experts"),
        "top_k": read.count("moe-router-topk", 2),
        "expert_ffn_size": read.count("moe-ffn-hidden-size", model["ffn_size"]),
    }
    table |= read.given(latent_size="moe-latent-size")
    # Experts that are filled up to a capacity of the mean all have it.
    capacity = read.rate("moe-expert-capacity-factor", 1.0, most=1e3)
    filled = read.flag("moe-pad-expert-input-to-capacity")
    if capacity < 1 or (filled and capacity > 1):
        read.problems.append(f"`moe-expert-capacity-factor` {capacity:g}")
    if "moe-expert-capacity-factor" in read and not filled:
        table |= {"balance": "dropless", "capacity_factor": max(capacity, 1.0)}
    groups = read.count("moe-router-num-groups", 1)
    chosen = read.count("moe-router-group-topk", groups)  # Without effect in a single group.
    if groups > 1:
        table |= {"num_groups": groups, "top_k_groups": chosen}
    shared = read.count("moe-shared-expert-intermediate-size", 0, least=0)
    gate = {"shared_gate": True} if read.flag("moe-shared-expert-gate") else {}
    return {**table, "shared_ffn_size": shared, **gate} if shared else table


def _mamba(read: Reader, hidden: int) -> Table:
    sizes = _sizes(read, "mamba")
    heads = max(1, 2 * hidden // sizes["mamba_head_size"])
    return {"mamba_num_heads": read.count("mamba-num-heads", heads), **sizes}


def _is_encoder(read: Reader) -> bool:
    """Whether the arguments are of BERT, as its vocabulary or `bert-no-binary-head` shows."""
    words = read.text("vocab-file").startswith(_WORD_PIECE)
    return not has_encoder(read) and (words or read.flag("bert-no-binary-head"))


def has_encoder(read: Reader) -> bool:
    """Whether the arguments are of T5."""
    return "encoder-num-layers" in read


def _encoder_and_decoder(read: Reader) -> tuple[list[Table], Table]:
    """The layers of T5 and their modules. The encoder has a sequence length of its own."""
    length = read.count("encoder-seq-length", read.count("seq-length", 512))
    if read.count("pipeline-model-parallel-size", 1) > 1:
        read.problems.append("a pipeline whose first stages are an encoder")
    layers = [
        {
            "modules": ["encoder_attention", "mlp"],
            "repeat": read.layers("encoder-num-layers"),
            "sequence_length": length,
        },
        {
            "modules": ["attention", "cross_attention", "mlp"],
            "repeat": read.layers("decoder-num-layers", read.layers("encoder-num-layers")),
        },
    ]
    modules = {
        "encoder_attention": {"kind": "attention", "causal": False},
        "cross_attention": {"kind": "attention", "causal": False, "context_length": length},
    }
    return layers, modules


def _layers(read: Reader, attention: str, *, windowed: bool, scans: bool) -> list[Table]:
    """The layers with a module of attention, which is `local` in those that see only a window."""
    pattern = read.text("hybrid-layer-pattern") or read.text("hybrid-override-pattern")
    pattern = pattern or _pattern_of_shares(read)
    if pattern:
        main, *further = pattern.split("/")
        unknown = set(main) - {*_SYMBOLS, "|"}
        if unknown:
            read.problems.append(f"`hybrid-layer-pattern` with {' '.join(sorted(unknown))}")
        if further:
            read.problems.append("further layers of multi-token prediction in a hybrid pattern")
        if len(main) > MOST_LAYERS:
            read.problems.append(f"`hybrid-layer-pattern` of {len(main)} layers")
            main = ""
        read.get("num-layers")
        return merged((_SYMBOLS[symbol],) for symbol in main if symbol in _SYMBOLS)
    count = read.layers("num-layers", 1 if has_encoder(read) else None)
    seen, experts = [attention] * count, ["num-experts" in read] * count
    if windowed and attention != "attention":
        read.problems.append("`window-size` with `multi-latent-attention`")
    # Of as many layers one is not replaced; by default all are.
    in_place = {"window-attn-skip-freq": "local"} if windowed else {}
    in_place |= {"linear-attention-freq": "gated-delta"} if scans else {}
    for key, module in in_place.items():
        chosen = [True] * count
        if key in read:
            chosen = _chosen(read, key, range(1, count + 1), lambda i, every: i % every != 0)
        seen = [module if yes else usual for yes, usual in zip(chosen, seen, strict=True)]
    frequency = read.count("dsa-indexer-topk-freq", 1) if attention == "mla" else 1
    first = max(read.count("dsa-indexer-skip-topk-offset", 0, least=0), 1)
    if frequency > 1:  # Layers between those with an indexer use what it has chosen.
        shares = (max(i - first, 0) % frequency for i in range(1, count + 1))
        seen = ["shared" if share else own for share, own in zip(shares, seen, strict=True)]
    if "num-experts" in read:
        experts = _chosen(read, "moe-layer-freq", range(count), lambda i, every: i % every == 0)
    return merged(zip(seen, ("moe" if is_moe else "mlp" for is_moe in experts), strict=True))


def _pattern_of_shares(read: Reader) -> str:
    """The pattern of layers whose kinds are given by their shares; empty without these. Attention
    is evenly between sections of Mamba-2, then MLPs among what is left of it (Megatron-LM,
    `megatron/core/ssm/mamba_hybrid_layer_allocation.py`).
    """
    shares = [read.rate(f"hybrid-{kind}-ratio", 0.0) for kind in ("attention", "mlp")]
    if not any(shares) or sum(shares) > 1:
        return ""
    count = read.layers("num-layers")
    attention, mlp = (round(count * share) for share in shares)
    letters = ["M"] * count
    for letter, number, sections in (("*", attention, attention + 1), ("-", mlp, mlp)):
        if not number:
            continue
        length = left = (letters.count("M") - number) / sections
        for i in range(count):
            if letters[i] == "M" and left < 0.5:
                letters[i], left = letter, left + length
            elif letters[i] == "M":
                left -= 1
    return "".join(letters)


def _window(read: Reader) -> int | None:
    """The number of keys that a query sees, including its own, from `(keys before, keys after)`;
    `None` if it sees all.
    """
    if "window-size" not in read:
        return read.count("window", 0, least=0) or None
    words = re.sub(r"[\[\](),]", " ", read.text("window-size")).split()
    if len(words) == 2 and words[0] == "-1":
        return None
    if len(words) != 2 or not re.fullmatch(r"\d{1,9}", words[0]) or words[1] not in ("0", "-1"):
        read.problems.append(f"`window-size` {' '.join(words)}")
        return None
    return int(words[0]) + 1


def _chosen(
    read: Reader, key: str, numbers: range, chosen: Callable[[int, int], bool]
) -> list[bool]:
    """Which layers are chosen, by a zero or one for each, or by a number: if `chosen` is true of
    the layer's number and that one.
    """
    text, period = read.text(key, "1"), 1
    if re.fullmatch(r"0*[1-9]\d{0,8}", text):
        period = int(text)
    else:
        try:
            entries = repeated(text)
            if len(entries) == len(numbers):
                return [bool(entry) for entry in entries]
            read.problems.append(f"`{key}` for {len(entries)} layers of {len(numbers)}")
        except ValueError as error:
            read.problems.append(f"`{key}` of {error}")
    return [chosen(i, period) for i in numbers]


def repeated(text: str) -> list[int]:
    """The entries of `([0]*3+[1]*11)` or `[0, 1, 1]`.

    **Raises:**

    A `ValueError` if it is neither.
    """
    compact = re.sub(r"[\s()]", "", text)
    entries: list[int] = []
    for term in compact.split("+"):
        match = re.fullmatch(r"\[(\d(?:,\d)*)\](?:\*(\d{1,5}))?", term)
        if not match:
            raise ValueError(f"`{text[:40]}`, which is no list of zeros and ones")
        digits, times = [int(digit) for digit in match[1].split(",")], int(match[2] or 1)
        # Before they are written out, which may take more memory than there is.
        if len(entries) + len(digits) * times > MOST_LAYERS:
            raise ValueError("more layers than any model has")
        entries += digits * times
    return entries
