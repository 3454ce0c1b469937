"""Reads and checks the settings of a PEFT folder, adapter_config.json."""

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from jaxlora.common.json_file import read_json_file, shown
from jaxlora.common.patterns import Patterns
from jaxlora.config.rules import WHOLE_MODULES
from jaxlora.errors import AdapterError
from jaxlora.models.slot_modules import SCORE
from jaxlora.modules.trained_tensors import tensor_settings
from jaxlora.modules.variants.table import variants

# Settings that are read below, or checked against the weights.
_READ = {
    "alpha_pattern",
    "init_lora_weights",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "peft_type",
    "r",
    "rank_pattern",
    "use_rslora",
}
# Settings without effect here: the weights determine which modules are adapted.
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "bias",  # see below
    "ensure_weight_tying",  # the weights of both modules are saved
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_weights",  # of VeRA, the first values of the vectors that are read
    "layers_pattern",
    "layers_to_transform",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",
    "task_type",
}
# Formats of bases from whose error LoftQ starts, by the bits that PEFT names.
LOFTQ_FORMATS = {4: "nf4", 8: "int8"}
# Ways to draw the first A and B that leave the base's own weights alone.
_INITIAL = ("gaussian", "eva", "orthogonal")


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
    config = kinds[kind].from_peft(path, config)
    _check_numbers(path, config, "r", "rank_pattern", patterns)
    _check_numbers(path, config, "lora_alpha", "alpha_pattern", patterns)
    _check_values(path, config)
    known = {*_READ, *_HARMLESS, *tensor_settings(), "trainable_token_indices"}
    known = known.union(*(variant.peft_keys for variant in variants()))
    config["modules_to_save"] = _whole_modules(path, config.get("modules_to_save"))
    known.add("modules_to_save")
    for key, value in config.items():
        if key not in known and value not in (None, False, [], {}):
            raise AdapterError(
                f"{path} sets {key}={shown(value)}, which is not supported and may "
                "change what the adapter computes. Merge it into its base with peft."
            )
    return config


def _whole_modules(path: pathlib.Path, given: Any) -> list[str]:
    """Returns the modules of which the folder has whole copies, but no score head."""
    names = given or []
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        # PEFT adds both to a sequence classifier.
        modules = {n.removeprefix("model.") for n in names} - {SCORE.name, "classifier"}
        if modules <= set(WHOLE_MODULES):
            return sorted(modules)
    raise AdapterError(
        f"{path} sets modules_to_save={shown(given)}; only whole copies of "
        f"{' and '.join(WHOLE_MODULES)} are read. Merge the adapter into its base with "
        "peft."
    )


def _check_values(path: pathlib.Path, config: Mapping[str, Any]) -> None:
    """Checks the settings that are no ranks."""
    dropout = config.get("lora_dropout")
    if dropout is not None and not (_is_number(dropout) and 0 <= dropout < 1):
        raise AdapterError(
            f"{path} has lora_dropout={shown(dropout)}; wanted a number from 0 to "
            "below 1."
        )
    initial = config.get("init_lora_weights")
    if not (isinstance(initial, bool | None) or initial in _INITIAL):
        raise AdapterError(
            f"{path} has init_lora_weights={shown(initial)}, which also changes the "
            "base's weights. Save it with peft's "
            "path_initial_model_for_weight_conversion."
        )
    for key in ("use_rslora", *tensor_settings()):
        if not isinstance(config.get(key), bool | None):
            raise AdapterError(
                f"{path} has {key}={shown(config[key])}; wanted true or false."
            )
    if config.get("bias") not in (None, "none", "lora_only"):
        raise AdapterError(
            f"{path} sets bias={shown(config['bias'])}; only 'none' and 'lora_only' "
            "are supported: other biases stay frozen."
        )


def _check_numbers(
    path: pathlib.Path, config: dict, key: str, pattern: str, patterns: Patterns
) -> None:
    """Checks that the common value and those of the pattern are above 0."""
    special = config.get(pattern) or {}
    if not isinstance(special, dict):
        raise AdapterError(f"{path} has {pattern}={shown(special)}; wanted an object.")
    for expression in special:
        patterns.check(f"{pattern} key", expression, is_end=True)
    is_rank = key == "r"
    for name, value in {key: config.get(key), **special}.items():
        is_number = isinstance(value, int if is_rank else int | float)
        # Whole numbers in JSON may be too large for a float.
        wanted = is_number and 0 < value <= sys.float_info.max
        if not wanted or isinstance(value, bool):
            whole = " whole" if is_rank else ""
            raise AdapterError(
                f"{path} has {name}={shown(value)}; wanted a{whole} number above 0."
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
