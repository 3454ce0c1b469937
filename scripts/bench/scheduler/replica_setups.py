"""Models, GPUs and lengths of samples for the benchmark of replicas."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlora.costs.gpus import find_speed, parse_machine
from jaxlora.models.options import DecoderOptions, Remat
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linears
from jaxlora.modules.multi_lora_linear import SlotShape
from jaxlora.pallas_kernels.device import planned_for
from jaxlora.plan.memory.device_memory import device_memory
from jaxlora.plan.memory.gpu_share import SHARE
from jaxlora.plan.mesh.predict import Rates
from jaxlora.plan.replicas.kinds import ReplicaModel
from jaxlora.scheduler import AffineCost
from jaxlora.scheduler.replicas import ReplicaKind
from scripts.bench.shapes import config_json

LONGEST, STEPS = 16384, 100
# Median, width and batch size of the samples of each job. All twelve together have
# about the mix of Figure 4: 75, 17, 7 and 1 % up to 2,048, 4,096, 8,192 and 16,384
# tokens, where the figure has 71, 22, 6 and 1 %.
JOBS = (
    (150, 0.5, 64),
    (300, 0.6, 64),
    (500, 0.6, 64),
    (800, 0.6, 64),
    (1000, 0.6, 64),
    (1300, 0.6, 64),
    (1600, 0.6, 32),
    (2000, 0.6, 32),
    (2400, 0.6, 32),
    (2800, 0.6, 32),
    (3200, 0.6, 32),
    (3600, 0.6, 32),
)
# Share of their speed that GPUs keep, beside all-reduces, if tensor parallelism is
# doubled inside a machine, and over two machines.
LOSSY, LOSSY_ACROSS = 0.88, 0.6
COSTS = ("data sheet", "lossy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A model and GPUs of the paper.

    Attributes:
        name: Name in tables.
        config: The model's config.json.
        gpus: The GPUs, as in `--gpu`.
        link_bytes: Bytes per second from one GPU to another in the same machine.
        network_gbits: Gigabits per second between machines.
        jobs: The jobs.
        remat: Part of each layer that the backward pass recomputes.
        saved: What LobRA saves over Task-Fused, in the paper.
        fused, deployment: The paper's deployments (Table 2), as tensor x stage.
    """

    name: str
    config: dict[str, Any]
    gpus: str
    link_bytes: float
    network_gbits: float
    jobs: tuple[tuple[float, float, int], ...]
    saved: str
    fused: str
    deployment: str
    remat: Remat = "none"


def _llama2(width: int, mlp: int, layers: int, heads: int, kv: int) -> dict[str, Any]:
    return config_json("llama-3.1-8b", layers) | {
        "vocab_size": 32000,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rope_scaling": None,
    }


A800 = {"gpus": "a100-80x64", "link_bytes": 200e9, "network_gbits": 1600.0}
SETUPS = (
    Setup(
        name="Llama2-7B",
        config=_llama2(4096, 11008, 32, 32, 32),
        gpus="a100-40x16",
        link_bytes=300e9,
        network_gbits=800.0,
        jobs=JOBS[::2],
        saved="45.03 %",
        fused="2 x <8,1>",
        deployment="6 x <1,1> + 1 x <2,1> + 1 x <8,1>",
    ),
    Setup(
        name="Qwen2.5-32B",
        config=config_json("qwen2.5-32b"),
        jobs=JOBS,
        saved="45 to 61 %",
        fused="8 x <8,1>",
        deployment="4 x <1,6> + 4 x <2,2> + 2 x <4,1> + 2 x <8,1>",
        **A800,
    ),
    Setup(
        name="Llama2-70B",
        config=_llama2(8192, 28672, 80, 64, 8),
        jobs=JOBS,
        saved="60.67 %",
        fused="4 x <16,1>",
        deployment="4 x <2,4> + 1 x <4,2> + 1 x <8,1> + 1 x <16,1>",
        remat="mlp",  # without it, no replica of 16 GPUs holds 16,384 tokens
        **A800,
    ),
)

# The jobs on GPUs of today, of which each machine has eight.
SCALING = Setup(
    name="Llama-3.1-8B",
    config=config_json("llama-3.1-8b"),
    gpus="h100x8",
    link_bytes=337e9,
    network_gbits=3200.0,
    jobs=JOBS,
    saved="",
    fused="",
    deployment="",
)


def draw_jobs(
    jobs: Sequence[tuple[float, float, int]], num_steps: int, seed: int = 0
) -> list[list[np.ndarray]]:
    """Draws lengths of the samples of each job in each step [jobs][steps]."""
    out = []
    for job, (median, width, size) in enumerate(jobs):
        rng = np.random.default_rng([seed, job])
        drawn = median * np.exp(width * rng.normal(size=(num_steps, size)))
        out.append(list(np.clip(np.rint(drawn), 16, LONGEST).astype(int)))
    return out


def together(jobs: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Returns the lengths of the samples of all jobs in each step."""
    return [np.concatenate(step) for step in zip(*jobs, strict=True)]


def make_kinds(
    setup: Setup, costs: str, num_gpus: int | None = None
) -> tuple[ReplicaKind, ...]:
    """Returns the kinds of replicas of a model on its GPUs, or on as many as given."""
    config = model_config(setup.config)
    layers = range(config.num_layers)
    adapted = sorted(f"layers.{i}.{n}" for i in layers for n in linears(config))
    machine = parse_machine(setup.gpus)
    if num_gpus is not None:
        machine = dataclasses.replace(machine, count=num_gpus)
    options = DecoderOptions(
        dtype=jnp.dtype(jnp.bfloat16),
        implementation="triton",
        attention="triton",
        max_segment_tokens=LONGEST,
        remat=setup.remat,
    )
    speed = dataclasses.replace(
        find_speed(machine.gpu.kind), link_bytes=setup.link_bytes
    )
    lengths = np.concatenate(together(draw_jobs(setup.jobs, 20))).astype(float)
    with planned_for(machine.planned(SHARE)):
        memory = device_memory(0)
        assert memory is not None
        kinds = ReplicaModel(
            spec=DecoderSpec(
                config=config,
                options=options,
                slots=SlotShape(num_slots=len(setup.jobs), rank=16),
                adapted=tuple(adapted),
            ),
            rates=Rates.of(speed, 8, setup.network_gbits),
            free_bytes=memory.num_bytes,
            num_gpus=machine.count,
            block_tokens=128,
            capacity=8192,
            mean_tokens=float((lengths**2).sum() / lengths.sum()),
        ).kinds()
    return kinds if costs == "data sheet" else tuple(map(lossy, kinds))


def lossy(kind: ReplicaKind) -> ReplicaKind:
    """Returns a kind whose tensor parallelism loses more than its all-reduces take."""
    doublings = math.log2(kind.tensor)
    keeps = LOSSY ** min(3.0, doublings) * (LOSSY_ACROSS if doublings > 3 else 1.0)
    cost = kind.cost * (1 / keeps)
    return dataclasses.replace(
        kind, cost=dataclasses.replace(cost, base=kind.cost.base)
    )


# GPUs, longest sample and share of the speed of single GPUs, of kinds without a model.
PLAIN = (
    (1, 2048, 1.0),
    (2, 4096, 0.92),
    (4, 8192, 0.78),
    (8, 16384, 0.58),
    (16, 32768, 0.33),
)


def plain_kinds() -> tuple[ReplicaKind, ...]:
    """Returns kinds of replicas whose costs do not follow from a model."""
    return tuple(
        ReplicaKind(
            tensor=gpus,
            longest=longest,
            cost=AffineCost(
                base=300.0,
                per_token=1 / (gpus * keeps),
                per_square=2e-5 / (gpus * keeps),
            ),
        )
        for gpus, longest, keeps in PLAIN
    )


def draw_mix(seed: int, num_samples: int, num_steps: int) -> list[np.ndarray]:
    """Draws lengths of steps of four to twelve jobs, and the jobs and shares, too."""
    rng = np.random.default_rng([9, seed])
    num = int(rng.integers(4, 13))
    medians = np.exp(rng.uniform(np.log(120), np.log(3500), num))
    widths, shares = rng.uniform(0.4, 0.8, num), rng.dirichlet(np.ones(num) * 1.5)
    jobs = rng.choice(num, (num_steps, num_samples), p=shares)
    drawn = medians[jobs] * np.exp(widths[jobs] * rng.normal(size=jobs.shape))
    return list(np.clip(np.rint(drawn), 16, LONGEST).astype(int))
