"""A small record that is right in every field, for the tests of the laboratory and of the site."""

import torch

from kernelbook.lab import schema
from kernelbook.lab.fingerprint import fingerprint

PROVENANCE = {
    "clocks": {"max_memory_mhz": 3201, "max_sm_mhz": 1980},
    "commit": "0123456789",
    "cuda": "13.0",
    "date": "2026-01-02T03:04:05Z",
    "driver": "1.2",
    "gpu": "Test GPU",
    "l2_mib": 60.0,
    "memory_gib": 139.8,
    "python": "3.12.3",
    "slug": "test-gpu",
    "sm_count": 132,
    "torch": "2.13.0",
    "triton": "3.7.1",
}
POINTS = [{"elements": n, "dtype": torch.float16} for n in (1000, 2000)]
SWEEP = {"limit": "copy", "work": "2 * elements * itemsize"}
"""What :func:`kernelbook.lab.bench` is asked, to get the recorded sweep named forward."""


def record(modules=("measured_module",), **changes):
    """Return a record of the chapter `tried` on Test GPU; ``changes`` replace its fields."""
    sweep = {
        "axis": "elements",
        "unit": "GB/s",
        "work": "2 * elements * itemsize",
        "limit": "copy",
        "limit_work": "2 * elements * itemsize",
        "points": [
            {"elements": 1000, "dtype": "float16", "itemsize": 2},
            {"elements": 2000, "dtype": "float16", "itemsize": 2},
        ],
        "providers": ["copy", "ours", "peer"],
        "milliseconds": {
            "copy": [[0.9, 1.0, 1.1], [1.8, 2.0, 2.2]],
            "ours": [[1.0, 2.0, 3.0], [2.0, 2.5, 3.0]],
            "peer": [[], [4.0, 4.0, 4.0]],
        },
        "skipped": {"peer": "peer refuses: ValueError"},
        "host_included": ["ours"],
        "providers_code": None,
    }
    row = {"case": "3", "direction": "forward", "dtype": "float16", "ok": True}
    row |= {"error": 2e-4, "torch_error": 2e-4, "tolerance": 1e-3}
    kernel = {"case": "float16", "kernel": "copy_kernel", "registers": 16, "shared_bytes": 0}
    kernel |= {"shuffles": 0, "spills": 0, "warps": 4}
    return {
        "schema": schema.SCHEMA,
        "chapter": "tried",
        "checks": {"sum": [row]},
        "fingerprint": fingerprint(modules),
        "kernels": [kernel],
        "modules": list(modules),
        "provenance": PROVENANCE,
        "reaches": "half of a copy",
        "script": None,
        "sweeps": {"forward": sweep},
        "tables": {"memory": {"columns": ["operator", "bytes"], "rows": [["ours", 8]]}},
    } | changes
