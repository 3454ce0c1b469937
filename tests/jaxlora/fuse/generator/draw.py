"""The choices that make a random function."""

import dataclasses

K, N, R, G = 32, 48, 4, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """The choices that make a function; the defaults are the textbook's linear.

    Attributes:
        seed: Seed of the values of the arguments.
        dtype: Dtype of x and w.
        lora_dtype: Dtype of A and B.
        x_dtype: Dtype of x, if another than that of w.
        x64: Whether 64-bit types are enabled.
        sizes: Sizes of the dimensions k, n, r and g.
        rows: Leading sizes of x.
        product: How products are written.
        stored: Which of w, a and b are stored transposed.
        cast_lora: Whether A and B are cast to the dtype of x.
        roundings: Values that are cast to a dtype and back, and that dtype.
        preferred: Products with a `preferred_element_type`, and that type.
        precision: Products with a `precision`, and its name.
        bias: Where a bias is added: "none", "before", "after" or "both" of the branch.
        bias_dtype: Its dtype.
        bias_size: The size of its values.
        scale: Kind of the scale, of "number", "whole", "scalar", "rank", "column",
            "row", "feature" or "adapter".
        scale_at: The value that is scaled.
        scale_dtype: Dtype of a scale that is an array.
        times: A number that multiplies the base.
        magnitude: How DoRA's magnitude scales the sum, of "sum", "both" terms, an
            "offset" from one as in PEFT, or such an offset that is "rounded".
        minus: Whether the branch is subtracted.
        branch_first: Whether the branch is the first summand.
        order: What is multiplied first: "s", "ab", or "merged" into w.
        dropout: How x is dropped for the branch.
        keep: The probability to keep an element.
        mask: What shares a draw: "elements", "rows" or "features".
        mask_reader: What reads the mask, too.
        choice: How rows choose an adapter; "none": there is one.
        mode: How a gather treats ids that are outside.
        ids_dtype: Dtype of the ids.
        ids: Which ids there are: "inside", "negative", "outside" or "both".
        fault: What makes it another function than a linear with a branch.
        second: Whether a second linear reads the same x.
        constraint: Whether the terms have a sharding constraint.
        post: What follows the sum.
        around: Transforms inside `fuse`, outermost first.
        outside: Transforms of the fused function, outermost first.
        gradient: Whether the function that is fused is a gradient.
        collective: What a `shard_map` computes over its axis.
        check_vma: The argument of `shard_map`.
        policy: What remat keeps.
    """

    seed: int = 0
    dtype: str = "float32"
    lora_dtype: str = "float32"
    x_dtype: str | None = None
    x64: bool = False
    sizes: tuple[int, int, int, int] = (K, N, R, G)
    rows: tuple[int, ...] = (24,)
    product: str = "matmul"
    stored: tuple[str, ...] = ()
    cast_lora: bool = True
    roundings: tuple[tuple[str, str], ...] = ()
    preferred: tuple[tuple[str, str], ...] = ()
    precision: tuple[tuple[str, str], ...] = ()
    bias: str = "none"
    bias_dtype: str = "float32"
    bias_size: float = 1.0
    scale: str = "number"
    scale_at: str = "branch"
    scale_dtype: str = "float32"
    times: float = 1.0
    magnitude: str = "none"
    minus: bool = False
    branch_first: bool = False
    order: str = "s"
    dropout: str = "none"
    keep: float = 0.75
    mask: str = "elements"
    mask_reader: str = "none"
    choice: str = "none"
    mode: str = "default"
    ids_dtype: str = "int32"
    ids: str = "inside"
    fault: str = "none"
    second: bool = False
    constraint: bool = False
    post: str = "none"
    around: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    gradient: bool = False
    collective: str = "none"
    check_vma: bool = True
    policy: str = "none"

    def __str__(self) -> str:
        changed = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"Draw({', '.join(changed)})"

    @property
    def splits_rows(self) -> bool:
        """Whether a transform gives the linear only some of the rows."""
        return bool({"vmap", "scan", "shard_map"} & {*self.around, *self.outside})
