"""Writes quantized checkpoints of the kinds on the hub, from NumPy code of its own.

The formulas are those of the programs that write such checkpoints, and share no code
with `jaxlora.hf.quantized` or `jaxlora.pallas_kernels.quantized`.
"""

import json

import ml_dtypes
import numpy as np
import safetensors.numpy

from jaxlora.models.registry import model_config
from jaxlora.models.structure import linear_names
from tests import tiny

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
# Blocks of 64 along K fit into the linears; 128 x 128 blocks have parts at the edges.
CONFIG = {
    **tiny.CONFIG,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "vocab_size": 288,
}
LINEARS = linear_names(model_config(CONFIG))
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
        *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ],
    np.float32,
)


def dynamic_map() -> np.ndarray:
    """Returns the codebook of nested absmax; zeros and ones are two more values."""
    values = [0.0, 1.0]
    for i in range(7):
        borders = np.linspace(0.1, 1, 2**i + 1, dtype=np.float32)
        means = (borders[:-1] + borders[1:]) / 2 * np.float32(10.0 ** (i - 6))
        values += [*means, *-means]
    return np.sort(np.array(values, np.float32))


DYNAMIC = dynamic_map()


def nearest(codebook: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns the index of the nearest value, as uint8."""
    return np.abs(x[..., None] - codebook).argmin(-1).astype(np.uint8)


def fp8_rows(w, scale_shape, name="weight_scale"):
    """One scale per row, or one for all if the scale's shape has one element."""
    axis = 1 if np.prod(scale_shape) > 1 else None
    scale = np.abs(w).max(axis=axis, keepdims=True) / np.float32(448)
    values = (w / scale).astype(E4M3)
    wanted = values.astype(np.float32) * scale
    return {"weight": values, name: scale.reshape(scale_shape)}, wanted


def fp8_blocks(w, name="weight_scale_inv", block=(128, 128)):
    """One scale per block; those at the edges are smaller."""
    n, k = w.shape
    scale = np.empty((-(-n // block[0]), -(-k // block[1])), np.float32)
    values, wanted = np.empty((n, k), E4M3), np.empty((n, k), np.float32)
    for i, j in np.ndindex(*scale.shape):
        part = np.s_[
            i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]
        ]
        scale[i, j] = np.abs(w[part]).max() / np.float32(448)
        values[part] = (w[part] / scale[i, j]).astype(E4M3)
        wanted[part] = values[part].astype(np.float32) * scale[i, j]
    return {"weight": values, name: scale}, wanted


def int8_rows(w):
    """As compressed-tensors writes it."""
    scale = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    values = np.clip(np.round(w / scale), -128, 127).astype(np.int8)
    return {"weight": values, "weight_scale": scale}, values * scale


def bitsandbytes_int8(w):
    """SCB is the largest magnitude of each row."""
    scb = np.abs(w).max(axis=1)
    values = np.round(w * (127 / scb)[:, None]).astype(np.int8)
    wanted = values * (scb / np.float32(127))[:, None]
    tensors = {"weight": values, "SCB": scb, "weight_format": np.uint8(0)}
    return tensors, wanted


def bitsandbytes_nf4(w, *, nested=True):
    """Returns the tensors and W of `BitsandbytesNf4`, block by block."""
    blocks = w.astype(np.float32).reshape(-1, 64)
    absmax = np.abs(blocks).max(axis=1)
    codes = nearest(NF4, blocks / absmax[:, None])
    flat = codes.reshape(-1, 2)
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": list(w.shape),
    }
    tensors = {
        "weight": (flat[:, :1] * 16 + flat[:, 1:]).astype(np.uint8),
        "weight.absmax": absmax,
        "weight.quant_map": NF4,
    }
    if nested:
        offset = np.float32(absmax.mean())
        state |= {
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": float(offset),
        }
        rest = absmax - offset
        nested_absmax = np.array(
            [np.abs(rest[i : i + 256]).max() for i in range(0, rest.size, 256)],
            np.float32,
        )
        each = np.repeat(nested_absmax, 256)[: rest.size]
        code = nearest(DYNAMIC, rest / each)
        absmax = DYNAMIC[code] * each + offset
        tensors |= {
            "weight.absmax": code,
            "weight.nested_absmax": nested_absmax,
            "weight.nested_quant_map": DYNAMIC,
        }
    text = json.dumps(state).encode()
    key = "weight.quant_state.bitsandbytes__nf4"
    tensors[key] = np.frombuffer(text, np.uint8)
    return tensors, (NF4[codes] * absmax[:, None]).reshape(w.shape)


def compressed(number, strategy, layout_format, **weights):
    """Returns the quantization_config of compressed-tensors."""
    args = {
        "num_bits": 8,
        "type": number,
        "strategy": strategy,
        "symmetric": True,
        **weights,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout_format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": args,
                "input_activations": {"num_bits": 8, "dynamic": True},
                "output_activations": None,
            }
        },
    }


FLOAT, INT = "float-quantized", "int-quantized"
BNB4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_compute_dtype": "bfloat16",
    "llm_int8_skip_modules": None,
}
# quantization_config, tensors and W of a linear, and the format that it is loaded as.
KINDS = {
    "fp8-channel": (
        compressed("float", "channel", FLOAT),
        lambda w: fp8_rows(w, (len(w), 1)),
        "fp8",
    ),
    "fp8-tensor": (
        compressed("float", "tensor", FLOAT),
        lambda w: fp8_rows(w, (1,)),
        "fp8",
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
        lambda w: fp8_rows(w, (len(w), 1)),
        "fp8",
    ),
    "fp8-one-scale": (
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
        },
        lambda w: fp8_rows(w, (), "weight_scale_inv"),
        "fp8",
    ),
    "int8-channel": (compressed("int", "channel", INT), int8_rows, "int8"),
    "bitsandbytes-int8": (
        {"load_in_8bit": True, "llm_int8_threshold": 6.0},
        bitsandbytes_int8,
        "int8",
    ),
    "nf4": (BNB4, lambda w: bitsandbytes_nf4(w, nested=False), "nf4"),
    "nf4-nested": (BNB4, bitsandbytes_nf4, "nf4"),
}
BLOCKS = {
    "fp8-blocks": (
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        fp8_blocks,
        "fp8",
    ),
    "compressed-blocks": (
        compressed("float", "block", FLOAT, block_structure=[32, 64]),
        lambda w: fp8_blocks(w, "weight_scale", (32, 64)),
        "fp8",
    ),
}


def write_quantized(folder, kind, *, keep=(), change=None):
    """Writes a checkpoint of a kind.

    Args:
        folder: Folder to make.
        kind: Key of `KINDS` or `BLOCKS`.
        keep: Ends of names of linears that stay dense.
        change: Changes the dict of all tensors before they are written.

    Returns:
        The dense weights that the checkpoint stands for, by Hugging Face's name.
    """
    quantization, quantize, _ = (KINDS | BLOCKS)[kind]
    dense = tiny.random_weights(config=CONFIG)
    tensors, wanted = dict(dense), dict(dense)
    for name in LINEARS:
        if name.endswith(tuple(keep)) and keep:
            continue
        parts, wanted[f"{name}.weight"] = quantize(tensors.pop(f"{name}.weight"))
        tensors |= {f"{name}.{part}": np.asarray(x) for part, x in parts.items()}
    if change is not None:
        change(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    tiny.write_tokenizer(folder)
    return wanted
