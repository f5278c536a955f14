"""The Triton kernel of `sparse_attention` (import it lazily)."""

import triton
import triton.language as tl

from pallas_kernels.triton_softmax import LOWEST, accumulate, store_part


@triton.jit
def sparse_kernel(
    q_ptr,  # [B, K, ROWS, D]
    k_ptr,  # [B, K, CACHE_ROWS, D]
    v_ptr,  # [B, K, CACHE_ROWS, D]
    blocks_ptr,  # [B, LISTS, ENTRIES]
    counts_ptr,  # [B]
    lengths_ptr,  # [B]
    tail_start_ptr,  # [B]
    tokens_ptr,  # [ROW_TILE], the query token of each packed row
    out_ptr,  # [B, K, PARTS, ROWS, D]
    lse_ptr,  # [B, K, PARTS, ROWS]
    KV_HEADS: tl.constexpr,
    CACHE_ROWS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    LISTS: tl.constexpr,  # one for all KV heads, or KV_HEADS
    ENTRIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    TO_LOG2: tl.constexpr,
):
    """Attends for one KV head of one sequence to one part of its listed keys and its tail.

    Key i is row i % BLOCK_SIZE of entry i // BLOCK_SIZE of the list; the tail's keys follow.
    """
    h, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * KV_HEADS + h
    length, tail_start = tl.load(lengths_ptr + b), tl.load(tail_start_ptr + b)
    listed = tl.load(counts_ptr + b) * BLOCK_SIZE
    blocks_ptr += (b.to(tl.int64) * LISTS + h % LISTS) * ENTRIES
    d = tl.arange(0, D)
    row = tl.arange(0, ROW_TILE)
    row_mask = row < ROWS
    q = tl.load(
        q_ptr + head * ROWS * D + row[:, None] * D + d[None, :], mask=row_mask[:, None], other=0.0
    )
    position = length + tl.load(tokens_ptr + row)

    keys_seen = listed + length + TOKENS - tail_start
    share = tl.cdiv(tl.cdiv(keys_seen, KEYS), PARTS) * KEYS
    begin = part * share
    end = tl.minimum(begin + share, keys_seen)

    peak = tl.full((ROW_TILE,), LOWEST, tl.float32)
    total = tl.zeros((ROW_TILE,), tl.float32)
    acc = tl.zeros((ROW_TILE, D), tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        in_list = key < listed
        block = tl.load(blocks_ptr + key // BLOCK_SIZE, mask=in_list, other=0)
        cache_row = tl.where(
            in_list, block * BLOCK_SIZE + key % BLOCK_SIZE, tail_start + key - listed
        )
        cell = (head * CACHE_ROWS + cache_row)[:, None] * D + d[None, :]
        readable = (key < keys_seen)[:, None]
        keys = tl.load(k_ptr + cell, mask=readable, other=0.0)
        values = tl.load(v_ptr + cell, mask=readable, other=0.0)
        logits = tl.dot(q, tl.trans(keys)) * TO_LOG2
        # What is listed lies below every query; where no key is left, `cache_row` is past them all.
        visible = in_list[None, :] | (cache_row[None, :] <= position[:, None])
        _, peak, total, acc = accumulate(logits, visible, values, peak, total, acc)

    part_row = (head * PARTS + part) * ROWS
    out_ptr += part_row * D
    lse_ptr += part_row
    store_part(out_ptr, lse_ptr, row, row_mask, d, peak, total, acc, D)
