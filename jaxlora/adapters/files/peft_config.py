"""The settings of a PEFT folder, adapter_config.json, as they are read and written."""

import pathlib
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, LiteralString

import pydantic
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from jaxlora.common.json_file import read_json_file, shown
from jaxlora.common.patterns import Patterns
from jaxlora.config.rules import WHOLE_MODULES
from jaxlora.errors import AdapterError
from jaxlora.models.slot_modules import SCORE
from jaxlora.modules.trained_tensors import tensor_settings
from jaxlora.modules.variants.table import variants

# Settings of other versions of peft without effect here, or read by other functions.
_OTHERS = {
    "ensure_weight_tying",  # the weights of both modules are saved
    "eva_config",
    "exclude_modules",
    "loftq_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "target_parameters",  # the weights show which parameters are adapted
    "trainable_token_indices",
}
_UNSUPPORTED = (
    ", which is not supported and may change what the adapter computes. Merge it into "
    "its base with peft."
)
# A sequence classifier has one of these, by both of which PEFT names it.
_SCORES = {SCORE.name, "classifier"}
# Formats of bases from whose error LoftQ starts, by the bits that PEFT names.
LOFTQ_FORMATS = {4: "nf4", 8: "int8"}


def _refused(text: LiteralString) -> pydantic.WrapValidator:
    """Replaces the errors of a setting by this text, which follows `name=value`."""

    def check(value: Any, validate: Any) -> Any:
        try:
            return validate(value)
        except pydantic.ValidationError as error:
            if error.errors()[0]["type"] == "wanted":  # of a value in a mapping
                raise
            raise PydanticCustomError("wanted", text) from None

    return pydantic.WrapValidator(check)


def _check_modules(names: list[str] | None) -> list[str] | None:
    modules = {name.removeprefix("model.") for name in names or ()}
    if not modules <= {*WHOLE_MODULES, *_SCORES}:
        raise ValueError
    return names


_Rank = Annotated[
    int, Field(gt=0, lt=2**63), _refused("; wanted a whole number above 0.")
]
# Whole numbers in JSON may be too large for a float.
_Alpha = Annotated[
    int | float,
    Field(gt=0, le=sys.float_info.max),
    _refused("; wanted a number above 0."),
]
_Dropout = Annotated[
    float | None, Field(ge=0, lt=1), _refused("; wanted a number from 0 to below 1.")
]
_WANTED_OBJECT = _refused("; wanted an object.")
_WANTED_FLAG = _refused("; wanted true or false.")
_MISSING: Any = None  # which is refused


class PeftConfig(pydantic.BaseModel):
    """Settings of all kinds of adapters, with the values that are written.

    A variant of LoRA may have further ones: see `Variant.to_peft`. The weights show
    which modules are adapted, so `target_modules` and other settings of type `Any` are
    not looked at.
    """

    model_config = pydantic.ConfigDict(
        extra="allow", strict=True, validate_default=True
    )

    auto_mapping: Any = None
    base_model_name_or_path: Any = None
    bias: Annotated[
        Literal["none", "lora_only"] | None,
        _refused(
            "; only 'none' and 'lora_only' are supported: other biases stay frozen."
        ),
    ] = "none"
    fan_in_fan_out: Annotated[Literal[False] | None, _refused(_UNSUPPORTED)] = False
    inference_mode: Any = True
    layers_pattern: Any = None
    layers_to_transform: Any = None
    modules_to_save: Annotated[
        list[str] | None,
        AfterValidator(_check_modules),
        _refused(
            "; only whole copies of embed_tokens and lm_head are read. Merge the "
            "adapter into its base with peft."
        ),
    ] = None
    peft_type: str = "LORA"
    r: _Rank = _MISSING
    revision: Any = None
    target_modules: Any = None
    task_type: Any = "CAUSAL_LM"


class LoraConfig(PeftConfig):
    """Settings of LoRA; those of other kinds are read under the same names."""

    alpha_pattern: Annotated[dict[str, _Alpha] | None, _WANTED_OBJECT] = {}
    init_lora_weights: Annotated[
        bool | Literal["gaussian", "eva", "orthogonal"] | None,
        _refused(
            ", which also changes the base's weights. Save it with peft's "
            "path_initial_model_for_weight_conversion."
        ),
    ] = True
    lora_alpha: _Alpha = _MISSING
    lora_dropout: _Dropout = 0.0
    rank_pattern: Annotated[dict[str, _Rank] | None, _WANTED_OBJECT] = {}
    use_rslora: Annotated[bool | None, _WANTED_FLAG] = False


def written_settings() -> list[set[str]]:
    """Returns the names of the settings that each kind of adapter is written with."""
    kinds: dict[str, set[str]] = {"LORA": {*LoraConfig.model_fields}}
    for variant in variants():
        own = kinds.setdefault(variant.peft_type, {*PeftConfig.model_fields})
        own |= variant.peft_keys
        if variant.peft_type == "LORA" and variant.setting is not None:
            own.add(variant.setting)
    return list(kinds.values())


def read_config(path: pathlib.Path, patterns: Patterns) -> dict[str, Any]:
    """Reads and checks adapter_config.json.

    Args:
        path: The file.
        patterns: Checks the patterns in it.

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
    kinds = {variant.peft_type: variant for variant in reversed(variants())}
    if not isinstance(config, dict) or kind not in list(kinds):
        read = " and ".join(map(repr, sorted(kinds)))
        raise AdapterError(f"{path} has peft_type={shown(kind)}; only {read} are read.")
    try:
        found = LoraConfig.model_validate(kinds[kind].from_peft(path, config))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise AdapterError(
            f"{path} has {first['loc'][-1]}={shown(first['input'])}{first['msg']}"
        ) from None
    flags = tensor_settings()
    own = {key for v in variants() if v.peft_type == kind for key in v.peft_keys}
    for key, value in (found.model_extra or {}).items():
        place = f"{path} has {key}={shown(value)}"
        if key in flags and not isinstance(value, bool | None):
            raise AdapterError(f"{place}; wanted true or false.")
        is_known = key in {*flags, *own, *_OTHERS}
        if not is_known and value not in (None, False, [], {}):
            raise AdapterError(f"{place}{_UNSUPPORTED}")
    values = found.model_dump()
    for key in ("rank_pattern", "alpha_pattern"):
        for expression in values[key] or ():
            patterns.check(f"{key} key", expression, is_end=True)
    copies = {n.removeprefix("model.") for n in found.modules_to_save or ()}
    return values | {"modules_to_save": sorted(copies - _SCORES)}


def loftq_format(path: pathlib.Path, config: Mapping[str, Any]) -> str | None:
    """Returns the format of a base from whose error the adapter started by LoftQ.

    None: it did not, so the adapter is relative to the weights as they are.

    Raises:
        AdapterError: They are no bits of LoftQ.
    """
    given = config.get("loftq_config") or {}
    bits = given.get("loftq_bits") if isinstance(given, dict) else None
    if given and (type(bits) is not int or bits not in LOFTQ_FORMATS):
        raise AdapterError(
            f"{path} has loftq_config={shown(given)}; wanted loftq_bits 4 or 8."
        )
    return None if bits is None else LOFTQ_FORMATS[bits]
