"""Settings of how the frozen weights of a run's base model are stored."""

from typing import Any, Literal

from jaxlora.config.strict import StrictModel, Wrong

QuantizedFormat = Literal["fp8", "int8", "mxfp4", "nf4"]


def _kept_linears(base: Any, wrong: Wrong) -> None:
    if base.keep_bf16 and base.quantize_base is None:
        wrong["keep_bf16"] = (
            "keep_bf16 chooses linears that quantize_base leaves out: set "
            "quantize_base, or leave keep_bf16 out."
        )


class BaseSettings(StrictModel):
    """Storage format of the frozen linears in the decoder layers.

    The embedding, the head, norms and biases always have the run's dtype.

    Attributes:
        quantize_base: Format of the weights: `fp8` (e4m3, one scale per output feature,
            multiplied in fp8), `int8` (one scale per output feature), `mxfp4` (as
            gpt-oss stores its experts) or `nf4` (as bitsandbytes stores it), the last
            three dequantized layer by layer. None: that of the checkpoint, which may be
            one of these. Experts are dequantized in all formats.
        quantize_base_args: Settings of the format, by name, such as
            `{fp8_backward: false}`: the fields of its class in `OPTIONS` of
            `jaxlora.pallas_kernels`.
        keep_bf16: Regular expressions; a linear with a name whose end one of them
            matches, as in `rank_pattern`, keeps its weights in the run's dtype.
    """

    rules = (_kept_linears,)

    quantize_base: QuantizedFormat | None = None
    quantize_base_args: dict[str, bool | int | float | str] = {}
    keep_bf16: tuple[str, ...] = ()
