"""Shapes of batches, and where answers end."""

import numpy as np

from jaxlora.generate.batch import Answer, Request, batch_shape, chat_shape


def shape(*sizes):
    made = batch_shape(*sizes)
    return made.num_rows, made.part_tokens, made.prompt_tokens, made.cache_tokens


def test_shapes_come_from_a_small_set():
    assert shape(1, 1, 1) == (2, 16, 16, 64)
    assert shape(5, 100, 128) == (8, 128, 128, 256)
    assert shape(8, 300, 85) == (8, 256, 512, 768)
    assert shape(1, 1025, 1) == (2, 1024, 2048, 3072)
    assert [shape(1, 16, n)[-1] for n in (48, 49, 81, 113)] == [64, 96, 128, 192]


def test_a_chat_keeps_its_shape_while_it_grows():
    shapes = [chat_shape(n, 128, 8192) for n in (3, 70, 1900)]
    assert {(s.num_rows, s.part_tokens, s.cache_tokens) for s in shapes} == {
        (2, 64, 2048)
    }
    assert [s.prompt_tokens for s in shapes] == [64, 128, 1920]
    assert chat_shape(2000, 128, 8192).cache_tokens == 3072
    assert chat_shape(3, 128, 512).cache_tokens == 512


def ended(token_ids, stop=None, at_most=9):
    request = Request(
        token_ids=np.zeros(1, np.int32),
        slot=0,
        seed=0,
        max_new_tokens=at_most,
        num_until_stop=lambda ids, before: stop,
    )
    answer = Answer()
    answer.extend(request, token_ids, [0.0] * len(token_ids), {2})
    return answer.token_ids, answer.finish_reason


def test_an_answer_ends_at_whatever_comes_first():
    assert ended([5, 6]) == ([5, 6], None)
    assert ended([5, 6, 2]) == ([5, 6, 2], "eos_token")
    assert ended([5, 6, 2], stop=2) == ([5, 6], "stop_sequence")
    assert ended([5, 6, 7, 8], at_most=3) == ([5, 6, 7], "length")
    assert ended([5, 6, 7, 8], stop=4, at_most=3) == ([5, 6, 7], "length")
    assert ended([5, 6, 2], at_most=3) == ([5, 6, 2], "eos_token")
