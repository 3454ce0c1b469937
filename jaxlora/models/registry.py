"""The table of model families, and how a config.json is read."""

from collections.abc import Mapping
from typing import Any

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.models.config import ModelConfig
from jaxlora.models.gemma import Gemma2, Gemma3
from jaxlora.models.granite import Granite
from jaxlora.models.hf_config import HfConfig
from jaxlora.models.llama import Llama
from jaxlora.models.mistral import Mistral
from jaxlora.models.olmo import Olmo2, Olmo3
from jaxlora.models.phi import Phi3
from jaxlora.models.qwen import Qwen2, Qwen3
from jaxlora.models.qwen3_5 import Qwen35
from jaxlora.models.qwen_moe import Qwen3Moe
from jaxlora.models.smollm3 import SmolLM3

FAMILIES: Mapping[str, type[HfConfig]] = {
    kind.FAMILY.model_type: kind
    for kind in (
        Llama,
        Mistral,
        Qwen2,
        Qwen3,
        Gemma2,
        Gemma3,
        SmolLM3,
        Granite,
        Olmo2,
        Olmo3,
        Phi3,
        Qwen3Moe,
        Qwen35,
    )
}
# Models with vision, whose text model this library reads, by their model_type.
_WITH_VISION: Mapping[str, type[HfConfig]] = {
    kind.FAMILY.vision_type: kind
    for kind in FAMILIES.values()
    if kind.FAMILY.vision_type is not None
}
_OF_WHOLE_MODEL = ("tie_word_embeddings", "quantization_config")
_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
)


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json.

    Args:
        config: The file's contents, in the spelling of transformers 4 or 5.

    Raises:
        ModelError: The family is unknown, a value is missing or unsupported, or a field
            is set that this library does not read and that may change the mathematics.
    """
    text = text_settings(config)
    return _family(text).read(text)


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of a config.json, of a model with vision for its text model.

    Raises:
        ModelError: It is a model with vision, without settings of a text model.
    """
    model_type = config.get("model_type")
    known = _WITH_VISION.get(model_type) if isinstance(model_type, str) else None
    if known is None:
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(
            f"config.json has model_type={model_type!r} and text_config={shown(text)}; "
            "wanted an object with the settings of the text model."
        )
    whole = {key: config[key] for key in _OF_WHOLE_MODEL if key in config}
    return {"model_type": known.FAMILY.model_type, **text, **whole}


def _family(config: Mapping[str, Any]) -> type[HfConfig]:
    model_type = config.get("model_type")
    known = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    read = () if known is None else known.model_fields
    experts = [key for key in _EXPERTS if config.get(key) and key not in read]
    if experts:
        raise ModelError(
            f"config.json sets {experts[0]}={shown(config[experts[0]])}: "
            "mixture-of-experts models are not supported, except qwen3_moe. "
            f"Supported: {', '.join(FAMILIES)}."
        )
    if model_type == "gemma3":
        raise ModelError(
            "config.json has model_type='gemma3': the text model is one part of the "
            "checkpoint, its tensors have other names (language_model.) and its "
            "settings lie in text_config. Only gemma3_text is supported: save the text "
            "model alone, as a Gemma3ForCausalLM."
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        names = (kind.FAMILY.models for kind in FAMILIES.values())
        raise ModelError(
            f"config.json has model_type={shown(model_type)}. Supported: "
            f"{', '.join((*FAMILIES, *_WITH_VISION))} ({', '.join(names)})."
        )
    return FAMILIES[model_type]
