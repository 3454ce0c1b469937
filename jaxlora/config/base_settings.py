"""Settings of how the frozen weights of a run's base model are stored."""

from typing import Any, Literal

import pydantic

from jaxlora.config.strict import Bool, StrictModel

QuantizedFormat = Literal["fp8", "int8", "nf4"]


def _fp8_settings_are_for_fp8(base: Any) -> tuple[str, str] | None:
    if base.quantize_base in (None, "fp8"):
        return None
    for name in base.fp8_settings:
        return name, (
            f"{name} has a meaning for fp8 only, and quantize_base is "
            f"{base.quantize_base}. Leave it out."
        )
    return None


def _copies_are_used(base: Any) -> tuple[str, str] | None:
    if base.fp8_weight_copies == 2 and not base.fp8_backward:
        return "fp8_weight_copies", (
            "fp8_weight_copies=2 stores a copy for an fp8 product that "
            "`fp8_backward: false` does not compute. Leave one of them out."
        )
    return None


def _something_is_kept_from(base: Any) -> tuple[str, str] | None:
    if base.keep_bf16 and base.quantize_base is None:
        return "keep_bf16", (
            "keep_bf16 chooses linears that quantize_base leaves out: set "
            "quantize_base, or leave keep_bf16 out."
        )
    return None


class BaseSettings(StrictModel):
    """Storage format of the frozen linears in the decoder layers.

    The embedding, the head, norms and biases always have the run's dtype.

    Attributes:
        quantize_base: Format of the weights: `fp8` (e4m3, one scale per output feature,
            multiplied in fp8), `int8` (one scale per output feature) or `nf4` (as
            bitsandbytes stores it), the last two dequantized layer by layer. None: that
            of the checkpoint, which may be one of these.
        fp8_backward: Whether the gradient of the input of an fp8 linear is also
            computed in fp8; false: from weights that are dequantized layer by layer.
        fp8_weight_copies: Number of copies of fp8 weights: 2 adds their transpose,
            which the backward pass multiplies with; 1 transposes the weights of each
            layer in each backward pass. `auto` takes 2 if memory allows.
        keep_bf16: Regular expressions; a linear with a name whose end one of them
            matches, as in `rank_pattern`, keeps its weights in the run's dtype.
    """

    rules = (_fp8_settings_are_for_fp8, _copies_are_used, _something_is_kept_from)

    quantize_base: QuantizedFormat | None = None
    fp8_backward: Bool = True
    fp8_weight_copies: Literal["auto", 1, 2] = "auto"
    keep_bf16: tuple[str, ...] = ()

    @property
    def fp8_settings(self) -> list[str]:
        """Names of the settings for fp8 only that differ from their defaults."""
        # A run that was written with all its settings names the defaults as well.
        fields = BaseSettings.model_fields
        names = ("fp8_backward", "fp8_weight_copies")
        return [n for n in names if getattr(self, n) != fields[n].default]

    @pydantic.field_validator("fp8_weight_copies", mode="before")
    @classmethod
    def _copies_are_no_truth_value(cls, copies: object) -> object:
        if isinstance(copies, bool):
            raise ValueError("expected auto, 1 or 2")
        return copies
