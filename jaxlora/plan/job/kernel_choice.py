"""Chooses the LoRA kernels and the attention of a run, and says why."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
from jax.typing import DTypeLike

from jaxlora.errors import ConfigError
from jaxlora.models.build import LayerLinear
from jaxlora.models.config import ModelConfig
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linears
from jaxlora.modules.attention import AttentionImplementation, WideHeads
from jaxlora.modules.attention_table import ATTENTIONS
from jaxlora.modules.triton_gated_delta import triton_delta_unsupported
from jaxlora.pallas_kernels import BACKENDS, Backend, LinearShape
from jaxlora.pallas_kernels.device import device_kind, planned_device
from jaxlora.pallas_kernels.dropout import TILE_TOKENS

_BLACKWELL = ("10.", "12.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice[Name: str]:
    """An implementation, and why it was chosen.

    Attributes:
        name: Its name.
        is_requested: Whether the user named it.
        passed_over: Why those before it in its table were not chosen, as what follows
            their names in a sentence.
    """

    name: Name
    is_requested: bool = False
    passed_over: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}, as requested" if self.is_requested else self.name


def with_choices(
    spec: DecoderSpec,
    part: ModelConfig,
    *,
    attention: str,
    implementation: str,
    block_tokens: int,
    mean_tokens: Callable[[], int] | None = None,
) -> tuple[DecoderSpec, str]:
    """Chooses attention and kernels of a decoder, and says which run it.

    Args:
        spec: The decoder, with its other options.
        part: The part of the model that a device runs, for which they are chosen.
        attention: The attention asked for, or `auto`.
        implementation: The back end of the kernels, likewise.
        block_tokens: Tokens of a block.
        mean_tokens: Gives the mean length of samples, if the attention depends on it;
            None: it is not known.

    Raises:
        ConfigError: No kernels or attention can run the model here.
    """
    options, dtype = spec.options, spec.options.dtype
    chosen = choose_attention(attention, dtype, part)
    wide = choose_wide_attention(attention, dtype, part)
    options = dataclasses.replace(
        options,
        attention=chosen.name,
        wide_heads=None if wide is None else WideHeads(wide[0], wide[1].name),
    )
    # Otherwise, other data of the same shapes would be compiled for anew.
    names = {chosen.name} | ({wide[1].name} if wide else set())
    if mean_tokens and any(ATTENTIONS[name].depends_on_mean for name in names):
        options = dataclasses.replace(options, mean_segment_tokens=mean_tokens())
    on_device = dataclasses.replace(spec, config=part, options=options)
    kernels = choose_kernels(implementation, on_device, block_tokens)
    options = dataclasses.replace(options, implementation=kernels.name)
    said = describe_choices(kernels, chosen, wide)
    model = spec.config
    for shape in set(filter(None, map(model.delta_shape, range(model.num_layers)))):
        reason = triton_delta_unsupported(dtype, shape)
        runs = "triton" if reason is None else f"xla; triton cannot run it: {reason}"
        said += f"; gated delta rule: {runs}"
    return dataclasses.replace(spec, options=options), said


def describe_choices(
    kernels: Choice[str],
    attention: Choice[AttentionImplementation],
    wide: tuple[int, Choice[AttentionImplementation]] | None = None,
) -> str:
    """Says in one line on which device a run is, what runs there, and why.

    A reason why something else cannot run there is told once.

    Args:
        kernels: The LoRA kernels.
        attention: The attention.
        wide: See `choose_wide_attention`.
    """
    passed_over = [*kernels.passed_over.items(), *attention.passed_over.items()]
    parts = [
        f"device: {describe_device()}",
        f"LoRA kernels: {kernels}",
        f"attention: {attention}",
    ]
    if wide is not None:
        parts.append(f"attention of heads of {wide[0]} features: {wide[1]}")
        passed_over += wide[1].passed_over.items()
    parts += group_reasons(passed_over)
    return "; ".join(parts)


def choose_kernels(asked: str, spec: DecoderSpec, block_tokens: int) -> Choice[str]:
    """Returns the back end asked for, or for `auto` the first that can run the model.

    Args:
        asked: Name of a back end, or `auto`.
        spec: The decoder; its own `implementation` is not used.
        block_tokens: Rows of a token block.

    Raises:
        ConfigError: The back end asked for cannot run the model here, or none can.
    """

    def why_not(name: str) -> str | None:
        unsupported = kernels_unsupported(BACKENDS[name], spec, block_tokens)
        return BACKENDS[name].why_not(unsupported, is_auto=asked == "auto")

    return _choose("implementation", asked, BACKENDS, why_not)


def choose_attention(
    asked: str, dtype: DTypeLike, model: ModelConfig
) -> Choice[AttentionImplementation]:
    """Returns the attention asked for, or for `auto` the first that can run the model.

    Args:
        asked: Name of an implementation, or `auto`.
        dtype: Dtype of the activations.
        model: The model.

    Raises:
        ConfigError: The implementation asked for cannot run the model here.
    """

    def why_not(name: AttentionImplementation) -> str | None:
        unsupported = ATTENTIONS[name].unsupported(dtype, model)
        return None if unsupported is None else f"cannot run this: {unsupported}"

    names = [one.name for one in ATTENTIONS.values()]
    return _choose("attention", asked, names, why_not)


def choose_wide_attention(
    asked: str, dtype: DTypeLike, model: ModelConfig
) -> tuple[int, Choice[AttentionImplementation]] | None:
    """Chooses the attention of layers with wider heads than the others, or narrower.

    Args:
        asked: The attention of all layers; `auto`, or one that cannot run these heads:
            it is chosen for them.
        dtype: Dtype of the activations.
        model: The model.

    Returns:
        The features of these heads, and the choice; None: all heads are alike.
    """
    layers = map(model.at_layer, range(model.num_layers))
    own = next((one for one in layers if one.head_dim != model.head_dim), None)
    if own is None:
        return None
    if asked != "auto" and ATTENTIONS[asked].unsupported(dtype, own) is not None:
        asked = "auto"
    return own.head_dim, choose_attention(asked, dtype, own)


def _choose[Name: str](
    setting: str,
    asked: str,
    names: Iterable[Name],
    why_not: Callable[[Name], str | None],
) -> Choice[Name]:
    """Chooses from a table, in its order.

    Args:
        setting: Name of the setting, for errors.
        asked: Name of an entry, or `auto`.
        names: Names of the entries.
        why_not: Returns why an entry is not taken, as what follows its name in a
            sentence; None if it is.
    """
    passed_over: dict[str, str] = {}
    for name in names:
        if asked not in ("auto", name):
            continue
        if (reason := why_not(name)) is None:
            is_requested = asked != "auto"
            return Choice(name=name, is_requested=is_requested, passed_over=passed_over)
        if asked == name:
            raise ConfigError(
                f"{setting}: {asked} {reason}. Use auto, or another {setting}."
            )
        passed_over[name] = reason
    reasons = "; ".join(group_reasons(passed_over.items()))
    raise ConfigError(f"{setting}: auto finds nothing that runs: {reasons}.")


def group_reasons(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Returns sentences without a full stop, one for each reason.

    Args:
        reasons: Names, and what follows them in a sentence.
    """
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        found = names.setdefault(reason, [])
        if name not in found:
            found.append(name)
    return [f"{_and(found)} {reason}" for reason, found in names.items()]


def _and(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def kernels_unsupported(
    backend: Backend,
    spec: DecoderSpec,
    block_tokens: int,
) -> str | None:
    """Returns why a back end cannot run some linear that it gets, or None if it can.

    It gets those that are adapted, and all linears of experts.

    Args:
        backend: The back end.
        spec: The decoder.
        block_tokens: Rows of a token block.
    """
    assert spec.slots is not None
    paths = dict.fromkeys((*spec.adapted, *_expert_paths(spec.config)))
    for path in paths:
        linear = spec.linear(path)
        if linear.in_xla:
            continue
        is_of_experts = linear.experts is not None
        shape = LinearShape(
            dtype=spec.options.dtype,
            in_features=linear.in_features,
            out_features=linear.out_features,
            rank=spec.slots.rank_of(is_of_experts=is_of_experts),
            block_tokens=TILE_TOKENS if is_of_experts else block_tokens,
            # Those of experts are dequantized before each product.
            weight_format=None if is_of_experts else spec.options.weight_format(path),
        )
        if (reason := backend.unsupported(shape)) is not None:
            return reason
    return None


def _expert_paths(config: ModelConfig) -> list[str]:
    """Returns the paths of the linears of experts, one of each kind."""
    kinds: dict[LayerLinear, str] = {}
    for i in range(config.num_layers):
        if config.expert_shape(i) is not None:
            for linear in linears(config, i).values():
                kinds.setdefault(linear, f"layers.{i}.{linear.name}")
    return [path for linear, path in kinds.items() if linear.experts is not None]


def describe_device() -> str:
    """Names the present device, with its compute capability if it is a GPU."""
    kind = device_kind()
    if (capability := present_capability()) is None:
        return kind
    untested = ", Blackwell, untested" if is_blackwell(capability) else ""
    return f"{kind} (compute capability {capability}{untested})"


def present_capability() -> str | None:
    """Returns the compute capability of the present GPU; None without an NVIDIA GPU."""
    if (planned := planned_device()) is not None:
        return str(planned.capability / 10)
    found = getattr(jax.local_devices()[0], "compute_capability", None)
    return None if found is None else str(found)


def is_blackwell(capability: str) -> bool:
    """Returns whether a GPU is a Blackwell GPU, on which jaxlora is untested."""
    return capability.startswith(_BLACKWELL)
