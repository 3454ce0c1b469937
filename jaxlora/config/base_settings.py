"""Settings of how the frozen weights of a run's base model are stored."""

from typing import Any, Literal

from jaxlora.config.strict import StrictModel

QuantizedFormat = Literal["fp8", "int8", "nf4"]


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
        quantize_base_args: Settings of the format, by name, such as
            `{fp8_backward: false}`: the fields of its class in `OPTIONS` of
            `jaxlora.pallas_kernels`.
        keep_bf16: Regular expressions; a linear with a name whose end one of them
            matches, as in `rank_pattern`, keeps its weights in the run's dtype.
    """

    rules = (_something_is_kept_from,)

    quantize_base: QuantizedFormat | None = None
    quantize_base_args: dict[str, bool | int | float | str] = {}
    keep_bf16: tuple[str, ...] = ()
