"""The interface of generators, which decode in slots and yield samples one by one, in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Container, Generator, Iterator, Sequence
from contextlib import closing

from app.distributed.stop_check import StopCheck, never_stop
from app.model.decode_weights import DecodeWeights
from app.records.sample import Prompt, Sample
from app.rollout.conversations import Conversations
from app.rollout.engine.engine import SlotEngine
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.sequence import DecodeText, RolloutSequence, make_sequences


class SampleGenerator(ABC):
    """Generates any number of samples in a fixed number of slots.

    Args:
        engine: the slot engine; with several workers, the engine with the largest KV cache.
        decode_text: converts token ids to text.
        stop_text: converts token ids to text, to find stop strings; see `stop_length`.
    """

    def __init__(self, engine: SlotEngine, *, decode_text: DecodeText, stop_text: DecodeText):
        self.engine = engine
        self._decode_text, self._stop_text = decode_text, stop_text
        self.conversations: Conversations | None = None
        """Passes turns to environments; None = every sample is a single turn."""
        self.stop_requested: StopCheck = never_stop

    def generate(self, weights: DecodeWeights, prompts: Sequence[Prompt], request: GenerationRequest) -> list[Sample]:
        """Returns `group_size` samples for each prompt, in order, as records without padding."""
        return list(self.stream(weights, prompts, request))

    def stream(
        self,
        weights: DecodeWeights,
        prompts: Sequence[Prompt],
        request: GenerationRequest,
        *,
        skipped_uids: Container[str] = (),
    ) -> Iterator[Sample]:
        """Yields the samples of `generate`, each once it and all earlier samples are done.

        Args:
            skipped_uids: uids of samples to leave out.

        Raises:
            InputError: a prompt does not fit into a slot.
            StoppedError: a stop was requested. The slots are free afterwards.
            WorkerDiedError: all workers that could run the samples have died.
        """
        sequences = self.make_rows(
            prompts, request, noise_step=request.policy_version, stop_requested=self.stop_requested
        )
        rows = {number: row for number, row in enumerate(sequences) if row.uid not in skipped_uids}
        with closing(self._run_in_order(weights, deque(rows.values()), request)) as done:
            for number, row in zip(rows, done, strict=True):
                group_id = request.first_group_id + number // request.group_size
                yield self.to_sample(row, group_id, request)

    def make_rows(
        self,
        prompts: Sequence[Prompt],
        request: GenerationRequest,
        *,
        noise_step: int,
        stop_requested: StopCheck = never_stop,
    ) -> list[RolloutSequence]:
        """Returns `group_size` new rows for each prompt; environments, if there are any, open the conversations first.

        Args:
            noise_step: policy version for the PRNG keys of the rows.

        Raises:
            InputError: a prompt does not fit into a slot.
            StoppedError: a stop was requested before all environments had answered.
        """
        if self.conversations is None:
            rows = make_sequences(prompts, request, noise_step=noise_step)
        else:
            rows = self.conversations.make_rows(prompts, request, noise_step=noise_step, stop_requested=stop_requested)
        for row in rows:
            self.engine.check_fits(row)
        return rows

    @abstractmethod
    def compile(self, rules: SamplingRules) -> None:
        """Compiles every program that a rollout under these rules needs."""

    @abstractmethod
    def _run_in_order(
        self, weights: DecodeWeights, rows: deque[RolloutSequence], request: GenerationRequest
    ) -> Generator[RolloutSequence, None, None]:
        """Yields all rows, each once it and all earlier rows are done and collected. May empty `rows`."""

    def to_sample(self, row: RolloutSequence, group_id: int, request: GenerationRequest) -> Sample:
        """Returns the record of a finished row."""
        return row.to_sample(group_id, request, decode_text=self._decode_text, stop_text=self._stop_text)
