"""Settings of how the frozen weights of a run's base model are stored."""

from typing import Literal

import pydantic

from jaxlora.strict import Bool, StrictModel

QuantizedFormat = Literal["fp8", "int8", "nf4"]


class BaseSettings(StrictModel):
    """How the linears of the decoder layers store their frozen weights.

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

    quantize_base: QuantizedFormat | None = None
    fp8_backward: Bool = True
    fp8_weight_copies: Literal["auto", 1, 2] = "auto"
    keep_bf16: tuple[str, ...] = ()

    @property
    def fp8_settings(self) -> list[str]:
        """Names of the settings for fp8 only that differ from their defaults."""
        # A run that was written with all its settings names the defaults as well.
        fields = type(self).model_fields
        names = ("fp8_backward", "fp8_weight_copies")
        return [n for n in names if getattr(self, n) != fields[n].default]

    @pydantic.field_validator("fp8_weight_copies", mode="before")
    @classmethod
    def _copies_are_no_truth_value(cls, copies: object) -> object:
        if isinstance(copies, bool):
            raise ValueError("expected auto, 1 or 2")
        return copies

    @pydantic.model_validator(mode="after")
    def _quantization_is_consistent(self):
        if self.quantize_base not in (None, "fp8"):
            for name in self.fp8_settings:
                raise ValueError(
                    f"{name} has a meaning for fp8 only, and quantize_base is "
                    f"{self.quantize_base}. Leave it out."
                )
        if self.fp8_weight_copies == 2 and not self.fp8_backward:
            raise ValueError(
                "fp8_weight_copies=2 stores a copy for an fp8 product that "
                "fp8_backward=false does not compute. Leave one of them out."
            )
        if self.keep_bf16 and self.quantize_base is None:
            raise ValueError(
                "keep_bf16 chooses linears that quantize_base leaves out: set "
                "quantize_base, or leave keep_bf16 out."
            )
        return self
