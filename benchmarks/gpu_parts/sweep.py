"""A small search over tiles; what wins goes to pallas_kernels/tuned, which the kernels read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.gpu_parts import attention
from benchmarks.gpu_parts.check import difference
from benchmarks.gpu_parts.inputs import Rows, ragged
from benchmarks.gpu_parts.matmuls import weight
from benchmarks.gpu_parts.session import Session, bind, lower, randoms
from pallas_kernels.grouped_matmul import grouped_matmul, route
from pallas_kernels.grouped_matmul import tiles as grouped_tiles
from pallas_kernels.paged_attention import shapes as paged
from pallas_kernels.platform import trial
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.quant_matmul import tiles as quant_tiles
from pallas_kernels.quant_matmul.shapes import FORMATS

GAIN = 1.03  # what a tile must be faster by than the default to be written down
Tile = dict[str, int]


class Search(NamedTuple):
    op: str
    case: str  # the key that the op looks up
    default: Tile
    others: list[Tile]  # differences from the default
    run: Callable[..., Any]
    args: tuple[Any, ...]


def sweep(s: Session) -> dict[str, Any]:
    winners: dict[str, dict[str, Tile]] = {}
    for make in s.cases([_decode, _quant_few, _prefill, _grouped, _quant_some, _quant_many], lambda m: m.__name__[1:]):
        for search in make(s):
            with s.attempt(f"{search.op} {search.case}"):
                _search(s, search, winners)
    return {"tuned": winners}


def _search(s: Session, search: Search, winners: dict[str, dict[str, Tile]]) -> None:
    tiles = {_name(tile): tile for tile in (search.default, *(search.default | other for other in search.others))}
    default, lowered = _name(search.default), {}
    for name, tile in tiles.items():
        with s.attempt(f"{search.op} {search.case} {name}"), trial(search.op, s.target, search.case, tile):
            jax.clear_caches()  # inner programs were traced with another tile
            lowered[name] = lower(search.run, *search.args)
    jax.clear_caches()
    calls = {name: bind(executable, *search.args) for name, executable in s.build(lowered).items()}
    wanted = calls[default]()
    for name in list(calls):
        with s.attempt(f"{search.op} {search.case} {name}"):
            if not (worst := difference(calls[name](), wanted)) < 2e-2:
                del calls[name]
                raise ValueError(f"off by {worst:.3g}")
    times = s.race(calls)
    for name, seconds in times.items():
        s.add(op=search.op, case=search.case, tile=name, us=seconds * 1e6, speedup=times[default] / seconds)
    best = min(times, key=lambda name: times[name])
    if times[default] > GAIN * times[best]:
        winners.setdefault(search.op, {})[search.case] = tiles[best]


def _name(tile: Tile) -> str:
    return " ".join(f"{key}={value}" for key, value in tile.items())


def _attention(s: Session, rows: Rows, tokens: int) -> tuple[Any, tuple[Any, ...]]:
    heads, kv_heads, dim = attention.shape(s)
    blocks = sum(-(-context // attention.BLOCK) for _, context in rows) * s.pick(2, 1) + 1
    pool = randoms((1, 2, blocks, kv_heads, attention.BLOCK, dim), jnp.bfloat16)
    q = randoms((tokens, heads, dim), jnp.bfloat16)
    width = -(-max(context for _, context in rows) // attention.BLOCK)
    made = attention.make_tables(s, rows, width, blocks, len(rows))
    args = (q, pool, None, made, ragged(rows, num_tokens=tokens, num_rows=len(rows)), jnp.int32(0))
    return attention.chain(s, dim), args


def _decode(s: Session) -> Iterator[Search]:
    rows = [(1, s.pick(4096, 40))] * s.pick(32, 2)
    run, args = _attention(s, rows, len(rows))
    case, default = paged.decode_case(args[1]), paged.decode_tile(args[0], args[1], s.target)
    others: list[Tile] = [
        {"block": 128},
        {"block": 128, "num_warps": 8},
        {"block": 32},
        {"num_warps": 8},
        {"num_stages": 4},
        {"num_stages": 2},
        {"block": 128, "num_stages": 2},
    ]
    yield Search("paged_decode", case, default, s.pick(others, others[2:3]), run, args)


def _prefill(s: Session) -> Iterator[Search]:
    tokens = s.pick(4096, 24)
    run, args = _attention(s, [(tokens, tokens)], tokens)
    case, default = paged.prefill_case(args[1]), paged.prefill_tile(args[0], args[1], s.target)
    others: list[Tile] = [
        {"queries": 128, "num_warps": 8},
        {"queries": 128, "num_warps": 8, "num_stages": 2},
        {"queries": 128, "keys": 128, "num_warps": 8, "num_stages": 2},
        {"num_stages": 2},
        {"keys": 32},
        {"num_warps": 8},
    ]
    yield Search("paged_prefill", case, default, s.pick(others, others[4:5]), run, args)


def _quant(s: Session, form: str, tokens: int, others: list[Tile]) -> Search:
    kind, group, _ = FORMATS[form]
    k, n = s.pick((4096, 6144), (256, 72))
    x, ws = randoms((tokens, k), jnp.bfloat16), [weight(form, k, n, i) for i in range(s.pick(8, 1))]

    def run(x: jax.Array, ws: list[Any]) -> list[jax.Array]:
        return [quant_matmul(x, w, out_dtype=x.dtype, target=s.target, backend="triton") for w in ws]

    default = asdict(quant_tiles.tile_of(kind, group, tokens, 2, s.target))  # type: ignore[arg-type]
    case = quant_tiles.case_name(kind, group, tokens)  # type: ignore[arg-type]
    return Search(quant_tiles.OP, case, default, others, run, (x, ws))


def _quant_few(s: Session) -> Iterator[Search]:
    others: list[Tile] = [
        {"block_n": 32},
        {"block_n": 128},
        {"block_k": 256},
        {"block_n": 32, "block_k": 256},
        {"num_stages": 3},
        {"num_stages": 6},
        {"num_warps": 2},
    ]
    yield _quant(s, "int4-g128", s.pick(8, 2), s.pick(others, others[:1]))


def _quant_some(s: Session) -> Iterator[Search]:
    others: list[Tile] = [{"block_n": 128}, {"block_n": 32}, {"block_k": 64}, {"num_stages": 4}, {"num_warps": 8}]
    if not s.small:
        yield _quant(s, "int4-g128", 64, others)


def _quant_many(s: Session) -> Iterator[Search]:
    others: list[Tile] = [{"block_m": 64}, {"block_n": 64}, {"block_k": 128}, {"num_stages": 2}, {"num_warps": 4}]
    if not s.small:
        yield _quant(s, "int4-g128", 1024, others)


def _grouped(s: Session) -> Iterator[Search]:
    experts, top_k, hidden, ffn = s.pick((8, 2, 4096, 14336), (4, 2, 64, 32))
    tokens, block_rows = s.pick(64, 5), 16
    x = randoms((tokens, hidden), jnp.bfloat16)
    w = randoms((experts, 2, ffn, hidden), jnp.bfloat16, 1, hidden**-0.5)
    logits = randoms((tokens, experts), jnp.float32, 3)

    def run(x: jax.Array, w: jax.Array, logits: jax.Array) -> jax.Array:
        _, groups = route(
            logits, jnp.int32(tokens), top_k=top_k, normalise=True, block_rows=block_rows, target=s.target
        )
        h = grouped_matmul(x, w, groups, activation="silu", target=s.target)
        real = (groups.rows < tokens) & jnp.repeat(groups.block_groups >= 0, block_rows)
        return jnp.where(real[:, None], h, jnp.zeros((), h.dtype))  # the other rows are undefined

    tile = grouped_tiles.tile_of(block_rows, True, ffn, hidden, "bfloat16", "bfloat16", s.target)
    case = grouped_tiles.case_name(block_rows, True, ffn, hidden, "bfloat16")
    default = {f.name: getattr(tile, f.name) for f in fields(tile)}
    others: list[Tile] = [
        {"block_k": 128},
        {"block_n": 32},
        {"block_n": 128},
        {"block_n": 32, "block_k": 128},
        {"num_stages": 4},
        {"num_stages": 2},
    ]
    yield Search("grouped_matmul", case, default, s.pick(others, others[5:]), run, (x, w, logits))
