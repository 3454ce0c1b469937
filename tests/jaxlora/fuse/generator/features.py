"""Random draws: a few features each, so that a failure names what it is about."""

import dataclasses
import random
from typing import Any

from tests.jaxlora.fuse.generator.draw import Draw, G, K, N, R

KEEPS = (0.5, 0.6, 0.75, 0.9)
PLACES = ("x", "branch_x", "w", "a", "s", "branch", "base", "sum")
SMALLER = {
    "float64": ("float32", "bfloat16"),
    "float32": ("bfloat16", "float16", "reduced"),
    "float16": ("bfloat16",),
    "bfloat16": ("float16",),
}
FAULTS = (
    "series",
    "series with a wide base",
    "attention",
    "activation of s",
    "activation of branch",
    "other x",
    "s has a reader",
    "base has a reader",
    "branch has a reader",
    "multiplied",
    "normalised s",
    "b of another adapter",
    "branch twice",
    "stopped s",
    "stopped branch",
)
CHOICES = ("gather", "take", "one hot", "one hot of tables", "compared", "ragged")
MODES = {
    "gather": (
        "default",
        "fill 0",
        "fill nan",
        "fill 1",
        "clip",
        "promise",
        "drop",
    ),
    "take": ("default", "clip", "fill 0", "fill nan", "wrap"),
}
TRANSFORMS = (
    "jit",
    "vmap",
    "scan",
    "remat",
    "cond",
    "custom_vjp",
    "shard_map",
    "shard_map",
)
EMPTY = ("t", "k", "n", "r", "g")


def _pairs(rng: random.Random, names: Any, values: Any, most: int = 2):
    chosen = rng.sample(names, rng.randint(1, most))
    return tuple((name, rng.choice(values)) for name in sorted(chosen))


def _dtypes(rng: random.Random) -> dict[str, Any]:
    dtype = rng.choices(
        ("float32", "bfloat16", "float16", "float64"), (52, 25, 11, 12)
    )[0]
    lora = dtype if rng.random() < 0.6 or dtype == "float64" else "float32"
    return {
        "dtype": dtype,
        "lora_dtype": lora,
        "cast_lora": rng.random() < 0.8,
        "x64": dtype == "float64" or rng.random() < 0.1,
    }


def _other_x(rng, made):
    return {"x_dtype": rng.choice(["bfloat16", "float32", "float16"])}


def _roundings(rng, made):
    return {"roundings": _pairs(rng, PLACES, SMALLER[made["dtype"]])}


def _preferred(rng, made):
    wanted = ("float32", "bfloat16") + (("float64",) if made["x64"] else ())
    return {"preferred": _pairs(rng, ("base", "s", "branch"), wanted, 3)}


def _precision(rng, made):
    names = ("HIGHEST", "HIGHEST", "DEFAULT", "HIGH")
    return {"precision": _pairs(rng, ("base", "s", "branch"), names, 3)}


def _bias(rng, made):
    return {
        "bias": rng.choice(["before", "after", "after", "both"]),
        "bias_dtype": rng.choice([made["dtype"], "float32", "bfloat16"]),
        "bias_size": rng.choice([1.0, 1000.0]),
    }


SCALED = {
    "number": ("x", "s", "a", "b", "branch"),
    "whole": ("x", "s", "a", "b", "branch"),
    "scalar": ("x", "s", "a", "b", "branch"),
    "rank": ("s",),
    "column": ("branch", "b"),
    "row": ("x", "s", "branch"),
    "feature": ("x",),
    "adapter": ("s", "branch"),
}


def _scale(rng, made):
    kinds = [k for k in SCALED if k != "adapter" or made.get("choice") == "gather"]
    kind = rng.choice(kinds)
    return {
        "scale": kind,
        "scale_at": rng.choice(SCALED[kind]),
        "scale_dtype": rng.choice([made["dtype"], "float32", "bfloat16"]),
    }


def _signs(rng, made):
    return {
        "minus": rng.random() < 0.4,
        "branch_first": rng.random() < 0.4,
        "times": rng.choice([1.0, 1.0, -1.0, 2.0]),
        "order": rng.choice(["s", "ab", "merged"]),
    }


def _product(rng, made):
    return {"product": rng.choice(["einsum", "dot_general", "left", "transposed"])}


def _stored(rng, made):
    return {"stored": tuple(n for n in ("w", "a", "b") if rng.random() < 0.6)}


def _dropout(rng, made):
    kinds = ("select", "divided after", "multiplied", "floats", "uniform", "equinox")
    return {
        "dropout": rng.choice(kinds),
        "keep": rng.choice(KEEPS),
        "mask": rng.choice(["elements"] * 3 + ["rows", "features"]),
        "mask_reader": rng.choice(["none"] * 3 + ["returned", "other", "base"]),
    }


def _choice(rng, made):
    choice = rng.choice(CHOICES + ("gather",) * 4)
    modes = MODES.get(choice, ("default",))
    made_ids = _ids(rng, choice)
    mode = rng.choice(modes)
    if mode == "wrap" and made_ids["sizes"][3] > G:
        mode = "clip"
    return {"choice": choice, "mode": mode, **made_ids}


def _ids(rng, choice):
    dtypes = ["int32", "int32", "int8", "uint8", "int16", "uint32"]
    if choice.startswith("one hot"):
        dtypes += ["float32", "float32"]
    dtype = rng.choice(dtypes)
    kinds = ["inside", "outside", "outside"]
    kinds += [] if dtype.startswith("u") else ["negative", "both"]
    g = G
    if choice in ("gather", "take") and rng.random() < 0.6:
        # JAX refuses to index more entries than int8 has numbers, but for `take`.
        g = {"uint8": 200, "int8": 200 if choice == "take" else 100}.get(dtype, G)
    return {"ids_dtype": dtype, "ids": rng.choice(kinds), "sizes": (K, N, R, g)}


def _empty(rng, made):
    k, n, r, g = made.get("sizes", (K, N, R, G))
    name = rng.choice(EMPTY if made.get("choice", "none") != "none" else EMPTY[:-1])
    if name == "t":
        return {"rows": (0,)}
    if name == "g":
        return {"choice": rng.choice(["one hot", "ragged"]), "sizes": (k, n, r, 0)}
    sizes = {"k": (0, n, r, g), "n": (k, 0, r, g), "r": (k, n, 0, g)}
    return {"sizes": sizes[name]}


def _fault(rng, made):
    return {"fault": rng.choice(FAULTS)}


def _rows(rng, made):
    return {"rows": rng.choice([(16,), (4, 6), (2, 3, 4), (48,)])}


def _around(rng, made):
    return {"around": (rng.choice(TRANSFORMS),), **_of_transforms(rng)}


def _outside(rng, made):
    return {"outside": (rng.choice(TRANSFORMS[1:]),), **_of_transforms(rng)}


def _nested(rng, made):
    around = (rng.choice(TRANSFORMS), rng.choice(TRANSFORMS[:6]))
    return {"around": around, **_of_transforms(rng)}


def _of_transforms(rng):
    return {
        "collective": rng.choice(["none", "psum", "all_gather", "axis_index"]),
        "check_vma": rng.random() < 0.6,
        "policy": rng.choice(["none", "names", "dots", "nothing"]),
    }


def _gradient(rng, made):
    return {"gradient": True}


def _second(rng, made):
    return {"second": True}


def _constraint(rng, made):
    return {"constraint": True}


def _post(rng, made):
    return {"post": rng.choice(["tanh", "float32", "bfloat16", "residual"])}


def _magnitude(rng, made):
    return {"magnitude": rng.choice(["sum", "both", "offset", "offset", "rounded"])}


# Each kind of feature, and how often a function has it.
FEATURES = (
    (_rows, 0.2),
    (_choice, 0.36),
    (_other_x, 0.06),
    (_roundings, 0.2),
    (_preferred, 0.14),
    (_precision, 0.08),
    (_bias, 0.3),
    (_scale, 0.4),
    (_signs, 0.3),
    (_product, 0.35),
    (_dropout, 0.28),
    (_empty, 0.08),
    (_fault, 0.16),
    (_second, 0.12),
    (_constraint, 0.06),
    (_post, 0.3),
    (_around, 0.26),
    (_outside, 0.2),
    (_nested, 0.06),
    (_gradient, 0.15),
    (_stored, 0.25),
    (_magnitude, 0.2),
)


def draw(seed: int) -> Draw:
    """Draws a function: a few features, so that a failure names what it is about."""
    rng = random.Random(seed)
    made = _dtypes(rng)
    for feature, probability in FEATURES:
        if rng.random() < probability:
            made |= feature(rng, made)
    return _consistent(Draw(seed=seed, **made))


def _consistent(draw: Draw) -> Draw:
    """Drops choices that cannot be together."""
    changed: dict[str, Any] = {}
    if draw.choice == "ragged":
        changed |= {"rows": (draw.rows[0] if draw.rows == (0,) else 24,)}
    if draw.choice == "gather" and draw.mode in ("default", "promise"):
        inside = {"outside": "inside", "both": "negative"}  # JAX promises nothing else
        changed |= {"ids": inside.get(draw.ids, draw.ids)}
    if draw.choice != "none":
        changed |= {"order": "s"}
    elif draw.fault == "b of another adapter":
        changed |= {"fault": "none"}
    if draw.fault.startswith("series") or draw.fault == "attention":
        k, _, r, g = draw.sizes
        changed |= {"sizes": (k, k, r, g), "choice": "none", "order": "s"}
        changed |= {"second": False}
    if draw.dropout != "none" or draw.fault not in ("none", "branch twice"):
        changed |= {"order": "s"} if draw.order == "merged" else {}
    if draw.fault in ("attention", "multiplied") or draw.order == "merged":
        changed |= {"magnitude": "none"}
    if draw.outside:
        changed |= {"gradient": False}
    if {*draw.around} & {*draw.outside} and draw.splits_rows:
        changed |= {"around": ()}
    shards = [*draw.around, *draw.outside].count("shard_map")
    if shards == 0 or 0 in draw.sizes[:2]:  # JAX gathers no empty dimension
        changed |= {"collective": "none"}
    if shards:
        changed |= {"constraint": False}
    if draw.choice == "ragged":  # JAX maps no ragged dot
        keep = lambda names: tuple(n for n in names if n != "vmap")
        changed |= {"around": keep(draw.around), "outside": keep(draw.outside)}
    if draw.splits_rows and len(draw.rows) == 3:
        changed |= {"rows": (4, 6)}
    return dataclasses.replace(draw, **changed)


def plain_draw(seed: int) -> Draw:
    """Draws a linear of the kinds that the documentation lists as found."""
    rng = random.Random(seed)
    dtype = rng.choice(["float32", "float32", "bfloat16"])
    made: dict[str, Any] = {
        "dtype": dtype,
        "lora_dtype": rng.choice([dtype, "float32"]),
        "rows": rng.choice([(24,), (4, 6)]),
        "bias": rng.choice(["none", "before", "after"]),
        "bias_dtype": dtype,
        "minus": rng.random() < 0.3,
        "branch_first": rng.random() < 0.3,
        "second": rng.random() < 0.2,
        "scale_dtype": dtype,
    }
    made["scale"] = rng.choice(["number", "whole", "scalar", "rank", "column"])
    made["scale_at"] = rng.choice(SCALED[made["scale"]])
    if rng.random() < 0.4:
        choice = rng.choice(["gather", "take", "one hot", "ragged"])
        made |= {"choice": choice, "ids_dtype": "int32", "mode": "default"}
    if rng.random() < 0.5:
        dropout = rng.choice(["select", "divided after", "multiplied", "floats"])
        made |= {"dropout": dropout, "keep": rng.choice(KEEPS)}
    if rng.random() < 0.5:
        made["product"] = rng.choice(["einsum", "dot_general", "left", "transposed"])
    if rng.random() < 0.6:
        place = rng.choice(["around", "around", "outside"])
        made |= {place: (rng.choice(TRANSFORMS),), **_of_transforms(rng)}
    made |= _stored(rng, made)
    return _consistent(Draw(seed=seed, **made))
