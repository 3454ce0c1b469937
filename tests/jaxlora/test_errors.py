"""The errors that users see."""

from jaxlora.errors import DataError, JaxloraError


def test_an_error_can_be_printed_whatever_it_quotes():
    error = DataError("field '\ud800' is missing; there is: 'né🦙'")
    assert str(error) == "field '\\ud800' is missing; there is: 'né🦙'"
    assert str(error).encode()
    assert isinstance(error, JaxloraError)
