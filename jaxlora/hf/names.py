"""Translates between Hugging Face's names of tensors and modules and ours."""

import dataclasses

from jaxlora.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One base weight.

    Attributes:
        hf_name: Name in the checkpoint.
        path: Name in this library.
        hf_shape: Shape in the checkpoint; linears are N K there.
        transpose: Whether our array is the transpose; linears are K N here.
    """

    hf_name: str
    path: str
    hf_shape: tuple[int, ...]
    transpose: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of our array."""
        return self.hf_shape[::-1] if self.transpose else self.hf_shape


def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Returns every base weight of a model."""
    v, d = config.vocab_size, config.hidden_size
    specs = [
        TensorSpec(
            hf_name="model.embed_tokens.weight",
            path="embed_tokens.embedding",
            hf_shape=(v, d),
        )
    ]
    for layer in range(config.num_layers):
        specs += _layer_specs(config, f"layers.{layer}")
    specs.append(
        TensorSpec(hf_name="model.norm.weight", path="norm.scale", hf_shape=(d,))
    )
    if not config.tie_embeddings:
        specs.append(
            TensorSpec(
                hf_name="lm_head.weight",
                path="lm_head.kernel",
                hf_shape=(v, d),
                transpose=True,
            )
        )
    return tuple(specs)


def _layer_specs(config: ModelConfig, layer: str) -> list[TensorSpec]:
    sizes = config.norms()
    specs = [
        TensorSpec(
            hf_name=f"model.{layer}.{norm.hf_name}.weight",
            path=f"{layer}.{norm.name}.scale",
            hf_shape=(sizes[norm.name],),
        )
        for norm in config.family.norms
    ]
    for linear in config.linears().values():
        path = f"{layer}.{linear.name}"
        specs.append(
            TensorSpec(
                hf_name=f"model.{path}.weight",
                path=f"{path}.kernel",
                hf_shape=(linear.out_features, linear.in_features),
                transpose=True,
            )
        )
        if linear.use_bias:
            specs.append(
                TensorSpec(
                    hf_name=f"model.{path}.bias",
                    path=f"{path}.bias",
                    hf_shape=(linear.out_features,),
                )
            )
    return specs


def linear_names(config: ModelConfig) -> tuple[str, ...]:
    """Returns Hugging Face's module names of the linears that LoRA may adapt."""
    return tuple(
        f"model.layers.{layer}.{name}"
        for layer in range(config.num_layers)
        for name in config.linears()
    )


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns the shape (K, N) of each linear that LoRA may adapt, by module name."""
    linears = config.linears()
    return {
        f"model.layers.{layer}.{name}": (linear.in_features, linear.out_features)
        for layer in range(config.num_layers)
        for name, linear in linears.items()
    }


def linear_path(module_name: str) -> str:
    """Returns our path of a linear, `layers.0.mlp.up_proj`, from its module name."""
    return module_name.removeprefix("model.")
