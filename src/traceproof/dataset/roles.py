"""What an input stands for, told by the words of its name: all that a schema says of an index or a mask."""

import re
from collections.abc import Mapping
from enum import StrEnum


class Role(StrEnum):
    """What the values of an input must be like."""

    DATA = "data"  # any number
    OFFSETS = "offsets"  # ascending from 0: indptr, cumulated lengths
    INDICES = "indices"  # of rows, pages, experts, slots
    LENGTHS = "lengths"  # of sequences, at least 1
    MASK = "mask"  # true or false, packed or not
    SCALE = "scale"  # positive, near 1
    SEED = "seed"  # any integer


# The first role whose words are in the name counts. Words are those of the dataset and of FlashInfer's API.
WORDS: Mapping[Role, str] = {
    Role.SEED: "seed philox",
    Role.OFFSETS: "indptr cu cumsum offsets",
    Role.LENGTHS: "len lens length lengths seqlen seqlens",
    Role.INDICES: "indices index ids idx positions position pos table tables slot slots",
    Role.MASK: "mask bitmap",
    Role.SCALE: "scale scales sf temperature",
}


def role_of(name: str) -> Role:
    """The role of an input of that name."""
    words = re.split(r"[_\d]+", name.lower())
    return next((role for role, known in WORDS.items() if not set(words).isdisjoint(known.split())), Role.DATA)
