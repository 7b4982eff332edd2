"""The decoder: what it computes, that its operators are injected, and that it learns."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernelbook.lab import decoder
from kernelbook.lab.decoder import PASSES, SIZES, Decoder, Operators, Size, Training

TINY = Size(d_model=32, d_ff=64, layers=2, heads=2, vocabulary=23)


def tiny(operators=decoder.PYTORCH, **options):
    torch.manual_seed(0)
    return Decoder(TINY, 16, operators, **options)


def tokens(batch=2, context=16):
    return torch.randint(TINY.vocabulary, (batch, context), generator=torch.manual_seed(1))


def test_a_size_has_the_parameters_of_its_name():
    for name, million in (("small", 101), ("large", 735), ("2.7B", 2571)):
        model = Decoder(SIZES[name], 1024, device="meta")
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) == million


def test_the_future_does_not_change_the_past():
    model, first = tiny(p=0.0), tokens()
    second = first.clone()
    second[:, 9:] = (second[:, 9:] + 1) % TINY.vocabulary
    before, after = model(first), model(second)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.isclose(before[:, 9:], after[:, 9:]).all(-1).any()


def test_attention_is_pytorchs():
    q, k, v = torch.randn(3, 2, 4, 16, 8, dtype=torch.float64, generator=torch.manual_seed(2))
    truth = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(decoder.standard_attention(q, k, v), truth)


def test_every_operator_is_the_injected_one():
    calls = {"attention": 0, "layer_norm": 0, "dropout": 0}

    def counting(name, operator):
        def run(*args):
            calls[name] += 1
            return operator(*args)

        return run

    plain = decoder.PYTORCH._asdict()
    model = tiny(Operators(**{name: counting(name, f) for name, f in plain.items()}))
    model(tokens())
    assert calls == {"attention": 2, "layer_norm": 5, "dropout": 4}


def test_checkpointing_changes_no_gradient():
    model, words = tiny(), tokens()
    found = []
    for model.checkpointed in (False, True):
        torch.manual_seed(3)  # the masks of dropout
        found.append(torch.autograd.grad(model.loss(words, words), list(model.parameters())))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_learns(dtype):
    model = tiny(p=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training, losses = Training(model, optimizer, dtype).draw(4, 16), []
    assert torch.equal(training.tokens[:, 1:], training.following[:, :-1])
    for _ in range(20):
        training.forward()
        losses.append(training.loss.item())
        training.backward()
        training.step()
    assert losses[-1] < losses[0] / 2
    assert all(p.grad is None for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_step_is_timed_pass_by_pass(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = tiny()
    training = Training(model, torch.optim.SGD(model.parameters())).draw(2, 16)
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    times = decoder.timed_step(training)
    assert tuple(times) == PASSES
    assert min(times.values()) > 0
    assert not torch.equal(before, nn.utils.parameters_to_vector(model.parameters()))


def test_a_captured_step_is_warmed_up_and_captured_once(monkeypatch):
    model, seen = tiny(), []
    training = Training(model, torch.optim.SGD(model.parameters())).draw(2, 16)
    whole = training.whole

    def noted():
        seen.append((inside[0], training.optimizer.param_groups[0].get("capturable", False)))
        whole()

    inside, stream = [False], SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def capturing(graph, stream, capture_error_mode):
        inside[0] = True
        yield
        inside[0] = False

    fakes = {"Stream": lambda: stream, "CUDAGraph": object, "graph": capturing}
    fakes |= {"stream": lambda of: nullcontext(), "current_stream": lambda: stream}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(training, "whole", noted)
    decoder.captured(training)
    assert seen == [(False, False), (False, False), (True, True)]
    assert not training.optimizer.param_groups[0]["capturable"]


@pytest.mark.usefixtures("gpu")
def test_a_replay_trains_as_a_step_does():
    found = []
    for replayed in (False, True):
        model = tiny(p=0.0, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        training = Training(model, optimizer, torch.bfloat16)
        training.tokens = training.following = tokens().cuda()
        training.whole()
        step = decoder.captured(training).replay if replayed else training.whole
        for _ in range(3 if replayed else 5):  # of which the warm-up of a capture makes two
            step()
        found.append(nn.utils.parameters_to_vector(model.parameters()))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
