"""`make fuzz`: the properties of test_random_programs.py on thousands of programs, from new seeds every time.

The profile of hypothesis says how many (`HYPOTHESIS_PROFILE=long`, in tests/conftest.py). What failed once is kept in
.hypothesis and tried first the next time.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from programs import FAMILIES, programs
from test_random_programs import NAN_CALLS, NAN_FAMILIES, calls, check, check_nans


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_surgery_agrees_with_the_twin(family, data):
    check(data.draw(programs(family)), data.draw(calls()))


@pytest.mark.parametrize("family", NAN_FAMILIES)
@given(data=st.data())
def test_nans_are_where_the_twin_has_them(family, data):
    check_nans(data.draw(programs(family)), data.draw(NAN_CALLS), data.draw(st.integers(0, 50)))
