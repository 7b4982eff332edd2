"""How the kernels of attention are cut into tiles, by architecture, and where each was measured."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from kernelbook import runtime
from kernelbook.ops.attention.tiles import head_block


@dataclass(frozen=True)
class Config:
    """How a kernel is cut into tiles and compiled."""

    block_m: int
    """Queries in a tile."""
    block_n: int
    """Keys in a tile."""
    num_warps: int
    num_stages: int
    """Tiles on their way or in use at a time."""
    maxnreg: int | None = None
    """The most registers that a thread may have, so that so many programs run at once."""
    described_rows: bool = True
    """Whether backward reads statistics by descriptors, or by pointers."""


INTERPRETED = Config(32, 32, 1, 1)
"""Tiles for the interpreter: small, so that small tests meet several."""


def largest_that_fits(
    configs: Iterable[Config], bytes_of: Callable[[Config], int], device: torch.device, what: str
) -> Config:
    """Return the first configuration whose shared memory the device has."""
    available = runtime.shared_memory(device)
    for config in configs:
        if bytes_of(config) <= available:
            return config
    raise ValueError(
        f"{what} needs {bytes_of(config):,} bytes of shared memory at least, and {device} has "
        f"{available:,}: pass a smaller head_dim or a 16-bit dtype."
    )


# -- forward

FORWARD = {
    (32, 2): Config(64, 128, 4, 2, maxnreg=128),
    (64, 2): Config(128, 128, 8, 2, maxnreg=128),
    (128, 2): Config(128, 64, 8, 2, maxnreg=128),
    (256, 2): Config(128, 64, 8, 2),
    (64, 4): Config(64, 64, 4, 2),
    (128, 4): Config(64, 32, 4, 1),
    (256, 4): Config(64, 32, 4, 1),
}
"""Tiles on Hopper, by the largest head_dim that they are for and the bytes of an element, in
ascending order. With 128 registers a thread two programs of eight warps run on a multiprocessor:
while one waits for a product, the other computes exponentials. On an H200, causal, with 16,384
tokens in bfloat16, that gave 531 TFLOP/s at head_dim 64, and 637 at 128. Three programs of 64
queries, four warps and 168 registers gave 494 and 564: they read keys and values twice as often.
One program of 128 queries and 128 keys without the limit gave 510 at head_dim 128. At head_dim 32,
with 4,096 tokens, four programs of four warps gave 309, and two of eight 272. Specialized warps
(``warp_specialize``) gave wrong results with Triton 3.6."""

FORWARD_ELSEWHERE = (
    Config(128, 32, 8, 2),
    Config(64, 32, 4, 1),
    Config(32, 32, 4, 1),
    Config(16, 16, 4, 1),
)
"""Tiles for other devices, and where the above ask for more shared memory than there is. Without
tensor descriptors in hardware every element has its own address, and large tiles do not fit."""


def forward_config(q: torch.Tensor) -> Config:
    """Return how the forward kernel is cut for these queries on their device."""
    if runtime.INTERPRETED:
        return INTERPRETED
    columns = head_block(q.shape[-1])
    configs = FORWARD_ELSEWHERE
    if runtime.capability(q.device)[0] == 9:
        ours = (c for (d, size), c in FORWARD.items() if size == q.itemsize and columns <= d)
        configs = next(ours), *FORWARD_ELSEWHERE

    def bytes_of(config: Config) -> int:
        rows = config.block_m + 2 * config.block_n * config.num_stages
        return rows * columns * q.itemsize + 1024  # and a few for barriers

    return largest_that_fits(configs, bytes_of, q.device, f"head_dim {q.shape[-1]} in {q.dtype}")


def forward_heads_at_once(k: torch.Tensor, group: int, is_causal: bool) -> int:
    """Return how many heads' tiles take turns: as many as have keys and values for half of L2.

    Taking turns lets the heaviest tiles of several heads start first, and light ones fill the
    gaps; too many heads at once would read their keys from memory again for each tile. Where tiles
    weigh the same there is nothing to gain. A power of two, so that few kernels are compiled.
    """
    if not is_causal:
        return 1
    bytes_a_head = 2 * k.shape[2] * k.shape[3] * k.itemsize
    fitting = max(1, runtime.l2_cache(k.device) // 2 // bytes_a_head) * group
    return min(64, 2 ** (fitting.bit_length() - 1))


# -- backward

BACKWARD: dict[tuple[str, int], Config] = {
    ("dkdv", 64): Config(64, 64, 4, 2),
    ("dkdv", 128): Config(64, 64, 4, 2, described_rows=False),
    ("dkdv", 256): Config(32, 64, 8, 2),
    ("dq", 64): Config(128, 64, 8, 3),
    ("dq", 128): Config(128, 64, 8, 3),
    ("dq", 256): Config(64, 64, 8, 2),
    ("all", 64): Config(64, 64, 4, 3),
    ("all", 128): Config(64, 128, 8, 2),
    ("all", 256): Config(32, 64, 8, 2),
}
"""Tiles on Hopper for 16 bits, by the sweep and the largest head_dim. A sweep over queries for each
tile of keys gives "dkdv" or, with dq added in memory, "all"; one over keys for queries gives "dq".
Of 84 on an H200 these were the fastest, in bfloat16 at 4,096 and causal at 16,384 tokens: "dkdv"
ran at 629 and 620 TFLOP/s of real work for head_dim 128, and at 587 and 615 if the statistics came
by descriptors. Programs of 4 warps, two on a multiprocessor, beat one of 8, whose two groups of
warps wait for each other: 488 and 558. For head_dim 64, pointers lost 15 % in the causal case."""

BACKWARD_SMALLER = (
    Config(64, 64, 8, 2),
    Config(32, 64, 8, 2),
    Config(32, 32, 4, 1),
    Config(16, 32, 4, 1),
    Config(16, 16, 4, 1),
)
"""What is tried in turn where the above asks for more shared memory than there is."""

BACKWARD_FLOAT32 = (Config(32, 32, 8, 1), Config(16, 32, 8, 1), Config(16, 16, 4, 1))
"""The same for float32: each operand is split into three, and registers run short."""


def backward_config(sweep: str, q: torch.Tensor) -> Config:
    """Return how the kernel of a sweep is cut for these queries on their device."""
    if runtime.INTERPRETED:
        return INTERPRETED
    columns = head_block(q.shape[-1])
    if runtime.capability(q.device)[0] == 9 and q.itemsize == 2:
        configs = (BACKWARD[sweep, max(columns, 64)], *BACKWARD_SMALLER)
    else:
        configs = BACKWARD_SMALLER if q.itemsize == 2 else BACKWARD_FLOAT32

    def bytes_of(config: Config) -> int:
        return bytes_of_sweep(sweep, config, columns, q.itemsize)

    what = f"the gradient of head_dim {q.shape[-1]} in {q.dtype}"
    return largest_that_fits(configs, bytes_of, q.device, what)


def bytes_of_sweep(sweep: str, config: Config, columns: int, itemsize: int) -> int:
    """Return the bytes of shared memory that a program of a sweep needs at most."""
    m, n = config.block_m, config.block_n
    if itemsize == 4:  # operands are rearranged for products of float32 where there is no wgmma
        return (7 if sweep == "all" else 5) * max(m, n) * columns * itemsize + 1024
    stays, flows = (m, n) if sweep == "dq" else (n, m)
    tiles = (2 * stays + 2 * flows * config.num_stages) * columns * itemsize
    sums = m * columns * 4 + m * n * itemsize if sweep == "all" else 0
    return tiles + sums + 8 * m * config.num_stages + 1024  # statistics, and barriers


def backward_heads_at_once(bytes_a_head: int, device: torch.device) -> int:
    """Return how many heads' tiles take turns: as many as flow by from half of L2.

    Taking turns lets the heaviest tiles of several heads start first, and light ones fill the
    gaps; too many heads at once would be read from memory again for each tile.
    """
    return max(1, runtime.l2_cache(device) // 2 // bytes_a_head)


# -- operands of 8 bits

FP8 = {
    (64, 1): Config(64, 128, 4, 2, 128),
    (128, 1): Config(64, 128, 4, 2, 168),
    (256, 1): Config(64, 64, 4, 1),
    (64, 2): Config(64, 128, 4, 2, 128),
    (128, 2): Config(64, 128, 4, 2, 168),
    (256, 2): Config(128, 64, 8, 2),
}
"""Tiles on Hopper, by the largest head_dim that they are for and the bytes of an element of q.
Three or four programs fit on a multiprocessor, and while one waits for its product the others
compute exponentials. At head_dim 128 and 16,384 tokens on an H200, causal, the limit of 168
registers gave 923 TFLOP/s against 867 without it, and 867 with three stages. At head_dim 256 tiles
of 64 queries gave 457 with 4,096 tokens, and 128 queries, which spill, 404. Keys in another order
would save the conversion of p, and gained nothing at head_dim 128."""

FP8_ELSEWHERE = Config(128, 64, 8, 2), Config(64, 32, 4, 1), Config(16, 32, 4, 1)
"""Tiles for other devices, and where the above ask for more shared memory than there is."""


def fp8_columns(head_dim: int) -> int:
    """Return the columns of a tile: no 8-bit product contracts fewer than 32."""
    return max(32, head_block(head_dim))


def fp8_config(q: torch.Tensor) -> Config:
    """Return how the kernel of 8-bit operands is cut for these queries on their device."""
    if runtime.INTERPRETED:
        return INTERPRETED
    columns = fp8_columns(q.shape[-1])
    configs = FP8_ELSEWHERE
    if runtime.capability(q.device)[0] == 9:
        configs = FP8[max(columns, 64), q.itemsize], *FP8_ELSEWHERE

    def bytes_of(config: Config) -> int:
        keys_and_values = config.block_n * config.num_stages * (q.itemsize + 1)
        return (config.block_m * q.itemsize + keys_and_values) * columns + 2048

    return largest_that_fits(configs, bytes_of, q.device, f"head_dim {q.shape[-1]} in {q.dtype}")
