"""One decoder for all families, whole or one pipeline stage of it."""

import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlora.models.build import LayerBuilder, make_norm
from jaxlora.models.config import ModelConfig
from jaxlora.models.layer import run_whole_layers
from jaxlora.models.options import DecoderOptions
from jaxlora.models.score import ScoreHead
from jaxlora.models.sharded import gathered_dim, run_sharded_layers
from jaxlora.models.slot_modules import SLOT_MODULES
from jaxlora.models.token_rows import TokenRows
from jaxlora.models.whole_tables import WholeTables
from jaxlora.modules.base_param import BaseParam, with_layout
from jaxlora.modules.expert_linear import ExpertLinear
from jaxlora.modules.loss import HeadRows
from jaxlora.modules.multi_lora_linear import MultiLoraLinear
from jaxlora.modules.routing import Place, Routing
from jaxlora.modules.rows import PackedRows, layer_ropes
from jaxlora.modules.shared_inputs import with_shared_inputs
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.modules.whole_head import WholeHeads
from jaxlora.sharding import layerwise
from jaxlora.sharding.tensor import own_indices, own_part, scatter_rows


class Embedding(nnx.Module):
    """The frozen token embedding, V D."""

    def __init__(self, vocab_size: int, features: int, *, dtype):
        self.embedding = with_layout(
            BaseParam(jnp.zeros((vocab_size, features), dtype)),
            hf_name="model.embed_tokens.weight",
            dimensions=("V", "D"),
            divided="V",
            # A device can then look up its columns for the tokens of all devices.
            gathered=(1,),
        )


class Head(nnx.Module):
    """The frozen output projection, D V."""

    def __init__(self, features: int, vocab_size: int, *, dtype):
        self.kernel = with_layout(
            BaseParam(jnp.zeros((features, vocab_size), dtype)),
            hf_name="lm_head.weight",
            dimensions=("D", "V"),
            divided="V",
            transpose=True,
        )


class Decoder(nnx.Module):
    """A decoder over packed rows, or one pipeline stage of it.

    A forward pass is `embed`, `run_layers`, and `norm` with the head. A stage has only
    its own layers, under their numbers in the whole model.

    It also has the modules of `SLOT_MODULES` that its slots train and that belong to
    its layers; the others are None.

    Attributes:
        config: The model's mathematics.
        options: How it runs.
        slots: Shape of the slot tables; None: there are none.
        embed_tokens: The embedding: on the first stage, and on the last if tied.
        layers: The layers of this stage, by number.
        norm: The final norm; None except on the last stage.
        lm_head: The head; None except on the last stage, or if it is tied.
    """

    score: ScoreHead | None
    token_rows: TokenRows | None
    head_rows: TokenRows | None
    whole_embedding: WholeTables | None
    whole_head: WholeTables | None

    def __init__(
        self,
        config: ModelConfig,
        options: DecoderOptions,
        slots: SlotShape | None,
        adapted: frozenset[str],
        *,
        layers: range,
    ):
        """Makes the modules; weights are placeholders until `DecoderSpec.bind`.

        Args:
            config: The model's mathematics.
            options: How it runs.
            slots: Shape of the slot tables of every adapted linear.
            adapted: Paths of the linears that get slots (`layers.0.self_attn.q_proj`).
            layers: Numbers of the layers to make.
        """
        self.config, self.options, self.slots = config, options, slots
        dtype, width = options.dtype, config.hidden_size
        is_first, is_last = layers.start == 0, layers.stop == config.num_layers
        is_tied = config.tie_embeddings
        embedding = functools.partial(Embedding, config.vocab_size, width, dtype=dtype)
        self.embed_tokens = embedding() if is_first or (is_last and is_tied) else None
        self.layers = nnx.Dict(
            {
                str(i): config.family.layer(
                    config, LayerBuilder(config, i, options, slots, adapted)
                )
                for i in layers
            }
        )
        self._numbers = layers
        norm = functools.partial(make_norm, config, width, "model.norm", dtype=dtype)
        self.norm = norm() if is_last else None
        head = functools.partial(Head, width, config.vocab_size, dtype=dtype)
        self.lm_head = head() if is_last and not is_tied else None
        for name, module in SLOT_MODULES.items():
            made, num_rows = None, 0 if slots is None else slots.num_rows(name)
            if slots and num_rows and (is_first if module.is_first else is_last):
                sizes = module.shape(config, num_rows)
                made = module.make(slots.num_slots, sizes, options.tensor)
            setattr(self, name, made)

    def embed(
        self, token_ids: Int[Array, " T"], block_adapter: Int[Array, " NB"]
    ) -> Float[Array, "U D"]:
        """Hidden states before the first layer; only on the first stage.

        Args:
            token_ids: Packed tokens.
            block_adapter: Slot of each block of them; -1: none.
        """
        assert self.embed_tokens is not None
        table, tensor = self.embed_tokens.embedding[...], self.options.tensor
        ids, is_own = token_ids, None
        if tensor > 1:
            ids, is_own = own_indices(token_ids, len(table), tensor)
        if self.options.fsdp == 1:
            h = table[ids]
        else:
            layerwise.check_axis(self.options.fsdp)
            h = layerwise.look_up(table, ids)
        if is_own is not None:
            h = jnp.where(is_own[:, None], h, 0)
            h = scatter_rows(h, tensor)
        if self.token_rows is not None:
            own = token_ids, block_adapter
            if tensor > 1:  # a block is divided into as many as there are devices
                blocks = jnp.repeat(block_adapter, tensor)
                own = own_part(token_ids, 0), own_part(blocks, 0)
            h = self.token_rows.looked_up(h, *own)
        if self.whole_embedding is not None:
            assert tensor == 1, "whole copies are not divided"
            h = self.whole_embedding.looked_up(h, token_ids, block_adapter)
        if (multiplier := self.config.embedding_multiplier) != 1:
            # It is rounded to the dtype, as in transformers.
            h *= jnp.asarray(multiplier, h.dtype)
        return h

    def run_layers(
        self,
        h: Float[Array, "U D"],
        positions: Int[Array, " T"],
        segment_ids: Int[Array, " T"],
        routing: Routing,
    ) -> tuple[Float[Array, "U D"], Float[Array, "U D"]]:
        """The output and the input of the last layer of this stage.

        Args:
            h: Hidden states before the first layer of this stage.
            positions: Each token's position in its own sample.
            segment_ids: Which sample each row belongs to; negative: padding.
            routing: Slot of each row, and the keys of dropout masks.
        """
        rows = PackedRows(
            ropes=layer_ropes(self.config, positions),
            routing=self._with_shared_inputs(routing),
            segment_ids=segment_ids,
            lengths=self.options.lengths,
            implementation=self.options.attention,
            wide_heads=self.options.wide_heads,
        )
        layers = {i: self.layers[str(i)] for i in self._numbers}
        remat, fsdp = self.options.remat, self.options.fsdp
        if fsdp > 1:
            layerwise.check_axis(fsdp)
            number = self.config.num_layers
            return run_sharded_layers(layers, number, remat, fsdp, h, rows)
        return run_whole_layers(layers, remat, h, rows)

    def _with_shared_inputs(self, routing: Routing) -> Routing:
        linears: dict[Place, MultiLoraLinear | ExpertLinear] = {
            (int(path.split(".")[1]), linear.projection): linear
            for path, linear in self._linears().items()
        }
        return with_shared_inputs(linears, routing)

    def __call__(
        self,
        token_ids: Int[Array, " T"],
        positions: Int[Array, " T"],
        segment_ids: Int[Array, " T"],
        routing: Routing,
    ) -> Float[Array, "U D"]:
        """Hidden states after the final norm; the head turns them into logits.

        Args:
            token_ids: Packed tokens.
            positions: Each token's position in its own sample.
            segment_ids: Which sample each row belongs to; negative: padding.
            routing: Slot of each row, and the keys of dropout masks.
        """
        h = self.embed(token_ids, routing.block_adapter)
        h, _ = self.run_layers(h, positions, segment_ids, routing)
        return self.final_norm(h)

    def keep_constants(self) -> None:
        """Computes once what does not change while weights and slots stay."""
        for linear in self._linears().values():
            if isinstance(linear, ExpertLinear):
                continue  # nothing that it computes stays
            linear.keep_constants(self.options.dtype)

    def final_norm(self, h: Float[Array, "U D"]) -> Float[Array, "U D"]:
        """Normalized hidden states, as the head takes them; only on the last stage."""
        assert self.norm is not None
        return self.norm(h)

    def head_input(self, hidden: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Hidden states after the final norm, as the head multiplies them.

        In a family that multiplies the logits, these are multiplied instead.
        """
        multiplier = self.config.logit_multiplier
        return hidden if multiplier == 1 else hidden * multiplier

    def _linears(self) -> dict[str, MultiLoraLinear | ExpertLinear]:
        """All linears, by path, which is the order of `SlotSettings`.

        In that order, XLA sees that stacking their settings gives `SlotSettings` back.
        """
        linears = {
            ".".join(map(str, path)): module
            for path, module in nnx.iter_modules(self)
            if isinstance(module, MultiLoraLinear | ExpertLinear)
        }
        return dict(sorted(linears.items()))

    def own_head_rows(self, block_adapter: Int[Array, " NB"]) -> HeadRows | None:
        """Rows of the head that slots train; None: no slot does.

        Args:
            block_adapter: Slot of each block of hidden states; -1: none.
        """
        if self.norm is None:
            return None
        rows = self.token_rows if self.lm_head is None else self.head_rows
        return None if rows is None else rows.of_head(block_adapter)

    def whole_heads(self, block_adapter: Int[Array, " NB"]) -> WholeHeads | None:
        """Heads that slots train as a whole; None: no slot does.

        Args:
            block_adapter: Slot of each block of hidden states; -1: none.
        """
        if self.whole_head is None:
            return None
        return self.whole_head.of_head(block_adapter)

    def stored_head(self, before: Float[Array, "T D"]) -> tuple[Array, bool]:
        """The output projection in its stored layout, without a copy; whether V D.

        Args:
            before: Hidden states before the last layer. If the head is divided among
                devices, it is gathered as soon as they are computed.
        """
        if self.lm_head is None:
            assert self.embed_tokens is not None
            head, transposed = self.embed_tokens.embedding, True
        else:
            head, transposed = self.lm_head.kernel, False
        array = head[...]
        dim = gathered_dim(head, self.options.fsdp)
        if dim is not None:
            (array,) = layerwise.gather([array], [dim], before)
        return array, transposed
