"""Settings of a session, in which a caller's own loop trains adapters."""

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxlora.config.strict import (
    AtLeastOne,
    Fraction,
    NonNegativeFloat,
    Number,
    OneOrMore,
    PositiveFloat,
    PositiveInt,
    StrictModel,
    Texts,
    Tokens,
    Wrong,
)

# Parts of a prompt for which a cache has room at least: two rows of two parts each.
LEAST_PARTS = 4
# More are a slip of the keyboard.
Versions = Annotated[int, Field(gt=0, le=65_536), Number]


def _blocks(session: Any, wrong: Wrong) -> None:
    if session.microbatch_tokens == "auto":
        return
    block = session.block_tokens
    odd = [tokens for tokens in session.microbatch_tokens if tokens % block]
    if odd:
        wrong["microbatch_tokens"] = (
            f"microbatch_tokens={odd[0]} is no multiple of block_tokens={block}. Set "
            f"it to {-(-odd[0] // block) * block}, or change block_tokens."
        )


class SessionConfig(StrictModel):
    """Settings of a session; they are compiled into its programs.

    Attributes:
        slots: Number of adapters on the device. Further ones wait in the host's memory
            for their turn. `auto` takes as many as fit, 64 at most.
        rank: Largest rank of an adapter.
        target_modules: Linears that adapters may adapt, as in `LoraJob`.
        microbatch_tokens: Tokens of a microbatch, padding included, and of the longest
            datum. Each of several sizes has a program of its own, and microbatches take
            those with the fewest rows. `auto` takes three, up to 8,192 tokens on a
            GPU if they fit beside the slots.
        block_tokens: Tokens of a block; each adapter's part of a microbatch fills whole
            blocks.
        adapters_per_microbatch: Most adapters in a microbatch, for whose gradients it
            needs memory; None: 8, or 4 if some targets are linears of experts.
        remat: Part of each layer that the backward pass recomputes, as in `RunConfig`.
        implementation: Which LoRA kernels run, as in `RunConfig`.
        attention: Attention implementation, as in `RunConfig`.
    """

    rules = (_blocks,)

    slots: PositiveInt | Literal["auto"] = "auto"
    rank: PositiveInt = 16
    target_modules: Texts = "all-linear"
    microbatch_tokens: (
        Literal["auto"] | Annotated[tuple[Tokens, ...], AtLeastOne, OneOrMore]
    ) = "auto"
    block_tokens: Tokens = 64
    adapters_per_microbatch: PositiveInt | None = None
    remat: Literal["none", "elementwise", "mlp", "layer"] = "none"
    implementation: Literal["auto", "mosaic", "triton", "xla"] = "auto"
    attention: Literal["auto", "cudnn", "triton", "xla"] = "auto"

    @property
    def num_slots(self) -> int:
        """The number of slots; `slots` must not be `auto`."""
        assert self.slots != "auto", "auto is not settled yet"
        return self.slots

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of microbatches, sorted; `microbatch_tokens` must not be `auto`."""
        assert self.microbatch_tokens != "auto", "auto is not settled yet"
        return tuple(sorted(self.microbatch_tokens))


def _parts(sampling: Any, wrong: Wrong) -> None:
    cache, part = sampling.cache_tokens, sampling.part_tokens
    if cache != "auto" and cache < LEAST_PARTS * part:
        wrong["cache_tokens"] = (
            f"cache_tokens={cache} is less than two rows of twice part_tokens={part}. "
            f"Set it to {LEAST_PARTS * part} or more, or lower part_tokens."
        )


class SamplingConfig(StrictModel):
    """Settings of sampling beside training.

    Attributes:
        versions: Number of published versions that are on the device at the same time;
            others wait in files.
        file_versions: Most versions that wait in files. Beyond it, those that were used
            least recently end; they are opened again if they have files of their own.
        rows: Most sequences of a similar length that are generated together.
        cache_tokens: Tokens of all sequences that the caches of keys and values hold,
            padding included, which bounds their memory. Further sequences wait. `auto`
            takes 65,536, or what there is memory for.
        part_tokens: Tokens of a prompt that run at once. A prompt's last part is padded
            to so many, and rows of the cache hold at least twice as many.
        share: Share of the time that sampling has while there is training, too.
    """

    rules = (_parts,)

    versions: Versions = 16
    file_versions: PositiveInt = 1000
    rows: PositiveInt = 64
    cache_tokens: PositiveInt | Literal["auto"] = "auto"
    part_tokens: Tokens = 256
    share: Annotated[float, Field(gt=0.0, lt=1.0), Number] = 0.5


class AdamParams(StrictModel):
    """Settings of one optimizer step of AdamW.

    Attributes:
        learning_rate: Learning rate.
        betas: Decays of the first and the second moment.
        eps: Added to the root of the second moment.
        lora_plus_ratio: Learning rate of B over that of A (LoRA+).
        weight_decay: Decoupled weight decay.
        grad_clip_norm: Clips the adapter's gradient to this norm; 0: never.
    """

    learning_rate: NonNegativeFloat
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: NonNegativeFloat = 1e-12
    lora_plus_ratio: PositiveFloat = 1.0
    weight_decay: NonNegativeFloat = 0.0
    grad_clip_norm: NonNegativeFloat = 0.0
