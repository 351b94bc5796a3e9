#!/usr/bin/env python3
"""Makes tests/io/data/*.npy with NumPy itself: what is read, and what is refused by name.

    python3 -m venv ~/fixtures && ~/fixtures/bin/pip install numpy
    ~/fixtures/bin/python tools/make_npy_fixtures.py --out tests/io/data
"""

import argparse
import pathlib

import numpy as np
from numpy.lib import format as npy

COUNT = np.arange(6).reshape(2, 3)
ARRAYS = {
    "f4": (COUNT.astype("<f4") / 2, (1, 0)),
    "f2": (COUNT.astype("<f2") / 2, (1, 0)),
    "i4": (COUNT.astype("<i4"), (1, 0)),
    "rank1_i4": (np.arange(3, dtype="<i4"), (1, 0)),
    "rank4_f4": (np.arange(24, dtype="<f4").reshape(1, 2, 3, 4), (1, 0)),
    "empty_f4": (np.zeros((2, 0, 3), "<f4"), (1, 0)),
    "version2_f4": (COUNT.astype("<f4") / 2, (2, 0)),
    "version3_f4": (COUNT.astype("<f4") / 2, (3, 0)),
    "bad_f8": (COUNT.astype("<f8"), (1, 0)),
    "bad_i8": (COUNT.astype("<i8"), (1, 0)),
    "bad_bool": (COUNT > 2, (1, 0)),
    "bad_big_endian": (COUNT.astype(">f4"), (1, 0)),
    "bad_fortran": (np.asfortranarray(COUNT.astype("<f4")), (1, 0)),
    "bad_objects": (np.array([{}, None], dtype=object), (1, 0)),
    "bad_records": (np.zeros(2, dtype=[("a", "<f4"), ("b", "<i4")]), (1, 0)),
    "bad_text": (np.array(["key", "value"]), (1, 0)),
    "bad_rank0": (np.float32(1.5), (1, 0)),
    "bad_rank5": (np.zeros((1, 1, 1, 1, 1), "<f4"), (1, 0)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    for name, (array, version) in ARRAYS.items():
        with open(args.out / f"{name}.npy", "wb") as file:
            npy.write_array(file, np.asanyarray(array), version=version, allow_pickle=True)


if __name__ == "__main__":
    main()
