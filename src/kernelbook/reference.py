"""The truth that kernels are checked against: plain PyTorch, in float64.

Nothing here is fast, and nothing here shares code with a kernel.
"""

import torch

_PHILOX_ROUND = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY = (0x9E3779B9, 0xBB67AE85)
_LOW_32 = 0xFFFFFFFF


def philox(seed: int, counter: torch.Tensor, rounds: int = 10) -> torch.Tensor:
    """Philox4x32: turn counters into random bits.

    ``counter`` holds integers of any shape; the answer has one more dimension, of size 4, with
    integers in [0, 2**32). int64 keeps the low 64 bits of every product, and those are all that
    the algorithm reads.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    counter = counter.to(torch.int64)
    c0, c1 = counter & _LOW_32, (counter >> 32) & _LOW_32
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _LOW_32, (seed >> 32) & _LOW_32
    for _ in range(rounds):
        product_0, product_2 = c0 * _PHILOX_ROUND[0], c2 * _PHILOX_ROUND[1]
        c0 = ((product_2 >> 32) & _LOW_32) ^ c1 ^ k0
        c2 = ((product_0 >> 32) & _LOW_32) ^ c3 ^ k1
        c1, c3 = product_2 & _LOW_32, product_0 & _LOW_32
        k0, k1 = (k0 + _PHILOX_KEY[0]) & _LOW_32, (k1 + _PHILOX_KEY[1]) & _LOW_32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def keep_mask(index: torch.Tensor, p: float, seed: int, rounds: int) -> torch.Tensor:
    """Which elements dropout keeps: element i reads number i % 4 of the Philox call i // 4."""
    numbers = philox(seed, index // 4, rounds)
    number = numbers.gather(-1, (index % 4).unsqueeze(-1)).squeeze(-1)
    return number >= min(round(p * 2**32), 2**32 - 1)


def weighted_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The sum of x * weight over the last dimension, in float64."""
    return (x.detach().double() * weight.detach().double()).sum(-1)


def weighted_sum_backward(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and weight of :func:`weighted_sum`, in float64."""
    x, weight, dy = (t.detach().double() for t in (x, weight, dy))
    return dy.unsqueeze(-1) * weight, dy.reshape(-1) @ x.reshape(dy.numel(), x.shape[-1])


def masked_dropout(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    """x / (1 - p) where ``keep`` is true and 0 elsewhere, in float64."""
    return torch.where(keep, x.double() / (1 - p), 0.0)


def seeded_dropout(x: torch.Tensor, p: float, seed: int, rounds: int = 7) -> torch.Tensor:
    """Dropout whose mask is a function of the seed and the element's index, in float64."""
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    return masked_dropout(x, keep_mask(index, p, seed, rounds), p)


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """exp(x) / sum(exp(x)) along ``dim``, in float64."""
    return torch.softmax(x.detach().double(), dim)


def softmax_backward(x: torch.Tensor, dy: torch.Tensor, dim: int) -> torch.Tensor:
    """The gradient of :func:`softmax` at x, by its Jacobian diag(y) - y y^T, in float64."""
    y = softmax(x, dim)
    dy = dy.double()
    return y * (dy - (y * dy).sum(dim, keepdim=True))


def layer_norm(
    x: torch.Tensor,
    n_dims: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, in float64."""
    xhat, _ = _normalised(x, n_dims, eps)
    y = xhat if weight is None else xhat * weight.detach().double()
    return y if bias is None else y + bias.detach().double()


def layer_norm_backward(
    x: torch.Tensor,
    dy: torch.Tensor,
    n_dims: int,
    weight: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients dx, dw and db of :func:`layer_norm` at x, in float64.

    dx is the Jacobian (I - 1 1^T / N - xhat xhat^T / N) * rstd, applied to w * dy.
    """
    xhat, rstd = _normalised(x, n_dims, eps)
    dy = dy.double()
    wdy = dy if weight is None else dy * weight.detach().double()
    last, first = tuple(range(-n_dims, 0)), tuple(range(x.ndim - n_dims))
    along_ones = wdy.mean(last, keepdim=True)
    along_xhat = xhat * (wdy * xhat).mean(last, keepdim=True)
    dx = (wdy - along_ones - along_xhat) * rstd
    if not first:
        return dx, dy * xhat, dy
    return dx, (dy * xhat).sum(first), dy.sum(first)


def _normalised(x: torch.Tensor, n_dims: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(x - mean) / sqrt(variance + eps) over the last dimensions, and 1 / sqrt(variance + eps)."""
    x = x.detach().double()
    last = tuple(range(-n_dims, 0))
    deviation = x - x.mean(last, keepdim=True)
    rstd = ((deviation * deviation).mean(last, keepdim=True) + eps).rsqrt()
    return deviation * rstd, rstd


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T) v and the logarithm of the sum of exponentials, in float64.

    Heads of k and v are shared by groups of query heads where there are fewer. Causal is aligned
    bottom right: query i sees key j when j <= i + seqlen_k - seqlen_q. With a window (left, right)
    it sees keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right, where None
    is no bound. A query that sees nothing gives 0, and -inf.
    """
    lse, p = _attention_weights(q, k, is_causal, scale, window)
    return p @ _for_each_query_head(v, q), lse


def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    block_n: int = 128,
    window: tuple[int | None, int | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`attention` in float64, but for weights that are rounded to float8_e4m3fn.

    q, k and v are values, that is stored * descale. As in a kernel that meets ``block_n`` keys at a
    time, what is rounded is 2^8 exp(score - largest score so far); sums are of unrounded numbers.
    The error of this, against :func:`attention`, is what no such kernel can avoid.
    """
    lse, p = _attention_weights(q, k, is_causal, scale, window)
    scores = (p.log() + lse.unsqueeze(-1)).masked_fill(p == 0, -torch.inf)
    largest = torch.stack([tile.amax(-1) for tile in scores.split(block_n, dim=-1)], dim=-1)
    largest = largest.cummax(-1).values.repeat_interleave(block_n, dim=-1)[..., : p.shape[-1]]
    largest = largest.clamp(min=-1e300)  # of no key at all: exp(-inf - largest) is still 0
    rounded = (256 * torch.exp(scores - largest)).to(torch.float8_e4m3fn).double() / 256
    p = rounded * torch.exp(largest - lse.clamp(min=-1e300).unsqueeze(-1))
    return p @ _for_each_query_head(v, q), lse


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    dlse: torch.Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients dq, dk and dv of :func:`attention`, in float64.

    Row by row dS = (diag(p) - p p^T) dP, the Jacobian of softmax, and dlse adds p times itself.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    do = do.double()
    _, p = _attention_weights(q, k, is_causal, scale, window)
    dv = p.mT @ do
    dp = do @ _for_each_query_head(v, q).mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    if dlse is not None:
        ds = ds + p * dlse.double().unsqueeze(-1)
    dq = scale * ds @ _for_each_query_head(k, q)
    dk = scale * ds.mT @ q.detach().double()
    shared = k.shape[1], q.shape[1] // k.shape[1]  # the heads of a group are neighbours
    return dq, dk.unflatten(1, shared).sum(2), dv.unflatten(1, shared).sum(2)


def _for_each_query_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Repeat heads of keys or values so that each query head has its own, in float64."""
    return x.detach().double().repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _attention_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    window: tuple[int | None, int | None] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of the sum of the scores' exponentials, and softmax, in float64."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * q.detach().double() @ _for_each_query_head(k, q).mT
    i = torch.arange(seqlen_q, device=q.device).unsqueeze(1)
    ahead = torch.arange(seqlen_k, device=q.device) - (i + seqlen_k - seqlen_q)
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if is_causal:
        hidden |= ahead > 0
    left, right = window or (None, None)
    if left is not None:
        hidden |= ahead < -left
    if right is not None:
        hidden |= ahead > right
    scores = scores.masked_fill(hidden, -torch.inf)
    p = torch.softmax(scores, -1)
    p = p.masked_fill(hidden.all(-1, keepdim=True), 0.0)  # what sees nothing weighs nothing
    return torch.logsumexp(scores, -1), p
