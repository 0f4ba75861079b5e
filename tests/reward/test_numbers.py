from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.reward.numbers import last_number, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        (" 18\n", 18),
        ("18.", 18),
        ("007", 7),
        ("1,234", 1234),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("-5", -5),
        ("\u22125", -5),
        ("+3.50", Fraction(7, 2)),
        (".5", Fraction(1, 2)),
        ("0.1", Fraction(1, 10)),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        ("1.5/2", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\tfrac{-3}{4}", Fraction(-3, 4)),
        ("$18.00", 18),
        (r"\$1,000", 1000),
        ("-$5", -5),
        ("$-5", -5),
        ("€ 5", 5),
        ("25%", 25),
        (r"25 \%.", 25),
    ],
)
def test_numbers_are_read_exactly(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "x", "-", "$", "%", ".", "1 2", "1,23", "1,2345", "12,34", ",123", "1.2.3", "--5", "-$-5"),
        *("1e6", "0x10", "1_000", "nan", "inf", "9**9**9", "2x", "1/0", "1/0.0", r"\frac{1}{0}", r"\frac{1}{}"),
        *("٣", "\uff13", "²", "½", "1٣", "1" * 201, "__import__('os')"),
    ],
)
def test_anything_else_is_no_number(text):
    assert parse_number(text) is None


@given(st.fractions())
def test_every_fraction_reads_back(value):
    assert parse_number(str(value)) == value
    assert parse_number(rf"\frac{{{value.numerator}}}{{{value.denominator}}}") == value


@given(st.integers(-(10**30), 10**30), st.integers(0, 999))
def test_commas_signs_and_decimals_change_nothing(whole, thousandths):
    text = f"{abs(whole):,}.{thousandths:03}"
    value = abs(whole) + Fraction(thousandths, 1000)
    assert parse_number(text) == value
    assert parse_number(f"-${text}") == -value


@given(st.text(), st.integers(-(10**9), 10**9))
def test_a_number_after_a_space_at_the_end_is_the_last_one(text, value):
    assert last_number(f"{text} is {value}.") == str(value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 3 = 13 eggs", "13"),
        ("16-3", "3"),
        ("f(2)-3", "3"),
        ("16 - 3", "3"),
        ("a loss of -3", "-3"),
        ("=-3", "-3"),
        ("it costs $1,250.50.", "$1,250.50"),
        ("half: 1/2 of it", "1/2"),
        (r"so $\frac{3}{4}$.", r"$\frac{3}{4}"),
        ("1, 2, 3", "3"),
        ("1,2,3", "3"),
        ("release 1.2.3", "1.2"),
        ("5 apples, x2, H2O", "5"),
        ("**18**", "18"),
        ("18٣", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number
