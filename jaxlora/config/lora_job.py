"""The settings of a job: one adapter, what it learns from, and how it is trained."""

import dataclasses
from typing import Annotated, Literal

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from jaxlora.common.job_name import check_job_name
from jaxlora.config.aliases import JOB_HINTS, JOB_NAMES
from jaxlora.config.clone import CloneOf
from jaxlora.config.data_config import DataConfig
from jaxlora.config.rules import OF_A_JOB, WholeModule, row_tokens, whole_modules
from jaxlora.config.schedules import ScheduleName
from jaxlora.config.starts import check_start, is_part_of_weight
from jaxlora.config.strict import (
    Bool,
    Fraction,
    Indices,
    InputPath,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Steps,
    StrictModel,
    Texts,
)


@dataclasses.dataclass(frozen=True, slots=True)
class VariantFile:
    """Marks a setting that makes the adapter a variant of LoRA.

    Attributes:
        name: The file of `jaxlora/modules/variants` that has the variant.
    """

    name: str


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
        expert_rank: Rank of the linears of experts, of which each token passes only a
            few: `scaled` is r divided by their number, at least 1; `full` is r; or a
            number. Their lora_alpha changes alike, so that the scaling stays.
        lora_alpha: The update is scaled by lora_alpha / r (see `use_rslora`).
        use_rslora: Scale by lora_alpha / sqrt(r) (rsLoRA, arXiv 2312.03732).
        use_dora: Also train the norms of the columns of W (DoRA, arXiv 2402.09353).
        use_vera: Train two vectors in each linear, beside random matrices that all
            linears share (VeRA, arXiv 2310.11454). Its rank may be large, and it has
            no lora_alpha.
        projection_prng_key: Seed of the matrices of VeRA, as in PEFT.
        d_initial: First value of the elements of VeRA's vector d.
        init_lora_weights: How A and B start, in PEFT's words: true (A uniform, B zero),
            `gaussian`, `orthogonal`, `pissa`, `pissa_niter_N` or `olora`; see
            `jaxlora.adapters.initial`.
        dropout: Probability of dropping an input feature of the LoRA path.
        target_modules: Suffixes (`q_proj`), one regular expression for the whole
            module name, or `all-linear`.
        target_parameters: Suffixes of PEFT's names of the experts' weights, such as
            `mlp.experts.gate_up_proj`, whose linears are adapted, too.
        exclude_modules: Suffixes or one regular expression, taken from the targets.
        layers_to_transform: Numbers of the layers that are adapted; empty: all.
        layers_pattern: Name of the list of layers, `layers`, as PEFT asks for it.
        trainable_token_indices: Tokens whose rows of the embedding are trained, too,
            and of a head that is tied to it; such as added tokens. As a dict, also
            those of a head that is not: `{embed_tokens: [...], lm_head: [...]}`.
        new_special_tokens: The same by the texts of tokens that are in the base's
            tokenizer, of the embedding and of a head that is not tied to it, such as
            those that `jaxlora convert --new-tokens` has added.
        modules_to_save: Modules of which the adapter trains whole copies, as in PEFT:
            `embed_tokens`, `lm_head` or both.
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
            `cpo`, `orpo`, `kto` or `reward`; see `jaxlora.objectives.table`. Others are
            made known with `jaxlora.register_objective`.
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
        lora_plus_ratio: Rate of B, and of the vectors of DoRA, over rate of A (LoRA+,
            arXiv 2402.12354).
        optimizer: How gradients change the weights: `adamw`, `schedule_free_adamw`,
            `lion`, `sgd`, `muon`, `adafactor`, or one that was registered with
            `jaxlora.register_optimizer`.
        optimizer_args: Settings of the optimizer, by name, such as
            `{b1: 0.95, b2: 0.98}` of `lion`.
        weight_decay: Decoupled weight decay.
        adam_b1: Decay of the first moment of AdamW, schedule-free too.
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
        early_stopping_delta: A decrease of the loss counts as an improvement if it is
            larger, in nats per token. So does a better value of a sweep's metric of
            answers, in its own unit, or an equal one with such a decrease of the loss.
        keep_best: Export the weights of the best evaluation, not the last. Of equal
            ones it is the later.
        priority: Jobs of higher priority come first: they fill microbatches before the
            others, and waiting ones get a slot first; equal ones in the
            order in which they are given. See also `RunConfig.preempt`.
    """

    aliases, hints = JOB_NAMES, JOB_HINTS
    rules = OF_A_JOB

    name: Annotated[str, AfterValidator(check_job_name)]
    data: DataConfig
    eval_data: DataConfig | None = None
    eval_fraction: Fraction = 0.0
    eval_seed: Annotated[NonNegativeInt, Field(lt=2**31)] = 0

    rank: PositiveInt = 16
    expert_rank: Literal["scaled", "full"] | PositiveInt = "scaled"
    lora_alpha: PositiveFloat = 32.0
    use_rslora: Bool = False
    use_dora: Annotated[Bool, VariantFile("dora")] = False
    use_vera: Annotated[Bool, VariantFile("vera")] = False
    projection_prng_key: Annotated[NonNegativeInt, Field(lt=2**32)] = 0
    d_initial: PositiveFloat = 0.1
    init_lora_weights: Annotated[Literal[True] | str, BeforeValidator(check_start)] = (
        True
    )
    dropout: Fraction = 0.0
    target_modules: Texts = "all-linear"
    target_parameters: tuple[str, ...] = ()
    exclude_modules: Texts = ()
    layers_to_transform: Indices = ()
    layers_pattern: Texts = ()
    trainable_token_indices: Annotated[
        Indices | dict[WholeModule, Indices], BeforeValidator(row_tokens)
    ] = ()
    new_special_tokens: tuple[str, ...] = ()
    modules_to_save: Annotated[
        tuple[WholeModule, ...], BeforeValidator(whole_modules)
    ] = ()
    rank_pattern: dict[str, PositiveInt] = {}
    alpha_pattern: dict[str, PositiveFloat] = {}
    init_from: InputPath | None = None
    continue_from: InputPath | None = None
    clone_of: CloneOf | None = None

    objective: str = "next_token"
    objective_args: dict[str, Annotated[float, Number] | str] = {}
    batch_size: PositiveInt = 8
    epochs: PositiveFloat = 1.0
    steps: Steps | None = None
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

    def is_set(self, setting: str) -> bool:
        """Whether a setting that makes the adapter a variant of LoRA is on."""
        return getattr(self, setting)

    @property
    def keeps_start(self) -> bool:
        """Whether the adapter is relative to its first weights, which it keeps."""
        return is_part_of_weight(self.init_lora_weights)

    @pydantic.field_validator("lr_schedule", mode="before")
    @classmethod
    def _warm_up_is_a_setting(cls, name: object) -> object:
        # The name that transformers has for it; warm-up is set apart from the schedule.
        return "constant" if name == "constant_with_warmup" else name

    @property
    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """Tokens whose rows of `embed_tokens` and of `lm_head` are trained."""
        given = self.trainable_token_indices
        given = given if isinstance(given, dict) else {"embed_tokens": given}
        return {"embed_tokens": (), "lm_head": ()} | given
