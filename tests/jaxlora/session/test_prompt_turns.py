"""Prompts of others, and the tokens that wait for them, have equal time."""

from jaxlora.session.prompt_turns import Beginner, PromptTurns


def test_whom_a_prompt_delays():
    sampled, scored = (Beginner("a", is_scored_only=scored) for scored in (False, True))
    assert [sampled.delays(one) for one in "ab"] == [False, True]
    assert [scored.delays(one) for one in "ab"] == [True, True]
    turns = PromptTurns(1.0)
    assert turns.delayed(scored) == []
    turns.follow("ab")
    assert turns.delayed(scored) == ["a", "b"] and turns.delayed(sampled) == ["b"]


def test_the_time_of_prompts_is_that_of_tokens_and_a_piece_at_most():
    turns, prompt = PromptTurns(1.0), Beginner("a", is_scored_only=False)
    spent = {"prompts": 0.0, "tokens": 0.0}
    for _ in range(100):
        turns.follow("ab")
        if turns.is_behind(turns.delayed(prompt)):
            turns.add_tokens("b", 0.7)
            spent["tokens"] += 0.7
        else:
            turns.add_prompts([prompt], 0.3)
            spent["prompts"] += 0.3
        assert 0 <= spent["prompts"] - spent["tokens"] <= 1.0 + 0.3
    assert not turns.is_behind("a")
    turns.follow("a")
    turns.follow("ab")  # what b was owed has ended with its sequences
    assert not turns.is_behind("b")
