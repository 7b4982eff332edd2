"""Attention over a sequence that is spread over the ranks of ``torch.distributed``.

Each rank holds a part of the queries and the same part of the keys and values. Softmax over a union
of keys is a weighted average of the softmax over each part, and the weights follow from the
logsumexp of each part (lse). So a rank can meet the parts one after another:

    ring         keys and values travel from rank to rank, while each rank computes with those that
                 it received before
    all to all   ranks exchange parts of the sequence for heads, compute whole sequences of fewer
                 heads, and exchange back

Under a causal mask the ring leaves ranks of a contiguous layout idle: rank r sees r + 1 parts. The
layout "zigzag" gives rank r the pieces r and 2 * world - 1 - r of 2 * world, so that in each step
each rank computes the same number of scores.

    layout       rank r holds                   causal: it computes
    contiguous   piece r of world               all scores with keys of lower ranks, and none with
                                                keys of higher ranks
    zigzag       pieces r, 2 * world - 1 - r    all queries with the first half of keys of lower
                                                ranks, the second half of queries with all keys of
                                                higher ranks

Sources: the ring: Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for
near-infinite context", arXiv:2310.01889, 2023; pieces from both ends: Brandon et al., "Striped
attention", arXiv:2311.09431, 2023, and the Llama 3 report, arXiv:2407.21783, 2024; heads for
sequence: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509, 2023.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from kernelbook.ops import checks, library
from kernelbook.ops.attention import operator

LAYOUTS = ("contiguous", "zigzag")

_eager = torch.compiler.disable(reason="ranks talk to each other through the host")
"""Compiled code calls these functions as they are: ranks agree in Python, on what it cannot see."""


@_eager
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "contiguous",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Attention of a sequence that is spread over ranks, with keys and values sent round a ring.

    Every rank calls it with its part of the sequence and gets the same part of the result. Memory
    per rank grows with its part: at most two parts of keys and values are there at a time, beside
    them in the backward pass as many of their gradients, and sums of its own part of the result,
    which, like gradients on their way, are float32 with more than two ranks.

    Ranks first tell each other what they pass, through the CPU, so that a mismatch raises on all of
    them. The GPU does not wait for that; the host waits for the slowest rank.

    Args:
        q: queries of this rank, (batch, heads, seqlen_q / world, head_dim), float32, float16 or
            bfloat16, of the same shape on all ranks.
        k: keys of this rank, (batch, heads, seqlen_k / world, head_dim).
        v: values of this rank, of the shape of ``k``.
        is_causal: whether a query sees only keys at its own position of the whole sequence and
            before it; ``q`` and ``k`` then have the same length.
        scale: what the products of q and k are multiplied by; ``None`` means head_dim ** -0.5.
        enable_gqa: whether ``k`` and ``v`` may have fewer heads: see :func:`attention`.
        layout: which part rank r holds: "contiguous", the r-th of world pieces, or "zigzag", the
            pieces r and 2 * world - 1 - r of 2 * world, in this order: see :func:`shard_sequence`.
            Under a causal mask "zigzag" gives all ranks the same work.
        group: the process group; ``None`` means all ranks.

    Returns:
        out, of the shape and dtype of ``q``. It can be differentiated once. A query whose scores
        with the keys of one rank are all -inf has NaN, as one without any other score has.

    Raises:
        TypeError, ValueError: what :func:`attention` refuses, on any rank: all ranks raise, and the
            message names the rank; arguments that differ between ranks, likewise, and where some
            ranks need a gradient and others none.
        RuntimeError: ``torch.distributed`` is not initialised, or a rank does not answer within the
            time-out of the group.

    Source: Liu, Zaharia and Abbeel, arXiv:2310.01889, 2023.
    """
    group = _group_of("ring_attention", group)

    def checked():
        return _checked(q, k, v, is_causal, scale, enable_gqa, layout, group)

    *tensors, is_causal, sm_scale = _agreed("ring_attention", checked, layout, group)
    return _Ring.apply(*tensors, is_causal, sm_scale, layout, group)


@_eager
def all_to_all_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "contiguous",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Attention of a sequence that is spread over ranks, which exchange heads for sequence.

    Arguments, result and errors are those of :func:`ring_attention`. Each rank computes whole
    sequences of 1 / world of the heads, so world must divide the heads of ``q`` and of ``k``.

    Source: Jacobs et al., arXiv:2309.14509, 2023.
    """
    group = _group_of("all_to_all_attention", group)

    def checked():
        for name, x in (("q", q), ("k", k)):
            world = group.size()
            if isinstance(x, torch.Tensor) and x.ndim == 4 and x.shape[1] % world:
                raise ValueError(
                    f"{name} must have a number of heads that {world} ranks can share, got "
                    f"{x.shape[1]}: use ring_attention."
                )
        return _checked(q, k, v, is_causal, scale, enable_gqa, layout, group)

    *tensors, is_causal, sm_scale = _agreed("all_to_all_attention", checked, layout, group)
    whole = _Exchange.apply(True, layout, group, *tensors)
    out = operator.attention(*whole, is_causal=is_causal, scale=sm_scale, enable_gqa=True)
    return _Exchange.apply(False, layout, group, out)[0]


def _check_dim(x: object, dim: object) -> None:
    """Raise unless x is a tensor that has this dimension."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"x must be a torch.Tensor, got {checks.described(x)}: pass the whole sequence, or the "
            "part of it that this rank holds."
        )
    if not -x.ndim <= checks.integer("dim", dim) < x.ndim:
        raise ValueError(
            f"dim must lie in [{-x.ndim}, {x.ndim}), got {dim}: pass the dimension of the sequence."
        )


@_eager
def shard_sequence(
    x: torch.Tensor,
    dim: int,
    *,
    layout: str = "contiguous",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the part of a sequence that this rank holds.

    Args:
        x: any tensor whose size along ``dim`` the number of ranks divides; with "zigzag", twice it.
        dim: the dimension of the sequence.
        layout: "contiguous" or "zigzag": see :func:`ring_attention`.
        group: the process group; ``None`` means all ranks.
    """
    group = _group_of("shard_sequence", group)
    layout = checks.choice("layout", layout, LAYOUTS)
    _check_dim(x, dim)
    pieces = _pieces_of(group.size(), layout)
    count = len(pieces) * len(pieces[0])
    if x.shape[dim] % count:
        raise ValueError(
            f"x must have a size along dim that {count} divides, got {x.shape[dim]}: pad it."
        )
    parts = x.chunk(count, dim) if x.shape[dim] else [x] * count
    return torch.cat([parts[i] for i in pieces[group.rank()]], dim)


@_eager
def unshard_sequence(
    x: torch.Tensor,
    dim: int,
    *,
    layout: str = "contiguous",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the whole sequence, gathered from all ranks; no gradient flows through it.

    Arguments are those of :func:`shard_sequence`; ``x`` has the same shape on all ranks.
    """
    group = _group_of("unshard_sequence", group)
    layout = checks.choice("layout", layout, LAYOUTS)
    _check_dim(x, dim)
    if layout == "zigzag" and x.shape[dim] % 2:
        raise ValueError(
            f"x must have an even size along dim in the layout zigzag, two pieces, got "
            f"{x.shape[dim]}: pass what shard_sequence gave this rank."
        )
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return _in_order(torch.cat(parts, dim), dim, group.size(), layout)


# -- who holds what, and who sees what


def _pieces_of(world: int, layout: str) -> list[tuple[int, ...]]:
    """Return which pieces of the sequence each rank holds, in the order in which it holds them."""
    if layout == "contiguous":
        return [(rank,) for rank in range(world)]
    return [(rank, 2 * world - 1 - rank) for rank in range(world)]


def _in_order(x: torch.Tensor, dim: int, world: int, layout: str) -> torch.Tensor:
    """Return the parts of all ranks, one after another, as the sequence they make."""
    held = [piece for pieces in _pieces_of(world, layout) for piece in pieces]
    parts = x.chunk(len(held), dim) if x.shape[dim] else [x] * len(held)
    return torch.cat([parts[held.index(piece)] for piece in range(len(held))], dim)


def _as_held(x: torch.Tensor, dim: int, world: int, layout: str) -> torch.Tensor:
    """Return a sequence as the parts of all ranks, one after another."""
    held = [piece for pieces in _pieces_of(world, layout) for piece in pieces]
    parts = x.chunk(len(held), dim) if x.shape[dim] else [x] * len(held)
    return torch.cat([parts[piece] for piece in held], dim)


def _work(rank: int, source: int, is_causal: bool, layout: str, length: int):
    """Return (queries, keys, causal): what a rank computes with the keys that a rank sent, or None.

    ``queries`` and ``keys`` are slices of the two parts, and ``causal`` tells whether the slices
    are masked: the last query sees the last key then.
    """
    all_of_it, half = slice(0, None), length // 2
    if not is_causal or source == rank:
        return all_of_it, all_of_it, is_causal
    if layout == "contiguous":
        return (all_of_it, all_of_it, False) if source < rank else None
    if source < rank:
        return all_of_it, slice(0, half), False
    return slice(half, None), all_of_it, False


# -- what ranks agree on


def _group_of(name: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{name} needs torch.distributed: call torch.distributed.init_process_group on each "
            "rank first, or use attention on one device."
        )
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):  # new_group gives an int to ranks outside it
        raise TypeError(
            f"group must be a process group that this rank belongs to, got "
            f"{checks.described(group)}: call {name} on the ranks of the group alone."
        )
    return group


def _checked(q, k, v, is_causal, scale, enable_gqa, layout, group):
    """Return (q, k, v, is_causal, sm_scale), or raise what attention raises."""
    is_causal = checks.flag("is_causal", is_causal)
    enable_gqa = checks.flag("enable_gqa", enable_gqa)
    layout = checks.choice("layout", layout, LAYOUTS)
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.tensor(name, x)
    if library.autocasts(q):
        q, k, v = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (q, k, v))
    operator._check_operands(q, k, v, enable_gqa)
    if is_causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"k must have the length of q where is_causal, {q.shape[2]}, got {k.shape[2]}: pass "
            "keys for the same positions as queries."
        )
    for name, x in (("q", q), ("k", k)):
        if layout == "zigzag" and x.shape[2] % 2:
            raise ValueError(
                f"{name} must have an even length in the layout zigzag, two pieces, got "
                f"{x.shape[2]}: shard the sequence by shard_sequence."
            )
    sm_scale = q.shape[-1] ** -0.5 if scale is None else operator.checked_scale(scale)
    return q, k, v, is_causal, sm_scale


_controls: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""For a group of GPUs, the same ranks as a group of CPUs, on which ranks agree."""


def _control(group: dist.ProcessGroup) -> dist.ProcessGroup:
    if torch.device("cpu") in group._device_types:
        return group
    if group not in _controls:
        _controls[group] = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=group._get_backend(torch.device("cuda")).options._timeout,
            backend="gloo",
            use_local_synchronization=True,
        )
    return _controls[group]


def _agreed(name: str, checked: Callable, layout: str, group: dist.ProcessGroup):
    """Return what ``checked`` returns, if it does on all ranks and all mean the same."""
    result, failure = None, None
    try:
        result = checked()
        *tensors, is_causal, sm_scale = result
        said = {"the function": name, "layout": layout}
        for letter, x in zip("qkv", tensors, strict=True):
            said[letter] = f"{checks.spell(x.dtype)} of shape {tuple(x.shape)}"
        said |= {"is_causal": is_causal, "scale": sm_scale}
        # Backward waits for all ranks, and a rank that needs no gradient would not come.
        needed = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        said["whether a gradient is needed"] = needed
    except (TypeError, ValueError) as error:
        failure, said = error, {"refused": str(error)}
    # A number for what is said travels faster than the words, which are only needed if two differ.
    number = zlib.crc32(repr(said).encode()) - (1 << 32) * ("refused" in said)
    try:
        extremes = torch.tensor([number, -number], device="cpu")
        dist.all_reduce(extremes, dist.ReduceOp.MIN, _control(group))
        smallest, largest = extremes[0].item(), -extremes[1].item()
        if failure is None and smallest == largest:
            return result
        answers: list = [None] * group.size()
        dist.all_gather_object(answers, said, group=_control(group))
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {group.rank()} of {group.size()} waited for the others in vain: one of them has "
            "stopped, or did not make this call within the time-out of the process group."
        ) from error
    if failure:
        raise failure
    for rank, answer in enumerate(answers):
        if "refused" in answer:
            raise ValueError(f"rank {rank} refused its input: {answer['refused']}")
    for rank, answer in enumerate(answers):
        for what, value in answer.items():
            if value != answers[0][what]:
                raise ValueError(
                    f"{what} must be the same on all ranks, got {value} on rank {rank} and "
                    f"{answers[0][what]} on rank 0: pass the same."
                )
    return result


# -- the ring


def _pass_on(
    sent: Sequence[torch.Tensor], group: dist.ProcessGroup, into: Sequence[torch.Tensor]
) -> list[dist.Work]:
    """Send tensors to the next rank, and receive those of the rank before."""
    rank, world = group.rank(), group.size()
    to, source = (dist.get_global_rank(group, (rank + step) % world) for step in (1, -1))
    sends = [dist.P2POp(dist.isend, x, to, group) for x in sent]
    return dist.batch_isend_irecv(sends + [dist.P2POp(dist.irecv, x, source, group) for x in into])


def _like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in tensors]


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, lse_part: torch.Tensor) -> None:
    """Add attention to more keys: change out and lse to those of all keys, by sums in float32.

    out = (1 - w) out + w part, where w = exp(lse_part) / (exp(lse) + exp(lse_part)). Both outputs
    are (..., seqlen, head_dim), and lse is (..., seqlen), float32, -inf for a query without keys.
    """
    w = torch.sigmoid(lse_part - lse).masked_fill_(lse_part == -torch.inf, 0).unsqueeze(-1)
    torch.addcmul(out * (1 - w), part, w, out=out)
    lse.copy_(torch.logaddexp(lse, lse_part))


def _dtype_of_sums(dtype: torch.dtype, world: int) -> torch.dtype:
    """Return the dtype of a sum with a term from each rank.

    Operations compute in float32 inside, so that a sum of two terms is rounded once either way.
    """
    return torch.float32 if world > 2 else dtype


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient):
        return gradient

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            "attention over ranks can be differentiated once, and its gradient was to be "
            "differentiated: use softmax(scale * q @ k.mT) @ v of the whole sequence where second "
            "derivatives are needed."
        )


def _once(backward: Callable) -> Callable:
    """Let a backward pass be differentiated once, and make it an error to differentiate it again.

    PyTorch's ``once_differentiable`` says so only where the gradients that come in need gradients.
    Those of a sum need none, and then what depends on q, k and v would be left out without a word.
    """

    @functools.wraps(backward)
    def pass_once(ctx, *gradients):
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return results
        return tuple(r if r is None else _Once.apply(r.detach().requires_grad_()) for r in results)

    return pass_once


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, sm_scale, layout, group):
        rank, world = group.rank(), group.size()
        out = lse = spare = None
        kv = k.contiguous(), v.contiguous()
        for step in range(world):
            # -- send: what is here goes on while it is computed with
            following = works = ()
            if step < world - 1:
                following = spare or _like(kv)
                works = _pass_on(kv, group, following)
            # -- attend: the scores that this mask leaves; all queries see keys of their own rank
            if work := _work(rank, (rank - step) % world, is_causal, layout, q.shape[2]):
                rows, keys, causal = work
                part, lse_part = operator.run(
                    q[:, :, rows], *(x[:, :, keys] for x in kv), causal, None, None, sm_scale, True,
                    "auto",
                )  # fmt: skip
                if step:
                    merge(out[:, :, rows], lse[:, :, rows], part, lse_part)
                else:
                    out, lse = part.to(_dtype_of_sums(q.dtype, world)), lse_part
            _wait(works)
            kv, spare = following, kv if step else None  # never into the caller's own k and v
        ctx.save_for_backward(q, k, v, out := out.to(q.dtype), lse)
        ctx.options = is_causal, sm_scale, layout, group
        return out

    @staticmethod
    @_once
    def backward(ctx, do):
        q, k, v, out, lse = ctx.saved_tensors
        is_causal, sm_scale, layout, group = ctx.options
        rank, world = group.rank(), group.size()
        dtype = _dtype_of_sums(q.dtype, world)
        kv = k.contiguous(), v.contiguous()
        spare, arriving, gradients = None, None, ()
        for step in range(world):
            last = step == world - 1
            following = works = ()
            if not last:
                following = spare or _like(kv)
                works = _pass_on(kv, group, following)
            # -- differentiate: P comes from the lse of all keys, so these are parts of a sum
            terms = None
            if work := _work(rank, (rank - step) % world, is_causal, layout, q.shape[2]):
                rows, keys, causal = work
                of_rows = (x[:, :, rows] for x in (out, lse, do))
                terms = operator.run_backward(
                    q[:, :, rows], *(x[:, :, keys] for x in kv), *of_rows, None, causal, None,
                    None, sm_scale, True, "auto", [True, True, True],
                )  # fmt: skip
            # -- add: to the gradients of these keys, which come from the rank before
            _wait(gradients)
            if step == 0:
                dq = terms[0].to(dtype)
                dkv = [term.to(dtype).contiguous() for term in terms[1:]]  # rows may have gaps
                arriving = _like(dkv) if world > 1 else None
            else:
                dkv, arriving = arriving, dkv
                if terms:
                    for dx, term in zip(dkv, terms[1:], strict=True):
                        dx[:, :, keys] += term
            if last and world > 1:  # the sum is complete: rounded it is shorter, and kv was read
                dkv, arriving = [dx.to(k.dtype) for dx in dkv], kv
            if world > 1:
                gradients = _pass_on(dkv, group, arriving)
            if step and terms:
                dq[:, :, rows] += terms[0]
            _wait(works)
            kv, spare = following, kv if step else None
        _wait(gradients)
        dk, dv = arriving if world > 1 else dkv
        return dq.to(q.dtype), dk, dv, None, None, None, None


class _Exchange(torch.autograd.Function):
    """Turn parts of the sequence with all heads into whole sequences of some heads, or back.

    Of all tensors at once, so that every rank sends back the gradients of all, in one order: ranks
    may need different ones, and what one sends is what the others wait for.
    """

    @staticmethod
    def forward(ctx, to_heads, layout, group, *tensors):
        ctx.options = to_heads, layout, group
        return tuple(_exchange(x, to_heads, layout, group) for x in tensors)

    @staticmethod
    @_once
    def backward(ctx, *gradients):
        to_heads, layout, group = ctx.options
        return None, None, None, *(_exchange(dy, not to_heads, layout, group) for dy in gradients)


def _exchange(x: torch.Tensor, to_heads: bool, layout: str, group) -> torch.Tensor:
    world = group.size()
    if to_heads:  # a part of the heads for each rank comes first
        sent = x.unflatten(1, (world, -1)).movedim(1, 0).contiguous()
    else:  # a part of the sequence for each rank comes first
        parts = _as_held(x, 2, world, layout).unflatten(2, (world, -1))
        sent = parts.movedim(2, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    if to_heads:
        return _in_order(received.movedim(0, 2).flatten(2, 3), 2, world, layout)
    return received.movedim(0, 1).flatten(1, 2)
