"""Which ids were seen, in 16 to 32 bytes an id: a set of strings would take five times that."""

import hashlib
from array import array

FIRST_SLOTS = 1024


class IdSet:
    """A set of 63-bit hashes of ids in an open table.

    Two of n distinct ids share a hash with a probability of about n * n / 2e19: the second is then
    taken for a repeat, the same in every run, which costs it its name and nothing else.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * FIRST_SLOTS))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, text: str) -> bool:
        """Add an id; return whether it is new."""
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little") | 1  # 0 marks an empty slot
        slot = self._find(key)
        if self._slots[slot] == key:
            return False
        self._slots[slot] = key
        self._count += 1
        if 2 * self._count > len(self._slots):
            self._grow()
        return True

    def unique(self, text: str, suffix: str) -> str:
        """Add and return an id: `text`, else with `suffix`, else with the first number free."""
        if self.add(text):
            return text
        number, name = 2, f"{text}-{suffix}"
        while not self.add(name):
            name = f"{text}-{suffix}-{number}"
            number += 1
        return name

    def _find(self, key: int) -> int:
        size = len(self._slots)
        slot = (key >> 1) % size
        while self._slots[slot] not in (0, key):
            slot = (slot + 1) % size
        return slot

    def _grow(self) -> None:
        keys = self._slots
        self._slots = array("Q", bytes(16 * len(keys)))
        for key in keys:
            if key:
                self._slots[self._find(key)] = key
