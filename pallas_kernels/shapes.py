"""Shapes of real models that benchmarks and tests share. Nothing here touches a device."""

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Heads:
    """The attention heads of a model's layer.

    Attributes:
      model: its name.
      query: H, query heads.
      kv: K, heads of the cache.
      dim: D, head_dim.
    """

    model: str
    query: int
    kv: int
    dim: int


QWEN3_8B = Heads("Qwen3-8B", query=32, kv=8, dim=128)
GPT_OSS_20B = Heads("gpt-oss-20b", query=64, kv=8, dim=64)


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """One layer's cache k, v [B, K, S, D].

    Attributes:
      heads: of the layer.
      batch: B, sequences.
      rows: S, cache rows of a sequence.
    """

    heads: Heads
    batch: int
    rows: int

    @property
    def size(self) -> str:
        """B x S, rows in binary thousands where they are whole."""
        rows = f"{self.rows // 1024}K" if self.rows % 1024 == 0 else str(self.rows)
        return f"{self.batch} x {rows}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of k and of v: [B, K, S, D]."""
        return self.batch, self.heads.kv, self.rows, self.heads.dim

    def bytes(self, rows: int, itemsize: int = 2) -> int:
        """Bytes of `rows` keys and values of each sequence."""
        return 2 * self.batch * self.heads.kv * rows * self.heads.dim * itemsize


@dataclasses.dataclass(frozen=True)
class SelectShape:
    """What `select_top_k` ranks at once.

    Attributes:
      layers: whose scores are ranked in one call.
      batch: B, sequences.
      size: M, scores of a sequence.
      k: how many are taken.
    """

    layers: int
    batch: int
    size: int
    k: int


@dataclasses.dataclass(frozen=True)
class ExpertsShape:
    """A product of a layer with a mixture of experts.

    Attributes:
      model: its name.
      experts: X.
      chosen: experts of a token.
      inputs: columns of the rows.
      outputs: columns of their products.
      packed: whether the matrices are MXFP4.
    """

    model: str
    experts: int
    chosen: int
    inputs: int
    outputs: int
    packed: bool


SIZES = ((1, 128 * 1024), (4, 96 * 1024), (8, 32 * 1024), (32, 10 * 1024))  # B, S
TOKENS = (1, 7)  # T: a plain step, and six drafts verified

CACHES = tuple(
    CacheShape(h, *size) for h, size in itertools.product((QWEN3_8B, GPT_OSS_20B), SIZES)
)
SPARSE_KEYS = 2304  # a sequence: 7% of 32K, in whole blocks of 64
SPARSE_TAIL = 20  # rows
SPARSE_BLOCKS = (64, 32, 16, 8, 1)
SPARSE_CACHES = (
    *(shape for shape in CACHES if shape.heads == QWEN3_8B and shape.batch <= 8),
    CacheShape(GPT_OSS_20B, 8, 32 * 1024),
)
SELECTIONS: tuple[SelectShape, ...] = (
    SelectShape(36, 8, 32 * 1024, 2304),
    SelectShape(1, 8, 32 * 1024, 2304),
    SelectShape(36, 4, 96 * 1024, 6912),
    SelectShape(36, 8, 2 * 1024, 144),  # 32K keys in blocks of 16
    SelectShape(1, 1, 128 * 1024, 9216),
)
EXPERTS: tuple[ExpertsShape, ...] = (
    ExpertsShape("Qwen3-30B-A3B", 128, 8, 2048, 1536, packed=False),
    ExpertsShape("Qwen3-30B-A3B", 128, 8, 768, 2048, packed=False),
    ExpertsShape("gpt-oss-20b", 32, 4, 2880, 5760, packed=True),
    ExpertsShape("gpt-oss-20b", 32, 4, 2880, 2880, packed=True),
)
EXPERT_TOKENS: tuple[int, ...] = (
    1,
    8,
    56,
    512,
)  # that one call multiplies; 56 are eight sequences of TOKENS[1]

# One of each, for a quick look.
QUICK_EXPERTS, QUICK_EXPERT_TOKENS = EXPERTS[::2], (8,)
QUICK_CACHE = CacheShape(QWEN3_8B, 8, 32 * 1024)
QUICK_SELECTIONS: tuple[SelectShape, ...] = (SELECTIONS[0], SELECTIONS[3])

# For machines without an accelerator: the same groups of heads and the same tail.
SMALL_CACHE = CacheShape(Heads("Qwen3-8B / 4", query=8, kv=2, dim=128), 2, 2048)
SMALL_KEYS = 256
SMALL_SELECTION = SelectShape(4, 2, 2048, 144)
SMALL_EXPERTS = (ExpertsShape("small", 8, 2, 64, 96, packed=True),)
SMALL_EXPERT_TOKENS = (5,)
