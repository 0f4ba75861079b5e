"""Tracks which KV blocks of a device are free, and which contain shared prompts.

Block 0 belongs to no row: it fills unused table entries.

Source: Kwon et al. 2023, PagedAttention, sections 4.2 to 4.4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain


class BlockPool:
    """Counts the references to each block by rows and by prompts that are kept for later samples.

    Prompts without rows are dropped when their blocks are needed, least recently used first.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._holders: Counter[int] = Counter()
        self._prompts: dict[bytes, list[int]] = {}
        """Blocks of each kept prompt, least recently used first."""
        self._spoilt: set[int] = set()

    def num_available(self, released: Iterable[Iterable[int]] = (), *, keeping: bytes | None = None) -> int:
        """Returns how many blocks can be allocated without dropping the prompt `keeping`.

        Args:
            released: blocks of rows to be released first.
        """
        droppable = [blocks for key, blocks in self._prompts.items() if key != keeping]
        given_up = Counter(chain(*droppable, *released))
        return len(self._free) + sum(self._holders[block] == count for block, count in given_up.items())

    def has_prompt(self, key: bytes) -> bool:
        return key in self._prompts

    def prompt_blocks(self, key: bytes) -> list[int]:
        """Returns the blocks of a kept prompt, which is now the most recently used."""
        blocks = self._prompts[key] = self._prompts.pop(key)
        return blocks

    def allocate(self, count: int) -> list[int]:
        """Returns blocks with one reference each; at most `num_available` can be allocated."""
        while len(self._free) < count:
            frees_any = (key for key, held in self._prompts.items() if any(self._holders[b] == 1 for b in held))
            self._drop_prompt(next(frees_any))
        taken = [self._free.pop() for _ in range(count)]
        self._holders.update(taken)
        return taken

    def keep_prompt(self, key: bytes, blocks: list[int]) -> None:
        """Keeps allocated blocks as the cache of a prompt."""
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
        """Drops all prompts; rows keep the blocks that they share."""
        for key in list(self._prompts):
            self._drop_prompt(key)

    def spoil(self, blocks: Sequence[int], prompt: bytes) -> None:
        """Marks the blocks of a row and of its prompt, which may contain non-finite values, and drops the prompt."""
        self._spoilt.update(blocks, self._prompts.get(prompt, ()))
        if prompt in self._prompts:
            self._drop_prompt(prompt)

    def take_spoilt(self) -> list[int]:
        """Returns the marked blocks that are now free and must be overwritten."""
        taken = [block for block in self._spoilt if not self._holders[block]]
        self._spoilt.difference_update(taken)
        return taken

    def _drop_prompt(self, key: bytes) -> None:
        self.release(self._prompts.pop(key))
