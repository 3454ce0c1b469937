"""The one table between Hugging Face's tensor names and ours."""

import dataclasses

from jaxlora.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One base weight.

    Attributes:
        hf_name: Its name in the checkpoint.
        path: Its name here.
        hf_shape: Its shape in the checkpoint; linears are N K there.
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


def _linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    """(N, K, whether it has a bias) of a layer's linears."""
    d, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj": (q, d, config.qkv_bias),
        "self_attn.k_proj": (kv, d, config.qkv_bias),
        "self_attn.v_proj": (kv, d, config.qkv_bias),
        "self_attn.o_proj": (d, q, config.o_bias),
        "mlp.gate_proj": (f, d, config.mlp_bias),
        "mlp.up_proj": (f, d, config.mlp_bias),
        "mlp.down_proj": (d, f, config.mlp_bias),
    }


def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every base weight of a model."""
    d, v = config.hidden_size, config.vocab_size

    def norm(name: str, size: int) -> TensorSpec:
        return TensorSpec(
            hf_name=f"model.{name}.weight", path=f"{name}.scale", hf_shape=(size,)
        )

    specs = [
        TensorSpec(
            hf_name="model.embed_tokens.weight",
            path="embed_tokens.embedding",
            hf_shape=(v, d),
        )
    ]
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        specs += [
            norm(f"{layer}.input_layernorm", d),
            norm(f"{layer}.post_attention_layernorm", d),
        ]
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                specs.append(norm(f"{layer}.self_attn.{name}", config.head_dim))
        for name, (n, k, has_bias) in _linear_shapes(config).items():
            hf = f"model.{layer}.{name}"
            specs.append(
                TensorSpec(
                    hf_name=f"{hf}.weight",
                    path=f"{layer}.{name}.kernel",
                    hf_shape=(n, k),
                    transpose=True,
                )
            )
            if has_bias:
                specs.append(
                    TensorSpec(
                        hf_name=f"{hf}.bias",
                        path=f"{layer}.{name}.bias",
                        hf_shape=(n,),
                    )
                )
    specs.append(norm("norm", d))
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


def linear_names(config: ModelConfig) -> tuple[str, ...]:
    """Module names of the linears that LoRA may adapt, in Hugging Face's spelling."""
    return tuple(
        f"model.layers.{i}.{name}"
        for i in range(config.num_layers)
        for name in _linear_shapes(config)
    )


def linear_path(module_name: str) -> str:
    """Our path of a linear: `layers.0.mlp.up_proj` of `model.layers.0.mlp.up_proj`."""
    return module_name.removeprefix("model.")


def linear_module(path: str) -> str:
    """Hugging Face's module name of one of our paths; inverse of `linear_path`."""
    return f"model.{path}"
