"""The tiny Llama with LoRA in float64, by its definition in plain `jax.numpy`."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import tiny


def logprobs(lora: dict, scalings: dict, tokens, targets):
    """Log-probability of each position's target.

    Args:
        lora: (A, B) by module name, K r and r N.
        scalings: Factor of A B, by module name.
        tokens: The tokens of one datum.
        targets: Their targets.
    """
    config = tiny.CONFIG
    weights = {k: jnp.asarray(v, float) for k, v in tiny.random_weights().items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    num, size = len(tokens), config["hidden_size"] // heads

    def linear(name, x):
        y = x @ weights[f"{name}.weight"].T
        if name in lora:
            a, b = lora[name]
            y += scalings[name] * (x @ a) @ b
        return y

    def norm(name, x):
        root = jnp.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return x / root * weights[f"{name}.weight"]

    angle = np.arange(num)[:, None] * config["rope_theta"] ** -(
        np.arange(0, size, 2) / size
    )
    cos, sin = (np.tile(f(angle), 2)[:, None] for f in (np.cos, np.sin))

    def rotated(x):
        first, second = jnp.split(x, 2, axis=-1)
        return x * cos + jnp.concatenate([-second, first], -1) * sin

    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h, at = norm(f"{layer}.input_layernorm", x), f"{layer}.self_attn"
        q = rotated(linear(f"{at}.q_proj", h).reshape(num, heads, size))
        k = rotated(linear(f"{at}.k_proj", h).reshape(num, kv_heads, size))
        v = linear(f"{at}.v_proj", h).reshape(num, kv_heads, size)
        k, v = (jnp.repeat(one, heads // kv_heads, axis=1) for one in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / size**0.5
        scores = jnp.where(np.tri(num, dtype=bool), scores, -jnp.inf)
        mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)
        x += linear(f"{at}.o_proj", mixed.reshape(num, -1))
        h, mlp = norm(f"{layer}.post_attention_layernorm", x), f"{layer}.mlp"
        gate = jax.nn.silu(linear(f"{mlp}.gate_proj", h))
        x += linear(f"{mlp}.down_proj", gate * linear(f"{mlp}.up_proj", h))
    logits = norm("model.norm", x) @ weights["model.embed_tokens.weight"].T
    return jax.nn.log_softmax(logits)[np.arange(num), targets]
