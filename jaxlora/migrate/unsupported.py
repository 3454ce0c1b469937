"""Finds base models that a run cannot use, before the run file is written."""

import pathlib
import re

from jaxlora.errors import ConfigError, ModelError
from jaxlora.migrate.migration import Migration

_QUANTIZED = (
    "{model} is, by its name, {what}, which is not supported. Use the original model, "
    "and quantize_base: nf4, int8 or fp8 for less memory."
)
_OTHER = (
    "{what} are not supported, and {model} is one by its name. Use a model of a family "
    "that is: Llama, SmolLM2, SmolLM3, Mistral, Qwen2, Qwen2.5, Qwen3, Gemma 2, "
    "Gemma 3 text, Granite 3, OLMo 2, OLMo 3, Phi-3 and Phi-4-mini."
)
# How the names of models are written whose weights are in a format that is not read.
_FORMATS = {
    "quantized as AWQ": r"awq",
    "quantized as GPTQ": r"gptq",
    "quantized as AQLM": r"aqlm",
    "quantized as HQQ": r"hqq",
    "quantized as EETQ": r"eetq",
    "quantized as EXL2": r"exl[23]",
    "quantized as QuIP#": r"quip|e8p",
    "quantized as MLX": r"mlx",
    "quantized as 4-bit or narrower": r"w[1-4]a\d+|int[1-4]|[1-35-7]bit|fp4"
    r"|(nv|mx)fp4|auto-?round",
    "a GGUF model": r"gguf",
}
# How the names of models are written whose architecture is not built.
_ARCHITECTURES = {
    "Mixtures of experts": r"mixtral|moe|llama4|llama-4|gpt-oss|grok"
    r"|(?<!distill-)deepseek-?(v[2-9]|r1)(?!-distill)|dbrx|arctic|kimi|jamba"
    r"|(?<!qwen3-30b-)(?<!qwen3-coder-30b-)(?<!qwen3-235b-)a\d+(\.\d+)?b"
    r"|maverick|scout|glm-?4\.[5-9]|minimax|ernie-?4\.5|llada",
    "Models of images, speech or video": r"vl|vision|llava|pixtral|internvl|omni"
    r"|audio|minicpm-?[vo]|paligemma|idefics|smolvlm|mllama|gemma-?3n|gemma-?3-(4|12|27)b|voxtral|ocr",
    "Models of this family": r"phi[-_]?\d?(\.\d)?|falcon|gpt-?2|gpt-?j|gpt-?neox?"
    r"|opt|bloomz?|mamba|rwkv|mpt|pythia|stablelm|starcoder2?|codegen|cohere"
    r"|command-?[ra]|olmo-?\d?|granite|chatglm\d?|glm-?\d?|baichuan\d?|internlm\d?"
    r"|recurrentgemma|t5|bert|nemotron|hunyuan|qwen3-next|qwen3\.5|qwen(?=-\d)|gemma"
    r"|gemma-?4|lfm2?|ministral-?3|seed-oss|exaone|bitnet",
}
# Such names hold a word of the tables, but are of models that are supported.
_SUPPORTED = re.compile(
    r"gemma-?[23](?![nb])|qwen-?([23](?!\.5|-next)|2\.5)|distill-|olmo-?[23]"
    r"|granite-3\.\d-[28]b|phi-?(3|3\.5|4)-mini|phi-?3-medium"
)


def check_model(migration: Migration) -> None:
    """Refuses a base model that is here and cannot be used; names one that may be such.

    Raises:
        ConfigError: The folder of the model holds a family or a quantization that is
            not supported.
    """
    model = migration.run.get("model")
    if not isinstance(model, str):
        return
    if "\0" not in model and (pathlib.Path(model) / "config.json").is_file():
        _check_folder(pathlib.Path(model))
    elif doubt := find_doubt(model):
        migration.to_do.insert(0, f"model: {doubt}")


def _check_folder(folder: pathlib.Path) -> None:
    # Imported late, because most settings name a model that is not here.
    from jaxlora.hf.files import read_json
    from jaxlora.hf.quantized.config import read_quantization
    from jaxlora.models.registry import model_config

    try:
        config = read_json(folder / "config.json")
        model_config(config)
        read_quantization(config)
    except ModelError as error:
        raise ConfigError(f"the model {folder} cannot be used: {error}") from error


def find_doubt(model: str) -> str | None:
    """Returns why a model is probably not supported, by its name; None: nothing known.

    Args:
        model: Its hub id, such as `mistralai/Mixtral-8x7B-v0.1`.
    """
    name = model.rpartition("/")[2].lower()
    for said, table in ((_QUANTIZED, _FORMATS), (_OTHER, _ARCHITECTURES)):
        for what, words in table.items():
            if not re.search(rf"(?<![a-z])({words})(?![a-z])", name):
                continue
            if what != "Models of this family" or not _SUPPORTED.search(name):
                return said.format(model=model, what=what)
    return None
