"""Tracks which KV blocks of a device are free, and which cache shared prompts.

Block 0 is never allocated; it fills unused entries of block tables.

Source: Kwon et al. 2023, PagedAttention, sections 4.2 to 4.4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain


class BlockPool:
    """Allocates blocks, and counts how many rows and cached prompts refer to each.

    If blocks run out, cached prompts that would free some are dropped, least recently used first.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._holders: Counter[int] = Counter()
        self._prompts: dict[bytes, list[int]] = {}
        """Key of a cached prompt -> its blocks, least recently used first."""
        self._spoilt: set[int] = set()

    def num_available(self, released: Iterable[Iterable[int]] = (), *, keeping: bytes | None = None) -> int:
        """Returns how many blocks can be allocated without dropping the prompt with the key `keeping`.

        Args:
            released: blocks of the rows that will be released first.
        """
        droppable = [blocks for key, blocks in self._prompts.items() if key != keeping]
        given_up = Counter(chain(*droppable, *released))
        return len(self._free) + sum(self._holders[block] == count for block, count in given_up.items())

    def has_prompt(self, key: bytes) -> bool:
        return key in self._prompts

    def prompt_blocks(self, key: bytes) -> list[int]:
        """Returns the blocks of a cached prompt, and marks it as the most recently used."""
        blocks = self._prompts[key] = self._prompts.pop(key)
        return blocks

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks, at most `num_available`, with one reference each."""
        while len(self._free) < count:
            frees_any = (key for key, held in self._prompts.items() if any(self._holders[b] == 1 for b in held))
            self._drop_prompt(next(frees_any))
        taken = [self._free.pop() for _ in range(count)]
        self._holders.update(taken)
        return taken

    def keep_prompt(self, key: bytes, blocks: list[int]) -> None:
        """Keeps allocated blocks, with their references, as the cache of a prompt."""
        self._prompts[key] = blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of these blocks."""
        self._holders.update(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """Removes a reference to each of these blocks; blocks without references become free."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)

    def drop_prompts(self) -> None:
        """Drops all cached prompts; blocks that rows share stay allocated."""
        for key in list(self._prompts):
            self._drop_prompt(key)

    def spoil(self, blocks: Sequence[int], prompt: bytes) -> None:
        """Marks the blocks of a row and of its prompt as possibly non-finite, and drops the prompt."""
        self._spoilt.update(blocks, self._prompts.get(prompt, ()))
        if prompt in self._prompts:
            self._drop_prompt(prompt)

    def take_spoilt(self) -> list[int]:
        """Returns and unmarks the marked blocks that are free; the caller must overwrite them."""
        taken = [block for block in self._spoilt if not self._holders[block]]
        self._spoilt.difference_update(taken)
        return taken

    def _drop_prompt(self, key: bytes) -> None:
        self.release(self._prompts.pop(key))
