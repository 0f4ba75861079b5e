"""Settings of the section `batching`."""

from __future__ import annotations

from settings.schema.section import Section


class BatchingSettings(Section):
    share_prompts: bool = True
    """Packs the prompt of a group once, followed by all its completions: the same results from fewer tokens. Set to
    false only for comparison."""
