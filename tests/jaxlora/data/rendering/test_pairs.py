"""Tests joining prompts and completions against a simple definition."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import example, given

from jaxlora.data.tokens.encode import join_pairs

IDS = st.lists(st.integers(0, 3), max_size=4)


def joined(prompt, completion, head, eos, learns_all):
    """Joins one pair by the definition."""
    text = [*prompt, *completion]
    tail = [] if eos is None or text[-1:] == [eos] else [eos]
    ids = [*head, *text, *tail]
    num_given = len(head) + len(prompt)
    is_target = [i > 0 and (learns_all or i >= num_given) for i in range(len(ids))]
    return ids, is_target


@given(
    st.lists(st.tuples(IDS, IDS), max_size=5),
    IDS,
    st.none() | st.integers(0, 3),
    st.booleans(),
)
@example([], [1], 2, False)
@example([([], []), ([1], [2]), ([], [])], [], None, False)
@example([([2], []), ([], []), ([], [2])], [3], 2, True)
def test_equals_the_definition(pairs, head, eos, learns_all):
    parts = [np.array(ids, np.int32) for pair in pairs for ids in pair]
    found = join_pairs(parts, np.array(head, np.int32), eos, learns_all=learns_all)
    assert [(ids.tolist(), is_target.tolist()) for ids, is_target in found] == [
        joined(*pair, head, eos, learns_all) for pair in pairs
    ]
