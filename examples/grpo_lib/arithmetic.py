"""The task: two-digit addition, one token per character, a reward that can be verified.

Owns the problems, the alphabet and the reward. Does not know the model, nor how answers are sampled.

An example is ``"47+85="`` with the answer ``"231"``: the digits of 132, lowest first. Written that way each digit
needs only the digits and the carry before it, which a small transformer learns fast (Lee et al. 2023, "Teaching
Arithmetic to Small Transformers", https://arxiv.org/abs/2307.03381). All prompts have the same length, so
batches need no padding on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "EOS_ID",
    "PROMPT_LENGTH",
    "RESPONSE_LENGTH",
    "VOCAB_SIZE",
    "Problem",
    "decode",
    "encode",
    "encode_answers",
    "is_well_formed",
    "make_problems",
    "response_mask",
    "reward_of",
    "split_problems",
]

#: Every character a prompt or an answer may hold. The end of an answer has no character, only a token.
ALPHABET = "0123456789+="
#: Ends an answer, and fills the rest of its row.
EOS_ID = len(ALPHABET)
VOCAB_SIZE = len(ALPHABET) + 1
#: ``"47+85="``
PROMPT_LENGTH = 6
#: Three digits (99 + 99 = 198) and the end token.
RESPONSE_LENGTH = 4

_ID_OF = {character: index for index, character in enumerate(ALPHABET)}


@dataclass(frozen=True)
class Problem:
    """One prompt and the only answer that is right.

    Parameters
    ----------
    prompt : str
        ``PROMPT_LENGTH`` characters, such as ``"47+85="``.
    answer : str
        The sum's decimal digits, lowest first, such as ``"231"``.
    """

    prompt: str
    answer: str


def make_problems() -> list[Problem]:
    """Return all 8,100 sums of two two-digit numbers, in a fixed order."""
    return [Problem(f"{a}+{b}=", str(a + b)[::-1]) for a in range(10, 100) for b in range(10, 100)]


def split_problems(problems: Sequence[Problem], num_held_out: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Part the problems into those trained on and those only ever used to measure.

    Parameters
    ----------
    problems : sequence of Problem
    num_held_out : int
        How many to set aside, drawn without replacement.
    seed : int
        The same seed gives the same parts.

    Returns
    -------
    train, held_out : list of Problem
    """
    if not 0 < num_held_out < len(problems):
        raise ValueError(f"num_held_out must be between 1 and {len(problems) - 1}, got {num_held_out}")
    order = np.random.default_rng((seed, 0)).permutation(len(problems))
    shuffled = [problems[index] for index in order]
    return shuffled[num_held_out:], shuffled[:num_held_out]


def encode(text: str) -> list[int]:
    """Turn characters into token ids, one each.

    Raises
    ------
    ValueError
        Names the first character outside the alphabet.
    """
    try:
        return [_ID_OF[character] for character in text]
    except KeyError as error:
        raise ValueError(f"character {error.args[0]!r} in {text!r} is not one of {ALPHABET!r}") from None


def decode(token_ids: Sequence[int]) -> str:
    """Turn token ids into characters, up to the first end token."""
    characters = []
    for token_id in token_ids:
        if token_id == EOS_ID:
            break
        characters.append(ALPHABET[token_id])
    return "".join(characters)


def encode_answers(answers: Sequence[str]) -> Tensor:
    """Return the answers as rows of tokens, each closed and filled up with the end token.

    Returns
    -------
    Tensor
        Shape ``(len(answers), RESPONSE_LENGTH)``, int64.
    """
    rows = []
    for answer in answers:
        row = encode(answer)
        if len(row) >= RESPONSE_LENGTH:
            raise ValueError(f"answer {answer!r} leaves no room for the end token in {RESPONSE_LENGTH} tokens")
        rows.append(row + [EOS_ID] * (RESPONSE_LENGTH - len(row)))
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), RESPONSE_LENGTH)


def response_mask(responses: Tensor) -> Tensor:
    """Mark the tokens that the model chose: all up to the first end token, and that one.

    Parameters
    ----------
    responses : Tensor
        Shape ``(rows, length)``, integer token ids.

    Returns
    -------
    Tensor
        Same shape, float32, 1 for the model's own tokens and 0 for the filling behind them.
    """
    is_end = (responses == EOS_ID).int()
    ends_before = is_end.cumsum(dim=1) - is_end
    return (ends_before == 0).float()


def is_well_formed(response_ids: Sequence[int]) -> bool:
    """Say whether a response is a number at all: one digit or more, closed by the end token."""
    return EOS_ID in response_ids and decode(response_ids).isdigit()


def reward_of(response_ids: Sequence[int], answer: str) -> float:
    """Check one response against the right answer.

    Nothing but the exact answer earns anything, so there is no reward to be had by looking right: a response with a
    wrong or missing digit, another character, or no end token gets 0.

    Parameters
    ----------
    response_ids : sequence of int
        Token ids, as sampled.
    answer : str
        As in :class:`Problem`.

    Returns
    -------
    float
        1.0 or 0.0.
    """
    return float(is_well_formed(response_ids) and decode(response_ids) == answer)
