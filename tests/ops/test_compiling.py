"""Compiling for GPUs that are not there: what is judged wrong, and a few kernels as recorded.

`make compile` compiles all of them.
"""

import compiling
import pytest

RTX = compiling.GPUS["sm_86"]
GOOD = {"kernel": "copy_kernel", "shared": 1024, "spilled": 0, "loads": {"128": 4}}
FITS = compiling.summary([GOOD])


def now(**changes):
    """What is kept of a case of two kernels, one of which is changed."""
    return compiling.summary([GOOD, GOOD | changes])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shared": 101_377}, "needs 101,377 of 101,376 of shared"),
        ({"tensor_memory": 513}, "needs 513 of 512 of tensor memory"),
        ({"shared": 2048, "row": 1024}, "copy_kernel needs 2,048 bytes, its row says 1,024"),
        ({"spilled": 8}, "copy_kernel spills 8 bytes, and 0 are recorded"),
        ({"loads": {"128": 4, "16": 2}}, "copy_kernel has 2 loads of fewer than 128 bits"),
        ({"error": "PassManager failed"}, "PassManager failed"),
        ({"kernel": "host", "error": "too little memory"}, "too little memory"),
    ],
)
def test_what_does_not_fit_or_was_better_is_wrong(changes, words):
    [wrong] = compiling.complaints(RTX, now(**changes), FITS)
    assert words in wrong
    assert not compiling.complaints(RTX, now(), FITS)


def test_what_is_recorded_may_get_better_and_not_worse():
    recorded = now(spilled=16, loads={"32": 3})
    assert not compiling.complaints(RTX, now(spilled=8, loads={"32": 2}), recorded)
    assert len(compiling.complaints(RTX, now(spilled=24, loads={"32": 4}), recorded)) == 2


def test_a_refusal_is_right_where_it_is_recorded():
    refused = now(kernel="host", error="ValueError: no FP8 products")
    assert not compiling.complaints(RTX, refused, refused)
    assert compiling.complaints(RTX, refused, now())


def test_a_first_recording_takes_what_fits_and_what_is_refused_and_no_failure():
    assert not compiling.complaints(RTX, now(spilled=8), None)
    assert not compiling.complaints(RTX, now(kernel="host", error="ValueError: no"), None)
    assert compiling.complaints(RTX, now(shared=200_000), None)
    assert compiling.complaints(RTX, now(error="PassManager failed"), None)


def test_another_compiler_spills_otherwise_and_must_fit_all_the_same():
    assert not compiling.complaints(RTX, now(spilled=8), FITS, same_compiler=False)
    assert compiling.complaints(RTX, now(shared=200_000), FITS, same_compiler=False)


def test_every_case_is_recorded_for_every_gpu_and_fits():
    recorded = compiling.recorded()
    assert recorded.keys() == compiling.GPUS.keys()
    for gpu, found in recorded.items():
        assert found["cases"].keys() == compiling.cases().keys()
        for name, case in found["cases"].items():
            assert not compiling.complaints(compiling.GPUS[gpu], case, case), (gpu, name)


@pytest.mark.parametrize(
    ("gpu", "case"),
    [
        ("sm_86", "attention float16 128 causal"),
        ("sm_86", "layer norm float32 8192 to bfloat16"),  # fits for what its threads exchange
        ("gfx942", "softmax bfloat16 65536"),
    ],
)
def test_kernels_compile_as_recorded(gpu, case):
    assert compiling.compare_all([gpu], case, record=False) == 0
