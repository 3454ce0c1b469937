"""The user's settings: a `LoraJob` for each adapter and a `RunConfig` for the run."""

import re
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxlora.common.note import Note
from jaxlora.config.aliases import OF_JOB, OF_RUN
from jaxlora.config.base_settings import BaseSettings
from jaxlora.config.clone import CloneOf
from jaxlora.config.data_config import DataConfig
from jaxlora.config.expansion import expand_run
from jaxlora.config.generation_settings import BASE, SamplesConfig
from jaxlora.config.replicas_config import (
    OF_REPLICAS,
    ReplicaConfig,
    check_listed,
)
from jaxlora.config.rules import (
    EVA,
    EVA_DEFAULTS,
    LOFTQ,
    OF_A_JOB,
    OF_A_RUN,
    check_start,
    embedding_tokens,
    is_part_of_weight,
    mesh_text,
)
from jaxlora.config.schedules import ScheduleName
from jaxlora.config.strict import (
    Bool,
    Fraction,
    Indices,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    StrictModel,
    Texts,
)
from jaxlora.config.sweep_config import Sweep
from jaxlora.problems import problems_of, validation_error
from jaxlora.scheduler import Limits, PackerName
from jaxlora.sharding.mesh_sizes import ONE_DEVICE, MeshSizes

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_job_name(name: str) -> str:
    """Returns a job's name if it can name a folder and an adapter.

    Raises:
        ValueError: It cannot.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"job name {name!r} must be a plain folder name: letters, digits, '.', "
            "'_' and '-', at most 100, not starting with '.', '_' or '-'."
        )
    if name == BASE:
        raise ValueError(
            f"job name {name!r} is the name of the base model when text is generated. "
            "Give the job another name."
        )
    return name


class LoraJob(StrictModel):
    """One adapter: what it learns from, its shape, and how it is trained.

    The names follow PEFT and the Hugging Face trainer where those have one.

    Attributes:
        name: Names the adapter and its folder.
        data: Training records.
        eval_data: Held-out records; or use `eval_fraction`.
        eval_fraction: Share of `data` held out for evaluation, chosen by
            `eval_seed`.
        eval_seed: Which records `eval_fraction` holds out. Jobs with the same data,
            fraction and `eval_seed` hold out the same records, whatever their `seed`.
        rank: LoRA rank r.
        lora_alpha: The update is scaled by lora_alpha / r (see `use_rslora`).
        use_rslora: Scale by lora_alpha / sqrt(r) (rsLoRA, arXiv 2312.03732).
        use_dora: Also train the norms of the columns of W (DoRA, arXiv 2402.09353).
        use_vera: Train two vectors in each linear, beside random matrices that all
            linears share (VeRA, arXiv 2310.11454). Its rank may be large, and it has
            no lora_alpha.
        projection_prng_key: Seed of the matrices of VeRA, as in PEFT.
        d_initial: First value of the elements of VeRA's vector d.
        init_lora_weights: How A and B start, in PEFT's words: true (A uniform, B zero),
            `gaussian`, `orthogonal`, `pissa`, `pissa_niter_N`, `olora`, `loftq` or
            `eva`; see `jaxlora.adapters.initial` and `jaxlora.adapters.eva`.
        loftq_config: Settings of `loftq`, as in PEFT: `loftq_bits`, those of the base's
            format (4 of nf4, 8 of int8), and `loftq_iter`, which is 1.
        eva_config: Settings of `eva`, as in PEFT: `rho` (2.0), `tau` (0.99),
            `use_label_mask` (true) and `whiten` (false).
        dropout: Probability of dropping an input feature of the LoRA path.
        target_modules: Suffixes (`q_proj`), one regular expression for the whole
            module name, or `all-linear`.
        exclude_modules: Suffixes or one regular expression, taken from the targets.
        layers_to_transform: Numbers of the layers that are adapted; empty: all.
        layers_pattern: Name of the list of layers, `layers`, as PEFT asks for it.
        trainable_token_indices: Tokens whose rows of the embedding are trained, too,
            and of a head that is tied to it; such as added tokens.
        train_bias: Also train the biases of the adapted linears that have one, as
            PEFT's `bias: lora_only`.
        rank_pattern: Rank of modules whose name matches the pattern, as in PEFT.
        alpha_pattern: lora_alpha of modules whose name matches the pattern.
        init_from: PEFT folder whose weights the adapter starts from.
        continue_from: Output folder of another run, whose job of the same name
            continues here with its whole state: optimizer, position in the data and
            evaluations.
        clone_of: Another job of the run, and the optimizer steps that it has done when
            this job starts as a copy of its whole state. What may differ is
            `jaxlora.config.clone.CHANGEABLE`.
        objective: What the loss is: `next_token`, or of preferences `dpo`, `simpo`,
            `cpo`, `orpo`, `kto` or `reward`; see `jaxlora.data.objectives`.
        objective_args: Settings of the objective, by name, such as `{beta: 0.5}`.
        batch_size: Samples (groups of them, if the objective has groups) in a global
            batch: one optimizer step.
        epochs: Passes over the data; may be a fraction. Used when `steps` is None.
        steps: Optimizer steps.
        learning_rate: Peak rate.
        lr_schedule: Shape of the rate after warm-up; see `jaxlora.config.schedules`.
        lr_schedule_args: Settings of the schedule, by name, such as
            `{num_cycles: 3}` of `cosine_with_restarts`.
        warmup_steps: Optimizer steps of linear warm-up.
        warmup_ratio: Warm-up as a share of all steps, when `warmup_steps` is None.
        lora_plus_ratio: Rate of B over rate of A (LoRA+, arXiv 2402.12354).
        optimizer: How gradients change the weights: `adamw`, `adamw_8bit`,
            `schedule_free_adamw`, `lion`, `sgd`, `muon`, `adafactor`, or one that was
            registered with `jaxlora.register_optimizer`.
        optimizer_args: Settings of the optimizer, by name, such as
            `{b1: 0.95, b2: 0.98}` of `lion`.
        weight_decay: Decoupled weight decay.
        adam_b1: Decay of the first moment of AdamW, 8-bit and schedule-free too.
        adam_b2: Decay of the second moment of AdamW.
        adam_eps: Added to the root of the second moment of AdamW.
        max_grad_norm: Clip the adapter's own gradient to this norm; None: never.
        max_length: Longest sample in tokens.
        too_long: What to do with a longer sample.
        shuffle: Permute the records anew in each epoch, by `seed`.
        seed: Random seed for the initial A, the order of the data and the dropout
            masks.
        eval_every: Optimizer steps between evaluations; None: start and end only.
        early_stopping: Number of evaluations without improvement after which the job
            stops; None: never.
        early_stopping_delta: Smallest decrease of the loss that counts as an
            improvement, in nats per token.
        keep_best: Export the weights of the best evaluation, not the last.
        priority: Waiting jobs of higher priority get a slot first; equal ones in the
            order in which they are given. See also `RunConfig.preempt`.
    """

    aliases = OF_JOB
    rules = OF_A_JOB
    nested = {"clone_of": CloneOf, "data": DataConfig, "eval_data": DataConfig}

    name: str
    data: DataConfig
    eval_data: DataConfig | None = None
    eval_fraction: Fraction = 0.0
    eval_seed: Annotated[NonNegativeInt, Field(lt=2**31)] = 0

    rank: PositiveInt = 16
    lora_alpha: PositiveFloat = 32.0
    use_rslora: Bool = False
    use_dora: Bool = False
    use_vera: Bool = False
    projection_prng_key: Annotated[NonNegativeInt, Field(lt=2**32)] = 0
    d_initial: PositiveFloat = 0.1
    init_lora_weights: Literal[True] | str = True
    loftq_config: dict[str, PositiveInt] = {}
    eva_config: dict[str, Bool | NonNegativeFloat] = {}
    dropout: Fraction = 0.0
    target_modules: Texts = "all-linear"
    exclude_modules: Texts = ()
    layers_to_transform: Indices = ()
    layers_pattern: Texts = ()
    trainable_token_indices: Indices = ()
    train_bias: Bool = False
    rank_pattern: dict[str, PositiveInt] = {}
    alpha_pattern: dict[str, PositiveFloat] = {}
    init_from: str | None = None
    continue_from: str | None = None
    clone_of: CloneOf | None = None

    objective: str = "next_token"
    objective_args: dict[str, Annotated[float, Number] | str] = {}
    batch_size: PositiveInt = 8
    epochs: PositiveFloat = 1.0
    steps: PositiveInt | None = None
    learning_rate: NonNegativeFloat = 2e-4
    lr_schedule: ScheduleName = "cosine"
    lr_schedule_args: dict[str, Annotated[float, Number] | str] = {}
    warmup_steps: NonNegativeInt | None = None
    warmup_ratio: Fraction = 0.0
    lora_plus_ratio: PositiveFloat = 1.0
    optimizer: str = "adamw"
    optimizer_args: dict[str, Bool | NonNegativeFloat] = {}
    weight_decay: NonNegativeFloat = 0.0
    adam_b1: Fraction = 0.9
    adam_b2: Fraction = 0.999
    adam_eps: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat | None = 1.0

    max_length: PositiveInt = 1024
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    shuffle: Bool = True
    seed: Annotated[int, Field(ge=0, lt=2**31), Number] = 0

    eval_every: PositiveInt | None = None
    early_stopping: PositiveInt | None = None
    early_stopping_delta: NonNegativeFloat = 0.0
    keep_best: Bool = False

    priority: Int = 0

    @pydantic.field_validator("name")
    @classmethod
    def _name_is_a_plain_folder_name(cls, name: str) -> str:
        return check_job_name(name)

    @property
    def keeps_start(self) -> bool:
        """Whether the adapter is relative to its first weights, which it keeps."""
        return is_part_of_weight(self.init_lora_weights)

    @property
    def loftq_bits(self) -> int | None:
        """Bits of the format from whose error LoftQ starts; None: it does not."""
        if self.init_lora_weights != LOFTQ:
            return None
        return self.loftq_config.get("loftq_bits", 4)

    @property
    def eva_settings(self) -> dict[str, float | bool] | None:
        """All settings of EVA; None: the adapter does not start by it."""
        if self.init_lora_weights != EVA:
            return None
        return EVA_DEFAULTS | self.eva_config

    @pydantic.field_validator("lr_schedule", mode="before")
    @classmethod
    def _warm_up_is_a_setting(cls, name: object) -> object:
        # The name that transformers has for it; warm-up is set apart from the schedule.
        return "constant" if name == "constant_with_warmup" else name

    @pydantic.field_validator("init_lora_weights", mode="before")
    @classmethod
    def _start_is_known(cls, start: object) -> object:
        return check_start(start)

    @pydantic.field_validator("trainable_token_indices", mode="before")
    @classmethod
    def _tokens_are_of_the_embedding(cls, tokens: object) -> object:
        return embedding_tokens(tokens)

    @pydantic.field_validator("target_modules")
    @classmethod
    def _targets_are_not_empty(cls, targets: str | tuple[str, ...]):
        if not targets:
            raise ValueError(
                "target_modules is empty, so nothing would be trained. Give suffixes "
                "such as ['q_proj', 'v_proj'], a regular expression, or 'all-linear'."
            )
        return targets


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
        mesh: Devices that the run uses, as sizes of the axes `data` (replicas), `stage`
            (pipeline stages), `fsdp` (devices that share the base weights) and `tensor`
            (devices that share each microbatch), such as `stage=2,fsdp=2`, or as a
            mapping; `auto` chooses the sizes.
        replicas: Replicas whose microbatches differ in size, on one device each, which
            train the same adapters: samples run where they fit; `auto` chooses them,
            or alike ones. None: replicas are alike (axis `data` of `mesh`).
        pipeline_microbatches: Microbatches that the first pipeline stage has in flight,
            at least one for each stage; None: as many as there are stages. More hide
            transfers between stages and uneven microbatches, but take memory, and the
            next batch of a job starts that much later.
        network_gbits: Gigabits per second, in each direction, between a host and all
            others, for `mesh: auto` on several hosts; None: by the data sheet of the
            machine that the GPU is usually sold in.
        microbatch_tokens: Capacity C of a microbatch, in tokens, padding included;
            `auto` takes the most that fits the device's memory and that the jobs can
            fill; on several devices less, if that is predicted to be faster.
        microbatch_shapes: Capacities, in tokens, of smaller microbatches, whose
            programs are compiled beside training; each microbatch has the smallest one
            that holds it. `auto` chooses up to two by simulation, if they save more
            time than `shape_compile_seconds`; those that are not smaller than
            `microbatch_tokens` are left out.
        shape_compile_seconds: Time in which `microbatch_shapes` should be compiled.
            They are used after as many microbatches as are predicted to take this time,
            so that the same run always has the same microbatches; training waits then
            for programs that are not ready. 0: training waits before its first step,
            and `auto` chooses none.
        block_tokens: Tokens of a block; each job's part of a microbatch fills whole
            blocks.
        dtype: Dtype of the base weights and activations; `auto` is bfloat16 on a GPU
            and float32 on a CPU.
        remat: Part of each layer that the backward pass recomputes to save memory:
            `none`, `elementwise` (all but the results of linears and of fused
            attention), `mlp` (with its norm), or `layer`. `auto` takes the one that is
            predicted to train fastest with the microbatches that fit beside it.
        implementation: Which LoRA kernels run: `mosaic` (Hopper), `triton` (NVIDIA
            GPUs from Ampere on) or `xla` (anywhere);
            `auto` takes the first back end of `pallas_kernels.BACKENDS` that can run
            every adapted linear.
        attention: Attention implementation: `cudnn` (GPUs of data centers from Hopper
            on), `triton` (NVIDIA GPUs from Ampere on) or `xla` (anywhere); `auto` takes
            the first of these that can run the model.
        window_steps: Rounds between two reports of the speed. A round ends when every
            running job has taken an optimizer step. The packers `greedy` and
            `lorafusion` pack so many batches of each job together.
        preempt: Whether a waiting job takes the slot of a running job of strictly lower
            priority, after that job's current global batch. The paused job keeps its
            whole state and continues when a slot is free, so no work is lost.
        packer: Packing algorithm: `joint` packs all jobs in one stream, without a
            break; `greedy` packs one step of every job at a time; `lorafusion` is
            LoRAFusion's algorithm.
        checkpoint_every: Rounds between checkpoints; None: only at the end and when
            interrupted.
        keep_checkpoints: Number of checkpoints to keep.
        log_every: Rounds between lines of the training log, at most one for each
            report of the speed.
        token_cache: Whether the tokens of data are kept in ~/.cache/jaxlora/tokens, so
            that later runs on the same data need not make them again.
        report_to: Experiment trackers that receive each job's metrics: `tensorboard`,
            `wandb` (W&B) and `trackio`; one name or a list. `none`: no tracker.
        samples: Prompts whose answers by each job are logged at its evaluations, to see
            what it learns. Training does the same with and without them.
        sweep: The jobs are configurations to choose from. If it has `parameters`, each
            job given becomes as many jobs, and `sweep` has none any more.
    """

    aliases = OF_RUN
    rules = (*BaseSettings.rules, *OF_A_RUN, *OF_REPLICAS)
    nested = {
        "jobs": LoraJob,
        "replicas": ReplicaConfig,
        "samples": SamplesConfig,
        "sweep": Sweep,
    }
    belongs = dict.fromkeys(
        [*LoraJob.model_fields, *OF_JOB.same],
        "a job. Put it there, or into defaults for all jobs",
    )

    model: str
    revision: str | None = None
    output_dir: str = "runs/jaxlora"
    jobs: tuple[LoraJob, ...]
    max_concurrent_jobs: PositiveInt | None = None
    slot_rank: PositiveInt | None = None
    slot_targets: Texts | None = None
    slot_dropout: Bool | None = None
    mesh: str = ONE_DEVICE
    replicas: Literal["auto"] | tuple[ReplicaConfig, ...] | None = None
    pipeline_microbatches: PositiveInt | None = None
    network_gbits: PositiveFloat | None = None
    microbatch_tokens: PositiveInt | Literal["auto"] = "auto"
    microbatch_shapes: Literal["auto"] | tuple[PositiveInt, ...] = ()
    shape_compile_seconds: NonNegativeFloat = 60.0
    block_tokens: PositiveInt = 64
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    remat: Literal["none", "elementwise", "mlp", "layer", "auto"] = "none"
    implementation: str = "auto"
    attention: Literal["auto", "cudnn", "triton", "xla"] = "auto"
    window_steps: PositiveInt = 4
    preempt: Bool = True
    packer: PackerName = "joint"
    checkpoint_every: PositiveInt | None = 50
    keep_checkpoints: PositiveInt = 2
    log_every: PositiveInt = 1
    token_cache: Bool = True
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    samples: SamplesConfig | None = None
    sweep: Sweep | None = None
    _notes: tuple[Note, ...] = ()

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _sweep_is_expanded(cls, values: Any, check: Any) -> Any:
        if not isinstance(values, dict):
            return check(values)
        expansion, made = expand_run(values, LoraJob), None
        problems = list(expansion.problems)
        try:
            made = check(expansion.values)
        except pydantic.ValidationError as error:
            problems += problems_of(error)
        if problems:
            raise validation_error(cls.__name__, problems)
        assert made is not None
        made._notes = tuple(Note(f"sweep: {note}") for note in expansion.notes)
        return made

    @property
    def notes(self) -> tuple[Note, ...]:
        """Lines for the log about how a sweep, and lists in jobs, were expanded."""
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
    def replica_tokens(self) -> tuple[int, ...]:
        """Tokens of a microbatch of each of `replicas`, the largest first.

        There are none while `replicas` is `auto`.
        """
        listed = () if self.replicas in (None, "auto") else self.replicas
        each = [one.microbatch_tokens for one in listed for _ in range(one.count)]
        return tuple(sorted(each, reverse=True))

    @property
    def num_devices(self) -> int:
        """Number of devices that the run uses; `mesh` must not be `auto`."""
        return len(self.replica_tokens) or self.mesh_sizes.num_devices

    @property
    def may_gather(self) -> bool:
        """Whether weights are, or may be, divided among devices and gathered."""
        return self.mesh == "auto" or self.mesh_sizes.fsdp > 1

    @pydantic.field_validator("mesh", mode="before")
    @classmethod
    def _mesh_is_given_by_words(cls, mesh: object) -> object:
        mesh = mesh_text(mesh)
        if not isinstance(mesh, str) or mesh == "auto":
            return mesh
        return str(MeshSizes.parse(mesh))

    @pydantic.field_validator("replicas", mode="before")
    @classmethod
    def _replicas_are_listed(cls, replicas: object) -> object:
        return check_listed(replicas)

    @pydantic.field_validator("report_to", mode="before")
    @classmethod
    def _trackers_are_a_list(cls, names: object) -> object:
        if names in ("none", None):
            return ()
        return (names,) if isinstance(names, str) else names

    @pydantic.field_validator("microbatch_tokens", mode="before")
    @classmethod
    def _tokens_or_auto(cls, tokens: object) -> object:
        is_number = isinstance(tokens, int | float) and not isinstance(tokens, bool)
        if tokens != "auto" and not (is_number and tokens >= 1):
            raise ValueError("expected a positive number of tokens, or auto.")
        return tokens

    @pydantic.field_validator("implementation")
    @classmethod
    def _implementation_is_known(cls, name: str) -> str:
        if name != "auto":
            # Importing the table takes JAX, which most uses of a config do not need.
            from jaxlora.pallas_kernels import BACKENDS

            if name not in BACKENDS:
                raise ValueError(f"expected auto or one of {', '.join(BACKENDS)}.")
        return name


LoraJob.belongs = dict.fromkeys(
    [*RunConfig.model_fields, *OF_RUN.same], "the run. Put it beside jobs"
)
