"""Arithmetic in GF(2^8) and the matrices of the codes. Pure; every backend computes the same bytes from them.

The field is that of ISA-L, jerasure and the RAID-6 literature: polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d),
generator 2. Addition is XOR.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.uint8]

POLYNOMIAL = 0x11D


@cache
def multiplication_table() -> Matrix:
    """256 x 256: ``table[a, b]`` is a * b."""
    powers = [1]
    for _ in range(254):
        doubled = powers[-1] << 1
        powers.append(doubled ^ POLYNOMIAL if doubled & 0x100 else doubled)
    log = {value: exponent for exponent, value in enumerate(powers)}
    table = np.zeros((256, 256), dtype=np.uint8)
    for a in range(1, 256):
        table[a, 1:] = [powers[(log[a] + log[b]) % 255] for b in range(1, 256)]
    table.setflags(write=False)
    return table


def inverse_of(a: int) -> int:
    """The b with a * b = 1; `a` must not be 0."""
    return int(np.flatnonzero(multiplication_table()[a] == 1)[0])


def multiply(left: Matrix, right: Matrix) -> Matrix:
    """The product of two matrices."""
    products = multiplication_table()[left[:, :, None], right[None, :, :]]
    return np.asarray(np.bitwise_xor.reduce(products, axis=1), dtype=np.uint8)


def invert(matrix: Matrix) -> Matrix:
    """The inverse, by Gauss-Jordan elimination.

    Raises:
        ValueError: the matrix is singular.
    """
    table, size = multiplication_table(), len(matrix)
    work = np.concatenate([matrix, np.eye(size, dtype=np.uint8)], axis=1)
    for column in range(size):
        candidates = np.flatnonzero(work[column:, column])
        if not candidates.size:
            raise ValueError("the matrix is singular")
        pivot = column + int(candidates[0])
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = table[inverse_of(int(work[column, column])), work[column]]
        factors = work[:, column].copy()
        factors[column] = 0
        work ^= table[factors[:, None], work[column][None, :]]
    return work[:, size:].copy()


@cache
def parity_matrix(k: int, m: int) -> Matrix:
    """m x k: parity unit i is the sum over j of ``matrix[i, j]`` * data unit j.

    m = 1 is XOR; k = 1 is plain copies. Otherwise a Cauchy matrix with elements 1 / ((k + i) ^ j): all its square
    submatrices are regular, so any k of the k + m units determine the others (Bloemer et al., "An XOR-based
    erasure-resilient coding scheme", 1995). A Vandermonde matrix does not have that property for every k and m.
    """
    if m == 1 or k == 1:
        matrix = np.ones((m, k), dtype=np.uint8)
    else:
        matrix = np.array([[inverse_of((k + i) ^ j) for j in range(k)] for i in range(m)], dtype=np.uint8)
    matrix.setflags(write=False)
    return matrix


@lru_cache(maxsize=4096)
def decode_matrix(k: int, m: int, survivors: tuple[int, ...], wanted: tuple[int, ...]) -> Matrix:
    """The matrix that gives units `wanted` from k `survivors`: one row per wanted unit, one column per survivor."""
    generator = np.concatenate([np.eye(k, dtype=np.uint8), parity_matrix(k, m)])
    matrix = multiply(generator[list(wanted)], invert(generator[list(survivors)]))
    matrix.setflags(write=False)
    return matrix
