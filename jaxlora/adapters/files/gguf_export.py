"""Writes an adapter as a GGUF file, which llama.cpp loads with `--lora`.

The format is that of llama.cpp's `convert_lora_to_gguf.py`. llama.cpp adds
`alpha / rank * A B` with one alpha for the whole file. So if modules have other
scalings, or rsLoRA is used, the ratio is multiplied into B. VeRA is written as the
LoRA that it is equal to.
"""

import os
import pathlib
import tempfile
from collections.abc import Mapping

import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.base_name import is_hub_id
from jaxlora.adapters.files.peft_export import CONFIG_FILE
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.common.json_file import shown
from jaxlora.errors import AdapterError
from jaxlora.hf.checkpoint import planned_checkpoint
from jaxlora.hf.files import read_json, tokenizer_folder
from jaxlora.models.config import ModelConfig
from jaxlora.models.slot_modules import SLOT_MODULES
from jaxlora.models.structure import linear_path, linear_shapes
from jaxlora.modules.trained_tensors import tensor_settings

# llama.cpp's architectures by model_type. It reads Mistral's models as Llama's.
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
# Names inside a layer of a GGUF file.
GGUF_LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# llama.cpp rotates interleaved pairs of features in these, not halves of a head.
_INTERLEAVED = {"llama"}


def export_gguf(
    adapter_folder: str | pathlib.Path,
    out: str | pathlib.Path,
    *,
    base: str | None = None,
    revision: str | None = None,
) -> pathlib.Path:
    """Writes a PEFT folder as a GGUF adapter, in float32.

    Args:
        adapter_folder: PEFT folder of a LoRA adapter.
        out: File to write; it must not exist.
        base: Folder or hub id of the base model, of which only config.json is read;
            None: the one that the adapter names.
        revision: Branch, tag or commit of the base on the hub.

    Raises:
        JaxloraError: The adapter or the base's config.json cannot be read, they do not
            fit, the model is of another kind than llama.cpp's converter has here,
            float32 cannot hold a scaling, or the `gguf` package is missing.
        FileExistsError: `out` exists.
    """
    adapter_folder, out = pathlib.Path(adapter_folder), pathlib.Path(out)
    if base is None:
        base, stated = _stated_base(adapter_folder / CONFIG_FILE)
        revision = revision or stated
    if not base:
        raise AdapterError(
            f"{adapter_folder} does not name its base model. Give its folder or hub "
            "id: --base MODEL."
        )
    if not is_hub_id(base) and not pathlib.Path(base).exists():
        raise AdapterError(
            f"{adapter_folder} names its base model {base!r}, which is no hub id and "
            "no folder here. Give the folder or hub id: --base MODEL."
        )
    _check_free(out)
    model = planned_checkpoint(tokenizer_folder(base, revision)).config
    if model.model_type not in _ARCHITECTURES:
        raise AdapterError(
            f"{base} has model_type={model.model_type!r}, whose adapters are not "
            f"written as GGUF; those of these are: {', '.join(_ARCHITECTURES)}. Merge "
            "it into its base (jaxlora merge), and convert the merged model."
        )
    shapes = linear_shapes(model)
    adapter = import_peft(adapter_folder, shapes).as_lora(shapes)
    _check_plain(adapter, adapter_folder)
    alpha, modules = _scaled(adapter, adapter_folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        part = pathlib.Path(temporary) / out.name
        _write(alpha, modules, model, part, adapter_folder.name)
        _check_free(out)  # another process may have written it meanwhile
        part.rename(out)
    return out


def _stated_base(path: pathlib.Path) -> tuple[str | None, str | None]:
    """Reads the base that an adapter names, and its revision; None: it names none."""
    config = read_json(path)
    keys = "base_model_name_or_path", "revision"
    for key in keys:
        if not isinstance(config.get(key), str | None):
            raise AdapterError(
                f"{path} has {key}={shown(config[key])}; wanted a text or null."
            )
    return config.get(keys[0]), config.get(keys[1])


def _check_plain(adapter: Adapter, folder: pathlib.Path) -> None:
    more = [setting for setting in tensor_settings() if adapter.is_set(setting)]
    more += [SLOT_MODULES[name].setting for name in adapter.outside]
    if more:
        raise AdapterError(
            f"{folder} has {more[0]}, and llama.cpp's adapters hold A and B only. "
            "Merge it into its base (jaxlora merge), and convert the merged model."
        )


def _check_free(out: pathlib.Path) -> None:
    if os.path.lexists(out):
        raise FileExistsError(f"{out} exists. Remove it, or choose another name.")


def _scaled(
    adapter: Adapter, folder: pathlib.Path
) -> tuple[float, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Brings all modules to one alpha, from which llama.cpp computes their scalings.

    Returns:
        The alpha, and A and B of each module in PEFT's layout, R K and N R. B is
        multiplied by the ratio of the module's own alpha to the one of the file.

    Raises:
        AdapterError: Float32 cannot hold an alpha, a scaling or a multiplied B.
    """
    modules = adapter.modules
    # With these, llama.cpp's scaling equals ours.
    alphas = {name: adapter.scaling(w) * w.rank for name, w in modules.items()}
    alpha, scaled = next(iter(alphas.values())), {}
    for name, weights in modules.items():
        own, b = alphas[name], weights.b.T
        for value in (own, own / weights.rank, alpha / weights.rank):
            _check_float32(value, f"the alpha or the scaling of {name}", folder)
        if own != alpha and b.any():
            # In float64, because the ratio alone may be beyond float32.
            product = b.astype(np.float64) * (own / alpha)
            largest = float(np.abs(product).max())
            _check_float32(largest, f"B of {name}, times {own / alpha:g},", folder)
            b = product.astype(np.float32)
        scaled[name] = weights.a.T, b
    return alpha, scaled


def _check_float32(value: float, what: str, folder: pathlib.Path) -> None:
    """Refuses a magnitude that float32 rounds to 0 or infinity, or holds in part."""
    limits = np.finfo(np.float32)
    smallest, largest = float(limits.smallest_normal), float(limits.max)
    if not smallest <= value <= largest:
        raise AdapterError(
            f"{folder}: {what} is {value:g}, and the float32 of GGUF files holds "
            f"{smallest:.3g} to {largest:.3g} in full. Change lora_alpha in "
            "adapter_config.json to a usual one, such as 16, and multiply B by the "
            "inverse; or train with such an alpha."
        )


def _write(
    alpha: float,
    modules: Mapping[str, tuple[np.ndarray, np.ndarray]],
    model: ModelConfig,
    path: pathlib.Path,
    name: str,
) -> None:
    try:
        import gguf
    except ImportError as error:
        raise AdapterError(
            "writing GGUF files needs the gguf package: pip install 'jaxlora[gguf]'."
        ) from error
    writer = gguf.GGUFWriter(path, _ARCHITECTURES[model.model_type])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(name)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for module, (a, b) in modules.items():
        b = rows_in_gguf(b, module, model)
        tensor = gguf_name(module)
        writer.add_tensor(f"{tensor}.lora_a", np.ascontiguousarray(a, np.float32))
        writer.add_tensor(f"{tensor}.lora_b", np.ascontiguousarray(b, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(module: str) -> str:
    """Returns the name of a linear's weight in GGUF files, `blk.0.attn_q.weight`."""
    _, layer, name = linear_path(module).split(".", 2)
    return f"blk.{layer}.{GGUF_LINEARS[name]}.weight"


def rows_in_gguf(rows: np.ndarray, module: str, model: ModelConfig) -> np.ndarray:
    """Reorders the output features of q and k for llama.cpp's rotary embedding.

    Hugging Face's rotates the features i and i + E / 2 of a head of E features. Where
    llama.cpp rotates 2 i and 2 i + 1 instead, they have to be interleaved.

    Args:
        rows: N rows, such as those of B in PEFT's layout, N R.
        module: Name of the linear.
        model: The base model.
    """
    heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads}
    count = heads.get(module.rpartition(".")[2])
    if count is None or _ARCHITECTURES[model.model_type] not in _INTERLEAVED:
        return rows
    halves = rows.reshape(count, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
