"""Samples one by one, in order, from whatever takes rows through slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import closing

import numpy as np

from app.distributed.cancellation import StopCheck, never_stop
from app.model.kv_cache import DecodeWeights
from app.records.sample import Prompt, Sample
from app.rollout.sampling import SamplingRules
from app.rollout.sequence import RolloutSequence


class SampleGenerator(ABC):
    """Generation through slots, for as many samples as there are.

    Args:
        decode_text: token ids -> text, for the record.
    """

    def __init__(self, *, decode_text: Callable[[Sequence[int]], str]):
        self._decode_text = decode_text
        self.stop_requested: StopCheck = never_stop

    def generate(
        self,
        weights: DecodeWeights,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        max_new_tokens: int | Sequence[int],
        rules: SamplingRules,
        seed: int,
        policy_version: int,
        first_group_id: int = 0,
    ) -> list[Sample]:
        """`group_size` samples of each prompt, in order, as ragged records; see `Engine.generate`."""
        return list(
            self.stream(
                weights,
                prompts,
                group_size=group_size,
                max_new_tokens=max_new_tokens,
                rules=rules,
                seed=seed,
                policy_version=policy_version,
                first_group_id=first_group_id,
            )
        )

    def stream(
        self,
        weights: DecodeWeights,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        max_new_tokens: int | Sequence[int],
        rules: SamplingRules,
        seed: int,
        policy_version: int,
        first_group_id: int = 0,
        skipped_uids: Container[str] = (),
    ) -> Iterator[Sample]:
        """The same one by one, each as soon as it and all before it are done.

        Args:
            skipped_uids: uids of samples that are not drawn.

        Raises:
            InputError: a prompt that no slot has room for.
            StoppedError: asked to stop. The slots are free then.
        """
        all_rows = make_sequences(
            prompts, group_size=group_size, max_new_tokens=max_new_tokens, noise_step=policy_version
        )
        rows = {number: row for number, row in enumerate(all_rows) if row.uid not in skipped_uids}
        done = self._run_in_order(weights, deque(rows.values()), rules=rules, seed=seed, policy_version=policy_version)
        with closing(done):
            for number, row in zip(rows, done, strict=True):
                yield self.to_sample(row, first_group_id + number // group_size, truncates=rules.truncates)

    @abstractmethod
    def compile(self, rules: SamplingRules) -> None:
        """Every program of such a rollout, ahead of the first."""

    @abstractmethod
    def _run_in_order(
        self,
        weights: DecodeWeights,
        rows: deque[RolloutSequence],
        *,
        rules: SamplingRules,
        seed: int,
        policy_version: int,
    ) -> Generator[RolloutSequence, None, None]:
        """All rows, each as soon as it and all before it are done and its tokens collected. May empty the queue."""

    def to_sample(self, row: RolloutSequence, group_id: int, *, truncates: bool) -> Sample:
        """The record of a row that is done."""
        return row.to_sample(group_id, decode_text=self._decode_text, truncates=truncates)


def make_sequences(
    prompts: Sequence[Prompt], *, group_size: int, max_new_tokens: int | Sequence[int], noise_step: int
) -> list[RolloutSequence]:
    """`group_size` samples of each prompt, in order, that have not begun."""
    num_new = np.broadcast_to(max_new_tokens, len(prompts) * group_size).tolist()
    return [
        RolloutSequence(prompts[i // group_size], i % group_size, max_new_tokens=longest, noise_step=noise_step)
        for i, longest in enumerate(num_new)
    ]
