"""Attention in Gluon against float64 truth, on a Hopper GPU, where a rule changes."""

import itertools
from dataclasses import replace
from types import FunctionType, SimpleNamespace

import pytest
import torch
from conftest import DEVICE
from conftest import assert_close as assert_within
from test_attention import LSE_FACTOR, by_pytorch
from test_attention import check as check_attention

from kernelbook import attention, lab, reference, runtime
from kernelbook.ops.attention import scope, tiles
from kernelbook.ops.attention.forward import attention_forward as plain_forward
from kernelbook.ops.hopper import choice, varlen
from kernelbook.ops.hopper import forward as hopper

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300, 1000)
NOT_PACKED = None
"""What a program of the dense kernel knows of packed sequences."""

MASKS = {
    "full": (False, None),
    "causal": (True, None),
    "window": (False, (70, 40)),
    "left": (False, (130, None)),
    "causal window": (True, (100, None)),
    "narrow": (False, (0, 0)),
    "ahead": (False, (None, 150)),
}


@pytest.fixture
def hopper_gpu():
    """Skip where the kernel cannot run."""
    if runtime.INTERPRETED:
        pytest.skip("needs a Hopper GPU")
    reason = hopper.supported(*draw(1, 1, 1, 64, 64, 64))
    if reason:
        pytest.skip(reason)


def draw(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, dtype=torch.bfloat16):
    shapes = ((heads, seqlen_q), (heads_k, seqlen_k), (heads_k, seqlen_k))
    return [torch.randn(batch, *s, head_dim, device=DEVICE).to(dtype) for s in shapes]


def check(q, k, v, mask="full", scale=None, config=None):
    """Compare out and lse with the truth, head by head, and with PyTorch's error."""
    is_causal, window = MASKS[mask] if isinstance(mask, str) else (False, mask)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    assert hopper.supported(q, k, v) is None
    out, lse = hopper.attention_forward(q, k, v, is_causal, scale, window, config)
    true_out, true_lse = reference.attention(q, k, v, is_causal, scale, window)
    theirs = by_pytorch(q, k, v, is_causal, scale, window)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    assert out.stride() == tiles.empty_dense_like(q).stride()
    for batch, head in itertools.product(*map(range, q.shape[:2])):
        assert_within(out[batch, head], true_out[batch, head], theirs[batch, head])
    if true_lse.abs().max() > 0:
        assert_within(lse, true_lse, true_lse.float(), LSE_FACTOR)
    return out, lse


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_every_length(hopper_gpu, head_dim, mask, seqlen_q):
    for dtype, seqlen_k in zip(itertools.cycle(SIXTEEN_BITS), LENGTHS, strict=False):
        check(*draw(1, 2, 1, seqlen_q, seqlen_k, head_dim, dtype), mask)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_many_tiles_heads_and_groups(hopper_gpu, head_dim, mask):
    check(*draw(3, 6, 2, 1500, 2100, head_dim), mask)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_layouts(hopper_gpu, head_dim, dtype):
    """Heads inside the sequence, one packed tensor, padded rows, and a batch that repeats."""
    for mask in ("full", "causal"):
        q, k, v = (
            torch.randn(2, 300, 3, head_dim, device=DEVICE).to(dtype).transpose(1, 2)
            for _ in range(3)
        )
        check(q, k, v, mask)
        packed = torch.randn(2, 200, 3, 4, head_dim, device=DEVICE).to(dtype)
        check(*packed.permute(2, 0, 3, 1, 4), mask)
        padded = torch.randn(3, 2, 4, 200, head_dim + 8, device=DEVICE).to(dtype)
        check(*padded[..., :head_dim], mask)
        q, k, v = draw(2, 2, 2, 200, 200, head_dim, dtype)
        check(q, k[:1].expand(2, -1, -1, -1), v, mask)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_far_from_zero(hopper_gpu, head_dim):
    for mask in ("full", "causal"):
        q, k, v = draw(1, 2, 2, 300, 500, head_dim)
        check(q, k + 8, v, mask)
        check(3 * q, 3 * k, v, mask)
        check(q, k, v + 100, mask)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_key_that_weighs_nothing_and_one_that_weighs_all(hopper_gpu, head_dim):
    q, k, v = draw(1, 1, 1, 200, 400, head_dim)
    q = q.abs() + 1
    for key in (0, 127, 128, 255, 399):
        low, high = k.clone(), k.clone()
        low[:, :, key] = -3e4
        high[:, :, key] = 30
        check(q, low, v)
        check(q, high, v)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_and_infinity(hopper_gpu, head_dim):
    """NaN reaches who sees it, and of others at most those whose tile meets it.

    As in the plain kernel, a weight of 0 does not remove a NaN; its tiles may have more queries.
    """
    q, k, v = draw(1, 2, 2, 300, 500, head_dim)
    q = q.abs() + 1
    k[0, 0, 200] = -torch.inf
    k[0, 1] = -torch.inf
    v[0, 0, 450] = torch.nan
    for mask in ("full", "causal"):
        is_causal, window = MASKS[mask]
        out, lse = hopper.attention_forward(q, k, v, is_causal, 0.1, window)
        theirs, their_lse = plain_forward(q, k, v, is_causal, 0.1, window)
        torch.testing.assert_close(lse, their_lse, equal_nan=True, rtol=1e-4, atol=1e-4)
        assert out[0, 1].isnan().all()
        sees = 250 if is_causal else 0
        assert out[0, 0, sees:].isnan().all()
        meets = 128 if is_causal else 0  # the tile of 64 queries that sees keys from 384 on
        assert out[0, 0, :meets].isfinite().all()
        finite = out.isfinite() & theirs.isfinite()
        torch.testing.assert_close(out[finite], theirs[finite], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_that_see_nothing(hopper_gpu, head_dim):
    q, k, v = draw(1, 2, 2, 400, 130, head_dim)
    out, lse = check(q, k, v, "causal")
    assert (out[:, :, :270] == 0).all()
    assert (lse[:, :, :270] == -torch.inf).all()
    assert lse[:, :, 270:].isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_equal_to_the_plain_kernel(hopper_gpu, head_dim, mask):
    q, k, v = draw(2, 4, 2, 1024, 1024, head_dim)
    is_causal, window = MASKS[mask]
    ours, lse = hopper.attention_forward(q, k, v, is_causal, 0.1, window)
    theirs, their_lse = plain_forward(q, k, v, is_causal, 0.1, window)
    truth, _ = reference.attention(q, k, v, is_causal, 0.1, window)
    assert_within(ours, truth, theirs)
    torch.testing.assert_close(lse, their_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_same_bits_again(hopper_gpu, head_dim, mask):
    """A race between the roles would show as other bits: many programs, many times."""
    q, k, v = draw(4, 16, 16, 2000, 2000, head_dim)
    is_causal, window = MASKS[mask]
    first = hopper.attention_forward(q, k, v, is_causal, 0.1, window)
    for _ in range(50):
        again = hopper.attention_forward(q, k, v, is_causal, 0.1, window)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "change",
    [
        {"take_turns": False},
        {"persistent": False},
        {"paired": False},
        {"consumers": 2},
        {"block_n": 64, "stages": 4},
        {"block_n": 64, "stages": 5},
        {"take_turns": False, "persistent": False},
    ],
    ids=str,
)
def test_every_configuration(hopper_gpu, head_dim, change):
    config = replace(hopper.CONFIGS[head_dim], **change)
    for mask in MASKS:
        check(*draw(1, 4, 2, 700, 900, head_dim), mask, config=config)
        check(*draw(9, 8, 2, 700, 400, head_dim), mask, config=config)  # turns of each program


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("batch", [27, 28])
@pytest.mark.parametrize("seqlen_q", [128, 300, 520])
def test_pairs(hopper_gpu, head_dim, batch, seqlen_q):
    """Programs take pairs of tiles: heads with an odd number of them, and one tile that is over."""
    for mask in ("causal", "left"):
        q, k, v = draw(batch, 5, 5, seqlen_q, 400, head_dim)
        check(q, k, v, mask, config=hopper.CONFIGS[head_dim])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("left", [0, 1, 62, 63, 64, 127, 128, 999, 1000, 1023, 1024])
def test_windows_over_many_turns(hopper_gpu, head_dim, left):
    """Programs compute several tiles of queries, with one tile of keys or with many."""
    for right, config in itertools.product((0, 40), (None, choice.CONFIGS[head_dim])):
        for seqlen_q, seqlen_k in ((1337, 1337), (1500, 1100), (1100, 1500)):
            q, k, v = draw(3, 8, 4, seqlen_q, seqlen_k, head_dim)
            check(q, k, v, (left, right), config=config)


# -- which tiles, in Python


def in_python(program, programs, load=None):
    """Return the functions that say which tiles a program computes, for numbers of Python.

    Gluon has no interpreter, and these are of plain arithmetic. ``load`` returns what lies at an
    address, which is a number too.
    """
    language = SimpleNamespace(
        program_id=lambda axis: torch.tensor(program),
        num_programs=lambda axis: programs,
        int32=torch.int32,
        cdiv=runtime.cdiv,
        minimum=min,
        maximum=max,
        where=lambda condition, x, y: x if condition else y,
        load=load,
    )
    names = {"gl": language, "tl": language, "ROWS": hopper.ROWS.value, "COLUMNS": 8}
    wanted = {
        hopper: (
            "turns_of_program",
            "forth_and_back",
            "order_of_turn",
            "tile_of_turn",
            "lengths_of_turn",
            "place",
            "place_of_consumer",
        ),
        scope: ("seen_keys", "key_stages"),
    }
    for module, functions in wanted.items():
        for name in functions:
            names[name] = FunctionType(getattr(module, name).fn.__code__, names, name)
    return SimpleNamespace(**names)


def constants_of(heads_at_once, window, consumers=2, block_n=128, stages=2, paired=False):
    return heads_at_once, window, True, False, consumers, block_n, stages, True, 128, paired, window


@pytest.mark.parametrize("kind", ["window", "triangle", "pairs"])
@pytest.mark.parametrize("batch_heads", [1, 3, 16])
@pytest.mark.parametrize("programs", [1, 2, 5, 132])
@pytest.mark.parametrize("seqlen", [64, 128, 700, 1337])
def test_every_tile_of_queries_is_computed_once(kind, batch_heads, programs, seqlen):
    for heads_at_once in (2,) if kind == "pairs" else (1, 2, 4, 64):
        constants = constants_of(heads_at_once, kind == "window", paired=kind == "pairs")
        left = 300 if kind == "window" else 0
        n_tiles = runtime.cdiv(seqlen, 128)
        limits = (n_tiles, batch_heads, batch_heads, 1, seqlen, seqlen, left, 0, NOT_PACKED)
        met = []
        for program in range(min(programs, n_tiles * batch_heads)):
            cut = in_python(program, min(programs, n_tiles * batch_heads))
            for turn in range(int(cut.turns_of_program(limits, constants))):
                batch_head, start_m, _, _ = cut.place(turn, limits, constants)
                met.append((int(batch_head), int(start_m)))
        tiles_of_queries = itertools.product(range(batch_heads), range(0, seqlen, 128))
        assert sorted(met) == sorted(tiles_of_queries)


# -- packed sequences

PACKED = (
    [[n] for n in (0, 1, 63, 64, 65, 128, 1000)]
    + [[0, 0, 5], [64, 128, 192], [1] * 20, [700, 0, 1, 129, 64, 0]]
    + torch.randint(0, 500, (20, 7), generator=torch.Generator().manual_seed(0)).tolist()
)
WRONG_OFFSETS = [[0, 700, 100, 900, 50, 1000], [900, 0, 1000], [0, 10**9, 5, 10**9], [-9, 500, 20]]


def tiles_of_slots(offsets, rows):
    """Return of each slot the sequence, the tile, and whether the sequence has that tile."""
    batch, total = len(offsets) - 1, 1000 if offsets in WRONG_OFFSETS else offsets[-1]
    language = SimpleNamespace(
        load=offsets.__getitem__, where=lambda condition, x, y: x if condition else y
    )
    code = varlen.sequence_of_slot.fn.__code__
    find = FunctionType(code, {"tl": language, "largest": lambda x: x}, "find")
    found = []
    for slot in range(total // rows + batch):
        b = find(0, batch, slot, rows)
        first = min(max(offsets[b], 0), total)
        length = min(max(offsets[b + 1], first), total) - first
        tile = slot - first // rows - b
        found.append((b, tile, 0 <= tile * rows < length))
    return found


@pytest.mark.parametrize("rows", [64, 128, 192])
@pytest.mark.parametrize("lengths", PACKED, ids=str)
def test_every_tile_of_packed_sequences_has_one_slot(lengths, rows):
    offsets = [0, *itertools.accumulate(lengths)]
    found = tiles_of_slots(offsets, rows)
    tiles = [(b, t) for b, n in enumerate(lengths) for t in range(runtime.cdiv(n, rows))]
    assert [(b, tile) for b, tile, there in found if there] == tiles
    assert len(found) - len(tiles) <= len(lengths)


@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("offsets", WRONG_OFFSETS, ids=str)
def test_no_program_waits_for_a_slot_without_a_tile(offsets, rows):
    """Backward waits for the slot before if that is of the same sequence, also if offsets are
    wrong: it must then have the tile before."""
    found = tiles_of_slots(offsets, rows)
    assert any(there for *_, there in found)
    for before, (b, tile, there) in itertools.pairwise(found):
        if there and tile > 0 and before[0] == b:
            assert before == (b, tile - 1, True)


def table_of_tiles(offsets_q, offsets_k, total_q, total_k, bounds, rows_of_band):
    """Return the rows of the table that the kernel writes, as many as it counts, and no others."""
    batch, (left, right) = len(offsets_q) - 1, bounds
    slots = total_q // 128 + batch
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (offsets_q, offsets_k))
    table = torch.full((slots + 1, 8), -7, dtype=torch.int32, device=DEVICE)
    varlen.order_tiles_kernel[(runtime.cdiv(slots, 32),)](
        table, cu_q, cu_k, slots, batch, total_q, total_k, total_q, total_k, left or 0, right or 0,
        rows_of_band, left is not None, right is not None, 8, 128, 128,
        32, 256,
    )  # fmt: skip
    *rows, count = table.tolist()
    count = count[0]
    assert all(row == [-7] * 8 for row in rows[count:])
    return [row[:5] for row in rows[:count]]


MANY = torch.randint(0, 900, (150,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (300, 0), (500, None)], ids=str)
@pytest.mark.parametrize("lengths", [*PACKED[::3], MANY], ids=lambda lengths: str(lengths[:7]))
@pytest.mark.parametrize("rows_of_band", [256, 10**6])
def test_tiles_of_packed_sequences_are_all_there_long_ones_first(lengths, bounds, rows_of_band):
    others = [max(n - 100, 0) if n % 2 else n + 50 for n in lengths]
    offsets_q, offsets_k = ([0, *itertools.accumulate(n)] for n in (lengths, others))
    found = table_of_tiles(offsets_q, offsets_k, offsets_q[-1], offsets_k[-1], bounds, rows_of_band)
    tiles_of_all = [
        [start, n, n_k, first_q, first_k]
        for n, n_k, first_q, first_k in zip(lengths, others, offsets_q, offsets_k, strict=False)
        for start in range(0, n, 128)
    ]
    assert sorted(found) == sorted(tiles_of_all)
    left, right = bounds
    ranks = []
    for start, n, n_k, first_q, _ in found:
        queries = torch.arange(start, min(start + 128, n))
        low, high = (torch.as_tensor(x) for x in scope.keys_seen(queries, n, n_k, left, right))
        low, high = low.clamp(min=0), high.clamp(0, n_k)
        first, end = int(low.min()) // 128, runtime.cdiv(int(high.max()), 128)
        band, last_band = first_q // rows_of_band, (offsets_q[-1] - 1) // rows_of_band
        sign = 1 if (last_band - band) % 2 else -1  # see the kernel: lengths never jump
        ranks.append((band, sign * max(end - first, 1)))
    assert ranks == sorted(ranks)


@pytest.mark.parametrize("offsets", WRONG_OFFSETS, ids=str)
def test_wrong_offsets_give_tiles_within_the_tensors(offsets):
    found = table_of_tiles(offsets, offsets, 1000, 1000, (None, 0), 10**6)
    assert found
    assert all(
        first >= 0 and first + n <= 1000 and 0 <= start < n for start, n, _, first, _ in found
    )


@pytest.mark.parametrize("programs", [1, 7, 132])
@pytest.mark.parametrize("heads", [1, 6, 16])
def test_programs_share_the_tiles_of_packed_sequences(programs, heads):
    """Each tile of each head is computed once, and no program has much more to do than the mean."""
    lengths = torch.randint(128, 4096, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    offsets = [0, *itertools.accumulate(lengths)]
    table = table_of_tiles(offsets, offsets, offsets[-1], offsets[-1], (None, 0), 10**6)
    flat = [number for row in table for number in (*row, 0, 0, 0)]
    work, met = [], []
    for heads_at_once in (1, 4):
        for program in range(programs):
            cut = in_python(program, programs, flat.__getitem__)
            limits = (len(table), heads, heads, 1, 0, 0, 0, 0, (0, offsets[-1], heads_at_once))
            constants = constants_of(1, False)
            turns = range(int(cut.turns_of_program(limits, constants)))
            places = [
                (*cut.tile_of_turn(turn, limits), cut.place(turn, limits, constants))
                for turn in turns
            ]
            met += [tuple(map(int, (heads_at_once, *tile))) for *tile, _ in places]
            work.append(sum(int(end - first) for *_, (_, _, first, end) in places))
    assert sorted(met) == sorted(
        (n, head, *row) for n in (1, 4) for head in range(heads) for row in table
    )
    if heads * len(table) > 20 * programs:
        assert max(work) < 1.05 * sum(work) / len(work)


@pytest.mark.parametrize("left", [1024, 4095])
def test_programs_of_a_window_end_together(left):
    """The longest program has less than 3 % more tiles of keys than the mean one."""
    seqlen, heads, programs = 16384, 16, 132
    constants = constants_of(64, True)
    limits = (seqlen // 128, heads, heads, 1, seqlen, seqlen, left, 0, NOT_PACKED)
    work = []
    for program in range(programs):
        cut = in_python(program, programs)
        turns = range(int(cut.turns_of_program(limits, constants)))
        places = [cut.place(turn, limits, constants) for turn in turns]
        work.append(sum(int(end - first) for _, _, first, end in places))
    assert max(work) < 1.03 * sum(work) / programs


@pytest.mark.parametrize(("consumers", "block_n"), [(2, 128), (3, 128), (2, 64)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(700, 700), (300, 900), (900, 300), (333, 334)])
@pytest.mark.parametrize("left", [0, 1, 63, 64, 100, 127, 128, 250])
@pytest.mark.parametrize("right", [0, 40, 130])
def test_the_edges_of_a_window(left, right, seqlen_q, seqlen_k, consumers, block_n):
    """A tile is masked on each side where a query of the consumer does not see all of it there."""
    rows = consumers * 64
    n_tiles = runtime.cdiv(seqlen_q, rows)
    limits = (n_tiles, 1, 1, 1, seqlen_q, seqlen_k, left, right, NOT_PACKED)
    constants = constants_of(1, True, consumers, block_n)
    for program, me in itertools.product(range(n_tiles), range(consumers)):
        cut = in_python(program, n_tiles)
        start_m, first, whole, right_edge, end, _ = map(
            int, cut.place_of_consumer(0, limits, me, constants)
        )
        query = torch.arange(start_m, start_m + 64)[:, None]
        query = query[query[:, 0] < seqlen_q]
        key = torch.arange(seqlen_k)
        low, high = scope.keys_seen(query, seqlen_q, seqlen_k, left, right)
        sees = (low <= key) & (key < high)
        tile = key // block_n
        not_left, not_right = (tile >= whole) | (key >= low), (tile < right_edge) | (key < high)
        computed = (tile >= first) & (tile < end) & not_left & not_right
        assert torch.equal(computed, sees)
        if seqlen_k % block_n and end * block_n > seqlen_k:
            assert right_edge <= seqlen_k // block_n  # keys past the end are masked


# -- by the public function


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_every_length_up_to_300_with_gradients(hopper_gpu, head_dim, is_causal):
    """Of queries, with as many keys, half as many, or some more."""
    for length in range(1, 301):
        seqlen_k = (length, length // 2 + 1, length + 77)[length % 3]
        operands = [x.requires_grad_() for x in draw(1, 2, 1, length, seqlen_k, head_dim)]
        check_attention(*operands, is_causal=is_causal, backend="gluon")


def boundaries():
    """Each row of the table, at its last length and the first behind it."""
    for (head_dim, mask), rows in choice.CHOICES.items():
        for most, _ in rows:
            longest = min(most, 8192)
            yield from ((head_dim, mask, keys) for keys in (longest, longest + 1))


@pytest.mark.parametrize("case", sorted(set(boundaries())), ids=str)
def test_where_the_choice_changes(hopper_gpu, case):
    head_dim, mask, keys = case
    length = keys + 100 if mask == "window" else keys
    options = {"window": (keys - 1, 0)} if mask == "window" else {"is_causal": mask == "causal"}
    operands = [x.requires_grad_() for x in draw(1, 2, 1, length, length, head_dim)]
    for backend in choice.BACKENDS:
        check_attention(*operands, **options, backend=backend)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_launches_the_kernel_that_was_chosen(hopper_gpu, head_dim):
    for keys, is_causal in itertools.product((256, 2048, 2049, 4096), (False, True)):
        q, k, v = draw(1, 8, 8, keys, keys, head_dim)
        chosen = choice.forward_choice((9, 0), q.dtype, q.shape, k.shape, is_causal)
        for backend in choice.BACKENDS:
            expected = chosen.backend if backend == "auto" else backend
            options = {"is_causal": is_causal, "backend": backend}
            (launched, _), *more = lab.compiled_by(lambda: attention(q, k, v, **options))  # noqa: B023
            assert not more
            assert ("hopper" in str(launched)) == (expected == "gluon")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 8])
def test_decoding_by_name(hopper_gpu, head_dim, group):
    """Where auto shares keys among programs, gluon runs, as it was told."""
    for seqlen_q in (1, 5):
        q, k, v = draw(2, 2 * group, 2, seqlen_q, 8191, head_dim)
        out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="gluon")
        truth, true_lse = reference.attention(q, k, v)
        assert_within(out, truth, by_pytorch(q, k, v))
        assert_within(lse, true_lse, true_lse.float(), LSE_FACTOR)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_copied_compiled_batched_and_in_a_graph(hopper_gpu, head_dim):
    def call(q, k, v):
        return attention(q, k, v, is_causal=True, backend="gluon")

    q, k, v = draw(2, 3, 3, 200, 300, head_dim)
    expected = call(q, k, v)
    shifted = torch.zeros(2, 3, 300, head_dim + 1, device=DEVICE, dtype=k.dtype)[..., 1:].copy_(k)
    assert torch.equal(call(q, shifted, v), expected)
    compiled = torch.compile(call, fullgraph=True)
    assert torch.equal(compiled(q, k, v), expected)
    batched = torch.func.vmap(lambda *x: call(*(y[None] for y in x))[0])
    assert torch.equal(batched(q, k, v), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(q, k, v)
    again = draw(2, 3, 3, 200, 300, head_dim)
    for x, new in zip((q, k, v), again, strict=True):
        x.copy_(new)
    graph.replay()
    assert torch.equal(captured, call(*again))


HARSH = {
    "the smallest scale": (1.0, 1.18e-38),
    "scores of 4e6": (2000.0, 1.0),
    "scores that overflow": (1e20, 1.0),
    "a scale that overflows": (1.0, 2.2e38),
}


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", HARSH.values(), ids=HARSH)
def test_both_kernels_agree_where_numbers_end(hopper_gpu, head_dim, mask, case):
    """Which results are finite, infinite or NaN, and their values where scores are exact."""
    magnitude, scale = case
    is_causal, window = MASKS[mask]
    q, k, v = draw(1, 2, 2, 150, 300, head_dim)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[..., 0] = magnitude, magnitude
    k[:, :, ::2, 0] *= -1
    options = {"is_causal": is_causal, "window": window, "scale": scale, "return_lse": True}
    ours = attention(q, k, v, **options, backend="gluon")
    theirs = attention(q, k, v, **options, backend="triton")
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_outside_of_windows_do_not_poison(hopper_gpu, head_dim):
    """NaN among keys that no query of a program sees, and infinity in any key that is masked."""
    q, k, v = draw(1, 2, 2, 1024, 1024, head_dim)
    for window in ((100, 0), (0, 0), (100, 50)):
        expected = attention(q, k, v, window=window, backend="gluon")
        dyed_k, dyed_v = k.clone(), v.clone()
        dyed_k[:, :, 700:] = dyed_v[:, :, 700:] = torch.nan
        out = attention(q, dyed_k, dyed_v, window=window, backend="gluon")
        far = 700 - 192 - 128 - 50  # queries of a program, keys of a tile, the bound
        assert torch.equal(out[:, :, :far], expected[:, :, :far])
        dyed_k[:, :, 700:] = torch.inf
        out = attention(q, dyed_k, v, window=window, backend="gluon")
        sees = 700 - window[1]
        assert torch.equal(out[:, :, :sees], expected[:, :, :sees])
        assert out[:, :, sees:].isnan().all()


def test_what_is_not_supported_says_why():
    q, k, v = draw(1, 2, 2, 64, 64, 64)
    if runtime.INTERPRETED or runtime.capability(q.device) != (9, 0):
        assert "Hopper" in hopper.supported(q, k, v)
        return
    assert hopper.supported(q, k, v) is None
    assert "head_dim" in hopper.supported(*draw(1, 2, 2, 64, 64, 32))
    assert "dtype" in hopper.supported(q.float(), k.float(), v.float())
    assert "empty" in hopper.supported(q, k[:, :, :0], v[:, :, :0])
    padded = torch.zeros(1, 2, 64, 65, device=DEVICE, dtype=q.dtype)[..., :64]
    assert "16 bytes" in hopper.supported(q, padded, v)
