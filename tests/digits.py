"""A user's reward: the share of digits in a completion. Dense, so that random policies learn something in a few steps."""


def digits(completion):
    return sum(character in "0123456789" for character in completion) / 10
