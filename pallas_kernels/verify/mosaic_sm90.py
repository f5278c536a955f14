"""`verify_attention` for Hopper (H100, H200): a Pallas Mosaic GPU kernel.

One CTA attends for one KV head to one of several parts of a sequence's keys. A memory warpgroup
copies tiles of keys and values to shared memory; two compute warpgroups take turns at them, so that
the softmax of one tile hides behind the copies and products of the next.

What scores cost. The least that can be written per key is one number a KV head, and where that
number exists it is all that is written:

- mode "logit": the mean over rows and heads of q.k is (the mean of q).k. The mean of the queries,
  as the sum of two numbers of the cache's dtype so that nothing is lost, is one more operand of the
  tensor cores: 4 bytes a key and KV head, 0.8% of what is read at D = 128, 1.6% at D = 64.
- mode "weight", blocks of 8 keys or a multiple: a row's weights exp(logit - lse) need the row's
  lse, which is known only at the end, so each row must be kept apart; but their sum over 8 keys,
  relative to the row's running maximum, is enough, and the tensor cores add it up while they
  multiply the same weights with the values: 4/8 bytes a key and row, 0.8% (D = 128, G = 4, 2
  tokens) to 3.1% (D = 64, G = 8).
- mode "weight", single keys: the weights themselves, relative to the running maximum, as the
  bfloat16 that the product with the values needs anyway (a relative error of 2**-9 at any size,
  where a float16 logit of 20 has 2**-7): 2 bytes a key and row, 3.1% to 12.5%.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import splits
from pallas_kernels.splits import LOG2_E
from pallas_kernels.verify.key_scores import KeyScores

KEYS = 64  # keys of a tile
ROWS = 64  # rows of queries that the tensor cores take at a time
SUMMED_KEYS = 8  # keys whose weights are added up for block scores
MAX_ROWS = 2 * ROWS
SHARED_MEMORY = 227 * 1024  # bytes that one CTA can have on Hopper
PROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is cut up.

    Attributes:
      parts: into how many parts each sequence's keys are cut.
      stages: tiles of keys and values in flight.
    """

    parts: int
    stages: int = 4

    def __post_init__(self) -> None:
        # A warpgroup keeps count of a barrier's phases by its own waits: when two take turns at the
        # tiles, each stage must always fall to the same one.
        if self.stages % 2:
            raise ValueError(f"`stages` must be even, but is {self.stages}.")

    @classmethod
    def of(cls, batch: int, kv_heads: int, rows: int, head_dim: int) -> "Config":
        """Two waves of CTAs, and as many stages as fit."""
        parts = max(1, 2 * PROCESSORS // (batch * kv_heads))
        stages = 2 if rows > ROWS and head_dim == 128 else 4 if head_dim == 128 else 6
        return cls(parts=min(parts, 32), stages=stages)


def refuses(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    slots: Array | None,
    key_scores: KeyScores | None,
    scale: float,
    window: int | None = None,
    sinks: Array | None = None,
) -> str | None:
    """Why the arguments are outside the kernel's domain."""
    _, tokens, heads, head_dim = q.shape
    kv_heads, cache_rows = k.shape[1:3]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"`q` must be bfloat16 or float16, but is {q.dtype},"
    if head_dim not in (64, 128):
        return f"`q` must have head_dim 64 or 128, but has {head_dim},"
    if tokens * heads // kv_heads > MAX_ROWS:
        return (
            f"`q` must have at most {MAX_ROWS} query tokens times query heads a KV head, "
            f"but has {tokens} * {heads // kv_heads},"
        )
    if cache_rows % KEYS:
        return f"`k` must have a multiple of {KEYS} cache rows, but has {cache_rows},"
    return None


def verify_attention(
    q: Float[Array, "b T H D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, " b"],
    slots: Int[Array, " b"] | None,
    key_scores: KeyScores | None,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "b T H D"], Float[Array, "b T H"], Float[Array, "b *rest S/block"] | None]:
    """See `pallas_kernels.verify_attention`; `interpret` as in `plgpu.kernel`."""
    batch, tokens, heads, head_dim = q.shape
    kv_heads, cache_rows = k.shape[1:3]
    group = heads // kv_heads
    order = splits.token_order(tokens, key_scores.rows if key_scores is not None else ())
    rows = splits.pack(q, kv_heads, order)
    if slots is None:
        slots = jnp.arange(batch, dtype=jnp.int32)
    config = config or Config.of(batch, kv_heads, rows.shape[2], head_dim)

    inputs: dict[str, Array] = dict(q=rows, k=k, v=v, lengths=lengths, slots=slots)
    outputs: dict[str, Any] = dict(
        out=jax.ShapeDtypeStruct((batch, kv_heads, config.parts, *rows.shape[2:]), jnp.float32),
        lse=jax.ShapeDtypeStruct((batch, kv_heads, config.parts, rows.shape[2]), jnp.float32),
    )
    if key_scores is not None and key_scores.mode == "logit":
        inputs["scorers"] = _scorers(q, kv_heads, key_scores)
        shape = (batch, kv_heads, inputs["scorers"].shape[2], cache_rows)
        outputs["logits"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    elif key_scores is not None:
        scored = splits.padded(len(key_scores.rows) * group)
        summed = SUMMED_KEYS if key_scores.block % SUMMED_KEYS == 0 else 1
        if summed > 1:
            # Column j of the product of the weights with this, transposed, is the sum of eight.
            column = jnp.arange(KEYS, dtype=jnp.int32)[None] // summed
            inputs["summer"] = (jnp.arange(KEYS // summed)[:, None] == column).astype(q.dtype)
        shape = (batch, kv_heads, scored, cache_rows // summed)
        dtype = jnp.float32 if summed > 1 else jnp.bfloat16
        outputs["weights"] = jax.ShapeDtypeStruct(shape, dtype)
        shape = (batch, kv_heads, cache_rows // KEYS, scored)
        outputs["peaks"] = jax.ShapeDtypeStruct(shape, jnp.float32)

    run = _kernel(config, order, group, scale, window, inputs, outputs, interpret)
    results = dict(zip(outputs, run(*inputs.values()), strict=True))
    out, lse = splits.combine(results["out"], results["lse"], order, group, sinks, q.dtype)
    if key_scores is None:
        return out, lse, None
    if key_scores.mode == "logit":
        scores = results["logits"]  # [b, K, R or 1, S]
        scores = scores.reshape(*scores.shape[:-1], -1, key_scores.block).mean(axis=-1)
        if not key_scores.per_kv_head:
            scores = scores.mean(axis=1)
        elif not key_scores.average_rows:
            scores = scores.swapaxes(1, 2)
        if key_scores.average_rows:
            scores = scores[..., 0, :]
    else:
        summed = cache_rows // results["weights"].shape[-1]
        row_lse = jnp.stack([lse[:, t] for t in key_scores.rows], axis=1) * LOG2_E
        row_lse = row_lse.reshape(batch, -1, kv_heads, group).swapaxes(1, 2)
        shape = (batch, kv_heads, len(key_scores.rows), group)
        scored = len(key_scores.rows) * group
        weights = results["weights"][:, :, :scored].astype(jnp.float32)
        weights = weights.reshape(*shape, cache_rows // KEYS, KEYS // summed)
        peaks = results["peaks"][..., :scored].swapaxes(2, 3)
        factor = jnp.exp2(peaks.reshape(*shape, -1) - row_lse[..., None]) / summed
        weights = (weights * factor[..., None]).reshape(*shape, -1)
        coarse = dataclasses.replace(key_scores, block=key_scores.block // summed)
        scores = coarse.average(weights)
    return out, lse, key_scores.mask(scores, lengths)


def _scorers(
    q: Float[Array, "b T H D"], kv_heads: int, key_scores: KeyScores
) -> Float[Array, "b K R 8 D"]:
    """The mean query of each KV head: its rounded value, what the rounding left, and six zeros."""
    batch, _, heads, head_dim = q.shape
    chosen = jnp.stack([q[:, t] for t in key_scores.rows], axis=1).astype(jnp.float32)
    mean = chosen.reshape(batch, -1, kv_heads, heads // kv_heads, head_dim).mean(axis=3)
    mean = mean.mean(axis=1)[:, :, None] if key_scores.average_rows else mean.swapaxes(1, 2)
    kind = jnp.finfo(q.dtype)
    # Not by way of `astype`: XLA would take the excess precision for a gift.
    rounded = lax.reduce_precision(mean, kind.nexp, kind.nmant)
    rest = (mean - rounded).astype(q.dtype)
    pair = jnp.stack([rounded.astype(q.dtype), rest], axis=3)  # [b, K, R, 2, D]
    return jnp.pad(pair, ((0, 0), (0, 0), (0, 0), (0, 6), (0, 0)))


def _kernel(
    config: Config,
    order: tuple[int, ...],
    group: int,
    scale: float,
    window: int | None,
    inputs: dict[str, Array],
    outputs: dict[str, Any],
    interpret: Any,
) -> Any:
    """The kernel for arguments of these shapes; `inputs` and `outputs` give its operands' order."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    batch, kv_heads, packed, head_dim = inputs["q"].shape
    dtype = inputs["q"].dtype
    halves = -(-packed // ROWS)
    turns = 3 - halves  # warpgroups that take turns at the tiles of keys; otherwise at the rows
    tokens = len(order)
    to_log2 = scale * LOG2_E
    lowest = float(jnp.finfo(jnp.float32).min)  # finite, so that a part without keys makes no NaN
    stages, parts = config.stages, config.parts
    names = (*inputs, *outputs)

    def body(*refs: Any, **scratch: Any) -> None:
        ref = dict(zip(names, refs, strict=True))
        b, h, part = (lax.axis_index(name) for name in ("b", "h", "part"))
        warpgroup = lax.axis_index("warpgroup")
        length, slot_row = ref["lengths"][b], ref["slots"][b]
        first = 0 if window is None else lax.div(jnp.maximum(length + 1 - window, 0), KEYS)
        last = lax.div(length + (tokens + KEYS - 1), KEYS)
        share = lax.div(last - first + (parts - 1), parts)
        begin = first + part * share
        steps = jnp.maximum(jnp.minimum(begin + share, last) - begin, 0)
        # Tiles that all queries see whole need no mask.
        whole = 0 if window is not None else jnp.clip(lax.div(length + 1, KEYS) - begin, 0, steps)

        @pl.when(warpgroup < 2)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            attend(ref, scratch, b, h, part, warpgroup, begin, steps, whole, length)

        @pl.when(warpgroup == 2)
        def _memory() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def load(i: Any, slot: Any) -> None:
                keys = (slot_row, h, pl.ds((begin + i) * KEYS, KEYS))
                for x in ("k", "v"):
                    plgpu.copy_gmem_to_smem(
                        ref[x].at[keys], scratch[x].at[slot], scratch[f"{x}_ready"].at[slot]
                    )

            @pl.loop(0, steps)
            def _(i: Any) -> None:
                slot = lax.rem(i, stages)

                @pl.when(i >= stages)
                def _() -> None:
                    plgpu.barrier_wait(scratch["free"].at[slot])

                load(i, slot)

            @pl.loop(jnp.maximum(steps - stages, 0), steps)
            def _drain(i: Any) -> None:  # every arrival is waited for
                plgpu.barrier_wait(scratch["free"].at[lax.rem(i, stages)])

    def attend(
        ref: Any,
        scratch: Any,
        b: Any,
        h: Any,
        part: Any,
        warpgroup: Any,
        begin: Any,
        steps: Any,
        whole: Any,
        length: Any,
    ) -> None:
        @pl.when(warpgroup == 0)
        def _() -> None:
            for half, count in enumerate(split_rows(packed)):
                plgpu.copy_gmem_to_smem(
                    ref["q"].at[b, h, pl.ds(half * ROWS, count)],
                    scratch["q"].at[half, pl.ds(0, count)],
                    scratch["q_ready"],
                )
            if "scorers" in ref:
                plgpu.copy_gmem_to_smem(
                    ref["scorers"].at[b, h], scratch["scorers"], scratch["q_ready"]
                )
            if "summer" in ref:
                plgpu.copy_gmem_to_smem(ref["summer"], scratch["summer"], scratch["q_ready"])

        plgpu.barrier_wait(scratch["q_ready"])
        half = warpgroup if halves == 2 else 0
        turn = 0 if halves == 2 else warpgroup
        staged = {name: scratch[name].at[warpgroup] for name in ("p", *scores_staged)}

        def write_logits(keys: Any, start: Any) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for row in range(ref["logits"].shape[2]):

                def score(acc_ref: Any, row: int = row) -> Any:
                    plgpu.wgmma(acc_ref, keys, scratch["scorers"].at[row].transpose((1, 0)))
                    return acc_ref[...].sum(axis=1) * scale

                staged["logits"][row] = pl.run_scoped(score, plgpu.ACC((KEYS, 8), jnp.float32))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged["logits"], ref["logits"].at[b, h, :, pl.ds(start, KEYS)])

        def write_weights(tile: Any, first: int, count: int) -> None:
            columns = staged["weights"].shape[1]
            rows, held = pl.ds(first, count), pl.ds(0, count)
            plgpu.copy_smem_to_gmem(
                staged["weights"].at[held],
                ref["weights"].at[b, h, rows, pl.ds(tile * columns, columns)],
            )
            plgpu.copy_smem_to_gmem(staged["peaks"].at[held], ref["peaks"].at[b, h, tile, rows])

        def clear_unwritten(values: Any, start: Any) -> None:
            row = plgpu.broadcasted_iota(jnp.int32, (KEYS, head_dim), 0, layout=plgpu.Layout.WGMMA)
            held = values[...]
            values[...] = jnp.where(row + start < length + tokens, held, jnp.zeros_like(held))
            plgpu.commit_smem()

        def step(masked: bool, c: Any, carry: Any) -> Any:
            acc, peak, total = carry
            i = turn + turns * c
            slot = lax.rem(i, stages)
            start = (begin + i) * KEYS
            keys, values = scratch["k"].at[slot], scratch["v"].at[slot]
            plgpu.barrier_wait(scratch["k_ready"].at[slot])

            def products(logits_ref: Any) -> Any:
                plgpu.wgmma(logits_ref, scratch["q"].at[half], keys.transpose((1, 0)))
                return logits_ref[...]

            logits = pl.run_scoped(products, plgpu.ACC((ROWS, KEYS), jnp.float32)) * to_log2
            if "logits" in ref:
                for_half(half, 0, functools.partial(write_logits, keys, start))
            if masked:
                visible = seen(half, start, length)
                logits = jnp.where(visible, logits, -jnp.inf)
            new_peak = jnp.maximum(peak, logits.max(axis=1))
            decay = jnp.exp2(peak - new_peak)
            weights = jnp.exp2(logits - lax.broadcast_in_dim(new_peak, logits.shape, [0]))
            acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
            total = total * decay + weights.sum(axis=1)
            if "weights" in ref:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                staged["peaks"][...] = new_peak
            if "weights" in ref and "summer" not in ref:
                staged["weights"][...] = weights.astype(jnp.bfloat16)
            staged["p"][...] = weights.astype(dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(scratch["v_ready"].at[slot])
            if masked:  # 0 * NaN is NaN: what lies past the last row is cleared
                for_half(half, 0, functools.partial(clear_unwritten, values, start))
                if halves == 2:  # both use the same tile
                    for_half(half, 0, lambda: plgpu.barrier_arrive(scratch["cleared"]))
                    for_half(half, 1, lambda: plgpu.barrier_wait(scratch["cleared"]))

            def weighted(acc_ref: Any) -> Any:
                plgpu.wgmma(acc_ref, staged["p"], values)
                return acc_ref[...]

            acc = acc + pl.run_scoped(weighted, plgpu.ACC((ROWS, head_dim), jnp.float32))
            plgpu.barrier_arrive(scratch["free"].at[slot])
            if "weights" in ref:
                if "summer" in ref:

                    def add_up(acc_ref: Any) -> Any:
                        plgpu.wgmma(acc_ref, staged["p"], scratch["summer"].transpose((1, 0)))
                        return acc_ref[...]

                    shape = (ROWS, KEYS // SUMMED_KEYS)
                    staged["weights"][...] = pl.run_scoped(add_up, plgpu.ACC(shape, jnp.float32))
                    plgpu.commit_smem()
                for which, count in enumerate(split_rows(ref["weights"].shape[2])):
                    write = functools.partial(write_weights, begin + i, which * ROWS, count)
                    for_half(half, which, write)
            return acc, new_peak, total

        rows = plgpu.Layout.WGMMA.reduce(1)
        carry = (
            plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), lowest, jnp.float32), rows),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), rows),
        )
        mine = lax.div(steps - turn + (turns - 1), turns)
        mine_whole = lax.div(whole - turn + (turns - 1), turns)
        carry = lax.fori_loop(0, mine_whole, functools.partial(step, False), carry)
        acc, peak, total = lax.fori_loop(mine_whole, mine, functools.partial(step, True), carry)
        spread = functools.partial(lax.broadcast_in_dim, shape=acc.shape, broadcast_dimensions=[0])
        out, lse = scratch["out"].at[half], scratch["lse"].at[half]

        def write(values: Any, peak: Any, total: Any) -> None:
            total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
            out[...] = values / spread(total)
            lse[...] = peak + jnp.log2(total)
            plgpu.commit_smem()
            for which, count in enumerate(split_rows(packed)):

                def copy(which: int = which, count: int = count) -> None:
                    rows, held = pl.ds(which * ROWS, count), pl.ds(0, count)
                    plgpu.copy_smem_to_gmem(out.at[held], ref["out"].at[b, h, part, rows])
                    plgpu.copy_smem_to_gmem(lse.at[held], ref["lse"].at[b, h, part, rows])

                for_half(half, which, copy)

        if halves == 2:
            write(acc, peak, total)
        else:  # the second warpgroup hands over what it has, the first joins the two

            @pl.when(warpgroup == 1)
            def _() -> None:
                out[...] = acc
                lse[...] = peak
                scratch["total"][...] = total
                plgpu.barrier_arrive(scratch["handed_over"])

            @pl.when(warpgroup == 0)
            def _() -> None:
                plgpu.barrier_wait(scratch["handed_over"])
                other_peak = plgpu.load(lse, (), layout=rows)
                other_total = plgpu.load(scratch["total"], (), layout=rows)
                other = plgpu.load(out, (), layout=plgpu.Layout.WGMMA)
                top = jnp.maximum(peak, other_peak)
                decay, other_decay = jnp.exp2(peak - top), jnp.exp2(other_peak - top)
                write(
                    acc * spread(decay) + other * spread(other_decay),
                    top,
                    total * decay + other_total * other_decay,
                )

        plgpu.wait_smem_to_gmem(0)

    def split_rows(count: int) -> list[int]:
        """How many of the first `count` packed rows each half holds."""
        return [min(ROWS, count - first) for first in range(0, count, ROWS)]

    def for_half(half: Any, which: int, do: Any) -> None:
        """Does it in the warpgroup that has this half of the rows."""
        if isinstance(half, int):
            if half == which:
                do()
        else:
            pl.when(half == which)(do)

    def seen(half: Any, start: Any, length: Any) -> Any:
        """Which keys of a tile each row of a half sees."""
        row, key = (
            plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        entry = lax.div(row + half * ROWS, group)
        token = entry + order[0]
        for i in range(1, tokens):
            if order[i] != order[i - 1] + 1:  # a new run of tokens
                token = jnp.where(entry >= i, entry + (order[i] - i), token)
        position = length + token
        visible = key + start <= position
        if window is not None:
            visible &= key + start > position - window
        return visible

    def shared(shape: tuple[int, ...], dtype: Any, swizzle: int = 128) -> Any:
        columns = 8 * swizzle // jnp.finfo(dtype).bits
        transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    ready = halves - 1 + len(inputs.keys() & {"q", "scorers", "summer"})
    scratch = dict(
        q=shared((halves, ROWS, head_dim), dtype),
        k=shared((stages, KEYS, head_dim), dtype),
        v=shared((stages, KEYS, head_dim), dtype),
        p=shared((2, ROWS, KEYS), dtype),
        out=shared((halves, ROWS, head_dim), jnp.float32),
        lse=plgpu.SMEM((halves, ROWS), jnp.float32),
        total=plgpu.SMEM((ROWS,), jnp.float32),
        q_ready=plgpu.Barrier(num_arrivals=ready),
        k_ready=plgpu.Barrier(num_barriers=stages),
        v_ready=plgpu.Barrier(num_barriers=stages),
        free=plgpu.Barrier(num_barriers=stages, num_arrivals=halves),
        cleared=plgpu.Barrier(),
        handed_over=plgpu.Barrier(),
    )
    scores_staged: list[str] = []
    if "scorers" in inputs:
        count = inputs["scorers"].shape[2]
        scratch["scorers"] = shared((count, 8, head_dim), dtype)
        scratch["logits"] = plgpu.SMEM((2, count, KEYS), jnp.float32)
        scores_staged = ["logits"]
    if "summer" in inputs:
        scratch["summer"] = shared((KEYS // SUMMED_KEYS, KEYS), dtype)
    if "weights" in outputs:
        if "summer" in inputs:
            weights = plgpu.SMEM((2, ROWS, KEYS // SUMMED_KEYS), jnp.float32)
        else:
            weights = shared((2, ROWS, KEYS), jnp.bfloat16)
        scratch["weights"] = weights
        scratch["peaks"] = plgpu.SMEM((2, ROWS), jnp.float32)
        scores_staged = ["weights", "peaks"]
    return plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=scratch,
        grid=(kv_heads, parts, batch),
        grid_names=("h", "part", "b"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
