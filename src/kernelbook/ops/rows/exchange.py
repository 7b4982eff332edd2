"""How the programs of one row tell each other two numbers: publish, wait, collect.

A row that is too wide for one program is split into parts, and what a part needs of the others is
little: a maximum and a sum, say. Each part has a slot of 64 bits in memory, zero at first:

    publish   the part stores its two float32 as one 64-bit number, so that no reader ever meets
              one number without the other
    wait      each of its warps reads the slots of the row until none is empty, or all give up
    collect   it takes the two numbers of every part apart again; what was read beyond the last
              part counts as the neutral element of the operation, -inf for a maximum, 0 for a sum

The hardware starts programs in the order of their numbers, so the parts of a row run at the same
time and the wait is short. Nothing guarantees that order, however, so a part that waits in vain
computes the others' numbers itself, which is slower and still right.
"""

import torch
import triton
import triton.language as tl

from kernelbook import runtime

MAX_POLLS = 1 if runtime.INTERPRETED else 2**14
"""How often a part looks for the others before it gives up: some milliseconds. The interpreter runs
programs one after the other, so waiting would be in vain there."""

EMPTY = tl.constexpr(0x7FC5A5A57FC5A5A5)
"""What an empty slot stands for: two NaN that no arithmetic makes. A slot is stored XOR this, so
that memory full of zeros is empty and every pair that is computed is not."""


def looks(n_parts: int, num_warps: int, device: torch.device, rows: int = 1) -> tuple[int, int]:
    """Return how many slots of each row a program reads, some several times, and its threads.

    A block of fewer numbers than threads is held by several threads, and a volatile load answers
    each of them for itself: one sees a slot filled, and its twin sees it empty. So either a warp
    reads as many slots as it has lanes, and each warp all of them; or each thread reads another.
    """
    lanes, slots = runtime.warp_size(device), rows * runtime.next_power_of_2(n_parts)
    return (lanes if slots <= lanes else max(slots, num_warps * lanes)) // rows, num_warps * lanes


@triton.jit
def to_slot(high, low):
    """Return two float32 as the 64 bits of a slot."""
    high = high.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (high | low) ^ EMPTY


@triton.jit
def publish(slots_ptrs, slot):
    """Fill a slot, which is zero. Its readers need no other memory of this part.

    An atomic stores all 64 bits at once. It is an "or", because AMD's backend has no exchange of a
    tensor of 64 bits.
    """
    tl.atomic_or(slots_ptrs, slot, sem="relaxed")


@triton.jit
def wait(slots_ptrs, max_polls, THREADS: tl.constexpr):
    """Read slots until none is empty, or max_polls times. Return (slots, ready).

    There are as many pointers as :func:`looks` says. Warps that each read all of the slots need not
    wait for each other to continue, only to agree on giving up.
    """
    # -- poll: until no slot is empty, or max_polls times
    slots = tl.zeros(slots_ptrs.shape, tl.int64)
    ready = tl.min((slots != 0).to(tl.int32))
    polls = 0
    while (ready == 0) & (polls < max_polls):
        slots = tl.load(slots_ptrs, volatile=True)
        ready = tl.min((slots != 0).to(tl.int32))
        polls += 1
    return slots, tl.min(tl.zeros((THREADS,), tl.int32) + ready)


@triton.jit
def collect(slots, exist, NEUTRAL_HIGH: tl.constexpr, NEUTRAL_LOW: tl.constexpr):
    """Return the two float32 of each slot, and the neutral ones beyond the last part."""
    bits = slots ^ EMPTY
    high = (bits >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    low = bits.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(exist, high, NEUTRAL_HIGH), tl.where(exist, low, NEUTRAL_LOW)
