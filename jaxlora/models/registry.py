"""The table of model families, and how a config.json is read."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.models.config import Composite, ModelConfig
from jaxlora.models.families.gemma import GEMMA3, Gemma2, Gemma3
from jaxlora.models.families.gemma4 import GEMMA4, Gemma4
from jaxlora.models.families.glm import Glm, Glm4
from jaxlora.models.families.gpt_oss import GptOss
from jaxlora.models.families.granite import Granite
from jaxlora.models.families.granite4 import Granite4
from jaxlora.models.families.llama import Llama
from jaxlora.models.families.ministral import MISTRAL3, Ministral3
from jaxlora.models.families.mistral import Mistral
from jaxlora.models.families.mixtral import Mixtral
from jaxlora.models.families.olmo import Olmo2, Olmo3
from jaxlora.models.families.olmoe import Olmoe
from jaxlora.models.families.phi import Phi3
from jaxlora.models.families.qwen import Qwen2, Qwen3
from jaxlora.models.families.qwen3_5 import QWEN3_5, Qwen35
from jaxlora.models.families.qwen3_next import QWEN3_5_MOE, Qwen3Next, Qwen35Moe
from jaxlora.models.families.qwen_moe import Qwen2Moe, Qwen3Moe
from jaxlora.models.families.smollm3 import SmolLM3
from jaxlora.models.hf_config import HfConfig, refuse_unread

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
        Ministral3,
        Glm4,
        Granite4,
        Qwen35,
        Glm,
        Gemma4,
        Qwen2Moe,
        Olmoe,
        Mixtral,
        GptOss,
        Qwen3Next,
        Qwen35Moe,
    )
}
# Models of which the text is one part.
COMPOSITES: Mapping[str, Composite] = {
    x.model_type: x for x in (MISTRAL3, QWEN3_5, GEMMA3, GEMMA4, QWEN3_5_MOE)
}
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
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in COMPOSITES:
        return _text_of(COMPOSITES[model_type], config)
    return _family(config).read(config)


def _text_of(composite: Composite, config: Mapping[str, Any]) -> ModelConfig:
    """Reads the text model of a model of several parts."""
    tokens = {"bos_token_id", "eos_token_id", "pad_token_id"}  # read elsewhere
    own = {"model_type", "text_config", "tie_word_embeddings"} | tokens
    refuse_unread(config, composite.keys | own)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(
            f"config.json has model_type={composite.model_type!r} and "
            f"text_config={shown(text)}; wanted the settings of its text model."
        )
    known, text = composite.texts, {"model_type": composite.texts[0], **text}
    if text["model_type"] not in known:
        raise ModelError(
            f"config.json has a text_config with model_type={shown(text['model_type'])}"
            f"; for {composite.model_type}, wanted one of {', '.join(known)}."
        )
    if (is_tied := config.get("tie_word_embeddings")) is not None:
        text["tie_word_embeddings"] = is_tied
    model = _family(text).read(text)
    family = dataclasses.replace(model.family, composite=composite)
    return dataclasses.replace(model, family=family)


def _family(config: Mapping[str, Any]) -> type[HfConfig]:
    model_type = config.get("model_type")
    known = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    read = () if known is None else known.model_fields
    experts = [key for key in _EXPERTS if config.get(key) and key not in read]
    if experts:
        others = [n for n, x in FAMILIES.items() if "num_experts" in x.model_fields]
        raise ModelError(
            f"config.json sets {experts[0]}={shown(config[experts[0]])}: "
            "mixture-of-experts models are not supported, except "
            f"{', '.join(others)}. Supported: {', '.join(FAMILIES)}."
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        names = [kind.FAMILY.models for kind in FAMILIES.values()]
        names += [composite.models for composite in COMPOSITES.values()]
        raise ModelError(
            f"config.json has model_type={shown(model_type)}. Supported: "
            f"{', '.join((*FAMILIES, *COMPOSITES))} ({', '.join(names)})."
        )
    return FAMILIES[model_type]
