"""When the weights of a decoder are gathered, in the programs that devices run."""

import collections
import dataclasses
import re

import jax
import pytest
from jax.extend.core import Jaxpr, Var

from jaxlora.models.structure import linears
from tests.deviceless import compile_deviceless
from tests.jaxlora.models import test_sharded as decoders
from tests.scheduled_hlo import entry_ops, gathered_arrays, most_alive_bytes

FSDP = 4
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
H200_LAYERS, VOCABULARY = 4, 128256
# q, k, v and o, then gate, up and down, in bfloat16.
LAYER_BYTES = 2 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
HEAD_BYTES = 2 * 4096 * VOCABULARY
KERNELS_OF_A_LAYER = 10


def stepper(spec):
    """A training step on each device, and its arguments."""

    def local(base, tables, batch):
        out = decoders.loss_and_gradients(spec, base, tables, decoders.first(batch))
        return decoders.with_axis(out)

    replicated = jax.sharding.PartitionSpec()
    # make_jaxpr refuses a nested jit with options.
    run = decoders.on_devices(
        spec, local, replicated, decoders.PER_DEVICE, compiler_options=None
    )
    return run, (*decoders.arrays(spec), decoders.batches(FSDP))


# ---- the program as it is traced -----------------------------------------------------


def ancestors(jaxpr: Jaxpr) -> dict[Var, set[int]]:
    """For each variable, the numbers of the equations that it is computed from."""
    found: dict[Var, set[int]] = {}
    for number, equation in enumerate(jaxpr.eqns):
        needed = {number}
        for operand in equation.invars:
            if isinstance(operand, Var):
                needed |= found.get(operand, set())
        found |= dict.fromkeys(equation.outvars, needed)
    return found


def shard_map_body(jaxpr: Jaxpr) -> Jaxpr:
    """The program of a device."""
    (equation,) = jaxpr.eqns
    while equation.primitive.name != "shard_map":
        (equation,) = equation.params["jaxpr"].eqns
    return equation.params["jaxpr"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherGroup:
    """The gathers that wait for one barrier; all by the numbers of their equations.

    Attributes:
        gathers: The gathers.
        users: The equations that read what they gather.
        waits: The equations that the barrier waits for.
    """

    gathers: set[int]
    users: set[int]
    waits: set[int]


def readers(body: Jaxpr, variables: set[Var], primitive: str | None = None) -> set[int]:
    """The equations that read any of the variables, or those of one primitive."""
    return {
        number
        for number, equation in enumerate(body.eqns)
        if variables & {v for v in equation.invars if isinstance(v, Var)}
        and primitive in (None, equation.primitive.name)
    }


def gather_groups(body: Jaxpr) -> list[GatherGroup]:
    """The gathers, in their order."""
    needs, groups = ancestors(body), []
    for barrier in body.eqns:
        gathers = readers(body, {*barrier.outvars}, "all_gather")
        if barrier.primitive.name == "optimization_barrier" and gathers:
            gathered = {v for i in gathers for v in body.eqns[i].outvars}
            operands = [v for v in barrier.invars if isinstance(v, Var)]
            groups.append(
                GatherGroup(
                    gathers=gathers,
                    users=readers(body, gathered),
                    waits=set().union(*(needs.get(v, set()) for v in operands)),
                )
            )
    return groups


@pytest.mark.needs_devices(FSDP)
@pytest.mark.parametrize(
    "remat",
    ["none", *(pytest.param(r, marks=pytest.mark.grid) for r in ("mlp", "layer"))],
)
def test_gathers_wait_for_the_last_layer_but_one_and_not_for_the_last(remat):
    """So at most two layers' gathered weights exist, in any order that XLA chooses.

    The last layer is gathered once for both passes.
    """
    run, args = stepper(decoders.make_spec(fsdp=FSDP, remat=remat))
    groups = gather_groups(shard_map_body(jax.make_jaxpr(run)(*args).jaxpr))
    num_layers = decoders.LAYERS
    num_gathers = [7] * num_layers + [1] + [7] * (num_layers - 1)
    assert [len(group.gathers) for group in groups] == num_gathers
    forward, head, backward = (
        groups[:num_layers],
        groups[num_layers],
        groups[num_layers + 1 :],
    )
    # The backward pass starts when the loss is computed.
    assert all(group.gathers <= backward[0].waits for group in [*forward, head])
    used_again = forward[-1].users - backward[0].waits
    last_layer = dataclasses.replace(forward[-1], users=used_again)
    for one_pass in (forward, [last_layer, *backward]):
        for i, group in enumerate(one_pass):
            complete = [other.users <= group.waits for other in one_pass]
            begun = [bool(other.users & group.waits) for other in one_pass]
            assert begun == [k <= i - 2 for k in range(num_layers)]
            assert complete == begun
    complete = [group.gathers <= head.waits for group in forward]
    assert complete == [True] * (num_layers - 1) + [False]


# ---- the compiled program ------------------------------------------------------------


def collectives(text: str) -> set[str]:
    """The kinds of collectives in a compiled program."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return set(re.findall(rf" ({kinds})(?:-start)?\(", text))


@pytest.mark.needs_devices(FSDP)
@pytest.mark.grid  # the traced program has each gather once, and these are all
@pytest.mark.parametrize(("remat", "tied"), [("none", False), ("layer", True)])
def test_each_weight_is_gathered_once_in_each_pass(remat, tied):
    """But the last layer only once, and the embedding only as a head that is tied."""
    spec = decoders.make_spec(fsdp=FSDP, remat=remat, tied=tied)
    run, args = stepper(spec)
    text = run.lower(*args).compile().as_text()
    assert collectives(text) == {"all-gather", "all-to-all"}
    sizes = collections.Counter(
        array.num_bytes // 4 for array in gathered_arrays(entry_ops(text))
    )
    wanted = collections.Counter()
    embedding = spec.base_shapes()["embed_tokens.embedding"].size
    wanted[embedding] = 1  # the head
    for layer in range(decoders.LAYERS):
        for linear in linears(spec.config).values():
            size = linear.in_features * linear.out_features
            # The first layer needs no gradient of its input, so q, k and v are not
            # needed backward. The last layer keeps its weights.
            only_forward = layer == 0 and linear.name in QKV and remat == "none"
            is_last = layer == decoders.LAYERS - 1
            wanted[size] += 1 if only_forward or is_last else 2
    assert sizes == wanted


# ---- the program that is compiled for H200 -------------------------------------------


@pytest.fixture(scope="module")
def h200_program(tmp_path_factory) -> str:
    """Text of a training step of four of Llama-3.1-8B's layers on four H200s."""
    out = tmp_path_factory.mktemp("h200") / "program.txt"
    compile_deviceless("tests.jaxlora.models.h200_program", str(H200_LAYERS), out)
    return out.read_text()


def test_on_h200_at_most_two_layers_are_gathered_at_once(h200_program):
    assert "is_scheduled=true" in h200_program
    assert collectives(h200_program) == {"all-gather", "all-to-all"}
    arrays = gathered_arrays(entry_ops(h200_program))
    layers = [array for array in arrays if VOCABULARY not in array.shape]
    assert len(arrays) - len(layers) == 1, "the head is gathered once"
    assert len(layers) == 7 * (2 * H200_LAYERS - 1)
    assert most_alive_bytes(layers) <= 2 * LAYER_BYTES
    assert most_alive_bytes(arrays) <= LAYER_BYTES + HEAD_BYTES


def test_on_h200_shards_are_copied_for_each_gather(h200_program):
    """XLA's own copies to symmetric memory would stay until the backward pass."""
    assert "S(1)" in h200_program, "the gathers use symmetric memory"
    copies = [op for op in entry_ops(h200_program) if op.kind == "copy"]
    shapes = [shape for op in copies for dtype, shape in op.shapes if dtype == "bf16"]
    assert not [shape for shape in shapes if len(shape) > 1]


def test_on_h200_each_gather_overlaps_with_the_layer_before(h200_program):
    """All of a layer's kernels run between start and end of the next one's gather."""
    ops = entry_ops(h200_program)
    is_kernel = [op.kind == "custom-call" for op in ops]
    overlapped = {
        (array.start, array.done): sum(is_kernel[array.start : array.done])
        for array in gathered_arrays(ops)
    }
    # Only the first layer's gather in the forward pass has no layer before it.
    assert len(overlapped) == (2 * H200_LAYERS - 1) + 1
    idle = [count for count in overlapped.values() if count < KERNELS_OF_A_LAYER]
    assert len(idle) == 1
    assert overlapped[min(overlapped)] == idle[0]
