"""Describes the present device, and which kernels and attention can run there."""

import dataclasses
import importlib.metadata
import os

import jax
import jax.numpy as jnp
from jax._src.lib import cuda_versions
from rich.console import Console

from jaxlora.device_check import check_device
from jaxlora.inspect.artifacts import print_rows
from jaxlora.models.config import DeltaShape
from jaxlora.models.registry import model_config
from jaxlora.modules.attention_table import ATTENTIONS
from jaxlora.modules.triton_gated_delta import triton_delta_unsupported
from jaxlora.pallas_kernels import BACKENDS, FORMATS, LinearShape
from jaxlora.plan.job.kernel_choice import (
    group_reasons,
    is_blackwell,
    present_capability,
)
from jaxlora.plan.memory.device_memory import device_memory
from jaxlora.plan.memory.gpu_share import choose_share, query_gpus

# The linears and the heads of Llama-3.1-8B.
_LINEAR = LinearShape(
    dtype=jnp.bfloat16, in_features=4096, out_features=4096, rank=16, block_tokens=64
)
_MODEL = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
# The gated delta nets of Qwen3.5-9B.
_DELTA = DeltaShape(
    num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4
)
_PACKAGES = ("jaxlora", "jax", "jaxlib", "triton", "jax-triton")
_BLACKWELL = (
    "Blackwell: jaxlora is untested there. The portable kernels are expected to run; "
    "please report whether they do."
)


def inspect_device(console: Console) -> None:
    """Prints what the present device is, and what can run there.

    Args:
        console: Console to print to.

    Raises:
        DeviceError: A GPU is visible, and JAX does not use it.
    """
    # Another process may be training on the GPU.
    share = choose_share(None, os.environ)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    check_device()
    facts = _device_facts()
    if share is not None:
        _, facts["memory of a run"] = share
    print_rows(console, "device", facts | _versions())
    kernels = {name: b.unsupported(_LINEAR) for name, b in BACKENDS.items()}
    why_not = {
        name: b.why_not(kernels[name], is_auto=True) for name, b in BACKENDS.items()
    }
    title = "LoRA kernels, for a linear of 4096 x 4096 in bfloat16, rank 16"
    _print_support(console, title, kernels, why_not)
    print_rows(console, "formats of a quantized base, for the same linear", _formats())
    model = model_config(_MODEL)
    attentions = {
        name: choice.unsupported(jnp.bfloat16, model)
        for name, choice in ATTENTIONS.items()
    }
    title = "attention, for heads of 128 features in bfloat16"
    _print_support(console, title, attentions, attentions)
    rules = {"triton": triton_delta_unsupported(jnp.bfloat16, _DELTA), "xla": None}
    title = "gated delta rule, for heads of 128 x 128 in bfloat16"
    _print_support(console, title, rules, rules)


def _formats() -> dict[str, str]:
    """Says for each format which back end `auto` takes, and how it multiplies."""
    rows = {}
    for name, weight in FORMATS.items():
        shape = dataclasses.replace(_LINEAR, weight_format=name)
        why_not = {
            b.name: b.why_not(b.unsupported(shape), is_auto=True)
            for b in BACKENDS.values()
        }
        taken = next(name for name, reason in why_not.items() if reason is None)
        how = (
            f"products in {name}"
            if weight.reaches_kernels
            else "products with weights that are dequantized layer by layer"
        )
        reasons = group_reasons((b, why) for b, why in why_not.items() if why)
        rows[name] = "; ".join([f"{how}, of {taken}", *reasons])
    return rows


def _device_facts() -> dict[str, str]:
    device = jax.local_devices()[0]
    count = jax.local_device_count()
    facts = {"device": device.device_kind + (f", {count} of them" * (count > 1))}
    if device.platform == "cpu":
        found = device_memory(0)
        return facts | {"memory": "unknown" if found is None else found.source}
    capability = present_capability() or "unknown"
    facts["compute capability"] = capability
    if is_blackwell(capability):
        facts["tested"] = _BLACKWELL
    for gpu in query_gpus() or ():
        if gpu.name == device.device_kind:
            facts["memory"] = f"{gpu.total_mib} MiB, of which {gpu.used_mib} are in use"
            facts["driver"] = gpu.driver
            break
    return facts


def _versions() -> dict[str, str]:
    absent = "not loaded; pip install 'jaxlora[cuda]' on a machine with an NVIDIA GPU"
    versions = {"CUDA": absent, "cuDNN": absent}
    if cuda_versions is not None:
        versions["CUDA"] = str(cuda_versions.cuda_runtime_get_version())
        versions["cuDNN"] = str(cuda_versions.cudnn_get_version())
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _print_support(
    console: Console,
    title: str,
    reasons: dict[str, str | None],
    why_not: dict[str, str | None],
) -> None:
    """Prints which entries of a table can run, and which one `auto` takes.

    Args:
        console: Console to print to.
        title: Title of the table.
        reasons: Why each entry cannot run; None if it can.
        why_not: Why `auto` does not take each entry; None if it can.
    """
    chosen = next((name for name, why in why_not.items() if why is None), None)
    rows = {}
    for name, reason in reasons.items():
        rows[name] = "yes" if reason is None else f"no: {reason}"
        if reason is None and why_not[name] is not None:
            rows[name] += f"; auto passes over it, as it {why_not[name]}"
        if name == chosen:
            rows[name] += "; auto takes it"
    print_rows(console, title, rows)
