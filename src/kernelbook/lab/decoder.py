"""A decoder-only transformer whose operators are injected, and what trains it.

Pre-norm (Xiong et al., 2020), with learned positions, causal attention, a feed-forward network with
GELU, and dropout behind each. Its defaults are PyTorch's own operators and attention as its formula
says. It knows no kernel: a chapter hands it those that it compares.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint


class Size(NamedTuple):
    """The numbers that make a decoder: its widths, its depth, its heads, its words."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    vocabulary: int = 10_000


SIZES = {
    "small": Size(768, 3072, 12, 12),
    "medium": Size(1024, 4096, 24, 16),
    "large": Size(1280, 5120, 36, 20),
    "xl": Size(1600, 6400, 48, 25),
    "2.7B": Size(2560, 10240, 32, 32),
}
"""The sizes of the course CS336, assignment 2."""


def standard_attention(q, k, v, softmax=torch.softmax):
    """Causal attention as the formula says: a matrix of scores, its softmax, a sum of values."""
    with record_function("scores"):
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    with record_function("mask"):
        shape = scores.shape[-2:]
        future = torch.ones(shape, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    with record_function("softmax"):
        weights = softmax(scores, dim=-1)
    with record_function("values"):
        return weights @ v


class Operators(NamedTuple):
    """What a block computes with: attention(q, k, v), and two functions as PyTorch calls them."""

    attention: Callable = standard_attention
    layer_norm: Callable = F.layer_norm
    dropout: Callable = F.dropout


PYTORCH = Operators()


class LayerNorm(nn.Module):
    """Layer norm by the operator of the decoder."""

    def __init__(self, width: int, operators: Operators, **where):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, **where))
        self.bias = nn.Parameter(torch.zeros(width, **where))
        self.operator = operators.layer_norm

    def forward(self, x):
        return self.operator(x, self.weight.shape, self.weight, self.bias)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), and to that its own feed_forward(norm(...))."""

    def __init__(self, size: Size, operators: Operators, p: float, **where):
        super().__init__()
        linear = partial(nn.Linear, bias=False, **where)
        self.heads, self.p = size.heads, p
        self.attention, self.dropout = operators.attention, operators.dropout
        self.norm_1 = LayerNorm(size.d_model, operators, **where)
        self.qkv = linear(size.d_model, 3 * size.d_model)
        self.out = linear(size.d_model, size.d_model)
        self.norm_2 = LayerNorm(size.d_model, operators, **where)
        self.up = linear(size.d_model, size.d_ff)
        self.down = linear(size.d_ff, size.d_model)

    def forward(self, x):
        x = x + self.dropout(self.attend(self.norm_1(x)), self.p, self.training)
        return x + self.dropout(self.feed_forward(self.norm_2(x)), self.p, self.training)

    def attend(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = (heads.transpose(1, 2) for heads in qkv.unbind(2))  # (batch, heads, seqlen, ...)
        return self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))

    def feed_forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """Tokens, (batch, seqlen), to the logits of the token that follows each."""

    def __init__(self, size: Size, context: int, operators=PYTORCH, p=0.1, **where):
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.d_model, **where)
        self.places = nn.Embedding(context, size.d_model, **where)
        self.blocks = nn.ModuleList(Block(size, operators, p, **where) for _ in range(size.layers))
        self.norm = LayerNorm(size.d_model, operators, **where)
        self.head = nn.Linear(size.d_model, size.vocabulary, bias=False, **where)
        self.checkpointed = False
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))

    def loss(self, tokens, following):
        """The mean cross-entropy of the tokens that follow, (batch, seqlen) as the tokens."""
        return F.cross_entropy(self(tokens).flatten(0, 1), following.flatten())


PASSES = ("forward", "backward", "step")
"""What a training step is made of; the last is the optimiser's."""


class Training:
    """A decoder, AdamW, and a batch of random tokens: forward(), backward() and step(), in turn."""

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, dtype=torch.float32):
        self.model, self.optimizer, self.dtype = model, optimizer, dtype

    def draw(self, batch: int, context: int) -> "Training":
        words = self.model.words.weight
        tokens = torch.randint(len(words), (batch, context + 1), device=words.device)
        self.tokens, self.following = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return self

    def forward(self):
        device, mixed = self.tokens.device.type, self.dtype != torch.float32
        with torch.autocast(device, self.dtype) if mixed else nullcontext():
            self.loss = self.model.loss(self.tokens, self.following)

    def backward(self):
        self.loss.backward()
        self.loss = None

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self):
        for name in PASSES:
            getattr(self, name)()


def timed_step(training: Training) -> dict[str, float]:
    """Return the milliseconds of each pass of one step, by a clock that waits for the GPU."""
    times = {}
    for name in PASSES:
        begin = time.perf_counter()
        getattr(training, name)()
        torch.cuda.synchronize()
        times[name] = 1e3 * (time.perf_counter() - begin)
    return times


def captured(training: Training, warmup: int = 2) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of one whole step. Its replay() trains on the batch of the training.

    The parameters and the averages of AdamW stay where they are. What a step allocates lies in
    memory of the graph's own. A step must have run before, so that everything is compiled.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what a stream sets up once must not be in the graph
        for _ in range(warmup):
            training.whole()
    torch.cuda.current_stream().wait_stream(stream)
    groups = training.optimizer.param_groups
    try:
        for group in groups:
            group["capturable"] = True  # AdamW counts its steps on the GPU
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            training.whole()
    finally:
        for group in groups:
            group["capturable"] = False
    return graph
