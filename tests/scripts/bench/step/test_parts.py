"""Attribution of kernels to the parts of a step."""

import pathlib

from scripts.bench.device_trace import Kernel, busy_ms
from scripts.bench.step import parts as step_parts
from scripts.bench.step.parts import Attribution

ROOT = pathlib.Path(__file__).parents[3]


def kernel(name, start_ms=0.0, ms=1.0):
    return Kernel(name=name, instruction="", module="", start_ms=start_ms, ms=ms)


def test_kernels_that_are_known_by_name():
    attribution = Attribution({}, rank=16)
    expected = {
        "lora_expand_outer_mosaic_gpu_kernel": step_parts.FROZEN,
        "lora_shrink": step_parts.OWN,
        "lora_outer": step_parts.OWN,
        "lora_quantizeshrink": step_parts.QUANTIZING,
        "expand_kernel": step_parts.FROZEN,
        "shrink_kernel": step_parts.OWN,
        "attention_key_gradient": step_parts.ATTENTION,
        "cudnn_sdpa_bprop": step_parts.ATTENTION,
        "nvjet_sm90_tst_256x128_64x4": step_parts.CUBLAS,
        "nvjet_sm90_tss_256x128_64x4": step_parts.HEAD,
        "something_else": step_parts.OTHER,
    }
    assert {name: attribution.part(kernel(name)) for name in expected} == expected


def test_every_source_file_of_the_table_exists():
    folders = (ROOT / "jaxlora", ROOT / "pallas_kernels")
    paths = [str(path) for folder in folders for path in folder.rglob("*.py")]
    names = [name for name, _ in step_parts._FILES] + list(step_parts._PRODUCT_FILES)
    assert not [name for name in names if not any(name in path for path in paths)]


def test_busy_time_counts_overlaps_once():
    kernels = [
        kernel("a", 0, 4),
        kernel("b", 1, 1),
        kernel("c", 3, 3),
        kernel("d", 9, 1),
    ]
    assert busy_ms(kernels) == 7
