"""The settings of a PEFT folder, adapter_config.json, as they are read and written."""

import pathlib
import sys
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, LiteralString

import pydantic
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from jaxlora.common.json_file import read_json_file, shown
from jaxlora.common.patterns import Patterns
from jaxlora.config.starts import LOFTQ_FORMATS
from jaxlora.errors import AdapterError

# Settings of other versions of peft without effect here, or read by other functions.
_OTHERS = {
    "ensure_weight_tying",  # the weights of both modules are saved
    "eva_config",
    "exclude_modules",
    "loftq_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "trainable_token_indices",
}
_UNSUPPORTED = (
    ", which is not supported and may change what the adapter computes. Merge it into "
    "its base with peft."
)
# A sequence classifier has one of these, by both of which PEFT names it.
_SCORES = {"score", "classifier"}
_WHOLE_MODULES = {"embed_tokens", "lm_head"}


def _or(text: LiteralString) -> pydantic.WrapValidator:
    """Makes the errors of a setting this text, which follows the name and the value."""

    def check(value: Any, validate: Any) -> Any:
        try:
            return validate(value)
        except pydantic.ValidationError as error:
            if error.errors()[0]["type"] == "wanted":  # of a value in a mapping
                raise
            raise PydanticCustomError("wanted", text) from None

    return pydantic.WrapValidator(check)


def _check_modules(names: list[str] | None) -> list[str] | None:
    if not {n.removeprefix("model.") for n in names or ()} <= _WHOLE_MODULES | _SCORES:
        raise ValueError
    return names


_Flag = Annotated[bool | None, _or("; wanted true or false.")]
_Rank = Annotated[int, Field(gt=0, lt=2**63), _or("; wanted a whole number above 0.")]
# Whole numbers in JSON may be too large for a float.
_Alpha = Annotated[
    int | float,
    Field(gt=0, le=sys.float_info.max),
    _or("; wanted a number above 0."),
]
_Dropout = Annotated[
    float | None, Field(ge=0, lt=1), _or("; wanted a number from 0 to below 1.")
]
_WANTED_OBJECT = _or("; wanted an object.")
_MISSING: Any = None  # which is refused


class PeftConfig(pydantic.BaseModel):
    """Settings of all kinds of adapters, with the values that are written.

    The weights show which modules are adapted, so `target_modules` and other settings
    of type `Any` are not looked at.
    """

    model_config = pydantic.ConfigDict(
        extra="allow", strict=True, validate_default=True
    )

    auto_mapping: Any = None
    base_model_name_or_path: Any = None
    bias: Annotated[
        Literal["none", "lora_only"] | None,
        _or("; only 'none' and 'lora_only' are supported: other biases stay frozen."),
    ] = "none"
    fan_in_fan_out: Annotated[Literal[False] | None, _or(_UNSUPPORTED)] = False
    inference_mode: Any = True
    layers_pattern: Any = None
    layers_to_transform: Any = None
    modules_to_save: Annotated[
        list[str] | None,
        AfterValidator(_check_modules),
        _or(
            "; only whole copies of embed_tokens and lm_head are read. Merge the "
            "adapter into its base with peft."
        ),
    ] = None
    r: _Rank = _MISSING
    revision: Any = None
    target_modules: Any = None
    task_type: Any = "CAUSAL_LM"


class LoraConfig(PeftConfig):
    """Settings of LoRA and DoRA."""

    alpha_pattern: Annotated[dict[str, _Alpha] | None, _WANTED_OBJECT] = {}
    init_lora_weights: Annotated[
        bool | Literal["gaussian", "eva", "orthogonal"] | None,
        _or(
            ", which also changes the base's weights. Save it with peft's "
            "path_initial_model_for_weight_conversion."
        ),
    ] = True
    lora_alpha: _Alpha = _MISSING
    lora_dropout: _Dropout = 0.0
    peft_type: Literal["LORA"] = "LORA"
    rank_pattern: Annotated[dict[str, _Rank] | None, _WANTED_OBJECT] = {}
    use_dora: _Flag = False
    use_rslora: _Flag = False


class VeraConfig(PeftConfig):
    """Settings of VeRA."""

    d_initial: Any = 0.1  # first values of the vectors that are read
    init_weights: Any = True
    peft_type: Literal["VERA"] = "VERA"
    projection_prng_key: Annotated[
        int, Field(ge=0, lt=2**32), _or("; wanted a whole number from 0 to below 2^32.")
    ] = _MISSING
    save_projection: Annotated[bool, _or("; wanted true or false.")] = True
    vera_dropout: _Dropout = 0.0


KINDS: dict[str, type[PeftConfig]] = {"LORA": LoraConfig, "VERA": VeraConfig}


def read_config(
    path: pathlib.Path, patterns: Patterns, tensor_settings: Collection[str]
) -> dict[str, Any]:
    """Reads and checks adapter_config.json.

    Args:
        path: The file.
        patterns: Checks the patterns in it.
        tensor_settings: Settings, true or false, that add kinds of trained tensors.

    Returns:
        Its settings. Those of VeRA have the names that LoRA has for them, and the
        setting that adds each kind of trained tensors is among them.

    Raises:
        AdapterError: The file is missing or damaged, or sets what is not supported.
        ConfigError: A pattern cannot be used.
    """
    try:
        config = read_json_file(path)
    except FileNotFoundError:
        raise AdapterError(
            f"{path}: there is no such file, so {path.parent} is no PEFT folder."
        ) from None
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"{path} cannot be read as JSON: {error}. Mend it, or copy it again."
        ) from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise AdapterError(
            f"{path} has peft_type={shown(kind)}; only 'LORA' and 'VERA' are read."
        )
    try:
        found = KINDS[kind].model_validate(config)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise AdapterError(
            f"{path} has {first['loc'][-1]}={shown(first['input'])}{first['msg']}"
        ) from None
    for key, value in (found.model_extra or {}).items():
        place = f"{path} has {key}={shown(value)}"
        if key in tensor_settings and not isinstance(value, bool | None):
            raise AdapterError(f"{place}; wanted true or false.")
        is_known = key in tensor_settings or key in _OTHERS
        if not is_known and value not in (None, False, [], {}):
            raise AdapterError(f"{place}{_UNSUPPORTED}")
    values = found.model_dump()
    for key in ("rank_pattern", "alpha_pattern"):
        for expression in values.get(key) or ():
            patterns.check(f"{key} key", expression, is_end=True)
    if isinstance(found, VeraConfig):
        names = {"lora_alpha": found.r, "lora_dropout": found.vera_dropout}
        values |= {"use_vera": True, **names}
    values["train_bias"] = found.bias == "lora_only"
    copies = {n.removeprefix("model.") for n in found.modules_to_save or ()}
    values["modules_to_save"] = sorted(copies - _SCORES)
    return values


def loftq_bits(path: pathlib.Path, config: Mapping[str, Any]) -> int | None:
    """Returns the bits of LoftQ; None: the adapter does not start by it.

    Raises:
        AdapterError: They are no bits of LoftQ.
    """
    given = config.get("loftq_config") or {}
    bits = given.get("loftq_bits") if isinstance(given, dict) else None
    if given and (type(bits) is not int or bits not in LOFTQ_FORMATS):
        raise AdapterError(
            f"{path} has loftq_config={shown(given)}; wanted loftq_bits 4 or 8."
        )
    return bits
