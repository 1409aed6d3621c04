"""Arithmetic in GF(2^8), checked against long multiplication of polynomials, which shares no code with the tables."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ec.matrix import Matrix, decode_matrix, inverse_of, invert, multiplication_table, multiply, parity_matrix

elements = st.integers(0, 255)
CODES = list(product(range(1, 13), range(1, 5)))
each_code = pytest.mark.parametrize(("k", "m"), CODES)


def long_product(a: int, b: int) -> int:
    """a * b as polynomials over GF(2), modulo x^8 + x^4 + x^3 + x^2 + 1."""
    total = 0
    for bit in range(8):
        if b >> bit & 1:
            total ^= a << bit
    for bit in range(15, 7, -1):
        if total >> bit & 1:
            total ^= 0b1_0001_1101 << (bit - 8)
    return total


def long_multiply(left: Matrix, right: Matrix) -> Matrix:
    total = np.zeros((left.shape[0], right.shape[1]), dtype=np.uint8)
    for i, j, inner in np.ndindex(left.shape[0], right.shape[1], left.shape[1]):
        total[i, j] ^= long_product(int(left[i, inner]), int(right[inner, j]))
    return total


def identity(size: int) -> Matrix:
    return np.eye(size, dtype=np.uint8)


def generator(k: int, m: int) -> Matrix:
    return np.concatenate([identity(k), parity_matrix(k, m)])


def rank(matrix: Matrix) -> int:
    rows = [[int(value) for value in row] for row in matrix]
    found = 0
    for column in range(matrix.shape[1]):
        pivot = next((row for row in rows if row[column]), None)
        if pivot is None:
            continue
        found += 1
        rows.remove(pivot)
        factors = [long_product(row[column], inverse_of(pivot[column])) for row in rows]
        rows = [
            [value ^ long_product(factor, other) for value, other in zip(row, pivot, strict=True)]
            for row, factor in zip(rows, factors, strict=True)
        ]
    return found


@st.composite
def matrices(draw: st.DrawFn, rows: int, columns: int) -> Matrix:
    values = draw(st.lists(elements, min_size=rows * columns, max_size=rows * columns))
    return np.array(values, dtype=np.uint8).reshape(rows, columns)


class TestField:
    def test_the_table_holds_every_product(self) -> None:
        expected = [[long_product(a, b) for b in range(256)] for a in range(256)]
        assert multiplication_table().tolist() == expected

    def test_every_element_but_zero_has_an_inverse(self) -> None:
        assert [long_product(a, inverse_of(a)) for a in range(1, 256)] == [1] * 255

    def test_the_table_cannot_be_written(self) -> None:
        with pytest.raises(ValueError, match="read-only"):
            multiplication_table()[0, 0] = 1


class TestMatrices:
    @given(st.data(), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
    def test_the_totalis_that_of_sums_of_products(
        self, data: st.DataObject, rows: int, inner: int, columns: int
    ) -> None:
        left, right = data.draw(matrices(rows, inner)), data.draw(matrices(inner, columns))
        assert multiply(left, right).tolist() == long_multiply(left, right).tolist()

    @given(st.data(), st.integers(1, 8))
    def test_a_matrix_has_an_inverse_or_is_refused_as_singular(self, data: st.DataObject, size: int) -> None:
        matrix = data.draw(matrices(size, size))
        before = matrix.copy()
        try:
            inverse = invert(matrix)
        except ValueError:
            assert rank(matrix) < size
        else:
            assert long_multiply(matrix, inverse).tolist() == identity(size).tolist()
        assert (matrix == before).all()


class TestParityMatrix:
    @pytest.mark.parametrize("m", [1, 2, 4, 254])
    def test_parities_of_a_single_unit_are_copies(self, m: int) -> None:
        assert parity_matrix(1, m).tolist() == [[1]] * m

    @pytest.mark.parametrize(("k", "m"), [(2, 2), (3, 4), (12, 4), (251, 4), (128, 127)])
    def test_anything_else_is_cauchy(self, k: int, m: int) -> None:
        reciprocals = [[long_product(int(parity_matrix(k, m)[i, j]), (k + i) ^ j) for j in range(k)] for i in range(m)]
        assert reciprocals == [[1] * k] * m

    def test_the_matrices_cannot_be_written(self) -> None:
        for matrix in (parity_matrix(3, 2), parity_matrix(3, 1), decode_matrix(3, 2, (0, 1, 3), (2,))):
            with pytest.raises(ValueError, match="read-only"):
                matrix[0, 0] = 7


class TestDecodeMatrix:
    @each_code
    def test_any_k_survivors_are_regular_and_give_every_unit(self, k: int, m: int) -> None:
        everything = tuple(range(k + m))
        for survivors in combinations(everything, k):
            matrix = decode_matrix(k, m, survivors, everything)
            assert (multiply(matrix, generator(k, m)[list(survivors)]) == generator(k, m)).all()

    @given(st.data(), st.integers(2, 251))
    def test_survivors_of_a_wide_code_are_regular(self, data: st.DataObject, k: int) -> None:
        m = data.draw(st.integers(2, min(4, 255 - k)))
        lost = data.draw(st.sets(st.integers(0, k + m - 1), min_size=m, max_size=m))
        survivors = tuple(i for i in range(k + m) if i not in lost)
        matrix = decode_matrix(k, m, survivors, tuple(lost))
        assert (multiply(matrix, generator(k, m)[list(survivors)]) == generator(k, m)[list(lost)]).all()
