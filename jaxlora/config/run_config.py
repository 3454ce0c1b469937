"""The settings of a run: a base model, its jobs, and how the machine is used."""

from typing import Annotated, Any, Literal

import pydantic

from jaxlora.common.note import Note
from jaxlora.config.aliases import JOB_HINTS, JOB_NAMES, RUN_NAMES
from jaxlora.config.base_settings import BaseSettings
from jaxlora.config.data_config import DataConfig
from jaxlora.config.expansion import expand_run
from jaxlora.config.generation_settings import SamplesConfig
from jaxlora.config.lora_job import LoraJob
from jaxlora.config.replicas_config import (
    ReplicaConfig,
    ReplicaShape,
    in_order,
    replica_rules,
)
from jaxlora.config.rules import OF_A_RUN, mesh_text
from jaxlora.config.strict import (
    AtLeastOne,
    Bool,
    InputPath,
    NonNegativeFloat,
    OutputPath,
    PositiveFloat,
    PositiveInt,
    Share,
    Texts,
    Tokens,
)
from jaxlora.config.sweep_config import Sweep
from jaxlora.problems import Source, problems_of, settings_error
from jaxlora.scheduler import Limits, Pace, PackerName
from jaxlora.sharding.mesh_sizes import ONE_DEVICE, MeshSizes


class RunConfig(BaseSettings):
    """One run: a base model, the jobs that share it, and how the machine is used.

    `BaseSettings` describes the settings of a quantized base.

    Attributes:
        model: Folder of a Hugging Face checkpoint, or a hub id.
        revision: Branch, tag or commit on the hub.
        output_dir: Where adapters, checkpoints, metrics and plots go.
        jobs: The adapters. More than `max_concurrent_jobs` wait for a free slot.
        max_concurrent_jobs: Adapter slots G; None: one for each job.
        slot_rank: Largest rank that a slot holds; None: the jobs' largest.
        slot_targets: Modules that get slots, as in `target_modules`, beyond those of
            the jobs: for jobs that join later.
        slot_dropout: Whether slots can drop features; None: if any job does.
        adapters_per_microbatch: Most adapters of experts in a microbatch. Each adapter
            of an expert fills whole blocks of rows, so more of them need more padding.
        expert_layout: How LoRA on experts is written to PEFT folders: `per_expert`, a
            tensor for each linear of an expert; `fused`, one for those of all experts;
            or `auto`: as peft reads it, per expert if it reads both.
        mesh: Devices that the run uses, as sizes of the axes `data` (replicas), `stage`
            (pipeline stages), `fsdp` (devices that share the base weights), `expert`
            (devices that share the experts of each layer) and `tensor` (devices that
            share each microbatch), such as `stage=2,fsdp=2`, or as a mapping; `auto`
            chooses the sizes.
        replicas: Replicas that differ in their devices or in the size of their
            microbatches, and train the same adapters; samples run where they fit.
            `auto` chooses them, or equal ones. None: replicas are equal (axis `data` of
            `mesh`).
        pipeline_microbatches: Microbatches that the first pipeline stage has in flight,
            at least one for each stage; None: as many as there are stages. More hide
            transfers between stages and uneven microbatches, but take memory, and the
            next batch of a job starts that much later.
        padding_share: Time of a row of padding as a share of a token's, for which the
            microbatches of meshes with stages are packed. With a share below 1, a batch
            that has the pipeline to itself begins and ends with smaller microbatches,
            so that the pipeline fills and drains faster. With 1, microbatches are as
            few as possible. `auto` takes the share that `jaxlora profile` measured, or
            else a usual one for the kernels.
        network_gbits: Gigabits per second, in each direction, between a host and all
            others, for `mesh: auto` on several hosts; None: by the data sheet of the
            machine that the GPU is usually sold in.
        microbatch_tokens: Capacity C of a microbatch, in tokens, padding included;
            `auto` takes the largest that fits into the device's memory and that the
            jobs can fill, or on several devices less if that is predicted to be faster.
        microbatch_shapes: Capacities, in tokens, of smaller microbatches, whose
            programs are compiled beside training; each microbatch has the smallest one
            that holds it. Those that are not smaller than `microbatch_tokens` are left
            out.
        shape_compile_seconds: Time in which `microbatch_shapes` should be compiled.
            They are used after as many microbatches as are predicted to take this time,
            so that the same run always has the same microbatches; training then waits
            for programs that are not ready. 0: training waits before its first step.
        block_tokens: Tokens of a block; each job's part of a microbatch fills whole
            blocks.
        dtype: Dtype of the base weights and activations; `auto` is bfloat16 on a GPU
            and float32 on a CPU.
        remat: Part of each layer that the backward pass recomputes to save memory:
            `none`, `elementwise` (all but the results of linears and of fused
            attention), `mlp` (with its norm), or `layer`. `auto` takes the one that is
            predicted to train fastest with the microbatches that fit beside it.
        layers_per_program: Layers of the decoder that each compiled program runs.
            Layers that are alike share one, so that a deep model takes as long to
            compile as a few of its layers. `auto` chooses it for deep models on meshes
            without `fsdp` and `stage`.
        implementation: Which LoRA kernels run: `mosaic` (Hopper), `triton` (NVIDIA
            GPUs from Ampere on) or `xla` (anywhere);
            `auto` takes the first back end of `pallas_kernels.BACKENDS` that can run
            every adapted linear.
        attention: Attention implementation: `cudnn` (GPUs of data centers from Hopper
            on), `triton` (NVIDIA GPUs from Ampere on) or `xla` (anywhere); `auto` takes
            the first of these that can run the model.
        window_steps: Rounds between two reports of the speed. A round ends when every
            running job has taken an optimizer step. The packers `greedy` and
            `lorafusion` pack that many batches of each job together.
        preempt: Whether a waiting job takes the slot of a running job of strictly lower
            priority, after that job's current global batch. The paused job keeps its
            whole state and continues when a slot is free, so no work is lost.
        pace: How running jobs of the same priority share microbatches: `together` lets
            them end at the same time, `equal` gives the same number of tokens to each.
            `auto` is `together` for a sweep, whose configurations wait for each other,
            and with pipeline stages or `replicas`, where one job alone would leave
            devices idle; otherwise it is `equal`, which needs the packer `joint`.
        packer: Packing algorithm: `joint` packs all jobs in one stream, without a
            break; `greedy` packs one step of every job at a time; `lorafusion` is
            LoRAFusion's algorithm.
        checkpoint_every: Rounds between checkpoints; None: only at the end and when
            interrupted. `auto` goes by `checkpoint_seconds`, or has 50 rounds with
            pipeline stages or several processes.
        checkpoint_seconds: Least time between checkpoints if `checkpoint_every` is
            `auto`.
        keep_checkpoints: Number of checkpoints to keep.
        log_every: Rounds between lines of the training log, at most one for each
            report of the speed.
        token_cache: Whether the tokens of data are kept in ~/.cache/jaxlora/tokens, so
            that later runs on the same data need not compute them again.
        report_to: Experiment trackers that receive each job's metrics: `tensorboard`,
            `wandb` (W&B) and `trackio`; one name or a list. `none`: no tracker.
        samples: Prompts that each job answers at its evaluations, in the log, to show
            what it learns. Training is the same with and without them.
        sweep: The jobs are configurations to choose from. If it has `parameters`, each
            job is expanded into one job for each configuration, and `sweep` then has
            none.
    """

    aliases, hints = RUN_NAMES, JOB_HINTS
    rules = (*BaseSettings.rules, *OF_A_RUN, replica_rules)
    belongs = dict.fromkeys(
        [*LoraJob.model_fields, *JOB_NAMES],
        "a job. Put it there, or into defaults for all jobs",
    )

    model: InputPath
    revision: str | None = None
    output_dir: OutputPath = "runs/jaxlora"
    jobs: tuple[LoraJob, ...]
    max_concurrent_jobs: PositiveInt | None = None
    slot_rank: PositiveInt | None = None
    slot_targets: Texts | None = None
    slot_dropout: Bool | None = None
    adapters_per_microbatch: PositiveInt = 4
    expert_layout: Literal["auto", "per_expert", "fused"] = "auto"
    mesh: str = ONE_DEVICE
    replicas: (
        Literal["auto"] | Annotated[tuple[ReplicaConfig, ...], AtLeastOne] | None
    ) = None
    pipeline_microbatches: PositiveInt | None = None
    padding_share: Share | Literal["auto"] = "auto"
    network_gbits: PositiveFloat | None = None
    microbatch_tokens: Tokens | Literal["auto"] = "auto"
    microbatch_shapes: tuple[Tokens, ...] = ()
    shape_compile_seconds: NonNegativeFloat = 60.0
    block_tokens: Tokens = 64
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    remat: Literal["none", "elementwise", "mlp", "layer", "auto"] = "none"
    layers_per_program: PositiveInt | Literal["auto"] = "auto"
    implementation: str = "auto"
    attention: Literal["auto", "cudnn", "triton", "xla"] = "auto"
    window_steps: PositiveInt = 4
    preempt: Bool = True
    pace: Literal["auto"] | Pace = "auto"
    packer: PackerName = "joint"
    checkpoint_every: PositiveInt | Literal["auto"] | None = "auto"
    checkpoint_seconds: PositiveFloat = 120.0
    keep_checkpoints: PositiveInt = 2
    log_every: PositiveInt = 1
    token_cache: Bool = True
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    samples: SamplesConfig | None = None
    sweep: Sweep | None = None
    _notes: tuple[Note, ...] = ()

    def __init__(self, /, **settings: Any):
        """Expands a sweep and lists in jobs, and checks the settings.

        Raises:
            ConfigError: Settings break rules; the message lists them all.
        """
        expansion = expand_run(settings)
        problems = list(expansion.problems)
        try:
            pydantic.BaseModel.__init__(self, **expansion.values)
        except pydantic.ValidationError as found:
            problems += problems_of(found)
        if problems:
            raise settings_error(problems, Source("RunConfig"))
        self._notes = expansion.notes

    # Without this mark, pydantic would call it again for settings already expanded.
    __init__.__pydantic_base_init__ = True  # pyrefly: ignore[missing-attribute]

    @property
    def notes(self) -> tuple[Note, ...]:
        """Lines for the log about how a sweep and lists in jobs were expanded."""
        return self._notes

    @property
    def limits(self) -> Limits:
        """Limits of a microbatch; `microbatch_tokens` must be a number, not `auto`."""
        assert isinstance(self.microbatch_tokens, int), "auto is not settled yet"
        return Limits(capacity=self.microbatch_tokens, block_tokens=self.block_tokens)

    @property
    def weakest_remat(self) -> Literal["none", "elementwise", "mlp", "layer"]:
        """`remat`; while it is `auto`, the weakest that it may become."""
        return "none" if self.remat == "auto" else self.remat

    @property
    def mesh_sizes(self) -> MeshSizes:
        """Sizes of the mesh; `mesh` must not be `auto`."""
        assert self.mesh != "auto", "auto is not settled yet"
        return MeshSizes.parse(mesh_text(self.mesh))

    @property
    def replica_shapes(self) -> tuple[ReplicaShape, ...]:
        """Each of `replicas`, those with the largest microbatches first.

        There are none while `replicas`, or one of their sizes, is `auto`.
        """
        if self.replicas is None or self.replicas == "auto":
            return ()
        each = []
        for one in self.replicas:
            if one.microbatch_tokens == "auto":
                return ()
            shape = ReplicaShape(tokens=one.microbatch_tokens, tensor=one.tensor)
            each += [shape] * one.count
        return tuple(in_order(each))

    @property
    def has_open_replicas(self) -> bool:
        """Whether `replicas`, or one of their sizes, is `auto`."""
        return self.replicas is not None and not self.replica_shapes

    @property
    def num_devices(self) -> int:
        """Number of devices that the run uses; `mesh` must not be `auto`."""
        each = [one.tensor for one in self.replica_shapes]
        return sum(each) or self.mesh_sizes.num_devices

    @property
    def settled_pace(self) -> Pace:
        """The pace of running jobs; `mesh` must not be `auto`."""
        if self.pace != "auto":
            return self.pace
        is_pipeline = self.mesh_sizes.stage > 1 or self.replicas is not None
        needs_company = is_pipeline or self.packer != "joint"
        return "together" if needs_company or self.sweep is not None else "equal"

    @property
    def may_gather(self) -> bool:
        """Whether weights are, or may be, gathered by the copy engines."""
        return self.mesh == "auto" or self.mesh_sizes.fsdp > 1

    @pydantic.field_validator("mesh", mode="before")
    @classmethod
    def _mesh_is_given_by_words(cls, mesh: object) -> object:
        mesh = mesh_text(mesh)
        if not isinstance(mesh, str) or mesh == "auto":
            return mesh
        return str(MeshSizes.parse(mesh))

    @pydantic.field_validator("report_to", mode="before")
    @classmethod
    def _trackers_are_a_list(cls, names: object) -> object:
        if names in ("none", None):
            return ()
        return (names,) if isinstance(names, str) else names

    @pydantic.field_validator("implementation")
    @classmethod
    def _implementation_is_known(cls, name: str) -> str:
        if name != "auto":
            # Importing the table takes JAX, which most uses of a config do not need.
            from jaxlora.pallas_kernels import BACKENDS

            if name not in BACKENDS:
                raise ValueError(f"expected auto or one of {', '.join(BACKENDS)}.")
        return name


LoraJob.belongs = {
    **dict.fromkeys(DataConfig.model_fields, "data. Put it there"),
    **dict.fromkeys(
        [*RunConfig.model_fields, *RUN_NAMES], "the run. Put it beside jobs"
    ),
}
