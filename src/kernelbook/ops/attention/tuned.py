"""How the kernels of attention are cut into tiles, by architecture, and where each was measured.

Every row says how much shared memory the kernel needs as it was compiled, not as it was reckoned:
`make compile` compiles all of them again and compares.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from kernelbook import runtime
from kernelbook.ops.attention.tiles import head_block
from kernelbook.ops.launch import planned


@dataclass(frozen=True, eq=False)  # two are the same if they are one: that is quickly seen
class Config:
    """How a kernel is cut into tiles and compiled."""

    block_m: int
    """Queries in a tile."""
    block_n: int
    """Keys in a tile."""
    num_warps: int
    num_stages: int
    """Tiles on their way or in use at a time."""
    shared: int = 0
    """Bytes of shared memory that a program needs, at most, as compiled."""
    maxnreg: int | None = None
    """The most registers that a thread may have, so that so many programs run at once."""
    described: bool = False
    """Whether tiles come by descriptors, or by addresses: see :func:`tiles.describe`."""
    described_rows: bool = False
    """Whether backward reads statistics by descriptors as well."""

    @cached_property
    def options(self) -> dict[str, int]:
        """What a launch is told."""
        limit = runtime.register_limit(self.maxnreg)
        return {"num_warps": self.num_warps, "num_stages": self.num_stages} | limit


INTERPRETED = Config(32, 32, 1, 1, described=True)
"""Tiles for the interpreter: small, so that small tests meet several."""


def by_descriptor(m, n, num_warps, num_stages, shared, maxnreg=None, described_rows=True):
    """A configuration whose tiles come by descriptors."""
    return Config(m, n, num_warps, num_stages, shared, maxnreg, True, described_rows)


# Keys of the tables: the kernel, the largest head_dim, and the bytes of an element of q. "dkdv" and
# "dq" are the two sweeps of backward, "all" is the one sweep that adds to dq in memory. "narrow dq"
# is "dq" where windows are narrow, on GPUs that have such a row: see NARROW.

HOPPER = {
    ("forward", 32, 2): by_descriptor(64, 128, 4, 2, 37_376, 128),
    ("forward", 64, 2): by_descriptor(128, 128, 8, 2, 82_944, 128),
    ("forward", 128, 2): by_descriptor(128, 64, 8, 2, 98_336, 128),
    ("forward", 256, 2): by_descriptor(128, 64, 8, 2, 196_640),
    ("forward", 64, 4): by_descriptor(64, 64, 4, 2, 65_560),
    ("forward", 128, 4): by_descriptor(64, 32, 4, 1, 32_776),
    ("forward", 256, 4): by_descriptor(64, 32, 4, 1, 65_544),
    ("decode", 64, 2): Config(64, 64, 4, 3, 57_344),
    ("decode", 128, 2): Config(64, 64, 4, 3, 114_688),
    ("decode", 256, 2): Config(64, 32, 4, 3, 131_072),
    ("decode", 64, 4): Config(64, 32, 4, 3, 81_920),
    ("decode", 128, 4): Config(16, 32, 4, 2, 53_248),
    ("decode", 256, 4): Config(16, 16, 8, 2, 67_584),
    ("dkdv", 64, 2): by_descriptor(64, 64, 4, 2, 50_176),
    ("dkdv", 128, 2): by_descriptor(64, 64, 4, 2, 99_328, described_rows=False),
    ("dkdv", 256, 2): by_descriptor(32, 64, 8, 2, 131_368),
    ("dq", 64, 2): by_descriptor(128, 64, 8, 3, 82_944),
    ("dq", 128, 2): by_descriptor(128, 64, 8, 3, 164_864),
    ("dq", 256, 2): by_descriptor(64, 64, 8, 2, 197_632),
    ("narrow dq", 64, 2): by_descriptor(128, 64, 8, 3, 82_944),
    ("narrow dq", 128, 2): by_descriptor(64, 64, 4, 2, 99_328),
    ("all", 64, 2): by_descriptor(64, 64, 4, 3, 92_160),
    ("all", 128, 2): by_descriptor(64, 128, 8, 2, 180_776),
    ("all", 256, 2): by_descriptor(32, 64, 8, 2, 168_232),
    ("dkdv", 64, 4): Config(32, 32, 8, 1, 40_960),
    ("dkdv", 128, 4): Config(16, 32, 8, 1, 73_728),
    ("dkdv", 256, 4): Config(16, 16, 8, 1, 81_920),
    ("dq", 64, 4): Config(64, 32, 8, 1, 81_920),
    ("dq", 128, 4): Config(32, 16, 8, 1, 73_728),
    ("dq", 256, 4): Config(16, 16, 8, 1, 81_920),
    ("all", 64, 4): Config(32, 32, 8, 1, 57_344),
    ("all", 128, 4): Config(32, 16, 8, 1, 65_536),
    ("all", 256, 4): Config(16, 16, 8, 1, 114_688),
    ("fp8", 64, 1): by_descriptor(64, 128, 4, 2, 37_376, 128),
    ("fp8", 128, 1): by_descriptor(64, 128, 4, 2, 74_752, 168),
    ("fp8", 256, 1): by_descriptor(64, 64, 4, 1, 32_776),
    ("fp8", 64, 2): by_descriptor(64, 128, 4, 2, 58_368, 128),
    ("fp8", 128, 2): by_descriptor(64, 128, 4, 2, 115_712, 168),
    ("fp8", 256, 2): by_descriptor(128, 64, 8, 2, 163_872),
}
"""For Hopper; 16 bits and FP8 were measured on an H200.

**Forward.** With 128 registers per thread, two programs of eight warps run on an SM: while one
waits for a matmul, the other computes exponentials. On an H200, causal, with 16,384 tokens in
bfloat16, that gave 531 TFLOP/s at head_dim 64, and 637 at 128. Three programs of 64 queries, four
warps and 168 registers gave 494 and 564: they read keys and values twice as often. One program of
128 queries and 128 keys without the limit gave 510 at head_dim 128. At head_dim 32, with 4,096
tokens, four programs of four warps gave 309, and two of eight 272. Specialized warps
(``warp_specialize``) gave wrong results with Triton 3.6.

**Decoding.** On an H200, in bfloat16 at head_dim 128, tiles of 64 keys with two to four stages read
131,072 keys of 16 heads at 0.99 to 1.01 of a copy, and tiles of 32 keys at 0.87. A tile of 16 rows
needs 72 KB there, so that three programs run on an SM and load while others compute; ``shared`` is
for the most rows, 64. float32 has tiles of 16 rows from head_dim 128, because larger ones spill.

**Backward.** Of 84 on an H200 these were the fastest, in bfloat16 at 4,096 and causal at 16,384
tokens: "dkdv" ran at 629 and 620 TFLOP/s of real work for head_dim 128, and at 587 and 615 if the
statistics came by descriptors. Programs of 4 warps, two on an SM, beat one of 8, whose two
groups of warps wait for each other: 488 and 558. For head_dim 64, pointers lost 15 % in the
causal case. float32 is split into three TF32 matmuls that read registers: by addresses nothing
spills but a few hundred bytes at head_dim 256, by descriptors up to 19.8 KB did.

**FP8.** Three or four programs fit on an SM, and while one waits for its matmul the others compute
exponentials. At head_dim 128 and 16,384 tokens on an H200, causal, the limit of 168
registers gave 923 TFLOP/s against 867 without it, and 867 with three stages. At head_dim 256 tiles
of 64 queries gave 457 with 4,096 tokens, and 128 queries, which spill, 404. Keys in another order
would save the conversion of p, and gained nothing at head_dim 128."""

BLACKWELL = {
    ("forward", 64, 2): by_descriptor(128, 64, 8, 3, 66_560),
    ("forward", 128, 2): by_descriptor(128, 64, 8, 3, 132_096),
    ("forward", 256, 2): by_descriptor(128, 64, 8, 2, 197_184),
    ("forward", 64, 4): by_descriptor(64, 32, 8, 2, 65_576),
    ("forward", 128, 4): by_descriptor(64, 32, 8, 1, 98_312),
    ("forward", 256, 4): Config(16, 32, 8, 1, 32_768),
    ("decode", 64, 2): Config(64, 64, 4, 3, 57_376),
    ("decode", 128, 2): Config(64, 64, 4, 3, 114_720),
    ("decode", 256, 2): Config(32, 32, 4, 2, 53_248),
    ("decode", 64, 4): Config(32, 32, 4, 3, 57_344),
    ("decode", 128, 4): Config(16, 32, 4, 2, 53_248),
    ("decode", 256, 4): Config(16, 16, 8, 2, 67_584),
    ("dkdv", 64, 2): by_descriptor(64, 128, 8, 2, 82_944),
    ("dkdv", 128, 2): by_descriptor(64, 64, 8, 2, 132_096),
    ("dkdv", 256, 2): by_descriptor(32, 64, 8, 2, 164_864),
    ("dq", 64, 2): by_descriptor(128, 64, 8, 3, 91_136),
    ("dq", 128, 2): by_descriptor(64, 64, 8, 2, 115_712),
    ("dq", 256, 2): by_descriptor(64, 32, 8, 2, 148_480),
    ("all", 64, 2): by_descriptor(64, 64, 8, 2, 91_136),
    ("all", 128, 2): by_descriptor(32, 64, 8, 2, 86_312),
    ("all", 256, 2): by_descriptor(32, 64, 8, 2, 135_464),
    ("dkdv", 64, 4): Config(32, 32, 8, 1, 40_960),
    ("dkdv", 128, 4): Config(16, 32, 8, 1, 73_728),
    ("dkdv", 256, 4): Config(16, 16, 8, 1, 81_920),
    ("dq", 64, 4): Config(32, 32, 8, 1, 40_960),
    ("dq", 128, 4): Config(32, 16, 8, 1, 73_728),
    ("dq", 256, 4): Config(16, 16, 8, 1, 81_920),
    ("all", 64, 4): Config(32, 32, 8, 1, 57_344),
    ("all", 128, 4): Config(32, 16, 8, 1, 65_536),
    ("all", 256, 4): Config(16, 16, 8, 1, 114_688),
    ("fp8", 64, 1): by_descriptor(128, 64, 8, 2, 33_344),
    ("fp8", 128, 1): by_descriptor(128, 64, 8, 2, 57_920),
    ("fp8", 256, 1): by_descriptor(128, 64, 8, 2, 107_072),
    ("fp8", 64, 2): by_descriptor(128, 64, 8, 2, 49_728),
    ("fp8", 128, 2): by_descriptor(128, 64, 8, 2, 90_688),
    ("fp8", 256, 2): by_descriptor(128, 64, 8, 2, 172_608),
}
"""For Blackwell in data centers (B200), compiled only: nothing spills but a few bytes, and the sums
stay in 512 columns of tensor memory."""

AMPERE = {
    ("forward", 64, 2): Config(128, 64, 4, 3, 49_152),
    ("forward", 128, 2): Config(128, 32, 4, 3, 65_536),
    ("forward", 256, 2): Config(64, 32, 8, 3, 98_304),
    ("forward", 64, 4): Config(64, 16, 4, 2, 16_384),
    ("forward", 128, 4): Config(16, 32, 8, 1, 16_384),
    ("forward", 256, 4): Config(16, 32, 8, 1, 32_768),
    ("decode", 64, 2): Config(64, 64, 4, 3, 40_960),
    ("decode", 128, 2): Config(64, 64, 4, 2, 57_344),
    ("decode", 256, 2): Config(32, 32, 4, 2, 53_248),
    ("decode", 64, 4): Config(32, 32, 4, 2, 40_960),
    ("decode", 128, 4): Config(16, 32, 4, 2, 53_248),
    ("decode", 256, 4): Config(16, 16, 8, 2, 67_584),
    ("dkdv", 64, 2): Config(64, 64, 4, 2, 33_280),
    ("dkdv", 128, 2): Config(64, 64, 8, 2, 74_240),
    ("dkdv", 256, 2): Config(32, 64, 8, 2, 102_656),
    ("dq", 64, 2): Config(64, 64, 4, 2, 32_768),
    ("dq", 128, 2): Config(64, 64, 8, 2, 73_728),
    ("dq", 256, 2): Config(64, 32, 8, 2, 102_400),
    ("all", 64, 2): Config(64, 64, 4, 2, 49_664),
    ("all", 128, 2): Config(64, 64, 8, 2, 74_240),
    ("all", 256, 2): Config(32, 64, 8, 2, 114_944),
    ("dkdv", 64, 4): Config(32, 32, 8, 1, 40_960),
    ("dkdv", 128, 4): Config(16, 32, 8, 1, 73_728),
    ("dkdv", 256, 4): Config(16, 16, 8, 1, 81_920),
    ("dq", 64, 4): Config(32, 32, 8, 1, 40_960),
    ("dq", 128, 4): Config(32, 16, 8, 1, 73_728),
    ("dq", 256, 4): Config(16, 16, 8, 1, 81_920),
    ("all", 64, 4): Config(32, 32, 8, 1, 57_344),
    ("all", 128, 4): Config(32, 16, 8, 1, 65_536),
    ("all", 256, 4): Config(16, 16, 8, 1, 114_688),
}
"""For the A100, compiled only. Four warps of 32 queries each read keys and values from shared
memory half as often as eight of 16, and such reads take as long there as the matmuls do."""

SMALL = AMPERE | {
    ("forward", 128, 2): Config(128, 32, 4, 2, 49_152),
    ("forward", 256, 2): Config(128, 32, 8, 2, 98_304),
    ("decode", 128, 2): Config(64, 32, 4, 3, 57_344),
    ("dkdv", 256, 2): Config(32, 32, 8, 2, 67_840),
    ("dq", 256, 2): Config(32, 32, 8, 2, 67_584),
    ("all", 256, 2): Config(32, 32, 8, 2, 82_176),
    ("fp8", 64, 1): Config(128, 32, 4, 2, 12_288),
    ("fp8", 128, 1): Config(128, 32, 4, 2, 24_576),
    ("fp8", 256, 1): Config(64, 32, 4, 1, 24_576),
    ("fp8", 64, 2): Config(128, 32, 4, 2, 22_528),
    ("fp8", 128, 2): Config(128, 32, 4, 2, 45_056),
    ("fp8", 256, 2): Config(64, 32, 4, 1, 49_152),
}
"""For what has 99 KB, the RTX 30, 40 and 50 and their relatives, compiled only."""

TURING = {
    ("forward", 64, 2): Config(32, 32, 8, 1, 16_384),
    ("forward", 128, 2): Config(32, 32, 8, 1, 32_768),
    ("forward", 256, 2): Config(16, 16, 8, 1, 32_768),
    ("forward", 64, 4): Config(64, 16, 4, 1, 24_576),
    ("forward", 128, 4): Config(16, 32, 8, 1, 26_688),
    ("forward", 256, 4): Config(16, 16, 8, 1, 33_856),
    ("decode", 64, 2): Config(16, 32, 8, 1, 12_288),
    ("decode", 128, 2): Config(16, 32, 8, 1, 24_576),
    ("decode", 256, 2): Config(16, 16, 8, 1, 32_768),
    ("decode", 64, 4): Config(16, 32, 4, 1, 14_400),
    ("decode", 128, 4): Config(16, 32, 8, 1, 26_688),
    ("decode", 256, 4): Config(16, 16, 8, 1, 33_856),
    ("dkdv", 64, 2): Config(32, 32, 8, 1, 24_576),
    ("dkdv", 128, 2): Config(16, 32, 8, 1, 40_960),
    ("dkdv", 256, 2): Config(16, 16, 8, 1, 49_152),
    ("dq", 64, 2): Config(32, 32, 8, 1, 24_576),
    ("dq", 128, 2): Config(16, 32, 8, 1, 32_768),
    ("dq", 256, 2): Config(16, 16, 8, 1, 49_152),
    ("all", 64, 2): Config(32, 32, 8, 1, 24_576),
    ("dkdv", 64, 4): Config(32, 32, 8, 1, 36_864),
    ("dkdv", 128, 4): Config(16, 16, 8, 1, 33_792),
    ("dq", 64, 4): Config(32, 32, 8, 1, 32_768),
    ("dq", 128, 4): Config(16, 16, 8, 1, 32_768),
    ("all", 64, 4): Config(32, 32, 8, 1, 36_864),
}
"""For the T4 and its relatives, compiled only. Triton uses no matrix instructions on them and
multiplies number by number, in float32: small tiles, or thousands of bytes spill. The gradient in
float32 above head_dim 128 needs 66,560 of its 65,536 bytes, and is refused."""

CDNA = SMALL | {
    ("forward", 64, 2): Config(128, 32, 4, 1, 16_384),
    ("forward", 128, 2): Config(64, 32, 8, 1, 24_576),
    ("forward", 256, 2): Config(64, 32, 8, 1, 49_152),
    ("decode", 64, 2): Config(64, 32, 4, 1, 8_192),
    ("decode", 128, 2): Config(64, 32, 4, 1, 16_384),
    ("decode", 256, 2): Config(32, 32, 8, 1, 16_384),
    ("decode", 64, 4): Config(16, 32, 4, 1, 8_192),
    ("decode", 128, 4): Config(16, 32, 8, 1, 16_384),
    ("decode", 256, 4): Config(16, 16, 8, 1, 16_384),
    ("dkdv", 128, 2): Config(32, 32, 8, 1, 8_192),
    ("dkdv", 256, 2): Config(16, 32, 8, 1, 16_384),
    ("dq", 128, 2): Config(32, 32, 8, 1, 8_192),
    ("dq", 256, 2): Config(32, 16, 8, 1, 16_384),
    ("all", 64, 2): Config(32, 64, 4, 1, 8_192),
    ("dkdv", 128, 4): Config(16, 16, 8, 1, 8_192),
    ("dkdv", 256, 4): Config(16, 16, 8, 1, 16_384),
    ("dq", 128, 4): Config(16, 16, 8, 1, 8_192),
    ("dq", 256, 4): Config(16, 16, 8, 1, 16_384),
}
"""For AMD's MI300X, compiled only. Nothing of this book has been run on a GPU of AMD's."""


def config(kernel: str, q: torch.Tensor, columns: int | None = None) -> Config | None:
    """Return how a kernel is cut for these queries, or None where it fits in no way."""
    if runtime.INTERPRETED:
        return INTERPRETED
    columns = columns or head_block(q.shape[-1])
    gpu = runtime.capability(q.device), runtime.shared_memory(q.device)
    return _row(kernel, q.itemsize, columns, *gpu)


@planned
def _row(
    kernel: str, itemsize: int, columns: int, capability: tuple[int, int], available: int
) -> Config | None:
    for table in _tables(*capability):
        fitting = (
            row
            for (of, d, size), row in table.items()
            if of == kernel and size == itemsize and columns <= d and row.shared <= available
        )
        if row := next(fitting, None):
            return row
    return None


def _tables(major: int, minor: int) -> tuple[dict, ...]:
    """Return the tables for a compute capability, the best first."""
    if torch.version.hip:
        return (CDNA,)
    if major == 7:
        return (TURING,)
    if (major, minor) == (8, 0):
        return AMPERE, SMALL
    return {9: (HOPPER, SMALL), 10: (BLACKWELL, SMALL)}.get(major, (SMALL,))


def _refuse(what: str, q: torch.Tensor) -> None:
    raise ValueError(
        f"{what} head_dim {q.shape[-1]} in {q.dtype} needs more than the "
        f"{runtime.shared_memory(q.device):,} bytes of shared memory that a program has on "
        f"{torch.cuda.get_device_name(q.device)}: pass a smaller head_dim or a 16-bit dtype."
    )


def forward_config(q: torch.Tensor) -> Config:
    """Return how the forward kernel is cut for these queries on their device."""
    return config("forward", q) or _refuse("attention of", q)


def decode_config(q: torch.Tensor) -> Config | None:
    """Return how keys are shared in decoding: ``block_m`` is the most rows of a tile."""
    return config("decode", q)


def forward_heads_at_once(k: torch.Tensor, group: int, uneven: bool) -> int:
    """Return between how many heads tiles alternate: half of L2 holds their keys and values.

    Alternating lets the heaviest tiles of several heads start first, and light ones fill the gaps;
    with too many heads at once, keys would be read from memory again for each tile. Where tiles are
    not ``uneven`` but take equally long, without a mask or with a window, there is nothing to gain.
    A power of two, so that few kernels are compiled.
    """
    if not uneven:
        return 1
    return heads_in_l2(2 * k.shape[2] * k.shape[3] * k.itemsize, group, k.device)


def heads_in_l2(bytes_a_head: int, group: int, device: torch.device) -> int:
    """Return of how many heads half of L2 holds what is read, as a power of two up to 64."""
    fitting = max(1, runtime.l2_cache(device) // 2 // bytes_a_head) * group
    return min(64, 2 ** (fitting.bit_length() - 1))


NARROW = 2048
"""Keys that a query sees, at most, where windows are narrow: there, tiles of fewer queries meet
fewer keys that some of them do not see, and that saves more than larger tiles do. On an H200, at
head_dim 128, tiles of 64 queries took 177 us instead of 227 where a query sees 256 keys, and 382
instead of 419 where it sees 1,024; where it sees 4,096 they lost. Between these nothing was
measured, nor at head_dim 64, which keeps its tiles."""


def backward_config(sweep: str, q: torch.Tensor, keys_seen: float = math.inf) -> Config:
    """Return how the kernel of a sweep is cut for these queries on their device.

    ``keys_seen`` is how many keys a query sees at most.
    """
    narrow = keys_seen <= NARROW and config(f"narrow {sweep}", q)
    return narrow or config(sweep, q) or _refuse("the gradient of attention of", q)


def backward_heads_at_once(bytes_a_head: int, device: torch.device, windowed: bool = False) -> int:
    """Return between how many heads tiles alternate: half of L2 holds their operands.

    Alternating lets the heaviest tiles of several heads start first, and light ones fill the gaps;
    with too many heads at once, operands would be read from memory again for each tile. With a
    window all tiles take equally long, and neighbours of one head share what they read.
    """
    if windowed:
        return 1
    return max(1, runtime.l2_cache(device) // 2 // bytes_a_head)


def fp8_columns(head_dim: int) -> int:
    """Return the columns of a tile: no 8-bit matmul contracts fewer than 32."""
    return max(32, head_block(head_dim))


def fp8_config(q: torch.Tensor) -> Config:
    """Return how the kernel of 8-bit operands is cut for these queries on their device."""
    return config("fp8", q, fp8_columns(q.shape[-1])) or _refuse("attention in FP8 of", q)
