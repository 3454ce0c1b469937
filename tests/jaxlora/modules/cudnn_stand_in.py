"""cuDNN's attention in plain JAX, with the guarantees of cuDNN and no others.

Rows and sums outside the segments of a call come back as NaN, and whatever lies behind
a segment's end is read and multiplied by zero, as in a tile of a kernel.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp


def ffi_call(target, out_types, *, output_layouts, legacy_backend_config, **_):
    """Takes the place of `jax.ffi.ffi_call`."""
    config = json.loads(legacy_backend_config)["cudnn_fmha_backend_config"]
    assert config["mask_type"] == "PADDING_CAUSAL"
    assert [len(x) for x in output_layouts] == [len(x.shape) for x in out_types]
    stand_in = _Attention(
        tokens=int(config["intermediate_tensor_shape"]["dimensions"][2]),
        scale=config["fmha_scale"],
        window=config["sliding_window_length"],
    )
    run = {
        "__cudnn$fmhaSoftmax": stand_in.forward,
        "__cudnn$fmhaSoftmaxBackward": stand_in.backward,
    }[target]

    def call(*operands):
        results = *run(*operands), jnp.zeros(0, jnp.uint8)
        return [
            x.astype(like.dtype) for x, like in zip(results, out_types, strict=True)
        ]

    return call


@dataclasses.dataclass(frozen=True)
class _Attention:
    tokens: int
    scale: float
    window: int

    def forward(self, q, k, v, lengths, _, q_offsets, kv_offsets):
        inside = self._inside(lengths)
        qs = self._gather(q, q_offsets)
        ks, vs = (self._gather(x, kv_offsets, q.shape[2]) for x in (k, v))
        scores, seen = self._scores(qs, ks, inside)
        sums = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.where(seen, jnp.exp(scores - sums[..., None]), 0)
        out = jnp.einsum("shqk,skhe->sqhe", weights, vs)
        stats = jnp.where(inside[:, None], sums, jnp.nan)
        return self._scatter(out, q, inside, q_offsets), stats

    def backward(self, q, k, v, sums, dout, out, lengths, _, q_offsets, kv_offsets):
        inside = self._inside(lengths)
        qs, dos, os = (self._gather(x, q_offsets) for x in (q, dout, out))
        ks, vs = (self._gather(x, kv_offsets, q.shape[2]) for x in (k, v))
        scores, seen = self._scores(qs, ks, inside)
        weights = jnp.where(seen, jnp.exp(scores - sums[..., None]), 0)
        # Sums must be finite for rows, and infinite where there is no row.
        right = jnp.where(inside[:, None], jnp.isfinite(sums), sums == jnp.inf)
        weights = jnp.where(right.all(), weights, jnp.nan)
        dweights = jnp.einsum("sqhe,skhe->shqk", dos, vs)
        dweights -= (dos * os).sum(-1).transpose(0, 2, 1)[..., None]
        ds = weights * dweights * self.scale
        dq = jnp.einsum("shqk,skhe->sqhe", ds, ks)
        dk = jnp.einsum("shqk,sqhe->skhe", ds, qs)
        dv = jnp.einsum("shqk,sqhe->skhe", weights, dos)
        return (
            self._scatter(dq, q, inside, q_offsets),
            self._scatter(dk, k, inside, kv_offsets),
            self._scatter(dv, v, inside, kv_offsets),
        )

    def _inside(self, lengths):
        return jnp.arange(self.tokens) < lengths[:, None]

    def _rows(self, x, offsets):
        row_elements = x.shape[-2] * x.shape[-1]
        return (offsets // row_elements)[:-1, None] + jnp.arange(self.tokens)

    def _gather(self, x, offsets, num_heads=None):
        """Returns the rows after each start: segments x tokens x heads x features."""
        flat = x.reshape(-1, *x.shape[-2:]).astype(jnp.float32)
        rows = flat.at[self._rows(x, offsets)].get(mode="clip")
        return jnp.repeat(rows, (num_heads or x.shape[2]) // x.shape[2], axis=2)

    def _scatter(self, x, like, inside, offsets):
        flat = jnp.full((like.shape[0] * self.tokens, *like.shape[2:]), jnp.nan)
        x = x.reshape(*x.shape[:2], like.shape[2], -1, x.shape[3]).sum(3)
        rows = jnp.where(inside, self._rows(like, offsets), len(flat))
        flat = flat.at[rows].set(x, mode="drop")
        return flat.reshape(like.shape).transpose(0, 2, 1, 3)

    def _scores(self, q, k, inside):
        back = jnp.arange(self.tokens)[:, None] - jnp.arange(self.tokens)
        seen = inside[:, :, None] & inside[:, None, :] & (back >= 0)
        seen = (seen & (back < (self.window or self.tokens)))[:, None]
        scores = jnp.einsum("sqhe,skhe->shqk", q, k) * self.scale
        return jnp.where(seen, scores, -jnp.inf), seen
