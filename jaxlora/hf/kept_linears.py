"""Which linears of a quantized base keep their weights in the run's dtype."""

from collections.abc import Sequence

from jaxlora.common.patterns import Patterns
from jaxlora.errors import ConfigError
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.names import linear_names, linear_path


def kept_linears(config: ModelConfig, keep_bf16: Sequence[str]) -> tuple[str, ...]:
    """Returns our paths of the linears that are not quantized, in the model's order.

    Args:
        config: The model.
        keep_bf16: Regular expressions for the end of a linear's name, after a dot, such
            as `down_proj` or `layers.0.*`.

    Raises:
        ConfigError: An expression is invalid, takes too long to match, or matches no
            linear; or all linears are kept.
    """
    patterns, names = Patterns("the run"), linear_names(config)
    kept = set()
    for expression in keep_bf16:
        patterns.check("keep_bf16", expression, is_end=True)
        found = {name for name in names if patterns.match_suffix(expression, name)}
        if not found:
            raise ConfigError(
                f"keep_bf16 {expression!r} matches no linear of the model. The linears "
                f"of a layer are: {', '.join(config.linears())}; a whole name is "
                f"{names[0]!r}. The embedding, the head and norms are never quantized."
            )
        kept |= found
    if len(kept) == len(names):
        raise ConfigError(
            f"keep_bf16={list(keep_bf16)} matches every linear of the model, so that "
            "nothing would be quantized. Leave out quantize_base and keep_bf16."
        )
    return tuple(linear_path(name) for name in names if name in kept)
