"""The Triton kernel of `verify_attention` (import it lazily)."""

import triton
import triton.language as tl

from pallas_kernels.triton_softmax import LOWEST, TINY, accumulate, store_part


@triton.jit
def verify_kernel(
    q_ptr,  # [b, K, ROWS, D]
    k_ptr,  # [B, K, CACHE_ROWS, D]
    v_ptr,  # [B, K, CACHE_ROWS, D]
    lengths_ptr,  # [b]
    slots_ptr,  # [b]
    tokens_ptr,  # [ROW_TILE], the query token of each packed row
    out_ptr,  # [b, K, PARTS, ROWS, D]
    lse_ptr,  # [b, K, PARTS, ROWS]
    scores_ptr,  # logits [b, K, ENTRIES, S'], log-sum-exps [b, K, SCORED, S' / SUMMED], or None
    KV_HEADS: tl.constexpr,
    CACHE_ROWS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE: tl.constexpr,
    LOG2_E: tl.constexpr,
    WINDOW: tl.constexpr,  # None: every key below a query
    SCORED: tl.constexpr,  # the first so many rows score the keys
    ENTRIES: tl.constexpr,  # runs of scored rows of which mean logits are written; or None
    SUMMED: tl.constexpr,  # neighbouring keys of which log-sum-exps are written; or None
):
    """Attends for one KV head of one sequence to one part of its keys; S' is whole tiles of S."""
    h, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * KV_HEADS + h
    length = tl.load(lengths_ptr + b)
    cache_head = tl.load(slots_ptr + b).to(tl.int64) * KV_HEADS + h
    d = tl.arange(0, D)
    row = tl.arange(0, ROW_TILE)
    row_mask = row < ROWS
    q = tl.load(
        q_ptr + head * ROWS * D + row[:, None] * D + d[None, :], mask=row_mask[:, None], other=0.0
    )
    position = length + tl.load(tokens_ptr + row)
    written = tl.minimum(length + TOKENS, CACHE_ROWS)  # cache rows from here on may hold anything

    first = 0
    if WINDOW is not None:
        first = tl.maximum(length + 1 - WINDOW, 0) // KEYS
    last = tl.cdiv(written, KEYS)
    share = tl.cdiv(last - first, PARTS)
    begin = first + part * share
    end = tl.minimum(begin + share, last)

    peak = tl.full((ROW_TILE,), LOWEST, tl.float32)
    total = tl.zeros((ROW_TILE,), tl.float32)
    acc = tl.zeros((ROW_TILE, D), tl.float32)
    for tile in range(begin, end):
        key = tile * KEYS + tl.arange(0, KEYS)
        cell = cache_head * CACHE_ROWS * D + key[:, None] * D + d[None, :]
        readable = (key < written)[:, None]
        keys = tl.load(k_ptr + cell, mask=readable, other=0.0)
        values = tl.load(v_ptr + cell, mask=readable, other=0.0)
        products = tl.dot(q, tl.trans(keys))
        visible = key[None, :] <= position[:, None]
        if WINDOW is not None:
            visible &= key[None, :] > position[:, None] - WINDOW
        logits = products * (SCALE * LOG2_E)
        weights, peak, total, acc = accumulate(logits, visible, values, peak, total, acc)

        tiles = tl.cdiv(CACHE_ROWS, KEYS)
        if ENTRIES is not None:
            run: tl.constexpr = SCORED // ENTRIES
            for entry in tl.static_range(ENTRIES):
                mine = (row // run == entry)[:, None]
                mean = tl.sum(tl.where(mine, products, 0.0), axis=0) * (SCALE / run)
                tl.store(scores_ptr + (head * ENTRIES + entry) * (tiles * KEYS) + key, mean)
        if SUMMED is not None:
            log_sums = logits
            if SUMMED > 1:
                sums = tl.sum(tl.reshape(weights, (ROW_TILE, KEYS // SUMMED, SUMMED)), axis=2)
                log_sums = peak[:, None] + tl.log2(tl.maximum(sums, TINY))
            columns: tl.constexpr = KEYS // SUMMED
            line = (head * SCORED + row[:, None]) * (tiles * columns)
            column = tile * columns + tl.arange(0, columns)[None, :]
            tl.store(scores_ptr + line + column, log_sums, mask=row[:, None] < SCORED)

    part_row = (head * PARTS + part) * ROWS
    out_ptr += part_row * D
    lse_ptr += part_row
    store_part(out_ptr, lse_ptr, row, row_mask, d, peak, total, acc, D)
