"""Checks: what is wrong in one part fails, whatever the other parts are like."""

from types import SimpleNamespace

import pytest
import torch

from kernelbook import lab
from kernelbook.lab import chapter
from kernelbook.lab.check import COLUMNS, LIMIT, ROWS, error, judge, tolerance


def case(ours, truth, in_torch=None):
    truth = torch.as_tensor(truth, dtype=torch.float64)
    in_torch = truth.to(ours.dtype) if in_torch is None else in_torch
    return lab.Case("3", "forward", ours=ours, torch=in_torch, truth=truth)


def test_a_right_result_passes_and_is_shown():
    truth = torch.tensor([1.0, -2.0, 3.0]).double() / 3
    shown = lab.check("thirds", [case(truth.half(), truth)])
    assert "pass" in shown.plain
    assert "direction" in shown.plain
    assert "kb-ok" in shown.html
    assert "PyTorch's" in shown.plain


def test_the_column_of_the_other_error_can_have_another_name():
    truth = torch.tensor([1.0, -2.0, 3.0]).double() / 3
    shown = lab.check("thirds", [case(truth.half(), truth)], theirs="yardstick")
    assert "yardstick" in shown.plain
    assert "yardstick" in shown.html
    assert "PyTorch" not in shown.plain


def test_what_is_shown_can_have_another_name_than_what_is_recorded():
    truth = torch.tensor([1.0, -2.0, 3.0]).double() / 3
    shown = lab.check("thirds", [case(truth.half(), truth)], title="three numbers")
    assert shown.plain.startswith("three numbers: the check passed")
    assert "thirds" not in shown.plain


def test_of_many_rows_one_of_each_dtype_is_seen_and_the_others_are_folded(monkeypatch):
    truth = torch.tensor([1.0, -2.0, 3.0]).double()
    near, exact = (truth.float() + torch.tensor([2e-7, 0, 0]), truth.float())
    cases = [case(exact, truth), case(near, truth), case(truth.half(), truth)]
    shown = lab.check("three", cases)
    line, table = shown.plain.split("\n", 1)
    assert line.startswith("three: all 3 checks passed in Triton's interpreter, the worst at 0.")
    assert [row.split()[1] for row in table.splitlines()[2:]] == ["float32", "float16"]
    assert "2.0e-07" not in table  # of float32 the row that came nearest: in units of 3
    assert "7.9e-08" in table
    visible, folded = shown.html.split("<details")
    assert visible.count("<tr>") == 3
    assert folded.count("<tr>") == 4


def test_what_the_recorded_gpu_found_stands_first(monkeypatch):
    row = {"case": "3", "direction": "forward", "dtype": "float32", "ok": True}
    row |= {"error": 1e-7, "torch_error": 1e-7, "tolerance": 2e-7}
    past = {"checks": {"sum": [row] * 5}, "provenance": {"gpu": "A GPU"}}
    monkeypatch.setattr(chapter, "_running", SimpleNamespace(past=past, live=False, on_gpus=False))
    truth = torch.tensor([1.0, -2.0, 3.0]).double()
    shown = lab.check("sum", [case(truth.half(), truth)])
    line, table = shown.plain.split("\n", 1)
    assert line == (
        "sum: all 5 checks passed on A GPU, the worst at 0.50 of its tolerance; "
        "the check passed in Triton's interpreter, the worst at 0.00 of its tolerance."
    )
    assert "float32" in table
    assert "float16" not in table
    assert shown.html.split("<details")[1].count("<tr>") == 8


def test_kernels_that_cannot_run_here_show_what_was_recorded(monkeypatch):
    row = {"case": "3", "direction": "forward", "dtype": "float32", "ok": True}
    row |= {"error": 1e-7, "torch_error": 1e-7, "tolerance": 2e-7}
    past = {"checks": {"sum": [row] * 5}, "provenance": {"gpu": "A GPU"}}
    monkeypatch.setattr(chapter, "_running", SimpleNamespace(past=past, live=False))
    never = (pytest.fail("a case was looked at") for _ in range(1))
    shown = lab.check("sum", never, here=False)
    assert shown.plain.startswith("sum: all 5 checks passed on A GPU, the worst at 0.50 of its")
    assert "interpreter" not in shown.plain
    assert "Not recorded yet" in lab.check("another", never, here=False).plain


@pytest.mark.parametrize(
    "wrong",
    [[0.0, 0.0, 0.0], [1.0, -2.0, 3.1], [1.0, -2.0, float("nan")], [1.0, float("inf"), 3.0]],
    ids=["zeros", "one element off", "NaN", "infinity"],
)
def test_a_wrong_result_raises(wrong):
    with pytest.raises(lab.CheckFailed, match="1 of 1 rows failed"):
        lab.check("wrong", [case(torch.tensor(wrong), [1.0, -2.0, 3.0])])


def test_a_check_of_nothing_raises():
    with pytest.raises(lab.CheckFailed, match="no case was checked"):
        lab.check("nothing", [])


@pytest.mark.parametrize("shape", [(3,), (0,), (2, 0, 4)])
def test_a_truth_that_zeros_would_pass_is_refused(shape):
    with pytest.raises(ValueError, match="a result of zeros would pass"):
        lab.check("zeros", [case(torch.zeros(shape), torch.zeros(shape))])


def test_infinities_and_nans_that_belong_there_pass():
    values = [1.0, float("inf"), float("-inf"), float("nan")]
    assert error(torch.tensor(values), torch.tensor(values).double()) == 0


def test_the_error_is_a_fraction_of_the_largest_truth_of_the_part():
    assert error(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 4.0]).double()) == 0.25
    assert error(torch.zeros(2), torch.tensor([2.0, 4.0]).double()) == 1
    assert error(torch.tensor(2.0), torch.tensor(4.0).double()) == 0.5


def test_no_tolerance_lets_zeros_pass():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert tolerance(0.0, dtype) < 0.01
    assert tolerance(1e-3, torch.float16) == 2e-3
    for no_yardstick in (LIMIT / 2, 1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="no yardstick"):
            tolerance(no_yardstick, torch.float16)


# -- parts: attention in plain PyTorch, whose late outputs are a tenth of the early ones


def attend(q, k, v, is_causal, lost=None):
    """Attention; where ``lost`` is given, the last 128 queries lose 64 keys from there on."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if lost is not None:
        scores[..., -128:, lost : lost + 64] = -torch.inf
    return scores.softmax(-1) @ v


@pytest.fixture(scope="module", params=[False, True], ids=["full", "causal"])
def attended(request):
    """4,099 tokens in bfloat16: the truth, PyTorch's result, a right one, and one that lost 64
    keys; two heads, the second a hundred times smaller."""
    draw = torch.Generator().manual_seed(20)
    q, k, v = (torch.randn(1, 2, 4099, 16, generator=draw).bfloat16() for _ in range(3))
    v[:, 1] /= 128
    truth = attend(q.double(), k.double(), v.double(), request.param)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=request.param)
    wide = (q.float(), k.float(), v.float(), request.param)
    right, lost = attend(*wide).bfloat16(), attend(*wide, lost=2000).bfloat16()
    return truth, theirs, right, lost


def test_a_right_attention_passes(attended):
    truth, theirs, right, _ = attended
    assert judge(right, theirs, truth).ok


def test_keys_that_the_last_queries_lose_are_missed(attended):
    truth, theirs, _, lost = attended
    assert not judge(lost, theirs, truth).ok


SPOIL = {
    "one row of zeros": lambda x: x[0, 0, 4000].zero_(),
    "zeros in the small head": lambda x: x[0, 1].zero_(),
    "zeros in the last rows": lambda x: x[0, 0, 4096:].zero_(),
    "heads swapped": lambda x: x.copy_(x.flip(1)),
    "the small head is the large": lambda x: x[0, 1].copy_(x[0, 0]),
    "NaN": lambda x: x[0, 1, 7, 3].fill_(torch.nan),
    "infinity": lambda x: x[0, 1, 7, 3].fill_(torch.inf),
}


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL)
def test_what_is_wrong_in_one_part_fails(attended, spoil):
    truth, theirs, right, _ = attended
    wrong = right.clone()
    spoil(wrong)
    assert not judge(wrong, theirs, truth).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(5, 3), (130, 40), (3, 2 * COLUMNS + 5), (2, 3, 2 * ROWS, 16), (3000,)], ids=str
)
def test_a_zero_output_in_any_one_part_fails(shape, dtype):
    truth = torch.randn(shape, dtype=torch.float64)
    truth *= torch.logspace(0, 3, shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
    right = truth.to(dtype)
    assert judge(right, right, truth).ok
    rows = [slice(i, i + ROWS) for i in range(0, shape[-2], ROWS)] if len(shape) > 1 else [...]
    columns = [slice(i, i + COLUMNS) for i in range(0, shape[-1], COLUMNS)]
    for row in rows:
        for column in columns:
            wrong = right.clone()
            last = wrong[(-1,) * (len(shape) - 2)] if len(shape) > 2 else wrong
            (last[column] if len(shape) == 1 else last[row, column]).zero_()
            assert not judge(wrong, right, truth).ok


def test_rows_of_their_own_scale_are_judged_one_by_one_where_asked():
    truth = torch.randn(64, 50).double()
    truth[17] *= 1e-3
    right = truth.bfloat16()
    wrong = right.clone()
    wrong[17] = 0
    assert judge(wrong, right, truth).ok  # beside the others, what is lost is less than rounding
    assert not judge(wrong, right, truth, rows=1).ok
    assert judge(right, right, truth, rows=1).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_cancels_is_judged_by_what_was_added(dtype):
    truth = torch.randn(4, 64, 32).double()
    truth[2] = 0  # the gradient of queries that see one key
    theirs = truth.to(dtype)
    ours = theirs.clone()
    for left in (1e-7, 6e-7)[: 1 + (dtype != torch.float32)]:  # float32's rounding of terms near 1
        ours[2, 3, 4] = left
        assert judge(ours, theirs, truth).ok
    ours[2, 3, 4] = 1e-4
    assert not judge(ours, theirs, truth).ok


def test_neither_one_lucky_part_nor_one_bad_decides_the_yardstick():
    truth = torch.randn(100, 1, 64).double()
    theirs = truth.clone().float()
    theirs[1:] *= 1 + 1e-5
    lucky = truth.float()
    lucky[0] *= 1 + 1.5e-5  # where PyTorch made no error at all
    assert judge(lucky, theirs, truth).ok
    theirs[50] = torch.nan
    assert judge(truth.float(), theirs, truth).ok
    wrong = truth.float()
    wrong[7] *= 1 + 1e-4
    assert not judge(wrong, theirs, truth).ok
    wrong = truth.float()
    wrong[50] = 0  # where PyTorch fails
    assert not judge(wrong, theirs, truth).ok


def test_numbers_below_the_smallest_normal_one_are_judged_by_their_spacing():
    truth = torch.rand(64, 64).double() * 1e-6 + 1e-6
    right = truth.half()
    assert judge(right, right, truth).ok
    assert not judge(right * 2, right, truth).ok


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(TypeError, match="truth must be float64"):
        error(torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="shape"):
        error(torch.ones(2), torch.ones(3).double())
